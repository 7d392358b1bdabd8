// SPDX-License-Identifier: AGPL-3.0-only
// Module w4a16_gemv_fused: two projections of one row in one launch, each with the bits of w4a16_gemv. Both have N
// outputs; blockIdx.z says which.

#include "w4a16.cuh"

// Grid (ceil(N / 4), 1, 2), block 256. K % 16 == 0; A on a 16-byte address, weights on 8-byte ones.
extern "C" __global__ void __launch_bounds__(256)
    w4a16_gemv_dual(const __nv_bfloat16* __restrict__ A, const unsigned char* __restrict__ B1_packed,
                    const unsigned char* __restrict__ B1_scale, float scale2_1, __nv_bfloat16* __restrict__ C1,
                    const unsigned char* __restrict__ B2_packed, const unsigned char* __restrict__ B2_scale,
                    float scale2_2, __nv_bfloat16* __restrict__ C2, unsigned int N, unsigned int K) {
    const bool second = blockIdx.z == 1u;
    spark_w4_block<1u, 1u, 4u>(A, second ? B2_packed : B1_packed, second ? B2_scale : B1_scale,
                               second ? scale2_2 : scale2_1, second ? C2 : C1, 1u, N, K);
}

// The same bits by a warp an output. Grid (ceil(N / 8), 1, 2), block 256.
extern "C" __global__ void __launch_bounds__(256)
    w4a16_gemv_dual_sw(const __nv_bfloat16* __restrict__ A, const unsigned char* __restrict__ B1_packed,
                       const unsigned char* __restrict__ B1_scale, float scale2_1, __nv_bfloat16* __restrict__ C1,
                       const unsigned char* __restrict__ B2_packed, const unsigned char* __restrict__ B2_scale,
                       float scale2_2, __nv_bfloat16* __restrict__ C2, unsigned int N, unsigned int K) {
    const bool second = blockIdx.z == 1u;
    spark_w4_warps(A, second ? B2_packed : B1_packed, second ? B2_scale : B1_scale, second ? scale2_2 : scale2_1,
                   second ? C2 : C1, N, K);
}
