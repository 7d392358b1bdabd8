// SPDX-License-Identifier: AGPL-3.0-only
// The engine's rule: a strict maximum in each thread, then a halving tree in which the lower slot keeps a tie.
#include "toolbox.cuh"

extern "C" __global__ void argmax_bf16(const half_t* logits, u32* out, u32 n) {
    __shared__ float value[GREEDY_THREADS];
    __shared__ u32 index[GREEDY_THREADS];
    float best = -1e30f;
    u32 at = 0;
    for (u32 i = threadIdx.x; i < n; i += GREEDY_THREADS) {
        const float v = __bfloat162float(logits[i]);
        if (v > best) best = v, at = i;
    }
    value[threadIdx.x] = best, index[threadIdx.x] = at;
    __syncthreads();
    for (u32 half = GREEDY_THREADS / 2; half; half /= 2) {
        if (threadIdx.x < half && value[threadIdx.x + half] > value[threadIdx.x]) {
            value[threadIdx.x] = value[threadIdx.x + half];
            index[threadIdx.x] = index[threadIdx.x + half];
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) *out = index[0];
}
