// SPDX-License-Identifier: AGPL-3.0-only
// Module moe_expert_gemv, moe_weighted_sum_blend: the experts of a token and the shared expert become one row.

#include "moe_blend.cuh"

// output [hidden] of expert_out [top_k, hidden], expert_weights [top_k], shared_out [hidden], input [K] and gate_weight
// [K] or NULL; the maths is in moe_blend.cuh. Grid ceil(hidden / 256), block 256.
extern "C" __global__ void moe_weighted_sum_blend(__nv_bfloat16* __restrict__ output,
                                                  const __nv_bfloat16* __restrict__ expert_out,
                                                  const float* __restrict__ expert_weights,
                                                  const __nv_bfloat16* __restrict__ shared_out,
                                                  const __nv_bfloat16* __restrict__ input,
                                                  const __nv_bfloat16* __restrict__ gate_weight, unsigned int hidden,
                                                  unsigned int top_k, unsigned int K) {
    spark_let_next_start();
    spark_wait_for_previous();
    spark_moe_blend(output, expert_out, expert_weights, shared_out, input, gate_weight, hidden, top_k, K);
}
