// SPDX-License-Identifier: AGPL-3.0-only
// Router logits as integers that are chosen by.
//
// A logit and its expert make one integer: the BF16 value as 16 bits that ascend with it, then the expert counted
// downwards. The largest integer is the largest logit with the lowest index, so ties have one answer on every path, and
// a round of selection is one maximum over a warp. NaN comes after -Inf: it is chosen only where fewer than k numbers
// are left, so that the k indices are always distinct and below E.
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
