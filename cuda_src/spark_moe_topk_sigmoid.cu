// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_moe_topk_sigmoid: the router of DeepSeek-V3 and MiniMax-M2. A kernel of this project.
//
// s = sigmoid(logit). The k experts of the largest s + bias are chosen, largest first; their weights come from s alone.
// With n_group > 1 the experts are n_group runs of E / n_group, and only those of the topk_group best runs can be
// chosen: a run is worth the sum of its two largest s + bias.
//
// A choice is a maximum over a warp, then the lowest index among those that have it: ties have one answer on every
// path. NaN comes after -Inf: it is chosen only where too few numbers are left, so that the k indices are always
// distinct and below E, and a run with fewer than two numbers comes after all others. One warp does a token; no barrier
// is needed.

#include "spark_common.cuh"

constexpr unsigned SIGMOID_PER_LANE = 16u;  // E <= 512
constexpr unsigned SIGMOID_NAN = 1u;        // below the key of -Inf
constexpr unsigned SIGMOID_NONE = 0u;       // no expert at all
constexpr unsigned SIGMOID_NOWHERE = 0xffffffffu;
constexpr float SIGMOID_SMALLEST = 1e-20f;  // added to the sum that weights are divided by

// 1 / (1 + exp(-l)): 0 where exp overflows. NaN gives NaN.
__device__ __forceinline__ float sigmoid_score(float l) { return 1.0f / (1.0f + expf(-l)); }

