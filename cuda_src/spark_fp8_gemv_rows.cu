// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_fp8_gemv_rows: spark_gemv_rows.cuh on E4M3 matrices with a scale a row.
//
// A weight is value * scale[n]. Every E4M3 value is a BF16 number and goes as such through tensor-core steps with FP32
// sums; the sum is multiplied by the row's scale and rounded once.
//
// A stripe is 128 k, steps in ascending order of the words of four bytes: lane 4 g + t takes 16 elements at a time. Of a
// word's bytes the pairs (0, 2) and (1, 3) lie where one shift brings both to the halves of a word.

#include "spark_choose.cuh"
#include "spark_gemv_argmax.cuh"
#include "spark_gemv_pairs.cuh"

constexpr unsigned FP8_RAISE = 0x7b807b80u;  // 2^120 twice: what bytes come too small by

// Bit 7 of a byte that is NaN, 0x7f or 0xff; other bits are anything.
__device__ __forceinline__ unsigned nans(unsigned bytes) { return (bytes & 0x7f7f7f7fu) + 0x01010101u; }

// Pairs (0, 2) and (1, 3) of a word of E4M3 bytes, as BF16. Exact; without NANS, NaN comes out as 480.
template <bool NANS>
__device__ __forceinline__ void decode(unsigned bytes, unsigned (&pairs)[2]) {
    constexpr unsigned MAGNITUDE = 0x07f007f0u;
    const unsigned signs = spark_choose(0x80808080u, bytes, 0u);
    pairs[0] = multiply_pair(spark_choose(MAGNITUDE, bytes << 4, signs << 8), FP8_RAISE);
    pairs[1] = multiply_pair(spark_choose(MAGNITUDE, bytes >> 4, signs), FP8_RAISE);
    if (NANS) {
        const unsigned nan = nans(bytes);
        pairs[0] |= ((nan & 0x00000080u) != 0u ? 0x00007fffu : 0u) | ((nan & 0x00800000u) != 0u ? 0x7fff0000u : 0u);
        pairs[1] |= ((nan & 0x00008000u) != 0u ? 0x00007fffu : 0u) | ((nan & 0x80000000u) != 0u ? 0x7fff0000u : 0u);
    }
}

struct Fp8Matrix : GemvMatrix {
    const float* scales;
};

struct Fp8 : PairFormat {
    using Matrix = Fp8Matrix;
    static constexpr unsigned CHUNK = 16u;
    static constexpr bool WHOLE = false;

    // Elements (0, 2), (1, 3), (4, 6), (5, 7), as the bytes lie.
    static __device__ __forceinline__ uint4 ready(const uint4& x) {
        return make_uint4(__byte_perm(x.x, x.y, 0x5410u), __byte_perm(x.x, x.y, 0x7632u),
                          __byte_perm(x.z, x.w, 0x5410u), __byte_perm(x.z, x.w, 0x7632u));
    }

    template <bool NANS, class Used>
    static __device__ __forceinline__ void steps(float (&sum)[4], const unsigned (&low)[4], const unsigned (&high)[4],
                                                 const uint4 (&x)[2], Used used) {
#pragma unroll
        for (unsigned w = 0u; w < 4u; ++w) {
            const uint4& a = x[w / 2u];
            unsigned lower[2];
            unsigned upper[2];
            decode<NANS>(low[w], lower);
            decode<NANS>(high[w], upper);
            spark_mma(sum, {lower[0], upper[0], lower[1], upper[1]},
                      {w % 2u == 0u ? a.x : a.z, w % 2u == 0u ? a.y : a.w});
            if (w % 2u == 1u) {
                used(w / 2u);
            }
        }
    }

    template <class Used>
    __device__ __forceinline__ void multiply(float (&sum)[4], unsigned, unsigned, const uint4& low, const uint4& high,
                                             const uint4 (&x)[2], Used used) const {
        const unsigned low_words[4] = {low.x, low.y, low.z, low.w};
        const unsigned high_words[4] = {high.x, high.y, high.z, high.w};
        unsigned nan = 0u;
#pragma unroll
        for (unsigned w = 0u; w < 4u; ++w) {
            nan |= nans(low_words[w]) | nans(high_words[w]);
        }
        if (__any_sync(SPARK_FULL_MASK, (nan & 0x80808080u) != 0u)) {  // seldom
            steps<true>(sum, low_words, high_words, x, used);
        } else {
            steps<false>(sum, low_words, high_words, x, used);
        }
    }

    static __device__ __forceinline__ float scaled(const Matrix& matrix, unsigned output, float sum) {
        const float scale = matrix.scales[output];
        return sum * scale;
    }
};

// Yi[m * stride_i + n] = bf16(scale_i[n] * sum over k of X[m, k] * value_i[n, k]), codes [Ni, K], scales FP32 [Ni]:
// tiled_gemv_rows. K % 16 == 0.
extern "C" __global__ void __launch_bounds__(128, 4)
    spark_fp8_gemv_rows(const __nv_bfloat16* __restrict__ X, const unsigned char* __restrict__ W0,
                        const unsigned char* __restrict__ W1, const unsigned char* __restrict__ W2,
                        const float* __restrict__ S0, const float* __restrict__ S1, const float* __restrict__ S2,
                        __nv_bfloat16* __restrict__ Y0, __nv_bfloat16* __restrict__ Y1,
                        __nv_bfloat16* __restrict__ Y2, unsigned int M, unsigned int N0, unsigned int N1,
                        unsigned int N2, unsigned int K, unsigned int stride0, unsigned int stride1,
                        unsigned int stride2, unsigned int head_dim) {
    const GemvMatrices<Fp8Matrix> all = {{{{reinterpret_cast<const uint4*>(W0), Y0, N0, stride0}, S0},
                                          {{reinterpret_cast<const uint4*>(W1), Y1, N1, stride1}, S1},
                                          {{reinterpret_cast<const uint4*>(W2), Y2, N2, stride2}, S2}}};
    paired_gemv_rows(Fp8{}, X, all, M, K, head_dim);
}

// ids[m] = argmax over n of bf16(scale[n] * sum over k of X[m, k] * value[n, k]), embed[m] = row ids[m] of embed_table:
// spark_gemv_argmax.cuh. K % 16 == 0; embed_table and embed as for spark_gemv_rows_argmax.
extern "C" __global__ void __launch_bounds__(128, 4)
    spark_fp8_gemv_rows_argmax(const __nv_bfloat16* __restrict__ X, const unsigned char* __restrict__ W,
                               const float* __restrict__ S, unsigned int* ids,
                               const __nv_bfloat16* __restrict__ embed_table, __nv_bfloat16* embed,
                               unsigned long long* best, unsigned int* done, unsigned int M, unsigned int N,
                               unsigned int K) {
    const GemvMatrices<Fp8Matrix> all = {{{{reinterpret_cast<const uint4*>(W), nullptr, N, N}, S}, {}, {}}};
    GemvArgmax<PAIR_OUTPUTS, 128u> argmax;
    paired_gemv_rows(Fp8{}, X, all, M, K, 0u, argmax);
    argmax.finish(M, {best, done}, {ids, embed_table, embed, K});
}
