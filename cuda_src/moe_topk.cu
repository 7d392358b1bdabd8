// SPDX-License-Identifier: AGPL-3.0-only
// Module moe_topk: the k largest of E router logits of a token, largest first, and their softmax weights.
//
// A logit and its expert make one integer: the BF16 value as 16 bits that ascend with it, then the expert counted
// downwards. The largest integer is the largest logit with the lowest index, so ties have one answer on every path, and
// a round of selection is one maximum over a warp. NaN comes after -Inf: it is chosen only where fewer than k numbers
// are left, so that the k indices are always distinct and below E. One warp does a token; no barrier is needed.

#include "spark_common.cuh"

constexpr unsigned TOPK_PER_LANE = 16u;  // E <= 512
constexpr unsigned TOPK_INFINITY = 0x7f80u;

// The value's place among BF16 numbers, upper half; +0 and -0 are one. NaN is 0. Then the expert, downwards.
__device__ __forceinline__ unsigned topk_key(__nv_bfloat16 logit, unsigned expert) {
    const unsigned bits = __bfloat16_as_ushort(logit);
    const unsigned magnitude = bits & 0x7fffu;
    const bool negative = bits != magnitude && magnitude != 0u;
    const unsigned number = negative ? 0x7fffu - magnitude : 0x8000u + magnitude;
    const unsigned place = magnitude > TOPK_INFINITY ? 0u : number;
    return (place << 16) | (0xffffu - expert);
}

__device__ __forceinline__ unsigned topk_expert(unsigned key) { return 0xffffu - (key & 0xffffu); }

__device__ __forceinline__ float topk_value(unsigned key) {
    const unsigned place = key >> 16;
    return __uint_as_float((place >= 0x8000u ? place - 0x8000u : 0xffffu - place) << 16);
}

// A sum over the warp that every lane gets.
__device__ __forceinline__ float topk_sum(float value) {
    return __shfl_sync(SPARK_FULL_MASK, spark_warp_sum(value, SPARK_WARP), 0);
}

// One token. weight = exp(l - max) / (sum of exp(l - max) over all experts), each lane adding its experts in ascending
// order; with `normalize` divided by the sum of the k weights on top of that. k <= min(32, E), E <= 512.
__device__ __forceinline__ void topk_softmax(const __nv_bfloat16* logits, unsigned* indices, float* weights,
                                             unsigned experts, unsigned k, bool normalize) {
    const unsigned lane = threadIdx.x;
    if (lane >= SPARK_WARP) {
        return;
    }
    unsigned keys[TOPK_PER_LANE];
#pragma unroll
    for (unsigned i = 0u; i < TOPK_PER_LANE; ++i) {
        const unsigned expert = lane + i * SPARK_WARP;
        keys[i] = expert < experts ? topk_key(logits[expert], expert) : 0u;
    }
    // Keys differ, so whatever is below the last winner was not chosen yet.
    unsigned chosen = 0u;
    unsigned last = 0xffffffffu;
    unsigned first = 0u;
    for (unsigned slot = 0u; slot < k; ++slot) {
        unsigned best = 0u;
#pragma unroll
        for (unsigned i = 0u; i < TOPK_PER_LANE; ++i) {
            best = keys[i] < last && keys[i] > best ? keys[i] : best;
        }
        last = __reduce_max_sync(SPARK_FULL_MASK, best);
        first = slot == 0u ? last : first;
        chosen = slot == lane ? last : chosen;
    }
    const float top = topk_value(first);
    float sum = 0.0f;
#pragma unroll
    for (unsigned i = 0u; i < TOPK_PER_LANE; ++i) {
        sum += lane + i * SPARK_WARP < experts ? __expf(topk_value(keys[i]) - top) : 0.0f;
    }
    sum = topk_sum(sum);
    float weight = lane < k ? __expf(topk_value(chosen) - top) / sum : 0.0f;
    if (normalize) {
        weight = weight / topk_sum(weight);
    }
    if (lane < k) {
        indices[lane] = topk_expert(chosen);
        weights[lane] = weight;
    }
}

// gate_logits [E] gives expert_indices [k] and expert_weights [k]. Grid 1, block 256.
extern "C" __global__ void moe_topk_softmax(const __nv_bfloat16* __restrict__ gate_logits,
                                            unsigned int* __restrict__ expert_indices,
                                            float* __restrict__ expert_weights, unsigned int num_experts,
                                            unsigned int top_k, unsigned int normalize) {
    spark_let_next_start();
    spark_wait_for_previous();
    topk_softmax(gate_logits, expert_indices, expert_weights, num_experts, top_k, normalize != 0u);
}

// The same for each of T tokens: [T, E] gives [T, k] and [T, k]. Grid (T), block 256.
extern "C" __global__ void moe_topk_softmax_batched(const __nv_bfloat16* __restrict__ gate_logits,
                                                    unsigned int* __restrict__ expert_indices,
                                                    float* __restrict__ expert_weights, unsigned int num_experts,
                                                    unsigned int top_k, unsigned int normalize) {
    spark_let_next_start();
    spark_wait_for_previous();
    const size_t token = blockIdx.x;
    topk_softmax(gate_logits + token * num_experts, expert_indices + token * top_k, expert_weights + token * top_k,
                 num_experts, top_k, normalize != 0u);
}
