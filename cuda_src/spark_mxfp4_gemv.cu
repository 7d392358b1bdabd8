// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_mxfp4_gemv: y = x W^T with MXFP4 weights [N, K], as DeepSeek-V4's checkpoint has its routed experts.
// This project's own kernels; format and order of arithmetic in mxfp4.cuh. K % 32 == 0; A and B_packed on 16-byte
// addresses.

#include "mxfp4.cuh"

// C[n] = bf16(A . B[n]) for one row. Grid ceil(N / 4), block 256.
extern "C" __global__ void __launch_bounds__(256)
    spark_mxfp4_gemv(const __nv_bfloat16* __restrict__ A, const unsigned char* __restrict__ B_packed,
                     const unsigned char* __restrict__ B_scale, __nv_bfloat16* __restrict__ C, unsigned int N,
                     unsigned int K) {
    spark_let_next_start();
    spark_wait_for_previous();
    __shared__ float warp_sums[1][2u * MXFP4_GROUPS];
    mxfp4_block<1u, 1u, 1u, 4u>(A, B_packed, B_scale, C, N, K, 0u, warp_sums);
}

constexpr unsigned MXFP4_BATCH_ROWS = 8u;
constexpr unsigned MXFP4_BATCH_OUTPUTS = 2u;

// C[m * out_stride + n] = bf16(A[m] . B[n]) for M rows, 1 to 8 (the host refuses others), each with the bits of the
// kernel above; each byte of weights is read once for all rows. Grid ceil(N / 8), block 256.
extern "C" __global__ void __launch_bounds__(256, 2)
    spark_mxfp4_gemv_batchm(const __nv_bfloat16* __restrict__ A, const unsigned char* __restrict__ B_packed,
                            const unsigned char* __restrict__ B_scale, __nv_bfloat16* __restrict__ C, unsigned int M,
                            unsigned int N, unsigned int K, unsigned int out_stride) {
    spark_let_next_start();
    spark_wait_for_previous();
    __shared__ float warp_sums[MXFP4_BATCH_ROWS * MXFP4_BATCH_OUTPUTS][2u * MXFP4_GROUPS];
    switch (M) {
// With more rows, two chunks of an output in flight would spill, and then two outputs at a time.
#define MXFP4_CASE(rows)                                                                      \
    case rows:                                                                                \
        mxfp4_block<rows, MXFP4_BATCH_OUTPUTS, rows <= 4u ? 2u : 1u, rows <= 2u ? 2u : 1u>(   \
            A, B_packed, B_scale, C, N, K, out_stride, warp_sums);                            \
        break;
        MXFP4_CASE(1u)
        MXFP4_CASE(2u)
        MXFP4_CASE(3u)
        MXFP4_CASE(4u)
        MXFP4_CASE(5u)
        MXFP4_CASE(6u)
        MXFP4_CASE(7u)
        MXFP4_CASE(8u)
#undef MXFP4_CASE
        default:
            break;
    }
}
