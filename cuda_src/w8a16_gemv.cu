// SPDX-License-Identifier: AGPL-3.0-only
// Module w8a16_gemv: y = x W^T with E4M3 weights as checkpoints have them, one FP32 factor for 128 x 128 weights.
// Parameters and geometry are the engine's.

#include "fp8_gemv.cuh"

// C[n] = bf16(A . B[n]), scaled by block, in the order of fp8_gemv.cuh; block_scale is [ceil(N / 128), ceil(K / 128)].
// Bytes 0x7f and 0xff are NaN: a broken weight shows. Grid ceil(N / 4), block 256. K % 16 == 0; A and B on 16-byte
// addresses.
extern "C" __global__ void __launch_bounds__(256)
    w8a16_gemv(const __nv_bfloat16* __restrict__ A, const unsigned char* __restrict__ B,
               const float* __restrict__ block_scale, __nv_bfloat16* __restrict__ C, unsigned int N, unsigned int K) {
    spark_let_next_start();
    spark_wait_for_previous();
    __shared__ float warp_sums[1][FP8_WARPS];
    fp8_gemv_block<Fp8Scales::BLOCK, 1u, 1u>(A, B, block_scale, C, N, K, 0u, warp_sums);
}
