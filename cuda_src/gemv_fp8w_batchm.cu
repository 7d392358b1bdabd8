// SPDX-License-Identifier: AGPL-3.0-only
// Module gemv_fp8w, 1 to 8 rows of activations: each byte of weights is read once for all of them, and each row has the
// bits that dense_gemv_fp8w gives it alone. This project's own kernel.

#include "fp8_gemv.cuh"

// C[m * out_stride + n] = bf16(A[m] . B[n]), scaled by row, in the order of fp8_gemv.cuh; A is [M, K]. Grid
// ceil(N / 8), block 256. M from 1 to 8 (the host refuses others), K % 16 == 0, A and B on 16-byte addresses.
extern "C" __global__ void __launch_bounds__(256)
    spark_dense_gemv_fp8w_batchm(const __nv_bfloat16* __restrict__ A, const unsigned char* __restrict__ B,
                                 const float* __restrict__ row_scale, __nv_bfloat16* __restrict__ C, unsigned int M,
                                 unsigned int N, unsigned int K, unsigned int out_stride) {
    spark_let_next_start();
    spark_wait_for_previous();
    fp8_gemv_rows<Fp8Scales::ROW>(A, B, row_scale, C, M, N, K, out_stride);
}
