// SPDX-License-Identifier: AGPL-3.0-only
// Module moe_topk_sqrt: DeepSeek-V4's learned router. The k experts of the largest s + bias, s = sqrt(softplus(logit)),
// largest first; their weights come from s alone. Parameters and geometry are the engine's.
//
// A choice is a maximum over a warp, then the lowest expert among those that have it: ties have one answer on every
// path. NaN comes after -Inf: it is chosen only where fewer than k numbers are left, so that the k indices are always
// distinct and below E. All threads of a token's block score experts; one warp chooses.

#include "moe_sqrt.cuh"

constexpr unsigned SQRT_PER_LANE = SQRT_MAX_EXPERTS / SPARK_WARP;
constexpr unsigned SQRT_NAN = 1u;   // below the key of -Inf
constexpr unsigned SQRT_NONE = 0u;  // no expert at all

// FP32 as an unsigned number that ascends with it; +0 and -0 are one.
__device__ __forceinline__ unsigned sqrt_key(float value) {
    if (value != value) {
        return SQRT_NAN;
    }
    const unsigned bits = __float_as_uint(value + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// One token; k <= min(32, E), E <= 512.
__device__ __forceinline__ void topk_sqrt(const __nv_bfloat16* logits, const float* bias, unsigned* indices,
                                          float* weights, unsigned experts, unsigned k, bool normalize,
                                          float scaling_factor) {
    __shared__ float scores[SQRT_MAX_EXPERTS];
    __shared__ unsigned all_keys[SQRT_MAX_EXPERTS];
    for (unsigned expert = threadIdx.x; expert < SQRT_MAX_EXPERTS; expert += blockDim.x) {
        unsigned key = SQRT_NONE;
        if (expert < experts) {
            scores[expert] = sqrt_softplus(spark_load(logits + expert));
            key = sqrt_key(scores[expert] + bias[expert]);
        }
        all_keys[expert] = key;
    }
    __syncthreads();
    const unsigned lane = threadIdx.x;
    if (lane >= SPARK_WARP) {
        return;
    }
    unsigned keys[SQRT_PER_LANE];
#pragma unroll
    for (unsigned i = 0u; i < SQRT_PER_LANE; ++i) {
        keys[i] = all_keys[lane + i * SPARK_WARP];
    }
    unsigned chosen = 0u;
    for (unsigned slot = 0u; slot < k; ++slot) {
        unsigned best = SQRT_NONE;
        unsigned expert = 0xffffffffu;
#pragma unroll
        for (unsigned i = 0u; i < SQRT_PER_LANE; ++i) {
            if (keys[i] > best) {
                best = keys[i];
                expert = lane + i * SPARK_WARP;
            }
        }
        const unsigned most = __reduce_max_sync(SPARK_FULL_MASK, best);
        const unsigned winner = __reduce_min_sync(SPARK_FULL_MASK, best == most ? expert : 0xffffffffu);
#pragma unroll
        for (unsigned i = 0u; i < SQRT_PER_LANE; ++i) {
            keys[i] = lane + i * SPARK_WARP == winner ? SQRT_NONE : keys[i];
        }
        chosen = slot == lane ? winner : chosen;
    }
    const float score = lane < k ? scores[chosen] : 0.0f;
    const float weight = sqrt_weight(score, normalize, scaling_factor);
    if (lane < k) {
        indices[lane] = chosen;
        weights[lane] = weight;
    }
}

// gate_logits [E] and bias [E] give expert_indices [k] and expert_weights [k]. Grid 1, block 256.
extern "C" __global__ void moe_topk_sqrtsoftplus(const __nv_bfloat16* __restrict__ gate_logits,
                                                 const float* __restrict__ bias,
                                                 unsigned int* __restrict__ expert_indices,
                                                 float* __restrict__ expert_weights, unsigned int num_experts,
                                                 unsigned int top_k, unsigned int normalize, float scaling_factor) {
    spark_wait_for_previous();
    spark_let_next_start();
    topk_sqrt(gate_logits, bias, expert_indices, expert_weights, num_experts, top_k, normalize != 0u, scaling_factor);
}

// The same for each of T tokens with one bias: [T, E] gives [T, k] and [T, k]. Grid T, block 256.
extern "C" __global__ void moe_topk_sqrtsoftplus_batched(const __nv_bfloat16* __restrict__ gate_logits,
                                                         const float* __restrict__ bias,
                                                         unsigned int* __restrict__ expert_indices,
                                                         float* __restrict__ expert_weights, unsigned int num_experts,
                                                         unsigned int top_k, unsigned int normalize,
                                                         float scaling_factor) {
    spark_wait_for_previous();
    spark_let_next_start();
    const size_t token = blockIdx.x;
    topk_sqrt(gate_logits + token * num_experts, bias, expert_indices + token * top_k, expert_weights + token * top_k,
              num_experts, top_k, normalize != 0u, scaling_factor);
}
