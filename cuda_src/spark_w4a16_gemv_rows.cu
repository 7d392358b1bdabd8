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

#include "spark_gemv_argmax.cuh"

constexpr float W4_RAISED = 0x1p117f;  // of a scale: codes come 2^126 times too small, and stay 2^9 times so
constexpr float W4_LOWERED = 512.0f;

// An E4M3 scale, raised, as BF16 in both halves of a word. Exact; 0x7f and 0xff are NaN.
__device__ __forceinline__ unsigned raised(unsigned code) {
    const float value = __uint_as_float(((code & 0x80u) << 24) | ((code & 0x7fu) << 20)) * 0x1p120f * W4_RAISED;
    const unsigned word = (code & 0x7fu) == 0x7fu ? 0x7fff7fffu : __float_as_uint(value);
    return __byte_perm(word, word, 0x3232u);
}

// Pairs (0, 4), (1, 5), (2, 6), (3, 7) of a word of codes times a scale: codes' three low bits are exponent and fraction.
__device__ __forceinline__ void decode(unsigned codes, unsigned scale, unsigned (&pairs)[4]) {
#pragma unroll
    for (unsigned j = 0u; j < 4u; ++j) {
        const unsigned magnitude = j < 2u ? codes << (6u - 4u * j) : codes >> (4u * j - 6u);
        const unsigned sign = codes << (12u - 4u * j);
        pairs[j] = multiply_pair((magnitude & 0x01c001c0u) | (sign & 0x80008000u), scale);
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
    static constexpr unsigned BUFFERS = 1u;

    uint4 (*ring)[GEMV_TILE];  // the warp's: 16 bytes are an output's scales of a stripe
    const uint4* scales_from;
    const uint4* x_row;
    bool x_live;
    unsigned scale[GEMV_PIECES][2];  // of output g and g + 8: two E4M3 each

    // A lane copies the scales of output lane.
    __device__ __forceinline__ void enter(const Matrix& matrix, unsigned output, unsigned row_stripes) {
        scales_from = matrix.scales + static_cast<size_t>(output + threadIdx.x % GEMV_TILE) * row_stripes;
    }

    __device__ __forceinline__ void copy(unsigned slot, unsigned stripe, unsigned left, const uint4* any) {
        const unsigned lane = threadIdx.x % SPARK_WARP;
        if (lane < GEMV_TILE) {
            const bool live = lane < left;
            spark_copy_16(&ring[slot][lane], live ? scales_from + stripe : any, live);
        }
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
    }

    __device__ __forceinline__ void multiply(float (&sum)[4], unsigned p, const uint4& low, const uint4& high) const {
        const unsigned low_words[4] = {low.x, low.y, low.z, low.w};
        const unsigned high_words[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
        for (unsigned w = 0u; w < 4u; ++w) {
            uint4 a = {0u, 0u, 0u, 0u};
            if (x_live) {
                a = x_row[16u * p + w];
            }
            const unsigned shift = w / 2u * 8u;
            unsigned first[4];
            unsigned second[4];
            decode(low_words[w], raised((scale[p][0] >> shift) & 0xffu), first);
            decode(high_words[w], raised((scale[p][1] >> shift) & 0xffu), second);
            spark_mma(sum, {first[0], second[0], first[1], second[1]},
                      {__byte_perm(a.x, a.z, 0x5410u), __byte_perm(a.x, a.z, 0x7632u)});
            spark_mma(sum, {first[2], second[2], first[3], second[3]},
                      {__byte_perm(a.y, a.w, 0x5410u), __byte_perm(a.y, a.w, 0x7632u)});
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

// ids[m] = argmax over n of bf16(scale2 * sum over k of X[m, k] * code[n, k] * scale[n, k / 16]), embed[m] = row ids[m]
// of embed_table: spark_gemv_argmax.cuh. K % 256 == 0; embed_table and embed as for spark_gemv_rows_argmax.
extern "C" __global__ void __launch_bounds__(256, 3)
    spark_w4a16_gemv_rows_argmax(const __nv_bfloat16* __restrict__ X, const unsigned char* __restrict__ W,
                                 const unsigned char* __restrict__ S, unsigned int* ids,
                                 const __nv_bfloat16* __restrict__ embed_table, __nv_bfloat16* embed,
                                 unsigned long long* best, unsigned int* done, unsigned int M, unsigned int N,
                                 unsigned int K, float scale2) {
    __shared__ uint4 scale_rings[GEMV_WARPS][GEMV_STAGES][GEMV_TILE];
    const GemvMatrices<Nvfp4Matrix> all = {{{{reinterpret_cast<const uint4*>(W), nullptr, N, N},
                                             reinterpret_cast<const uint4*>(S),
                                             scale2},
                                            {},
                                            {}}};
    Nvfp4 format = {};
    format.ring = scale_rings[threadIdx.x / SPARK_WARP];
    GemvArgmax argmax;
    tiled_gemv_rows(format, X, all, M, K, 0u, argmax);
    argmax.finish(M, {best, done}, {ids, embed_table, embed, K});
}
