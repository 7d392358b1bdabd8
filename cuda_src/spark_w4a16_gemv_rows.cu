// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_w4a16_gemv_rows: spark_gemv_pairs.cuh on NVFP4 matrices.
//
// A row of K weights is K / 2 bytes of E2M1 codes (low nibble first) and K / 16 block scales in E4M3; a weight is
// code * scale * scale2. code * scale has six significant bits, so it is a BF16 number, and goes as such, 2^9 times
// smaller, through tensor-core steps with FP32 sums. The sum is multiplied by 2^9 scale2 and rounded once.
//
// A stripe is 256 k, steps in ascending order of the words of eight codes: lane 4 g + t takes the 32 elements from 32 t
// on, of codes in the pairs of spark_e2m1.cuh. Scales of both tiles are copied as codes are, into a ring beside theirs.

#include "spark_e2m1.cuh"
#include "spark_fp8.cuh"
#include "spark_gemv_argmax.cuh"
#include "spark_gemv_pairs.cuh"

constexpr unsigned W4_RAISED = 0x7a007a00u;  // 2^117 twice: codes come 2^126 times too small, and stay 2^9 times so
constexpr float W4_LOWERED = 512.0f;
// Blocks on a multiprocessor. Code for the later architectures spills with as few registers as four leave.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr unsigned W4_BLOCKS = 3u;
#else
constexpr unsigned W4_BLOCKS = 4u;
#endif

__device__ __forceinline__ unsigned multiply_pair(unsigned a, unsigned b) {
    const __nv_bfloat162 x = *reinterpret_cast<const __nv_bfloat162*>(&a);
    const __nv_bfloat162 y = *reinterpret_cast<const __nv_bfloat162*>(&b);
    const __nv_bfloat162 product = __hmul2(x, y);
    return *reinterpret_cast<const unsigned*>(&product);
}

// Two E4M3 scales, raised, each as BF16 in both halves of a word. Exact; NaN stays NaN.
__device__ __forceinline__ void raise(unsigned short codes, unsigned (&words)[2]) {
    float scales[2];
    spark_widen_e4m3(codes, scales);
    const unsigned pair = multiply_pair(spark_pack(scales[0], scales[1]), W4_RAISED);
    const __nv_bfloat162 both = *reinterpret_cast<const __nv_bfloat162*>(&pair);
    const __nv_bfloat162 low = __halves2bfloat162(both.x, both.x);  // no instruction: the product takes a half twice
    const __nv_bfloat162 high = __halves2bfloat162(both.y, both.y);
    words[0] = *reinterpret_cast<const unsigned*>(&low);
    words[1] = *reinterpret_cast<const unsigned*>(&high);
}

// Pairs (0, 4), (1, 5), (2, 6), (3, 7) of a word of codes times a scale.
__device__ __forceinline__ void decode(unsigned codes, unsigned scale, unsigned (&pairs)[4]) {
    spark_e2m1_pairs(codes, pairs);
#pragma unroll
    for (unsigned j = 0u; j < 4u; ++j) {
        pairs[j] = multiply_pair(pairs[j], scale);
    }
}

struct Nvfp4Matrix : GemvMatrix {
    const uint4* scales;
    float scale2;
};

struct Nvfp4 {
    using Matrix = Nvfp4Matrix;
    static constexpr unsigned CHUNK = 32u;

    uint4* ring;               // 16 bytes are an output's scales of a stripe
    unsigned to;               // where the lane's copies go
    unsigned mine;             // where the lane's scales are, in pairs of scales
    const uint4* scales_from;  // what the lane copies next
    unsigned short scale[2][GEMV_PIECES][2];  // of output g and g + 8 of each tile: two E4M3 each

    // A lane copies the scales of output lane.
    __device__ __forceinline__ void enter(const Matrix& matrix, unsigned output, unsigned row_stripes) {
        scales_from = matrix.scales + static_cast<size_t>(output + threadIdx.x % SPARK_WARP) * row_stripes +
                      threadIdx.x / SPARK_WARP;
    }

    __device__ __forceinline__ void copy(unsigned left) {
        spark_copy_16(&ring[to], scales_from, threadIdx.x % SPARK_WARP < left);
        scales_from += PAIR_WARPS;
    }

    __device__ __forceinline__ void read() {
        const unsigned short* scales = reinterpret_cast<const unsigned short*>(ring) + mine;
#pragma unroll
        for (unsigned i = 0u; i < 4u; ++i) {
            scale[i / 2u][0][i % 2u] = scales[64u * i];
            scale[i / 2u][1][i % 2u] = scales[64u * i + 4u];
        }
    }

    // Elements (0, 4), (1, 5), (2, 6), (3, 7), as the codes lie.
    static __device__ __forceinline__ uint4 ready(const uint4& x) {
        return make_uint4(__byte_perm(x.x, x.z, 0x5410u), __byte_perm(x.x, x.z, 0x7632u),
                          __byte_perm(x.y, x.w, 0x5410u), __byte_perm(x.y, x.w, 0x7632u));
    }

