// SPDX-License-Identifier: AGPL-3.0-only
// Module gemv: y = x W^T for one row x, BF16 weights [N, K].

#include "dense_gemv.cuh"

// C[n] = bf16(sum over k of A[k] * B[n, k]), in the order of dense_gemv.cuh. Grid ceil(N / 4), block 256: four outputs
// a block. K % 8 == 0; A and B on 16-byte addresses.
extern "C" __global__ void dense_gemv_bf16(const __nv_bfloat16* __restrict__ A, const __nv_bfloat16* __restrict__ B,
                                           __nv_bfloat16* __restrict__ C, unsigned int N, unsigned int K) {
    spark_let_next_start();
    spark_wait_for_previous();
    __shared__ float warp_sums[8];
    const unsigned group = threadIdx.x / SPARK_DOT_THREADS;
    const unsigned lane = threadIdx.x % SPARK_DOT_THREADS;
    const size_t row = static_cast<size_t>(blockIdx.x) * 4u + group;
    // Threads past N have nothing to add but do reach the barrier.
    float sum = 0.0f;
    if (row < N) {
        const __nv_bfloat16* weights = B + row * K;
        sum = spark_dot_share(reinterpret_cast<const uint4*>(A), reinterpret_cast<const uint4*>(weights),
                              K / SPARK_DOT_CHUNK, lane);
    }
    sum = spark_warp_sum(sum, SPARK_WARP);
    if (threadIdx.x % SPARK_WARP == 0u) {
        warp_sums[threadIdx.x / SPARK_WARP] = sum;
    }
    __syncthreads();
    if (lane == 0u && row < N) {
        spark_store(C + row, warp_sums[2u * group] + warp_sums[2u * group + 1u]);
    }
}
