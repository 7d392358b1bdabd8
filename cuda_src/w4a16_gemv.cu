// SPDX-License-Identifier: AGPL-3.0-only
// Module w4a16_gemv: y = x W^T for one row x and NVFP4 weights [N, K]. The kernels for several rows are in
// w4a16_gemv_batch.cu and w4a16_gemv_joint_batch.cu.

#include "w4a16.cuh"

// C[n] = bf16(A . B[n]), scaled by chunk. Grid ceil(N / 4), block 256. K % 16 == 0; A on a 16-byte address, B_packed on
// an 8-byte one.
extern "C" __global__ void __launch_bounds__(256)
    w4a16_gemv(const __nv_bfloat16* __restrict__ A, const unsigned char* __restrict__ B_packed,
               const unsigned char* __restrict__ B_scale, float scale2, __nv_bfloat16* __restrict__ C,
               unsigned int N, unsigned int K) {
    spark_w4_block<1u, 1u, 4u>(A, B_packed, B_scale, scale2, C, 1u, N, K);
}

// The same bits by a warp an output. Grid ceil(N / 8), block 256: never the grid of w4a16_gemv.
extern "C" __global__ void __launch_bounds__(256)
    w4a16_gemv_sw(const __nv_bfloat16* __restrict__ A, const unsigned char* __restrict__ B_packed,
                  const unsigned char* __restrict__ B_scale, float scale2, __nv_bfloat16* __restrict__ C,
                  unsigned int N, unsigned int K) {
    spark_w4_warps(A, B_packed, B_scale, scale2, C, N, K);
}

// Queries and gates of num_heads heads, scaled by weight. Row n = 2 * head_dim * h + i of the weights is element i of
// the query of head h for i < head_dim, and of its gate beyond; C holds all queries, then all gates. N = 2 * num_heads *
// head_dim. Grid ceil(N / 4), block 256. B_packed on a 4-byte address.
extern "C" __global__ void __launch_bounds__(256)
    w4a16_gemv_qg(const __nv_bfloat16* __restrict__ A, const unsigned char* __restrict__ B_packed,
                  const unsigned char* __restrict__ B_scale, float scale2, __nv_bfloat16* __restrict__ C,
                  unsigned int N, unsigned int K, unsigned int num_heads, unsigned int head_dim) {
    const size_t output = static_cast<size_t>(blockIdx.x) * 4u + threadIdx.x / SPARK_W4_LANES;
    const float sum = spark_w4_by_weight(A, B_packed, B_scale, scale2, output, N, K);
    if (threadIdx.x % SPARK_W4_LANES == 0u && output < N) {
        spark_store(C + spark_w4_apart(output, num_heads, head_dim), sum);
    }
}

// C[n] = A . B[n] in FP32, scaled by weight. Grid ceil(N / 4), block 256. B_packed on a 4-byte address.
extern "C" __global__ void __launch_bounds__(256)
    w4a16_gemv_logits(const __nv_bfloat16* __restrict__ A, const unsigned char* __restrict__ B_packed,
                      const unsigned char* __restrict__ B_scale, float scale2, float* __restrict__ C,
                      unsigned int N, unsigned int K) {
    const size_t output = static_cast<size_t>(blockIdx.x) * 4u + threadIdx.x / SPARK_W4_LANES;
    const float sum = spark_w4_by_weight(A, B_packed, B_scale, scale2, output, N, K);
    if (threadIdx.x % SPARK_W4_LANES == 0u && output < N) {
        C[output] = sum;
    }
}
