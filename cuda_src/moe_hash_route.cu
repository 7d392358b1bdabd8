// SPDX-License-Identifier: AGPL-3.0-only
// Module moe_hash_route: the experts of a token by its id, from a table, and their weights from the learned router's
// logits as in moe_topk_sqrt. Parameters and geometry are the engine's.
//
// An entry that is no expert gives index 0, as in the engine, and a weight of NaN: nothing beyond the logits is read, and
// the fault shows in what the token's experts give. Token ids are not checked: the kernel does not know the table's
// length.

#include "moe_sqrt.cuh"

// gate_logits [E], row token_id_ptr[0] of tid2eid [V, k]: expert_indices [k] and expert_weights [k]. Grid 1, block 256,
// of which one warp works, a lane a slot; k <= 32.
extern "C" __global__ void moe_hash_route(const __nv_bfloat16* __restrict__ gate_logits,
                                          const long long* __restrict__ tid2eid,
                                          const unsigned int* __restrict__ token_id_ptr,
                                          unsigned int* __restrict__ expert_indices,
                                          float* __restrict__ expert_weights, unsigned int num_experts,
                                          unsigned int top_k, unsigned int normalize, float scaling_factor) {
    spark_let_next_start();
    spark_wait_for_previous();
    const unsigned lane = threadIdx.x;
    if (lane >= SPARK_WARP) {
        return;
    }
    unsigned expert = 0u;
    float score = 0.0f;
    if (lane < top_k) {
        const long long entry = tid2eid[static_cast<size_t>(token_id_ptr[0]) * top_k + lane];
        const bool known = entry >= 0 && entry < static_cast<long long>(num_experts);
        expert = known ? static_cast<unsigned>(entry) : 0u;
        score = known ? sqrt_softplus(spark_load(gate_logits + expert)) : __uint_as_float(0x7fffffffu);
    }
    const float weight = sqrt_weight(score, normalize != 0u, scaling_factor);
    if (lane < top_k) {
        expert_indices[lane] = expert;
        expert_weights[lane] = weight;
    }
}
