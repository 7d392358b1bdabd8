// SPDX-License-Identifier: AGPL-3.0-only
// What the kernels of DeepSeek-V4's attention share: the rotation of neighbours, a warp's sum, and vectors of eight.
#pragma once

#include "spark_common.cuh"

constexpr unsigned V4_MAX_HEAD_DIM = 512u;
constexpr unsigned V4_MAX_PAIRS = V4_MAX_HEAD_DIM / 2u;
constexpr unsigned V4_WIDTH = 8u;  // elements of a vector: 16 bytes of BF16, 8 of E4M3

// 1 / theta^(2 pair / rope_dim), in FP64. It takes a while and depends on no other kernel's results: a kernel computes that
// of pair threadIdx.x before it waits for the one before it.
__device__ __forceinline__ double v4_frequency(unsigned pair, unsigned rope_dim, float theta) {
    const double exponent = static_cast<double>(2u * pair) / static_cast<double>(rope_dim);
    return 1.0 / pow(static_cast<double>(theta), exponent);
}

__device__ __forceinline__ double v4_own_frequency(unsigned rope_dim, float theta) {
    return threadIdx.x < rope_dim / 2u ? v4_frequency(threadIdx.x, rope_dim, theta) : 0.0;
}

// turns[i] = (cos, sin) of position / theta^(2 i / rope_dim) for the pairs i < rope_dim / 2, by the threads of a block, of
// which each has its `own` frequency; the angle is FP64 up to its cast, as in rope_forward. `inverse` turns the other way.
// A barrier has to follow.
__device__ __forceinline__ void v4_turns(float2* turns, unsigned position, unsigned rope_dim, float theta, bool inverse,
                                         double own) {
    for (unsigned pair = threadIdx.x; pair < rope_dim / 2u; pair += blockDim.x) {
        const double frequency = pair == threadIdx.x ? own : v4_frequency(pair, rope_dim, theta);
        const float angle = static_cast<float>(static_cast<double>(position) * frequency);
        const float s = sinf(angle);
        turns[pair] = make_float2(cosf(angle), inverse ? -s : s);
    }
}

// The pair (a, b) turned.
__device__ __forceinline__ float2 v4_turn(float a, float b, float2 turn) {
    return make_float2(a * turn.x - b * turn.y, a * turn.y + b * turn.x);
}

// Sum over a warp as the tree 16, 8, 4, 2, 1; the same bits in every lane.
__device__ __forceinline__ float v4_warp_sum(float value) {
#pragma unroll
    for (unsigned step = SPARK_WARP / 2u; step > 0u; step /= 2u) {
        value += __shfl_xor_sync(SPARK_FULL_MASK, value, static_cast<int>(step));
    }
    return value;
}

// Eight BF16 as FP32: exact.
__device__ __forceinline__ void v4_widen(uint4 words, float* to) {
    to[0] = spark_low(words.x);
    to[1] = spark_high(words.x);
    to[2] = spark_low(words.y);
    to[3] = spark_high(words.y);
    to[4] = spark_low(words.z);
    to[5] = spark_high(words.z);
    to[6] = spark_low(words.w);
    to[7] = spark_high(words.w);
}
