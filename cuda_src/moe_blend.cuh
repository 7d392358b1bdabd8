// SPDX-License-Identifier: AGPL-3.0-only
// What a token's experts add up to: y = sum over slots e of w[e] * x[e], in slot order, + g * shared.
//
// g = 1 / (1 + exp(-(input . gate_weight))), or 1 where there is no gate_weight. Each block computes g: thread t adds
// the 8-element chunks t, t + 256, ... in ascending k, then the block adds up. Every product and sum rounds to FP32,
// the result once to BF16. With a gate K % 8 == 0, and input and gate_weight lie on 16-byte addresses.
#pragma once

#include "dense_gemv.cuh"

constexpr unsigned SPARK_BLEND_BLOCK = 256u;

// One element a thread, SPARK_BLEND_BLOCK threads a block, block x of a row. expert_out is [top_k, hidden].
__device__ __forceinline__ void spark_moe_blend(__nv_bfloat16* __restrict__ output,
                                                const __nv_bfloat16* __restrict__ expert_out,
                                                const float* __restrict__ weights,
                                                const __nv_bfloat16* __restrict__ shared_out,
                                                const __nv_bfloat16* __restrict__ input,
                                                const __nv_bfloat16* __restrict__ gate_weight, unsigned hidden,
                                                unsigned top_k, unsigned K) {
    const bool gated = gate_weight != nullptr;
    float logit = 0.0f;
    if (gated) {
        const uint4* a = reinterpret_cast<const uint4*>(input);
        const uint4* b = reinterpret_cast<const uint4*>(gate_weight);
        for (unsigned c = threadIdx.x; c < K / SPARK_DOT_CHUNK; c += SPARK_BLEND_BLOCK) {
            logit = spark_dot_chunk(logit, a[c], b[c]);
        }
    }
    // The experts' rows are on their way while the block adds up its logit. Threads past the row reach the barriers.
    const size_t h = static_cast<size_t>(blockIdx.x) * SPARK_BLEND_BLOCK + threadIdx.x;
    float sum = 0.0f;
    float shared = 0.0f;
    if (h < hidden) {
        shared = spark_load(shared_out + h);
#pragma unroll 8
        for (unsigned e = 0u; e < top_k; ++e) {
            sum = sum + weights[e] * spark_load(expert_out + static_cast<size_t>(e) * hidden + h);
        }
    }
    float gate = 1.0f;
    if (gated) {
        gate = 1.0f / (1.0f + __expf(-spark_block_sum(logit)));
    }
    if (h < hidden) {
        spark_store(output + h, sum + gate * shared);
    }
}
