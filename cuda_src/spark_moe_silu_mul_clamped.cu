// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_moe_silu_mul_clamped: the gated activation of SwiGLU with DeepSeek-V4's limit, which bounds the gate from
// above alone and up on both sides. Otherwise as moe_silu_mul.

#include "spark_common.cuh"

constexpr unsigned CLAMPED_ELEMENTS = 8u;

// bf16((g * sigmoid(g)) * u), g = min(gate, limit), u = min(max(up, -limit), limit). NaN stays NaN.
__device__ __forceinline__ float clamped_product(float gate, float up, float limit) {
    const float g = gate > limit ? limit : gate;
    const float u = up > limit ? limit : up < -limit ? -limit : up;
    const float sigmoid = 1.0f / (1.0f + __expf(-g));
    return g * sigmoid * u;
}

__device__ __forceinline__ unsigned clamped_pair(unsigned gate, unsigned up, float limit) {
    return spark_pack(clamped_product(spark_low(gate), spark_low(up), limit),
                      clamped_product(spark_high(gate), spark_high(up), limit));
}

// Grid ceil(total_elements / 2048), block 256: 8 elements a thread, 16 bytes at a time where all three buffers lie on
// 16 bytes. output may be gate or up.
extern "C" __global__ void spark_moe_silu_mul_clamped(const __nv_bfloat16* gate, const __nv_bfloat16* up,
                                                      __nv_bfloat16* output, unsigned int total_elements, float limit) {
    spark_let_next_start();
    spark_wait_for_previous();
    const size_t first = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * CLAMPED_ELEMENTS;
    const size_t end = first + CLAMPED_ELEMENTS;
    if (end <= total_elements && spark_aligned(gate, 16u) && spark_aligned(up, 16u) && spark_aligned(output, 16u)) {
        const uint4 g = *reinterpret_cast<const uint4*>(gate + first);
        const uint4 u = *reinterpret_cast<const uint4*>(up + first);
        *reinterpret_cast<uint4*>(output + first) =
            make_uint4(clamped_pair(g.x, u.x, limit), clamped_pair(g.y, u.y, limit), clamped_pair(g.z, u.z, limit),
                       clamped_pair(g.w, u.w, limit));
        return;
    }
    for (size_t i = first; i < end && i < total_elements; ++i) {
        spark_store(output + i, clamped_product(spark_load(gate + i), spark_load(up + i), limit));
    }
}
