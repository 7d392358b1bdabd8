// SPDX-License-Identifier: AGPL-3.0-only
// Module gemm, the scalar kernel: C = A W^T with every output summed in ascending k. gemm_pipelined.cu holds the other.

#include "spark_common.cuh"

constexpr unsigned GEMM_TILE = 16u;

// C[m, n] = bf16(sum over k of A[m, k] * B[n, k]): one FP32 sum, ascending k, a product and then an addition, both
// rounded. Grid (ceil(N / 16), ceil(M / 16)), block (16, 16). Any M, N and K; no alignment beyond the element's.
extern "C" __global__ void dense_gemm_bf16(const __nv_bfloat16* __restrict__ A, const __nv_bfloat16* __restrict__ B,
                                           __nv_bfloat16* __restrict__ C, unsigned int M, unsigned int N,
                                           unsigned int K) {
    // A column more than is used, so that a column of the tile lies in different banks.
    __shared__ float a_tile[GEMM_TILE][GEMM_TILE + 1u];
    __shared__ float b_tile[GEMM_TILE][GEMM_TILE + 1u];
    const size_t m = static_cast<size_t>(blockIdx.y) * GEMM_TILE + threadIdx.y;
    const size_t n = static_cast<size_t>(blockIdx.x) * GEMM_TILE + threadIdx.x;
    const size_t staged_n = static_cast<size_t>(blockIdx.x) * GEMM_TILE + threadIdx.y;
    float sum = 0.0f;
    for (size_t first = 0u; first < K; first += GEMM_TILE) {
        const size_t k = first + threadIdx.x;
        a_tile[threadIdx.y][threadIdx.x] = m < M && k < K ? spark_load(A + m * K + k) : 0.0f;
        b_tile[threadIdx.y][threadIdx.x] = staged_n < N && k < K ? spark_load(B + staged_n * K + k) : 0.0f;
        __syncthreads();
        const unsigned count = K - first < GEMM_TILE ? static_cast<unsigned>(K - first) : GEMM_TILE;
        for (unsigned i = 0u; i < count; ++i) {
            sum = sum + a_tile[threadIdx.y][i] * b_tile[threadIdx.x][i];
        }
        __syncthreads();
    }
    if (m < M && n < N) {
        spark_store(C + m * N + n, sum);
    }
}
