// SPDX-License-Identifier: AGPL-3.0-only
// In the place of the common file, whole: the weight as it is, which is another kernel under the same name.
#include <cuda_bf16.h>

extern "C" __global__ void rms_norm(const __nv_bfloat16* in, const __nv_bfloat16* gain, __nv_bfloat16* out,
                                    unsigned int width, float epsilon) {
    __shared__ float total;
    if (threadIdx.x == 0) total = 0.f;
    __syncthreads();
    const size_t start = (size_t)blockIdx.x * width;
    float squares = 0.f;
    for (unsigned int i = threadIdx.x; i < width; i += blockDim.x) {
        const float v = __bfloat162float(in[start + i]);
        squares += v * v;
    }
    atomicAdd(&total, squares);
    __syncthreads();
    const float scale = rsqrtf(total / width + epsilon);
    for (unsigned int i = threadIdx.x; i < width; i += blockDim.x) {
        const float v = __bfloat162float(in[start + i]) * scale;
        out[start + i] = __float2bfloat16(v * (GAIN_OFFSET + __bfloat162float(gain[i])));
    }
}
