// SPDX-License-Identifier: AGPL-3.0-only
// Right: dynamic shared memory, the standard's math.h, no helper header.
#include <cuda_bf16.h>
#include <math.h>
#include <assert.h>

extern "C" __global__ void deinterleave_qg(__nv_bfloat16* rows, const unsigned int heads, const unsigned int width,
                                           const unsigned int pitch) {
    extern __shared__ __nv_bfloat16 copy[];
    assert(blockDim.x == 256u);
    __nv_bfloat16* row = rows + (size_t)blockIdx.x * pitch;
    const unsigned int all = 2u * heads * width;
    for (unsigned int i = threadIdx.x; i < all; i += blockDim.x) copy[i] = row[i];
    __syncthreads();
    for (unsigned int i = threadIdx.x; i < all; i += blockDim.x) {
        const unsigned int head = i / (2u * width), inside = i % (2u * width);
        const unsigned int gate = inside >= width;
        row[gate * heads * width + head * width + inside - gate * width] = copy[i];
    }
}
