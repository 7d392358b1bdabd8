// SPDX-License-Identifier: AGPL-3.0-only
// What the kernels of a mixture of experts in two launches share: the slots of a row and where their weights lie.
//
// Slots 0 .. top_k - 1 of a row are its chosen experts, best first; slot top_k is the shared expert. Tables have an entry
// an expert, an address of 0 where it lives elsewhere: then its part is zeros.
#pragma once

#include "dense_gemv.cuh"
#include "moe_topk.cuh"

constexpr unsigned MOE_STEP_THREADS = 512u;
constexpr unsigned MOE_STEP_WARPS = MOE_STEP_THREADS / SPARK_WARP;
constexpr unsigned MOE_STEP_EXPERTS = TOPK_PER_LANE * SPARK_WARP;
constexpr unsigned MOE_STEP_SLOTS = SPARK_WARP;  // chosen experts of a row, at most

static_assert(MOE_STEP_EXPERTS <= MOE_STEP_THREADS, "a thread copies one entry of each table");

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

// silu(gate) * up of BF16 numbers, in FP32.
__device__ __forceinline__ float moe_gated(float gate, float up) {
    return gate * (1.0f / (1.0f + __expf(-gate))) * up;
}

__device__ __forceinline__ float moe_rounded(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }
