// SPDX-License-Identifier: AGPL-3.0-only
// Module dense_gemv_bf16_batchm: Y = X W^T for 1 to 16 rows of X. Each weight is read once for all rows, and each row
// has the bits that gemv::dense_gemv_bf16 gives it alone.

#include "dense_gemv.cuh"

constexpr unsigned BATCH_MAX_ROWS = 16u;
constexpr unsigned BATCH_WARPS = 8u;
constexpr unsigned BATCH_OUTPUTS = 4u;
constexpr unsigned BATCH_STAGED = 2048u;  // chunks of X that wait in shared memory: 32 KiB

// The four outputs of a block for ROWS rows. A stripe is the 64 chunks that the 64 lanes of an output take in one turn;
// a block stages a few stripes of every row between two barriers, for its four outputs to share.
template <unsigned ROWS>
__device__ __forceinline__ void gemv_rows(const uint4* a, const uint4* b, __nv_bfloat16* c, unsigned n, unsigned chunks,
                                          unsigned out_stride, uint4* staged, float (*warp_sums)[BATCH_WARPS]) {
    constexpr unsigned STRIPES = ROWS <= 8u ? 4u : 1u;
    constexpr unsigned AT_ONCE = STRIPES * SPARK_DOT_THREADS;
    static_assert(ROWS * AT_ONCE <= BATCH_STAGED, "more than the shared memory holds");
    const unsigned group = threadIdx.x / SPARK_DOT_THREADS;
    const unsigned lane = threadIdx.x % SPARK_DOT_THREADS;
    const size_t output = static_cast<size_t>(blockIdx.x) * BATCH_OUTPUTS + group;
    // Threads past N have nothing to add but do reach the barriers.
    const unsigned mine = output < n ? chunks : 0u;
    const uint4* weights = b + output * chunks;
    float sums[ROWS] = {};
    uint4 ahead[STRIPES] = {};
#pragma unroll
    for (unsigned s = 0u; s < STRIPES; ++s) {
        const unsigned chunk = s * SPARK_DOT_THREADS + lane;
        if (chunk < mine) {
            ahead[s] = weights[chunk];
        }
    }
    for (unsigned first = 0u; first < chunks; first += AT_ONCE) {
        __syncthreads();  // what was staged before has been read
#pragma unroll 2
        for (unsigned i = threadIdx.x; i < ROWS * AT_ONCE; i += BATCH_WARPS * SPARK_WARP) {
            const unsigned chunk = first + i % AT_ONCE;
            if (chunk < chunks) {
                staged[i] = a[static_cast<size_t>(i / AT_ONCE) * chunks + chunk];
            }
        }
        __syncthreads();
        uint4 weight[STRIPES];
#pragma unroll
        for (unsigned s = 0u; s < STRIPES; ++s) {
            weight[s] = ahead[s];
            const unsigned chunk = first + AT_ONCE + s * SPARK_DOT_THREADS + lane;
            if (chunk < mine) {
                ahead[s] = weights[chunk];
            }
        }
#pragma unroll
        for (unsigned s = 0u; s < STRIPES; ++s) {
            const unsigned at = s * SPARK_DOT_THREADS + lane;
            if (first + at < mine) {
#pragma unroll
                for (unsigned row = 0u; row < ROWS; ++row) {
                    sums[row] = spark_dot_chunk(sums[row], staged[row * AT_ONCE + at], weight[s]);
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
    if (lane < ROWS && output < n) {
        const float* halves = warp_sums[lane] + 2u * group;
        spark_store(c + static_cast<size_t>(lane) * out_stride + output, halves[0] + halves[1]);
    }
}

// C[m * out_stride + n] = bf16(sum over k of A[m, k] * B[n, k]), in the order of dense_gemv.cuh. Grid ceil(N / 4),
// block 256. M from 1 to 16 (the host refuses more), K % 8 == 0, A and B on 16-byte addresses.
extern "C" __global__ void __launch_bounds__(256)
    dense_gemv_bf16_batchm(const __nv_bfloat16* __restrict__ A, const __nv_bfloat16* __restrict__ B,
                           __nv_bfloat16* __restrict__ C, unsigned int M, unsigned int N, unsigned int K,
                           unsigned int out_stride) {
    spark_let_next_start();
    spark_wait_for_previous();
    __shared__ uint4 staged[BATCH_STAGED];
    __shared__ float warp_sums[BATCH_MAX_ROWS][BATCH_WARPS];
    const uint4* a = reinterpret_cast<const uint4*>(A);
    const uint4* b = reinterpret_cast<const uint4*>(B);
    const unsigned chunks = K / SPARK_DOT_CHUNK;
    switch (M) {
#define SPARK_ROWS(rows)                                                    \
    case rows:                                                              \
        gemv_rows<rows>(a, b, C, N, chunks, out_stride, staged, warp_sums); \
        break;
        SPARK_ROWS(1)
        SPARK_ROWS(2)
        SPARK_ROWS(3)
        SPARK_ROWS(4)
        SPARK_ROWS(5)
        SPARK_ROWS(6)
        SPARK_ROWS(7)
        SPARK_ROWS(8)
        SPARK_ROWS(9)
        SPARK_ROWS(10)
        SPARK_ROWS(11)
        SPARK_ROWS(12)
        SPARK_ROWS(13)
        SPARK_ROWS(14)
        SPARK_ROWS(15)
        SPARK_ROWS(16)
#undef SPARK_ROWS
        default:
            break;
    }
}
