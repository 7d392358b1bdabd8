// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_w4a16_gemv_rows: spark_gemv_rows.cuh on NVFP4 matrices.
//
// A row of K weights is K / 2 bytes of E2M1 codes (low nibble first) and K / 16 block scales in E4M3; a weight is
// code * scale * scale2. code * scale has six significant bits, so it is a BF16 number, and goes as such, 2^9 times
// smaller, through tensor-core steps with FP32 sums. The sum is multiplied by 2^9 scale2 and rounded once.
//
// A stripe is 256 k, steps in ascending order of the words of eight codes: lane 4 g + t takes the 32 elements from 32 t
// on. Of a word's codes 0 .. 7 the pairs (0, 4), (1, 5), (2, 6) and (3, 7) lie where one shift brings both to the halves
// of a word. Scales are copied as codes are, into a ring beside theirs.

#include "spark_e2m1.cuh"
#include "spark_fp8.cuh"
#include "spark_gemv_rows.cuh"

constexpr unsigned W4_RAISED = 0x7a007a00u;  // 2^117 twice: codes come 2^126 times too small, and stay 2^9 times so
constexpr float W4_LOWERED = 512.0f;

// Two E4M3 scales, raised, each as BF16 in both halves of a word. Exact; NaN stays NaN.
__device__ __forceinline__ void raise(unsigned short codes, unsigned (&words)[2]) {
    float scales[2];
    spark_widen_e4m3(codes, scales);
    const unsigned pair = multiply_pair(spark_pack(scales[0], scales[1]), W4_RAISED);
    words[0] = __byte_perm(pair, pair, 0x1010u);
    words[1] = __byte_perm(pair, pair, 0x3232u);
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

struct Nvfp4 : GemvFormat {
    using Matrix = Nvfp4Matrix;
    static constexpr unsigned CHUNK = 32u;
    static constexpr bool WHOLE = true;
    static constexpr unsigned BUFFERS = 2u;

    uint4 (*ring)[GEMV_TILE];  // the warp's: 16 bytes are an output's scales of a stripe
    const uint4* scales_from;  // what the lane copies next
    const uint4* x_row;
    bool x_live;
    uint4 rows[4];                         // eight elements of x each; zeros of a row that does not exist
    unsigned short scale[GEMV_PIECES][2];  // of output g and g + 8: two E4M3 each

    // Lanes below 16 copy the scales of an output each.
    __device__ __forceinline__ void enter(const Matrix& matrix, unsigned output, unsigned left, unsigned row_stripes) {
        const unsigned row = threadIdx.x % GEMV_TILE;
        scales_from = matrix.scales + static_cast<size_t>(output + (row < left ? row : left - 1u)) * row_stripes +
                      threadIdx.x / SPARK_WARP;
    }

    __device__ __forceinline__ void copy(unsigned slot) {
        const unsigned lane = threadIdx.x % SPARK_WARP;
        if (lane < GEMV_TILE) {
            spark_copy_16(&ring[slot][lane], scales_from, true);
        }
        scales_from += GEMV_WARPS;
    }

    __device__ __forceinline__ void read_scales(unsigned slot, unsigned p) {
        const unsigned short* scales = reinterpret_cast<const unsigned short*>(ring[slot]);
        const unsigned g = threadIdx.x % SPARK_WARP / 4u;
        const unsigned t = threadIdx.x % 4u;
        scale[p][0] = scales[g * 8u + 4u * p + t];
        scale[p][1] = scales[(g + 8u) * 8u + 4u * p + t];
    }

    __device__ __forceinline__ void read_x(const uint4* x, unsigned first, unsigned, bool live) {
        x_row = x + 4u * first;
        x_live = live;
#pragma unroll
        for (unsigned w = 0u; w < 4u; ++w) {
            spark_load_16(rows[w], x_row + w, live);
        }
    }

    __device__ __forceinline__ void multiply(float (&sum)[4], unsigned p, const uint4& low, const uint4& high) {
        const unsigned low_words[4] = {low.x, low.y, low.z, low.w};
        const unsigned high_words[4] = {high.x, high.y, high.z, high.w};
        unsigned scales[2][2];
        raise(scale[p][0], scales[0]);
        raise(scale[p][1], scales[1]);
#pragma unroll
        for (unsigned w = 0u; w < 4u; ++w) {
            const uint4 a = rows[w];
            unsigned first[4];
            unsigned second[4];
            decode(low_words[w], scales[0][w / 2u], first);
            decode(high_words[w], scales[1][w / 2u], second);
            spark_mma(sum, {first[0], second[0], first[1], second[1]},
                      {__byte_perm(a.x, a.z, 0x5410u), __byte_perm(a.x, a.z, 0x7632u)});
            spark_mma(sum, {first[2], second[2], first[3], second[3]},
                      {__byte_perm(a.y, a.w, 0x5410u), __byte_perm(a.y, a.w, 0x7632u)});
            if (p + 1u < GEMV_PIECES) {
                spark_load_16(rows[w], x_row + 16u * (p + 1u) + w, x_live);
            }
        }
    }

    static __device__ __forceinline__ float scaled(const Matrix& matrix, unsigned, float sum) {
        const float factor = W4_LOWERED * matrix.scale2;
        return sum * factor;
    }
};

// Yi[m * stride_i + n] = bf16(scale2_i * sum over k of X[m, k] * code_i[n, k] * scale_i[n, k / 16]): tiled_gemv_rows.
// K % 256 == 0; scales on 16-byte addresses too.
extern "C" __global__ void __launch_bounds__(256, 3)
    spark_w4a16_gemv_rows(const __nv_bfloat16* __restrict__ X, const unsigned char* __restrict__ W0,
                          const unsigned char* __restrict__ W1, const unsigned char* __restrict__ W2,
                          const unsigned char* __restrict__ S0, const unsigned char* __restrict__ S1,
                          const unsigned char* __restrict__ S2, __nv_bfloat16* __restrict__ Y0,
                          __nv_bfloat16* __restrict__ Y1, __nv_bfloat16* __restrict__ Y2, unsigned int M,
                          unsigned int N0, unsigned int N1, unsigned int N2, unsigned int K, unsigned int stride0,
                          unsigned int stride1, unsigned int stride2, float scale2_0, float scale2_1, float scale2_2,
                          unsigned int head_dim) {
    __shared__ uint4 scale_rings[GEMV_WARPS][GEMV_STAGES][GEMV_TILE];
    const auto matrix = [](const unsigned char* codes, const unsigned char* scales, __nv_bfloat16* out, unsigned n,
                           unsigned stride, float scale2) {
        return Nvfp4Matrix{{reinterpret_cast<const uint4*>(codes), out, n, stride},
                           reinterpret_cast<const uint4*>(scales),
                           scale2};
    };
    const GemvMatrices<Nvfp4Matrix> all = {{matrix(W0, S0, Y0, N0, stride0, scale2_0),
                                            matrix(W1, S1, Y1, N1, stride1, scale2_1),
                                            matrix(W2, S2, Y2, N2, stride2, scale2_2)}};
    Nvfp4 format = {};
    format.ring = scale_rings[threadIdx.x / SPARK_WARP];
    tiled_gemv_rows(format, X, all, M, K, head_dim);
}
