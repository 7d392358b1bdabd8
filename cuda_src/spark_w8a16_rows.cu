// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_w8a16_rows: spark_gemv_rows.cuh on E4M3 matrices as checkpoints have them, one FP32 factor for 128 x 128
// weights, or on the groups of a block-diagonal one.
//
// Every E4M3 value is a BF16 number and goes as such through tensor-core steps with FP32 sums. A stripe is 128 k, so that a
// warp's part of a tile has one factor for it: its steps start from zero, in ascending order of the words of four bytes,
// and their sum s is added as fmaf(factor, s, sum). From sm_89 on the conversion of two bytes to FP16, which is exact too
// and knows NaN, is one instruction; by way of FP32 it is four for a pair.

#include "spark_fp8.cuh"
#include "spark_gemv_rows.cuh"

constexpr unsigned W8_SIDE = 128u;  // of a square with one factor

struct W8Matrix : GemvMatrix {
    const float* factors;
    const uint4* x;  // its own rows
    unsigned rows;
};

struct W8 : GemvFormat {
    using Matrix = W8Matrix;
    static constexpr unsigned CHUNK = 16u;
    static constexpr bool KEEPS = false;
    static constexpr unsigned BUFFERS = 2u;

    unsigned groups;    // of the first matrix
    const uint4* mine;  // this lane's row of x for the tile, where there is one
    bool there;
    const float* factors;
    float factor;
    uint4 rows[GEMV_PIECES][2];
    float part[4];

    static __device__ __forceinline__ bool holds(const Matrix& matrix, unsigned row) { return row < matrix.rows; }

    __device__ __forceinline__ void begin(const GemvMatrices<W8Matrix>& all, unsigned tile, unsigned k) {
        unsigned output;
        const W8Matrix matrix = find(all, tile, output);
        factors = matrix.factors + static_cast<size_t>(output / W8_SIDE) * ((k + W8_SIDE - 1u) / W8_SIDE);
        const unsigned g = threadIdx.x % SPARK_WARP / 4u;
        there = g < matrix.rows;
        mine = matrix.x + (static_cast<size_t>(there ? g : 0u) * groups + output / (matrix.n / groups)) * (k / 8u);
    }

    __device__ __forceinline__ void read_x(const uint4*, unsigned first, unsigned chunks, bool) {
        factor = factors[first / GEMV_UNITS];
#pragma unroll
        for (unsigned p = 0u; p < GEMV_PIECES; ++p) {
            const unsigned chunk = first + 4u * p;
            rows[p][0] = make_uint4(0u, 0u, 0u, 0u);
            rows[p][1] = make_uint4(0u, 0u, 0u, 0u);
            if (there && chunk < chunks) {
                rows[p][0] = mine[2u * chunk];
                rows[p][1] = mine[2u * chunk + 1u];
            }
        }
    }

    __device__ __forceinline__ void multiply(float (&sum)[4], unsigned p, const uint4& low, const uint4& high) {
        if (p == 0u) {
#pragma unroll
            for (unsigned i = 0u; i < 4u; ++i) {
                part[i] = 0.0f;
            }
        }
        const unsigned low_words[4] = {low.x, low.y, low.z, low.w};
        const unsigned high_words[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
        for (unsigned w = 0u; w < 4u; ++w) {
            const uint4 a = rows[p][w / 2u];
            unsigned lower[2];
            unsigned upper[2];
            spark_e4m3_pairs(low_words[w], lower);
            spark_e4m3_pairs(high_words[w], upper);
            spark_mma(part, {lower[0], upper[0], lower[1], upper[1]},
                      {w % 2u == 0u ? a.x : a.z, w % 2u == 0u ? a.y : a.w});
        }
        if (p == GEMV_PIECES - 1u) {
#pragma unroll
            for (unsigned i = 0u; i < 4u; ++i) {
                sum[i] = fmaf(factor, part[i], sum[i]);
            }
        }
    }

    static __device__ __forceinline__ float scaled(const Matrix&, unsigned, float sum) { return sum; }
};

// Yi[m * stride_i + n] = bf16(sum over k of Xi[m, k] * value_i[n, k] * factor_i[n / 128, k / 128]) for Mi rows, codes
// [Ni, K]: tiled_gemv_rows. X1 may be X0, N1 may be 0. groups > 1: the first matrix is that many, [N0 / groups, K] each,
// and group g of it reads X0[m, g * K + k]; N1 is 0 then. K % 16 == 0, N0 / groups % 16 == 0 where groups > 1.
extern "C" __global__ void __launch_bounds__(256, 3)
    spark_w8a16_rows(const __nv_bfloat16* __restrict__ X0, const __nv_bfloat16* __restrict__ X1,
                     const unsigned char* __restrict__ W0, const unsigned char* __restrict__ W1,
                     const float* __restrict__ S0, const float* __restrict__ S1, __nv_bfloat16* __restrict__ Y0,
                     __nv_bfloat16* __restrict__ Y1, unsigned int M0, unsigned int M1, unsigned int N0,
                     unsigned int N1, unsigned int K, unsigned int stride0, unsigned int stride1,
                     unsigned int groups) {
    const GemvMatrices<W8Matrix> all = {
        {{{reinterpret_cast<const uint4*>(W0), Y0, N0, stride0}, S0, reinterpret_cast<const uint4*>(X0), M0},
         {{reinterpret_cast<const uint4*>(W1), Y1, N1, stride1}, S1, reinterpret_cast<const uint4*>(X1), M1},
         {{nullptr, nullptr, 0u, 0u}, nullptr, nullptr, 0u}}};
    W8 format = {};
    format.groups = groups;
    tiled_gemv_rows(format, X0, all, M0 > M1 ? M0 : M1, K, 0u);
}
