// SPDX-License-Identifier: AGPL-3.0-only
// Module moe_expert_gemv: one NVFP4 projection of each expert that a router chose. Order of arithmetic and tables as in
// moe_expert.cuh.

#include "moe_expert.cuh"

// C[y] = A[y] . expert expert_indices[y], C [top_k, N]. Rows of A [K] are input_stride elements apart, a multiple of 8;
// 0 is one row for all. An address of 0 gives zeros. Grid (ceil(N / 4), top_k), block 128: a warp an output.
extern "C" __global__ void __launch_bounds__(128)
    moe_expert_gemv(const __nv_bfloat16* __restrict__ A, const unsigned long long* __restrict__ packed_ptrs,
                    const unsigned long long* __restrict__ scale_ptrs, const float* __restrict__ scale2_vals,
                    __nv_bfloat16* __restrict__ C, const unsigned int* __restrict__ expert_indices, unsigned int N,
                    unsigned int K, unsigned int top_k, unsigned int input_stride) {
    spark_let_next_start();
    spark_wait_for_previous();
    const size_t slot = blockIdx.y;
    if (slot < top_k) {
        const SparkNvfp4Tables tables = {packed_ptrs, scale_ptrs, scale2_vals};
        const SparkRow row = {A + slot * input_stride};
        spark_expert_outputs<1u, 4u>(row, tables.of(expert_indices[slot]), C + slot * N, N, K);
    }
}
