// SPDX-License-Identifier: AGPL-3.0-only
// A race: nothing keeps the first warp from reading sums that the others have not written yet.
#include "toolbox.cuh"

KERNEL(rms_norm_vanilla)(const half_t* x, const half_t* w, half_t* y, u32 size, float eps) {
    __shared__ float sums[ROW_THREADS_MOST];
    const half_t* row = x + (size_t)blockIdx.x * size;
    float squares = 0.f;
    for (u32 i = threadIdx.x; i < size; i += blockDim.x) squares += __bfloat162float(row[i]) * __bfloat162float(row[i]);
    sums[threadIdx.x] = squares;
    float total = 0.f;
    for (u32 t = 0; t < blockDim.x; ++t) total += sums[t];
    const float scale = rsqrtf(total / size + eps);
    for (u32 i = threadIdx.x; i < size; i += blockDim.x) {
        y[(size_t)blockIdx.x * size + i] = __float2bfloat16(__bfloat162float(row[i]) * scale * __bfloat162float(w[i]));
    }
}
