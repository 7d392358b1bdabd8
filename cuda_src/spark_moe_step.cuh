// SPDX-License-Identifier: AGPL-3.0-only
// What the kernels of a mixture of experts in two launches share: a row's routing, slots and the shared expert's share.
//
// Slots 0 .. top_k - 1 of a row are its chosen experts, best first; slot top_k is the shared expert, which is done first,
// since its weights are known before the row is. Tables have an entry an expert, an address of 0 where it lives
// elsewhere: then its part is zeros.
//
// A block runs for some microseconds and much of its code once, so code is short: instructions that no one has run yet
// come from far away.
#pragma once

#include "dense_gemv.cuh"
#include "moe_topk.cuh"
#include "spark_mma_step.cuh"

constexpr unsigned MOE_EXPERTS = TOPK_PER_LANE * SPARK_WARP;  // at most
constexpr unsigned MOE_SLOTS = SPARK_WARP;                    // chosen experts of a row, at most
constexpr unsigned MOE_GATE_WARPS = 8u;

typedef unsigned long long moe_address;

// silu(gate) * up in FP32.
__device__ __forceinline__ float moe_gated(float gate, float up) {
    return gate * (1.0f / (1.0f + __expf(-gate))) * up;
}

__device__ __forceinline__ float moe_rounded(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

// The expert of slot `lane` of a row, in the lanes of every warp. A warp chooses the best of its own experts, one round
// after the other, and then each warp for itself among what all of them found. WARPS * 32 threads with EXPERTS each.
template <unsigned WARPS>
struct MoeRoute {
    static constexpr unsigned EXPERTS = (MOE_EXPERTS + WARPS * SPARK_WARP - 1u) / (WARPS * SPARK_WARP);

    unsigned lists[WARPS][SPARK_WARP];

    // The block's experts; a barrier has to follow.
    __device__ __forceinline__ void find(const __nv_bfloat16* logits, unsigned experts, unsigned k) {
        unsigned keys[EXPERTS];
#pragma unroll
        for (unsigned i = 0u; i < EXPERTS; ++i) {
            const unsigned expert = threadIdx.x + i * WARPS * SPARK_WARP;
            keys[i] = expert < experts ? topk_key(logits[expert], expert) : 0u;
        }
        unsigned found = 0u;
#pragma unroll 1
        for (unsigned slot = 0u; slot < k; ++slot) {
            unsigned own = keys[0];
#pragma unroll
            for (unsigned i = 1u; i < EXPERTS; ++i) {
                own = keys[i] > own ? keys[i] : own;
            }
            const unsigned best = __reduce_max_sync(SPARK_FULL_MASK, own);
            found = slot == threadIdx.x % SPARK_WARP ? best : found;
#pragma unroll
            for (unsigned i = 0u; i < EXPERTS; ++i) {
                keys[i] = keys[i] == best ? 0u : keys[i];
            }
        }
        lists[threadIdx.x / SPARK_WARP][threadIdx.x % SPARK_WARP] = found;
    }

    // Behind the barrier, by a whole warp.
    __device__ __forceinline__ unsigned choose(unsigned k) const {
        const unsigned lane = threadIdx.x % SPARK_WARP;
        unsigned at = 0u;
        unsigned head = lane < WARPS ? lists[lane][0] : 0u;
        unsigned chosen = 0u;
#pragma unroll 1
        for (unsigned slot = 0u; slot < k; ++slot) {
            const unsigned best = __reduce_max_sync(SPARK_FULL_MASK, head);
            chosen = slot == lane ? best : chosen;
            if (head == best) {  // of one lane: keys differ
                at += 1u;
                head = at < k && lane < WARPS ? lists[lane][at] : 0u;
            }
        }
        return topk_expert(chosen);
    }
};

// A row's logits as FP32 numbers, and the weights that they give the chosen experts: those of moe_topk_softmax.
struct MoeShares {
    float logits[MOE_EXPERTS];

    // By all threads of the block; a barrier has to follow.
    __device__ __forceinline__ void read(const __nv_bfloat16* from, unsigned experts) {
        for (unsigned e = threadIdx.x; e < experts; e += blockDim.x) {
            logits[e] = topk_value(topk_key(from[e], e));
        }
    }

    // Behind the barrier, by a whole warp: the weight of slot `lane`, whose expert is `id`; 0 in lanes from k on.
    __device__ __forceinline__ float weight(unsigned id, unsigned experts, unsigned k, bool normalize) const {
        const unsigned lane = threadIdx.x % SPARK_WARP;
        const float chosen = lane < k ? logits[id] : 0.0f;
        const float top = __shfl_sync(SPARK_FULL_MASK, chosen, 0);
        float sum = 0.0f;
#pragma unroll 1
        for (unsigned e = lane; e < experts; e += SPARK_WARP) {
            sum = sum + __expf(logits[e] - top);
        }
        sum = topk_sum(sum);
        float share = lane < k ? __expf(chosen - top) / sum : 0.0f;
        if (normalize) {
            share = share / topk_sum(share);
        }
        return share;
    }
};

// The shared expert's share of a row, sigmoid(input . gate_weight), in the order of moe_blend.cuh: the sums of the first
// warps, then, behind a barrier, what they give. n % 8 == 0.
__device__ __forceinline__ void moe_gate_sums(float (&sums)[MOE_GATE_WARPS], const __nv_bfloat16* input,
                                              const __nv_bfloat16* gate_weight, unsigned n) {
    const unsigned warp = threadIdx.x / SPARK_WARP;
    if (warp < MOE_GATE_WARPS) {
        const uint4* a = reinterpret_cast<const uint4*>(input);
        const uint4* b = reinterpret_cast<const uint4*>(gate_weight);
        float logit = 0.0f;
#pragma unroll 1
        for (unsigned c = threadIdx.x; c < n / SPARK_DOT_CHUNK; c += MOE_GATE_WARPS * SPARK_WARP) {
            logit = spark_dot_chunk(logit, a[c], b[c]);
        }
        logit = spark_warp_sum(logit, SPARK_WARP);
        if (threadIdx.x % SPARK_WARP == 0u) {
            sums[warp] = logit;
        }
    }
}

// Right in lane 0.
__device__ __forceinline__ float moe_gate_share(const float (&sums)[MOE_GATE_WARPS]) {
    const unsigned lane = threadIdx.x % SPARK_WARP;
    const float logit = spark_warp_sum(lane < MOE_GATE_WARPS ? sums[lane] : 0.0f, SPARK_WARP);
    return 1.0f / (1.0f + __expf(-logit));
}
