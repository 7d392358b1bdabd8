// SPDX-License-Identifier: AGPL-3.0-only
// What the kernels of a mixture of experts in two launches share: the slots of a row and where their weights lie.
//
// Slots 0 .. top_k - 1 of a row are its chosen experts, best first; slot top_k is the shared expert. Tables have an entry
// an expert, an address of 0 where it lives elsewhere: then its part is zeros.
#pragma once

#include "dense_gemv.cuh"
#include "moe_topk.cuh"

constexpr unsigned MOE_STEP_EXPERTS = TOPK_PER_LANE * SPARK_WARP;
constexpr unsigned MOE_STEP_SLOTS = SPARK_WARP;  // chosen experts of a row, at most
constexpr unsigned MOE_GATE_WARPS = 8u;

typedef unsigned long long moe_address;

// Sum of each half of 64 lanes as the tree 16, 8, 4, 2, 1, then first half + second; a thread is lane l and lane l + 32.
// Every thread of the warp gets it.
__device__ __forceinline__ float moe_halves_sum(float first, float second) {
    const bool low = threadIdx.x % SPARK_WARP < SPARK_WARP / 2u;
    // From here on the lower lanes have the first half, the upper ones the second.
    float sum = low ? first : second;
    sum = sum + __shfl_xor_sync(SPARK_FULL_MASK, low ? second : first, 16);
#pragma unroll
    for (int step = 8; step > 0; step /= 2) {
        sum = sum + __shfl_xor_sync(SPARK_FULL_MASK, sum, step);
    }
    return sum + __shfl_xor_sync(SPARK_FULL_MASK, sum, 16);
}

// What a thread has read of a vector that THREADS threads share: COUNT items at most.
template <class Item, unsigned THREADS, unsigned COUNT>
struct MoeShare {
    Item items[COUNT];

    __device__ __forceinline__ void read(const Item* from, unsigned count, unsigned first) {
#pragma unroll
        for (unsigned i = 0u; i < COUNT; ++i) {
            const unsigned at = first + threadIdx.x + i * THREADS;
            if (at < count) {
                items[i] = from[at];
            }
        }
    }

    // put(index, item) for each of them.
    template <class Put>
    __device__ __forceinline__ void write(unsigned count, unsigned first, const Put& put) const {
#pragma unroll
        for (unsigned i = 0u; i < COUNT; ++i) {
            const unsigned at = first + threadIdx.x + i * THREADS;
            if (at < count) {
                put(at, items[i]);
            }
        }
    }
};

// silu(gate) * up of BF16 numbers, in FP32.
__device__ __forceinline__ float moe_gated(float gate, float up) {
    return gate * (1.0f / (1.0f + __expf(-gate))) * up;
}

__device__ __forceinline__ float moe_rounded(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

// The chosen experts of a row, by one warp: `ids` gets 32, of which the first top_k are right. Block 0 of the row stores
// them, and their logits. Logits and results are the row's.
__device__ __forceinline__ void moe_route(const __nv_bfloat16* logits, unsigned* ids, unsigned* expert_indices,
                                          float* expert_logits, unsigned num_experts, unsigned top_k) {
    const unsigned lane = threadIdx.x % SPARK_WARP;
    TopkLane mine;
    mine.load(logits, num_experts);
    mine.select(top_k);
    ids[lane] = topk_expert(mine.chosen);
    if (blockIdx.x == 0u && lane < top_k) {
        expert_indices[lane] = topk_expert(mine.chosen);
        expert_logits[lane] = topk_value(mine.chosen);
    }
}

// The shared expert's share of a row, sigmoid(input . gate_weight), in the order of moe_blend.cuh: the sums of the first
// warps, then, behind a barrier, what they give. n % 8 == 0.
__device__ __forceinline__ void moe_gate_sums(float (&sums)[MOE_GATE_WARPS], const __nv_bfloat16* input,
                                              const __nv_bfloat16* gate_weight, unsigned n) {
    const unsigned warp = threadIdx.x / SPARK_WARP;
    if (warp < MOE_GATE_WARPS) {
        const uint4* a = reinterpret_cast<const uint4*>(input);
        const uint4* b = reinterpret_cast<const uint4*>(gate_weight);
        float logit = 0.0f;
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
