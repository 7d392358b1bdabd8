// SPDX-License-Identifier: AGPL-3.0-only
// The largest magnitude of BF16 values, which the quantisers scale by. NaN never wins; infinity does.
#pragma once

#include "spark_common.cuh"

constexpr unsigned ABSMAX_BLOCK = 256u;
constexpr unsigned ABSMAX_CHUNK = 8u;  // BF16 values of a 16-byte load

// The larger of a maximum and |x|.
__device__ __forceinline__ float spark_larger(float most, float x) {
    const float magnitude = fabsf(x);
    return magnitude > most ? magnitude : most;
}

__device__ __forceinline__ float spark_larger_chunk(float most, uint4 words) {
    const unsigned word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (unsigned w = 0u; w < 4u; ++w) {
        most = spark_larger(spark_larger(most, spark_low(word[w])), spark_high(word[w]));
    }
    return most;
}

// What thread `first` of `threads` sees of `count` values: chunks where the address allows them, the rest one by one.
__device__ __forceinline__ float spark_absmax(const __nv_bfloat16* values, size_t count, size_t first, size_t threads) {
    float most = 0.0f;
    const size_t chunks = spark_aligned(values, 16u) ? count / ABSMAX_CHUNK : 0u;
    for (size_t c = first; c < chunks; c += threads) {
        most = spark_larger_chunk(most, reinterpret_cast<const uint4*>(values)[c]);
    }
    for (size_t i = chunks * ABSMAX_CHUNK + first; i < count; i += threads) {
        most = spark_larger(most, spark_load(values + i));
    }
    return most;
}

// Maximum over a block of 256 threads of numbers that are not NaN; every thread gets it. One call a kernel.
__device__ __forceinline__ float spark_block_max(float value) {
    __shared__ float warp_maxima[ABSMAX_BLOCK / SPARK_WARP];
#pragma unroll
    for (unsigned step = SPARK_WARP / 2u; step > 0u; step /= 2u) {
        value = fmaxf(value, __shfl_xor_sync(SPARK_FULL_MASK, value, static_cast<int>(step)));
    }
    if (threadIdx.x % SPARK_WARP == 0u) {
        warp_maxima[threadIdx.x / SPARK_WARP] = value;
    }
    __syncthreads();
    float most = warp_maxima[0];
#pragma unroll
    for (unsigned w = 1u; w < ABSMAX_BLOCK / SPARK_WARP; ++w) {
        most = fmaxf(most, warp_maxima[w]);
    }
    return most;
}
