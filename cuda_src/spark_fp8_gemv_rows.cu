// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_fp8_gemv_rows: spark_gemv_rows.cuh on E4M3 matrices with a scale a row.
//
// A weight is value * scale[n]. Every E4M3 value is a BF16 number and goes as such through tensor-core steps with FP32
// sums; the sum is multiplied by the row's scale and rounded once.
//
// A stripe is 128 k, steps in ascending order of the words of four bytes: lane 4 g + t takes 16 elements at a time. The
// conversion to FP16, exact too, is one instruction for two bytes from sm_89 on, and knows NaN; by way of FP32 a pair of
// BF16 takes four, where shifts, masks and a look for NaN are seven.

#include "spark_fp8.cuh"
#include "spark_gemv_argmax.cuh"

struct Fp8Matrix : GemvMatrix {
    const float* scales;
};

struct Fp8 : GemvFormat {
    using Matrix = Fp8Matrix;
    static constexpr unsigned CHUNK = 16u;
    static constexpr bool KEEPS = true;
    static constexpr unsigned BUFFERS = 1u;

    uint4 rows[GEMV_PIECES][2];

    __device__ __forceinline__ void read_x(const uint4* x, unsigned first, unsigned chunks, bool live) {
#pragma unroll
        for (unsigned p = 0u; p < GEMV_PIECES; ++p) {
            const unsigned chunk = first + 4u * p;
            rows[p][0] = make_uint4(0u, 0u, 0u, 0u);
            rows[p][1] = make_uint4(0u, 0u, 0u, 0u);
            if (live && chunk < chunks) {
                rows[p][0] = x[2u * chunk];
                rows[p][1] = x[2u * chunk + 1u];
            }
        }
    }

    __device__ __forceinline__ void multiply(float (&sum)[4], unsigned p, const uint4& low, const uint4& high) const {
        const unsigned low_words[4] = {low.x, low.y, low.z, low.w};
        const unsigned high_words[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
        for (unsigned w = 0u; w < 4u; ++w) {
            const uint4 a = rows[p][w / 2u];
            unsigned lower[2];
            unsigned upper[2];
            spark_e4m3_pairs(low_words[w], lower);
            spark_e4m3_pairs(high_words[w], upper);
            spark_mma(sum, {lower[0], upper[0], lower[1], upper[1]},
                      {w % 2u == 0u ? a.x : a.z, w % 2u == 0u ? a.y : a.w});
        }
    }

    static __device__ __forceinline__ float scaled(const Matrix& matrix, unsigned output, float sum) {
        const float scale = matrix.scales[output];
        return sum * scale;
    }
};

// Yi[m * stride_i + n] = bf16(scale_i[n] * sum over k of X[m, k] * value_i[n, k]), codes [Ni, K], scales FP32 [Ni]:
// tiled_gemv_rows. K % 16 == 0.
extern "C" __global__ void __launch_bounds__(256, 3)
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
    tiled_gemv_rows(Fp8{}, X, all, M, K, head_dim);
}

// ids[m] = argmax over n of bf16(scale[n] * sum over k of X[m, k] * value[n, k]), embed[m] = row ids[m] of embed_table:
// spark_gemv_argmax.cuh. K % 16 == 0; embed_table and embed as for spark_gemv_rows_argmax.
extern "C" __global__ void __launch_bounds__(256, 3)
    spark_fp8_gemv_rows_argmax(const __nv_bfloat16* __restrict__ X, const unsigned char* __restrict__ W,
                               const float* __restrict__ S, unsigned int* ids,
                               const __nv_bfloat16* __restrict__ embed_table, __nv_bfloat16* embed,
                               unsigned long long* best, unsigned int* done, unsigned int M, unsigned int N,
                               unsigned int K) {
    const GemvMatrices<Fp8Matrix> all = {{{{reinterpret_cast<const uint4*>(W), nullptr, N, N}, S}, {}, {}}};
    GemvArgmax<GEMV_TILE, 1u> argmax;
    tiled_gemv_rows(Fp8{}, X, all, M, K, 0u, argmax);
    argmax.finish(M, {best, done}, {ids, embed_table, embed, K});
}
