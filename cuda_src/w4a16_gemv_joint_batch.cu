// SPDX-License-Identifier: AGPL-3.0-only
// Module w4a16_gemv, joint projections of two and three rows: queries with gates, and two weights of one shape. A
// weight is read once for all rows. All are scaled by weight: rows of the first have the bits of w4a16_gemv_qg, those
// of the second do not have the bits of w4a16_gemv_dual.
//
// A [rows, K] and C [rows, N] without gaps. K % 16 == 0; A on a 16-byte address, codes on 4-byte ones.

#include "w4a16.cuh"

template <unsigned ROWS>
__device__ __forceinline__ void queries_and_gates(const __nv_bfloat16* a, const unsigned char* packed,
                                                  const unsigned char* scales, float scale2, __nv_bfloat16* c,
                                                  unsigned n, unsigned k, unsigned num_heads, unsigned head_dim) {
    const size_t output = static_cast<size_t>(blockIdx.x) * 4u + threadIdx.x / SPARK_W4_LANES;
    float totals[ROWS];
    spark_w4_by_weight(totals, a, packed, scales, scale2, output, n, k);
    if (threadIdx.x % SPARK_W4_LANES == 0u && output < n) {
        const size_t at = spark_w4_apart(output, num_heads, head_dim);
#pragma unroll
        for (unsigned r = 0u; r < ROWS; ++r) {
            spark_store(c + static_cast<size_t>(r) * n + at, totals[r]);
        }
    }
}

template <unsigned ROWS>
__device__ __forceinline__ void one_of_two(const __nv_bfloat16* a, const unsigned char* packed,
                                           const unsigned char* scales, float scale2, __nv_bfloat16* c, unsigned n,
                                           unsigned k) {
    const size_t output = static_cast<size_t>(blockIdx.x) * 4u + threadIdx.x / SPARK_W4_LANES;
    float totals[ROWS];
    spark_w4_by_weight(totals, a, packed, scales, scale2, output, n, k);
    if (threadIdx.x % SPARK_W4_LANES == 0u && output < n) {
#pragma unroll
        for (unsigned r = 0u; r < ROWS; ++r) {
            spark_store(c + static_cast<size_t>(r) * n + output, totals[r]);
        }
    }
}

// Each row of C holds all queries, then all gates, as w4a16_gemv_qg has them. Grid ceil(N / 4), block 256.
extern "C" __global__ void __launch_bounds__(256)
    w4a16_gemv_qg_batch2(const __nv_bfloat16* __restrict__ A, const unsigned char* __restrict__ B_packed,
                         const unsigned char* __restrict__ B_scale, float scale2, __nv_bfloat16* __restrict__ C,
                         unsigned int N, unsigned int K, unsigned int num_heads, unsigned int head_dim) {
    queries_and_gates<2u>(A, B_packed, B_scale, scale2, C, N, K, num_heads, head_dim);
}

extern "C" __global__ void __launch_bounds__(256)
    w4a16_gemv_qg_batch3(const __nv_bfloat16* __restrict__ A, const unsigned char* __restrict__ B_packed,
                         const unsigned char* __restrict__ B_scale, float scale2, __nv_bfloat16* __restrict__ C,
                         unsigned int N, unsigned int K, unsigned int num_heads, unsigned int head_dim) {
    queries_and_gates<3u>(A, B_packed, B_scale, scale2, C, N, K, num_heads, head_dim);
}

// Two weights [N, K_in]; blockIdx.z says which. Grid (ceil(N / 4), 1, 2), block 256.
extern "C" __global__ void __launch_bounds__(256)
    w4a16_gemv_dual_batch2(const __nv_bfloat16* __restrict__ A, const unsigned char* __restrict__ B0_packed,
                           const unsigned char* __restrict__ B0_scale, float B0_scale2, __nv_bfloat16* __restrict__ C0,
                           const unsigned char* __restrict__ B1_packed, const unsigned char* __restrict__ B1_scale,
                           float B1_scale2, __nv_bfloat16* __restrict__ C1, unsigned int N, unsigned int K_in) {
    const bool second = blockIdx.z == 1u;
    one_of_two<2u>(A, second ? B1_packed : B0_packed, second ? B1_scale : B0_scale, second ? B1_scale2 : B0_scale2,
                   second ? C1 : C0, N, K_in);
}

extern "C" __global__ void __launch_bounds__(256)
    w4a16_gemv_dual_batch3(const __nv_bfloat16* __restrict__ A, const unsigned char* __restrict__ B0_packed,
                           const unsigned char* __restrict__ B0_scale, float B0_scale2, __nv_bfloat16* __restrict__ C0,
                           const unsigned char* __restrict__ B1_packed, const unsigned char* __restrict__ B1_scale,
                           float B1_scale2, __nv_bfloat16* __restrict__ C1, unsigned int N, unsigned int K_in) {
    const bool second = blockIdx.z == 1u;
    one_of_two<3u>(A, second ? B1_packed : B0_packed, second ? B1_scale : B0_scale, second ? B1_scale2 : B0_scale2,
                   second ? C1 : C0, N, K_in);
}
