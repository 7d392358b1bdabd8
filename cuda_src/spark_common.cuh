// SPDX-License-Identifier: AGPL-3.0-only
// What every kernel file shares: BF16 access and the sums over a warp and a block.
//
// All files are compiled with --fmad=false, so a * b + c rounds twice unless fmaf is written out.
#pragma once

#include <cuda_bf16.h>

#include "spark_dependent.cuh"

constexpr unsigned SPARK_WARP = 32u;
constexpr unsigned SPARK_FULL_MASK = 0xffffffffu;

// One BF16 as FP32: exact.
__device__ __forceinline__ float spark_load(const __nv_bfloat16* p) { return __bfloat162float(*p); }

// FP32 to BF16, nearest, ties to even.
__device__ __forceinline__ void spark_store(__nv_bfloat16* p, float value) { *p = __float2bfloat16_rn(value); }

// The two BF16 values of a 32-bit word; the low half comes first in memory.
__device__ __forceinline__ float spark_low(unsigned word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float spark_high(unsigned word) { return __uint_as_float(word & 0xffff0000u); }

__device__ __forceinline__ unsigned spark_pack(float low, float high) {
    const unsigned low_bits = __bfloat16_as_ushort(__float2bfloat16_rn(low));
    const unsigned high_bits = __bfloat16_as_ushort(__float2bfloat16_rn(high));
    return low_bits | (high_bits << 16);
}

// Whether an address is a multiple of `bytes`, a power of two.
__device__ __forceinline__ bool spark_aligned(const void* p, unsigned bytes) {
    return (reinterpret_cast<size_t>(p) & (bytes - 1u)) == 0u;
}

// Sum over the first `live` lanes of a warp (32 for a whole one), as the tree 16, 8, 4, 2, 1; right in lane 0.
// Lanes that do not exist count as zero, and are never named in the mask.
__device__ __forceinline__ float spark_warp_sum(float value, unsigned live) {
    const unsigned lane = threadIdx.x % SPARK_WARP;
    const unsigned mask = live < SPARK_WARP ? (1u << live) - 1u : SPARK_FULL_MASK;
#pragma unroll
    for (unsigned step = SPARK_WARP / 2u; step > 0u; step /= 2u) {
        const unsigned partner = lane ^ step;
        const float other = __shfl_sync(mask, value, static_cast<int>(partner < live ? partner : lane));
        value += partner < live ? other : 0.0f;
    }
    return value;
}

// Sum over a one-dimensional block of any size up to 1024: the tree in each warp, then the same tree over the warps.
// Every thread gets the result. One call a kernel: a second one needs a barrier in between.
__device__ __forceinline__ float spark_block_sum(float value) {
    __shared__ float warp_sums[SPARK_WARP];
    const unsigned lane = threadIdx.x % SPARK_WARP;
    const unsigned warp = threadIdx.x / SPARK_WARP;
    const unsigned left = blockDim.x - warp * SPARK_WARP;
    const unsigned live = left < SPARK_WARP ? left : SPARK_WARP;
    value = spark_warp_sum(value, live);
    if (lane == 0u) {
        warp_sums[warp] = value;
    }
    __syncthreads();
    if (warp == 0u) {
        const unsigned warps = (blockDim.x + SPARK_WARP - 1u) / SPARK_WARP;
        value = spark_warp_sum(lane < warps ? warp_sums[lane] : 0.0f, live);
        if (lane == 0u) {
            warp_sums[0] = value;
        }
    }
    __syncthreads();
    return warp_sums[0];
}
