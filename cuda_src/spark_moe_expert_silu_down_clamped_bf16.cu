// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_moe_expert_silu_down_clamped_bf16: moe_expert_silu_down_shared_bf16 of several rows with DeepSeek-V4's
// limit, which holds for the routed experts and for the shared one: silu(min(gate, limit)) * clamp(up, -limit, limit),
// in FP32 throughout. This project's own kernel. Order of arithmetic in moe_expert_bf16.cuh; where nothing exceeds the
// limit, the bits are those of spark_moe_expert_silu_down_shared_bf16_rows.

#include "moe_expert_bf16.cuh"

// gate_out and up_out [rows, top_k, K], sh_gate_in and sh_up_in [rows, K]; C [rows, top_k, N], sh_down_out [rows, N].
// Table, slots and a NULL sh_down_weight as in moe_shared_expert_fused_bf16. Grid (ceil(N / 8), rows, top_k + 1), block
// 128. K % 8 == 0.
extern "C" __global__ void spark_moe_expert_silu_down_clamped_bf16_rows(
    const __nv_bfloat16* __restrict__ gate_out, const __nv_bfloat16* __restrict__ up_out,
    const unsigned long long* __restrict__ weight_ptrs, __nv_bfloat16* __restrict__ C,
    const unsigned int* __restrict__ expert_indices, const __nv_bfloat16* __restrict__ sh_gate_in,
    const __nv_bfloat16* __restrict__ sh_up_in, const __nv_bfloat16* __restrict__ sh_down_weight,
    __nv_bfloat16* __restrict__ sh_down_out, unsigned int N, unsigned int K, unsigned int top_k, float limit) {
    spark_let_next_start();
    spark_wait_for_previous();
    const MoeBf16Slot slot(weight_ptrs, C, expert_indices, sh_down_weight, sh_down_out, blockIdx.y, blockIdx.z, N,
                           top_k);
    moe_bf16_down((slot.routed ? gate_out : sh_gate_in) + slot.row * K,
                  (slot.routed ? up_out : sh_up_in) + slot.row * K, slot, N, K, SparkLimit{limit});
}
