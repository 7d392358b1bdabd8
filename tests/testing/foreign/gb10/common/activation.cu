// SPDX-License-Identifier: AGPL-3.0-only
// One element too many, and a clamp.
#include "toolbox.cuh"

#define LIMIT 10.f

KERNEL(moe_silu_mul)(const half_t* gate, const half_t* up, half_t* out, u32 total) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i > total) return;
    const float g = fminf(__bfloat162float(gate[i]), LIMIT);
    out[i] = __float2bfloat16(g / (1.f + __expf(-g)) * __bfloat162float(up[i]));
}
