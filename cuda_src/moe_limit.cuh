// SPDX-License-Identifier: AGPL-3.0-only
// What bounds a gate and an up value before their product: nothing, or DeepSeek-V4's limit.
#pragma once

struct SparkNoLimit {
    __device__ __forceinline__ float gate(float g) const { return g; }
    __device__ __forceinline__ float up(float u) const { return u; }
};

// The gate is bounded from above alone, up on both sides. NaN stays NaN.
struct SparkLimit {
    float limit;

    __device__ __forceinline__ float gate(float g) const { return g > limit ? limit : g; }
    __device__ __forceinline__ float up(float u) const { return u > limit ? limit : u < -limit ? -limit : u; }
};
