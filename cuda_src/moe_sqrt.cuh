// SPDX-License-Identifier: AGPL-3.0-only
// Scores and weights of DeepSeek-V4's router: s = sqrt(softplus(logit)). moe_topk_sqrt.cu chooses experts by them,
// moe_hash_route.cu takes experts from a table.
#pragma once

#include "spark_common.cuh"

constexpr unsigned SQRT_MAX_EXPERTS = 512u;
constexpr float SQRT_SMALLEST_SUM = 1e-20f;  // at or below it weights are not divided

// sqrt(log(1 + exp(l))) as sqrt(max(l, 0) + log1p(exp(-|l|))): nothing overflows, and a very negative l keeps its
// relative accuracy. NaN gives NaN, +Inf gives +Inf, -Inf gives 0.
__device__ __forceinline__ float sqrt_softplus(float l) { return sqrtf(fmaxf(l, 0.0f) + log1pf(expf(-fabsf(l)))); }

// The weight of the score that this lane, a whole warp's with the others, has for its slot; 0 for a lane without one.
// The sum is the tree 16, 8, 4, 2, 1 over slots. A NaN among the scores makes every weight NaN where they are divided.
__device__ __forceinline__ float sqrt_weight(float score, bool normalize, float scaling_factor) {
    if (normalize) {
        const float sum = __shfl_sync(SPARK_FULL_MASK, spark_warp_sum(score, SPARK_WARP), 0);
        if (!(sum <= SQRT_SMALLEST_SUM)) {
            score = score / sum;
        }
    }
    return score * scaling_factor;
}
