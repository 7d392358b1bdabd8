// SPDX-License-Identifier: AGPL-3.0-only
// Module moe_topk: the k largest of E router logits of a token, largest first, and their softmax weights. What they are
// is in moe_topk.cuh. One warp does a token.

#include "moe_topk.cuh"

// gate_logits [E] gives expert_indices [k] and expert_weights [k]. Grid 1, block 256.
extern "C" __global__ void moe_topk_softmax(const __nv_bfloat16* __restrict__ gate_logits,
                                            unsigned int* __restrict__ expert_indices,
                                            float* __restrict__ expert_weights, unsigned int num_experts,
                                            unsigned int top_k, unsigned int normalize) {
    spark_let_next_start();
    spark_wait_for_previous();
    if (threadIdx.x < SPARK_WARP) {
        topk_softmax(gate_logits, expert_indices, expert_weights, num_experts, top_k, normalize != 0u);
    }
}

// The same for each of T tokens: [T, E] gives [T, k] and [T, k]. Grid (T), block 256.
extern "C" __global__ void moe_topk_softmax_batched(const __nv_bfloat16* __restrict__ gate_logits,
                                                    unsigned int* __restrict__ expert_indices,
                                                    float* __restrict__ expert_weights, unsigned int num_experts,
                                                    unsigned int top_k, unsigned int normalize) {
    spark_let_next_start();
    spark_wait_for_previous();
    const size_t token = blockIdx.x;
    if (threadIdx.x < SPARK_WARP) {
        topk_softmax(gate_logits + token * num_experts, expert_indices + token * top_k, expert_weights + token * top_k,
                     num_experts, top_k, normalize != 0u);
    }
}
