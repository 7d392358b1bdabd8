// SPDX-License-Identifier: AGPL-3.0-only
// Dot products on tensor cores of weights that each lane reads for itself, as neighbours in memory as it likes.
//
// In a step of spark_mma a lane 4 g + t gives rows g and g + 8 of a, and column g of b. Here both rows are outputs of the
// same two, for the elements of k that the lane has read, and column g is x at the same elements. So entry (g, g) of the
// result is the first output's sum over the elements of lanes 4 g .. 4 g + 3, entry (g + 8, g) the second's; what lies
// beside the diagonal means nothing and is never looked at. A step is 256 useful products in one instruction, with neither
// a pass through shared memory nor a row of weights that fewer than 32 lanes read at a time.
//
// Each row of x has a step of its own, so that its bits do not depend on the other rows.
#pragma once

#include "spark_mma_step.cuh"

// Sum over the diagonal's eight entries for output `second` (0 or 1) of a pair; right in lane 0. g of the diagonal is with
// lane 4 g + g / 2, as its sum g % 2 of either output.
__device__ __forceinline__ float spark_diagonal_sum(const float (&sums)[4], unsigned second) {
    const unsigned g = threadIdx.x % SPARK_WARP / 4u;
    const float own = g % 2u == 0u ? sums[2u * second] : sums[2u * second + 1u];
    return spark_warp_sum(g / 2u == threadIdx.x % 4u ? own : 0.0f, SPARK_WARP);
}

// Two BF16 numbers times two others, each product rounded.
__device__ __forceinline__ unsigned spark_multiply_pairs(unsigned a, unsigned b) {
    const __nv_bfloat162 x = *reinterpret_cast<const __nv_bfloat162*>(&a);
    const __nv_bfloat162 y = *reinterpret_cast<const __nv_bfloat162*>(&b);
    const __nv_bfloat162 product = __hmul2(x, y);
    return *reinterpret_cast<const unsigned*>(&product);
}
