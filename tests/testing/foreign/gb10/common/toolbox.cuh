// SPDX-License-Identifier: AGPL-3.0-only
#pragma once
#include <cuda_bf16.h>
#include <math.h>
#include <stdint.h>

typedef __nv_bfloat16 half_t;
using u32 = uint32_t;

#define KERNEL(name) extern "C" __global__ void name
#define EACH(i, n) for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += gridDim.x * blockDim.x)

namespace toolbox {
template <typename T>
struct Plus {
    __device__ static T of(T a, T b) { return a + b; }
};

template <typename Op, typename T>
__device__ T across_warp(T v) {
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) v = Op::of(v, __shfl_xor_sync(0xffffffffu, v, d));
    return v;
}

// Any block size up to 1024; the last warp may be ragged.
__device__ inline float across_block(float v, float* pad) {
    pad[threadIdx.x] = v;
    __syncthreads();
    u32 live = blockDim.x;
    while (live > 1u) {
        const u32 upper = (live + 1u) / 2u;
        if (threadIdx.x + upper < live) pad[threadIdx.x] += pad[threadIdx.x + upper];
        __syncthreads();
        live = upper;
    }
    const float total = pad[0];
    __syncthreads();
    return total;
}
}  // namespace toolbox
