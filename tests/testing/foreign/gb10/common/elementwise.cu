// SPDX-License-Identifier: AGPL-3.0-only
// One of each: right and made by a macro, rounded once too often, and with a parameter of another width.
#include "toolbox.cuh"

KERNEL(bf16_residual_add)(half_t* acc, const half_t* add, u32 count) {
    EACH(i, count) acc[i] = __float2bfloat16(__bfloat162float(acc[i]) + __bfloat162float(add[i]));
}

KERNEL(sigmoid_gate_mul)(const half_t* in, const half_t* g, half_t* out, u32 count) {
    EACH(i, count) {
        const half_t s = __float2bfloat16(1.f / (1.f + expf(-__bfloat162float(g[i]))));
        out[i] = __float2bfloat16(__bfloat162float(in[i]) * __bfloat162float(s));
    }
}

KERNEL(bf16_concat)(const half_t* first, const half_t* second, half_t* out, unsigned long long count) {
    EACH(i, count) {
        out[i] = first[i];
        out[count + i] = second[i];
    }
}
