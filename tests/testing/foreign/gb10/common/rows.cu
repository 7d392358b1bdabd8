// SPDX-License-Identifier: AGPL-3.0-only
// Right, with another reduction and another spelling: one template behind two entry points.
#include "toolbox.cuh"

template <bool COPY>
__device__ void normalise(const half_t* x, const half_t* w, half_t* y, half_t* keep, u32 size, float eps) {
    __shared__ float pad[ROW_THREADS_MOST];
    x += (size_t)blockIdx.x * size, y += (size_t)blockIdx.x * size;
    float squares = 0.f;
    for (u32 i = threadIdx.x; i < size; i += blockDim.x) {
        const float v = __bfloat162float(x[i]);
        squares = fmaf(v, v, squares);
    }
    const float scale = 1.f / sqrtf(toolbox::across_block(squares, pad) / (float)size + eps);
    for (u32 i = threadIdx.x; i < size; i += blockDim.x) {
        const half_t v = x[i];
        if (COPY) keep[(size_t)blockIdx.x * size + i] = v;
        y[i] = __float2bfloat16(__bfloat162float(v) * scale * (1.f + __bfloat162float(w[i])));
    }
}

extern "C" {
__global__ __launch_bounds__(1024) void rms_norm(const half_t* __restrict__ in, const half_t* __restrict__ gain,
                                                 half_t* out, u32 width, float epsilon) {
    normalise<false>(in, gain, out, nullptr, width, epsilon);
}

__global__ void rms_norm_residual(const half_t* in, const half_t* gain, half_t* out, half_t* copy, u32 width,
                                  float epsilon) {
    normalise<true>(in, gain, out, copy, width, epsilon);
}
}
