// SPDX-License-Identifier: AGPL-3.0-only
// Module moe_silu_mul: the gated activation of SwiGLU, without a clamp.

#include "spark_common.cuh"

// output = bf16((gate * sigmoid(gate)) * up). Grid ceil(total_elements / 256), block 256; output may be gate or up.
extern "C" __global__ void moe_silu_mul(const __nv_bfloat16* gate, const __nv_bfloat16* up, __nv_bfloat16* output,
                                        unsigned int total_elements) {
    spark_let_next_start();
    spark_wait_for_previous();
    const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < total_elements) {
        const float g = spark_load(gate + i);
        const float sigmoid = 1.0f / (1.0f + __expf(-g));
        spark_store(output + i, g * sigmoid * spark_load(up + i));
    }
}