// FP32 as an unsigned number that ascends with it; +0 and -0 are one.
__device__ __forceinline__ unsigned sigmoid_key(float value) {
    if (value != value) {
        return SIGMOID_NAN;
    }
    const unsigned bits = __float_as_uint(value + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The number that a key stands for; NaN for that of NaN and for none.
__device__ __forceinline__ float sigmoid_value(unsigned key) {
    if (key <= SIGMOID_NAN) {
        return __uint_as_float(0x7fc00000u);
    }
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

// The lowest lane whose `key` is `most`.
__device__ __forceinline__ unsigned sigmoid_first_lane(unsigned key, unsigned most) {
    return static_cast<unsigned>(__ffs(static_cast<int>(__ballot_sync(SPARK_FULL_MASK, key == most)))) - 1u;
}

// Bit g set for each chosen run g. 2 <= n_group <= 32, and a run has at least two experts.
__device__ __forceinline__ unsigned sigmoid_groups(const unsigned (&keys)[SIGMOID_PER_LANE], unsigned experts,
                                                   unsigned n_group, unsigned topk_group) {
    const unsigned lane = threadIdx.x;
    const unsigned size = experts / n_group;
    unsigned worth = SIGMOID_NONE;  // of run `lane`
    for (unsigned group = 0u; group < n_group; ++group) {
        unsigned first = SIGMOID_NONE;
        unsigned second = SIGMOID_NONE;
#pragma unroll
        for (unsigned i = 0u; i < SIGMOID_PER_LANE; ++i) {
            const unsigned expert = lane + i * SPARK_WARP;
            const unsigned key = expert - group * size < size ? keys[i] : SIGMOID_NONE;
            second = max(second, min(first, key));
            first = max(first, key);
        }
        const unsigned best = __reduce_max_sync(SPARK_FULL_MASK, first);
        const bool mine = lane == sigmoid_first_lane(first, best);
        const unsigned next = __reduce_max_sync(SPARK_FULL_MASK, mine ? second : first);
        const unsigned sum = sigmoid_key(sigmoid_value(best) + sigmoid_value(next));
        worth = lane == group ? sum : worth;
    }
    unsigned chosen = 0u;
    for (unsigned slot = 0u; slot < topk_group; ++slot) {
        const unsigned winner = sigmoid_first_lane(worth, __reduce_max_sync(SPARK_FULL_MASK, worth));
        chosen |= 1u << winner;
        worth = lane == winner ? SIGMOID_NONE : worth;
    }
    return chosen;
}

// One token; k <= min(32, E), E <= 512, k experts in topk_group runs.
__device__ __forceinline__ void topk_sigmoid(const __nv_bfloat16* logits, const float* bias, unsigned* indices,
                                             float* weights, unsigned experts, unsigned k, unsigned n_group,
                                             unsigned topk_group, bool normalize, float scaling_factor) {
    const unsigned lane = threadIdx.x;
    unsigned keys[SIGMOID_PER_LANE];
#pragma unroll
    for (unsigned i = 0u; i < SIGMOID_PER_LANE; ++i) {
        const unsigned expert = lane + i * SPARK_WARP;
        keys[i] = SIGMOID_NONE;
        if (expert < experts) {
            const float score = sigmoid_score(spark_load(logits + expert));
            keys[i] = sigmoid_key(bias == nullptr ? score : score + bias[expert]);
        }
    }
    if (n_group > 1u) {
        const unsigned open = sigmoid_groups(keys, experts, n_group, topk_group);
        const unsigned size = experts / n_group;
#pragma unroll
        for (unsigned i = 0u; i < SIGMOID_PER_LANE; ++i) {
            const unsigned expert = lane + i * SPARK_WARP;
            keys[i] = expert < experts && (open >> (expert / size) & 1u) != 0u ? keys[i] : SIGMOID_NONE;
        }
    }
    unsigned chosen = 0u;
    for (unsigned slot = 0u; slot < k; ++slot) {
        unsigned best = SIGMOID_NONE;
        unsigned expert = SIGMOID_NOWHERE;
#pragma unroll
        for (unsigned i = 0u; i < SIGMOID_PER_LANE; ++i) {
            if (keys[i] > best) {
                best = keys[i];
                expert = lane + i * SPARK_WARP;
            }
        }
        const unsigned most = __reduce_max_sync(SPARK_FULL_MASK, best);
        const unsigned winner = __reduce_min_sync(SPARK_FULL_MASK, best == most ? expert : SIGMOID_NOWHERE);
#pragma unroll
        for (unsigned i = 0u; i < SIGMOID_PER_LANE; ++i) {
            keys[i] = lane + i * SPARK_WARP == winner ? SIGMOID_NONE : keys[i];
        }
        chosen = slot == lane ? winner : chosen;
    }
    float weight = lane < k ? sigmoid_score(spark_load(logits + chosen)) : 0.0f;
    if (normalize) {
        // The tree 16, 8, 4, 2, 1 over slots. A NaN among the scores makes every weight NaN.
        const float sum = __shfl_sync(SPARK_FULL_MASK, spark_warp_sum(weight, SPARK_WARP), 0);
        weight = weight / (sum + SIGMOID_SMALLEST);
    }
    if (lane < k) {
        indices[lane] = chosen;
        weights[lane] = weight * scaling_factor;
    }
}

// gate_logits [E] and correction_bias [E], or NULL, give expert_indices [k] and expert_weights [k]. Grid 1, block 32.
extern "C" __global__ void spark_moe_topk_sigmoid(const __nv_bfloat16* __restrict__ gate_logits,
                                                  const float* __restrict__ correction_bias,
                                                  unsigned int* __restrict__ expert_indices,
                                                  float* __restrict__ expert_weights, unsigned int num_experts,
                                                  unsigned int top_k, unsigned int n_group, unsigned int topk_group,
                                                  unsigned int normalize, float scaling_factor) {
    spark_let_next_start();
    spark_wait_for_previous();
    topk_sigmoid(gate_logits, correction_bias, expert_indices, expert_weights, num_experts, top_k, n_group, topk_group,
                 normalize != 0u, scaling_factor);
}

// The same for each of T tokens with one bias: [T, E] gives [T, k] and [T, k]. Grid T, block 32.
extern "C" __global__ void spark_moe_topk_sigmoid_batched(const __nv_bfloat16* __restrict__ gate_logits,
                                                          const float* __restrict__ correction_bias,
                                                          unsigned int* __restrict__ expert_indices,
                                                          float* __restrict__ expert_weights, unsigned int num_experts,
                                                          unsigned int top_k, unsigned int n_group,
                                                          unsigned int topk_group, unsigned int normalize,
                                                          float scaling_factor) {
    spark_let_next_start();
    spark_wait_for_previous();
    const size_t token = blockIdx.x;
    topk_sigmoid(gate_logits + token * num_experts, correction_bias, expert_indices + token * top_k,
                 expert_weights + token * top_k, num_experts, top_k, n_group, topk_group, normalize != 0u,
                 scaling_factor);
}
