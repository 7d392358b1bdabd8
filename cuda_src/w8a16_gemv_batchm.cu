// SPDX-License-Identifier: AGPL-3.0-only
// Module w8a16_gemv, 1 to 8 rows of activations: each byte of weights is read once for all of them, and each row has
// the bits that w8a16_gemv gives it alone. This project's own kernel.

#include "fp8_gemv.cuh"

// C[m * out_stride + n] = bf16(A[m] . B[n]), scaled by block, in the order of fp8_gemv.cuh; A is [M, K]. Grid
// ceil(N / 8), block 256. M from 1 to 8 (the host refuses others), K % 16 == 0, A and B on 16-byte addresses.
extern "C" __global__ void __launch_bounds__(256)
    spark_w8a16_gemv_batchm(const __nv_bfloat16* __restrict__ A, const unsigned char* __restrict__ B,
                            const float* __restrict__ block_scale, __nv_bfloat16* __restrict__ C, unsigned int M,
                            unsigned int N, unsigned int K, unsigned int out_stride) {
    spark_let_next_start();
    spark_wait_for_previous();
    fp8_gemv_rows<Fp8Scales::BLOCK>(A, B, block_scale, C, M, N, K, out_stride);
}