    template <class Used>
    __device__ __forceinline__ void multiply(float (&sum)[4], unsigned h, unsigned p, const uint4& low,
                                             const uint4& high, const uint4 (&x)[4], Used used) const {
        const unsigned low_words[4] = {low.x, low.y, low.z, low.w};
        const unsigned high_words[4] = {high.x, high.y, high.z, high.w};
        unsigned scales[2][2];
        raise(scale[h][p][0], scales[0]);
        raise(scale[h][p][1], scales[1]);
#pragma unroll
        for (unsigned w = 0u; w < 4u; ++w) {
            unsigned first[4];
            unsigned second[4];
            decode(low_words[w], scales[0][w / 2u], first);
            decode(high_words[w], scales[1][w / 2u], second);
            spark_mma(sum, {first[0], second[0], first[1], second[1]}, {x[w].x, x[w].y});
            spark_mma(sum, {first[2], second[2], first[3], second[3]}, {x[w].z, x[w].w});
            used(w);
        }
    }

    static __device__ __forceinline__ float scaled(const Matrix& matrix, unsigned, float sum) {
        const float factor = W4_LOWERED * matrix.scale2;
        return sum * factor;
    }
};

// The format of a thread, whose block has `ring` for scales.
__device__ __forceinline__ Nvfp4 nvfp4_format(uint4* ring) {
    Nvfp4 format = {};
    format.ring = ring;
    format.to = kept(threadIdx.x);
    format.mine = kept(threadIdx.x / SPARK_WARP * PAIR_OUTPUTS * 8u + threadIdx.x % SPARK_WARP / 4u * 8u + threadIdx.x % 4u);
    return format;
}

// Yi[m * stride_i + n] = bf16(scale2_i * sum over k of X[m, k] * code_i[n, k] * scale_i[n, k / 16]): tiled_gemv_rows.
// K % 256 == 0; scales on 16-byte addresses too.
extern "C" __global__ void __launch_bounds__(128, W4_BLOCKS)
    spark_w4a16_gemv_rows(const __nv_bfloat16* __restrict__ X, const unsigned char* __restrict__ W0,
                          const unsigned char* __restrict__ W1, const unsigned char* __restrict__ W2,
                          const unsigned char* __restrict__ S0, const unsigned char* __restrict__ S1,
                          const unsigned char* __restrict__ S2, __nv_bfloat16* __restrict__ Y0,
                          __nv_bfloat16* __restrict__ Y1, __nv_bfloat16* __restrict__ Y2, unsigned int M,
                          unsigned int N0, unsigned int N1, unsigned int N2, unsigned int K, unsigned int stride0,
                          unsigned int stride1, unsigned int stride2, float scale2_0, float scale2_1, float scale2_2,
                          unsigned int head_dim) {
    __shared__ uint4 scale_rings[PAIR_WARPS * PAIR_OUTPUTS];
    const auto matrix = [](const unsigned char* codes, const unsigned char* scales, __nv_bfloat16* out, unsigned n,
                           unsigned stride, float scale2) {
        return Nvfp4Matrix{{reinterpret_cast<const uint4*>(codes), out, n, stride},
                           reinterpret_cast<const uint4*>(scales),
                           scale2};
    };
    const GemvMatrices<Nvfp4Matrix> all = {{matrix(W0, S0, Y0, N0, stride0, scale2_0),
                                            matrix(W1, S1, Y1, N1, stride1, scale2_1),
                                            matrix(W2, S2, Y2, N2, stride2, scale2_2)}};
    paired_gemv_rows(nvfp4_format(scale_rings), X, all, M, K, head_dim);
}

// ids[m] = argmax over n of bf16(scale2 * sum over k of X[m, k] * code[n, k] * scale[n, k / 16]), embed[m] = row ids[m]
// of embed_table: spark_gemv_argmax.cuh. K % 256 == 0; embed_table and embed as for spark_gemv_rows_argmax.
extern "C" __global__ void __launch_bounds__(128, W4_BLOCKS)
    spark_w4a16_gemv_rows_argmax(const __nv_bfloat16* __restrict__ X, const unsigned char* __restrict__ W,
                                 const unsigned char* __restrict__ S, unsigned int* ids,
                                 const __nv_bfloat16* __restrict__ embed_table, __nv_bfloat16* embed,
                                 unsigned long long* best, unsigned int* done, unsigned int M, unsigned int N,
                                 unsigned int K, float scale2) {
    __shared__ uint4 scale_rings[PAIR_WARPS * PAIR_OUTPUTS];
    const GemvMatrices<Nvfp4Matrix> all = {{{{reinterpret_cast<const uint4*>(W), nullptr, N, N},
                                             reinterpret_cast<const uint4*>(S),
                                             scale2},
                                            {},
                                            {}}};
    GemvArgmax<PAIR_OUTPUTS, 2u> argmax;
    paired_gemv_rows(nvfp4_format(scale_rings), X, all, M, K, 0u, argmax);
    argmax.finish(M, {best, done}, {ids, embed_table, embed, K});
}
