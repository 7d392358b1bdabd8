// SPDX-License-Identifier: AGPL-3.0-only
// The k largest of E router logits of a token, largest first, and their softmax weights, by one warp.
//
// A logit and its expert make one integer: the BF16 value as 16 bits that ascend with it, then the expert counted
// downwards. The largest integer is the largest logit with the lowest index, so ties have one answer on every path, and
// a round of selection is one maximum over a warp. NaN comes after -Inf: it is chosen only where fewer than k numbers
// are left, so that the k indices are always distinct and below E. No barrier is needed. Each lane sorts its own
// experts first: what it offers in a round is the first that it has left.
#pragma once

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

// Of a lane: its experts' keys (those of experts that do not exist are 0), the largest first; and the key that it won.
struct TopkLane {
    unsigned keys[TOPK_PER_LANE];
    unsigned chosen;  // in lane i < k: the i-th largest key of all

    __device__ __forceinline__ void load(const __nv_bfloat16* logits, unsigned experts) {
#pragma unroll
        for (unsigned i = 0u; i < TOPK_PER_LANE; ++i) {
            const unsigned expert = threadIdx.x % SPARK_WARP + i * SPARK_WARP;
            keys[i] = expert < experts ? topk_key(logits[expert], expert) : 0u;
        }
    }

    // Bitonic: runs of 2, 4, 8 and 16, the last one descending. Afterwards keys are no more in the order of experts.
    __device__ __forceinline__ void sort() {
#pragma unroll
        for (unsigned run = 1u; run <= 4u; ++run) {
#pragma unroll
            for (unsigned step = 0u; step < run; ++step) {
#pragma unroll
                for (unsigned i = 0u; i < TOPK_PER_LANE; ++i) {
                    const unsigned j = i ^ (1u << (run - 1u - step));
                    if (j > i) {
                        const unsigned high = keys[i] > keys[j] ? keys[i] : keys[j];
                        const unsigned low = keys[i] > keys[j] ? keys[j] : keys[i];
                        const bool ascends = (i >> run) % 2u != 0u;
                        keys[i] = ascends ? low : high;
                        keys[j] = ascends ? high : low;
                    }
                }
            }
        }
    }

    // k <= min(32, E). The keys are used up.
    __device__ __forceinline__ void select(unsigned k) {
        sort();
        chosen = 0u;
        for (unsigned slot = 0u; slot < k; ++slot) {
            const unsigned best = __reduce_max_sync(SPARK_FULL_MASK, keys[0]);
            chosen = slot == threadIdx.x % SPARK_WARP ? best : chosen;
            const bool mine = keys[0] == best;  // of one lane: keys differ
#pragma unroll
            for (unsigned i = 0u; i + 1u < TOPK_PER_LANE; ++i) {
                keys[i] = mine ? keys[i + 1u] : keys[i];
            }
            keys[TOPK_PER_LANE - 1u] = mine ? 0u : keys[TOPK_PER_LANE - 1u];
        }
    }
};

// A lane's weight: exp(l - max) / (sum of exp(l - max) over all experts), each lane adding its experts in ascending order;
// with `normalize` divided by the sum of the k weights on top of that. `terms` are as they were loaded, `chosen` the
// logits of the chosen experts, the largest first. 0 in lanes from k on.
__device__ __forceinline__ float topk_weight(const TopkLane& terms, float chosen, unsigned experts, unsigned k,
                                             bool normalize) {
    const unsigned lane = threadIdx.x % SPARK_WARP;
    const float top = __shfl_sync(SPARK_FULL_MASK, chosen, 0);
    float sum = 0.0f;
#pragma unroll
    for (unsigned i = 0u; i < TOPK_PER_LANE; ++i) {
        sum += lane + i * SPARK_WARP < experts ? __expf(topk_value(terms.keys[i]) - top) : 0.0f;
    }
    sum = topk_sum(sum);
    float weight = lane < k ? __expf(chosen - top) / sum : 0.0f;
    if (normalize) {
        weight = weight / topk_sum(weight);
    }
    return weight;
}

// One token, by a whole warp. k <= min(32, E), E <= 512.
__device__ __forceinline__ void topk_softmax(const __nv_bfloat16* logits, unsigned* indices, float* weights,
                                             unsigned experts, unsigned k, bool normalize) {
    const unsigned lane = threadIdx.x % SPARK_WARP;
    TopkLane mine;
    mine.load(logits, experts);
    const TopkLane terms = mine;
    mine.select(k);
    const float weight = topk_weight(terms, topk_value(mine.chosen), experts, k, normalize);
    if (lane < k) {
        indices[lane] = topk_expert(mine.chosen);
        weights[lane] = weight;
    }
}
