// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_v4_grouped_gemv: DeepSeek-V4's block-diagonal output projection, all groups and rows in one launch.

#include "dense_gemv.cuh"

constexpr unsigned GROUPED_ROWS = 8u;  // of a block: each weight is read once for all of them
constexpr unsigned GROUPED_WARPS = 8u;
constexpr unsigned GROUPED_OUTPUTS = 4u;

// The four outputs of a block for ROWS rows. A row of A is small and read by many blocks: it comes from cache.
template <unsigned ROWS>
__device__ __forceinline__ void grouped_rows(const uint4* a, const uint4* b, __nv_bfloat16* c, unsigned outputs,
                                             unsigned per_group, unsigned chunks,
                                             float (*warp_sums)[GROUPED_WARPS]) {
    constexpr unsigned DEPTH = ROWS <= 2u ? 4u : 2u;  // weights in flight
    const unsigned own = threadIdx.x / SPARK_DOT_THREADS;
    const unsigned lane = threadIdx.x % SPARK_DOT_THREADS;
    const size_t output = static_cast<size_t>(blockIdx.x) * GROUPED_OUTPUTS + own;
    // Threads past the last output have nothing to add but do reach the barrier.
    const unsigned mine = output < outputs ? chunks : 0u;
    const size_t group = output / per_group;
    const size_t a_stride = static_cast<size_t>(outputs / per_group) * chunks;
    const uint4* weights = b + output * chunks;
    const uint4* inputs = a + group * chunks;
    float sums[ROWS] = {};
    for (unsigned first = lane; first < mine; first += DEPTH * SPARK_DOT_THREADS) {
        uint4 weight[DEPTH] = {};
#pragma unroll
        for (unsigned d = 0u; d < DEPTH; ++d) {
            const unsigned chunk = first + d * SPARK_DOT_THREADS;
            if (chunk < mine) {
                weight[d] = weights[chunk];
            }
        }
#pragma unroll
        for (unsigned d = 0u; d < DEPTH; ++d) {
            const unsigned chunk = first + d * SPARK_DOT_THREADS;
            if (chunk < mine) {
#pragma unroll
                for (unsigned row = 0u; row < ROWS; ++row) {
                    sums[row] = spark_dot_chunk(sums[row], inputs[row * a_stride + chunk], weight[d]);
                }
            }
        }
    }
#pragma unroll
    for (unsigned row = 0u; row < ROWS; ++row) {
        const float sum = spark_warp_sum(sums[row], SPARK_WARP);
        if (threadIdx.x % SPARK_WARP == 0u) {
            warp_sums[row][threadIdx.x / SPARK_WARP] = sum;
        }
    }
    __syncthreads();
    if (lane < ROWS && output < outputs) {
        const float* halves = warp_sums[lane] + 2u * own;
        spark_store(c + static_cast<size_t>(lane) * outputs + output, halves[0] + halves[1]);
    }
}

// C[m, g * N + n] = bf16(sum over k of A[m, g * K + k] * B[g * N + n, k]): group g of a row sees its own K elements and
// its own N rows of weights, in the order of dense_gemv.cuh, so that a group has the bits that gemv::dense_gemv_bf16
// gives it alone. A [M, groups * K], B [groups * N, K], C [M, groups * N]. Grid (ceil(groups * N / 4), ceil(M / 8)),
// block 256. K % 8 == 0, A and B on 16-byte addresses, groups * N below 2^32.
extern "C" __global__ void __launch_bounds__(256)
    spark_v4_grouped_gemv(const __nv_bfloat16* __restrict__ A, const __nv_bfloat16* __restrict__ B,
                          __nv_bfloat16* __restrict__ C, unsigned int M, unsigned int groups, unsigned int N,
                          unsigned int K) {
    spark_let_next_start();
    spark_wait_for_previous();
    __shared__ float warp_sums[GROUPED_ROWS][GROUPED_WARPS];
    const unsigned chunks = K / SPARK_DOT_CHUNK;
    const unsigned outputs = groups * N;
    const unsigned first = blockIdx.y * GROUPED_ROWS;
    const uint4* a = reinterpret_cast<const uint4*>(A) + static_cast<size_t>(first) * groups * chunks;
    const uint4* b = reinterpret_cast<const uint4*>(B);
    __nv_bfloat16* c = C + static_cast<size_t>(first) * outputs;
    switch (M - first) {
#define SPARK_ROWS(rows)                                                \
    case rows:                                                          \
        grouped_rows<rows>(a, b, c, outputs, N, chunks, warp_sums);     \
        break;
        SPARK_ROWS(1)
        SPARK_ROWS(2)
        SPARK_ROWS(3)
        SPARK_ROWS(4)
        SPARK_ROWS(5)
        SPARK_ROWS(6)
        SPARK_ROWS(7)
#undef SPARK_ROWS
        default:
            grouped_rows<GROUPED_ROWS>(a, b, c, outputs, N, chunks, warp_sums);
            break;
    }
}
