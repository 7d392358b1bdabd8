// SPDX-License-Identifier: AGPL-3.0-only
// Module gemv: y = x W^T for one row x, BF16 weights [N, K].

#include "dense_gemv.cuh"

// C[n] = bf16(sum over k of A[k] * B[n, k]), in the order of dense_gemv.cuh. Grid ceil(N / 4), block 256: four outputs
// a block. K % 8 == 0; A and B on 16-byte addresses.
extern "C" __global__ void dense_gemv_bf16(const __nv_bfloat16* A, const __nv_bfloat16* __restrict__ B,
                                           __nv_bfloat16* __restrict__ C, unsigned int N, unsigned int K) {
    constexpr unsigned EARLY = 4u;  // chunks of weights that are asked for before the wait
    __shared__ float warp_sums[8];
    const unsigned group = threadIdx.x / SPARK_DOT_THREADS;
    const unsigned lane = threadIdx.x % SPARK_DOT_THREADS;
    const size_t row = static_cast<size_t>(blockIdx.x) * 4u + group;
    const unsigned chunks = row < N ? K / SPARK_DOT_CHUNK : 0u;
    const uint4* weights = reinterpret_cast<const uint4*>(B + row * K);
    uint4 first[EARLY];
    spark_let_next_start();
#pragma unroll
    for (unsigned d = 0u; d < EARLY; ++d) {
        const unsigned c = lane + d * SPARK_DOT_THREADS;
        first[d] = c < chunks ? weights[c] : make_uint4(0u, 0u, 0u, 0u);
    }
    spark_wait_for_previous();
    // Threads past N have nothing to add but do reach the barrier.
    const uint4* a = reinterpret_cast<const uint4*>(A);
    float sum = 0.0f;
#pragma unroll
    for (unsigned d = 0u; d < EARLY; ++d) {
        const unsigned c = lane + d * SPARK_DOT_THREADS;
        if (c < chunks) {
            sum = spark_dot_chunk(sum, a[c], first[d]);
        }
    }
    sum = spark_dot_share(a, weights, chunks, lane + EARLY * SPARK_DOT_THREADS, sum);
    sum = spark_warp_sum(sum, SPARK_WARP);
    if (threadIdx.x % SPARK_WARP == 0u) {
        warp_sums[threadIdx.x / SPARK_WARP] = sum;
    }
    __syncthreads();
    if (lane == 0u && row < N) {
        spark_store(C + row, warp_sums[2u * group] + warp_sums[2u * group + 1u]);
    }
}
