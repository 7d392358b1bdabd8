// SPDX-License-Identifier: AGPL-3.0-only
// Module moe_shared_expert_fused_bf16: all experts of a token in two launches, BF16 weights through tables of
// addresses. The maths is in moe_expert_bf16.cuh.

#include "moe_expert_bf16.cuh"

// gate_out and up_out [top_k, N] = A [K] through the gate and up weights of the chosen experts, sh_gate_out and
// sh_up_out [N] through the shared expert's. Grid (ceil(N / 8), top_k + 1, 2), block 128; z 0 is gate, 1 is up.
extern "C" __global__ void moe_expert_gate_up_shared_bf16(
    const __nv_bfloat16* __restrict__ A, const unsigned long long* __restrict__ gate_weight_ptrs,
    __nv_bfloat16* __restrict__ gate_out, const unsigned long long* __restrict__ up_weight_ptrs,
    __nv_bfloat16* __restrict__ up_out, const unsigned int* __restrict__ expert_indices,
    const __nv_bfloat16* __restrict__ sh_gate_weight, __nv_bfloat16* __restrict__ sh_gate_out,
    const __nv_bfloat16* __restrict__ sh_up_weight, __nv_bfloat16* __restrict__ sh_up_out, unsigned int N,
    unsigned int K, unsigned int top_k) {
    spark_let_next_start();
    spark_wait_for_previous();
    const bool up = blockIdx.z != 0u;
    const MoeBf16Slot slot(up ? up_weight_ptrs : gate_weight_ptrs, up ? up_out : gate_out, expert_indices,
                           up ? sh_up_weight : sh_gate_weight, up ? sh_up_out : sh_gate_out, 0u, blockIdx.y, N, top_k);
    moe_bf16_project(A, slot, N, K);
}

// C [top_k, N] = silu(gate_out) * up_out [top_k, K] through the down weights of the chosen experts, sh_down_out [N] =
// silu(sh_gate_in) * sh_up_in [K] through the shared expert's. Grid (ceil(N / 8), top_k + 1, 1), block 128.
extern "C" __global__ void moe_expert_silu_down_shared_bf16(
    const __nv_bfloat16* __restrict__ gate_out, const __nv_bfloat16* __restrict__ up_out,
    const unsigned long long* __restrict__ weight_ptrs, __nv_bfloat16* __restrict__ C,
    const unsigned int* __restrict__ expert_indices, const __nv_bfloat16* __restrict__ sh_gate_in,
    const __nv_bfloat16* __restrict__ sh_up_in, const __nv_bfloat16* __restrict__ sh_down_weight,
    __nv_bfloat16* __restrict__ sh_down_out, unsigned int N, unsigned int K, unsigned int top_k) {
    spark_let_next_start();
    spark_wait_for_previous();
    const MoeBf16Slot slot(weight_ptrs, C, expert_indices, sh_down_weight, sh_down_out, 0u, blockIdx.y, N, top_k);
    moe_bf16_down((slot.routed ? gate_out : sh_gate_in) + slot.row * K,
                  (slot.routed ? up_out : sh_up_in) + slot.row * K, slot, N, K);
}
