// SPDX-License-Identifier: AGPL-3.0-only
// Right, in another order of sums: one warp for two outputs, the other warps for the next.
#include "toolbox.cuh"

KERNEL(dense_gemv_bf16)(const half_t* vec, const half_t* mat, half_t* out, u32 N, u32 K) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 row = blockIdx.x * 4 + warp;
    if (warp >= 4 || row >= N) return;
    float sum = 0.f;
    for (u32 k = lane; k < K; k += 32) sum += __bfloat162float(vec[k]) * __bfloat162float(mat[(size_t)row * K + k]);
    sum = toolbox::across_warp<toolbox::Plus<float>>(sum);
    if (lane == 0) out[row] = __float2bfloat16(sum);
}
