// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_moe_rows: a mixture of experts for T rows in three launches, each row with its own experts and with the
// bits of the kernel for one row. Rows are dense: [T, K], [T, top_k, N], [T, N], [T, top_k].
//
// Grid y counts the rows and grid z the slots: the blocks of all rows that read the shared expert's weights follow each
// other, so the weights come from memory once and from the L2 cache after that.

#include "moe_blend.cuh"
#include "moe_expert_bf16.cuh"

// moe_expert_gate_up_shared_bf16 of each row. Grid (ceil(N / 8), T, 2 * (top_k + 1)), block 128; z is 2 * slot for the
// gate and 2 * slot + 1 for up.
extern "C" __global__ void spark_moe_expert_gate_up_shared_bf16_rows(
    const __nv_bfloat16* __restrict__ A, const unsigned long long* __restrict__ gate_weight_ptrs,
    __nv_bfloat16* __restrict__ gate_out, const unsigned long long* __restrict__ up_weight_ptrs,
    __nv_bfloat16* __restrict__ up_out, const unsigned int* __restrict__ expert_indices,
    const __nv_bfloat16* __restrict__ sh_gate_weight, __nv_bfloat16* __restrict__ sh_gate_out,
    const __nv_bfloat16* __restrict__ sh_up_weight, __nv_bfloat16* __restrict__ sh_up_out, unsigned int N,
    unsigned int K, unsigned int top_k) {
    spark_let_next_start();
    spark_wait_for_previous();
    const size_t row = blockIdx.y;
    const bool up = blockIdx.z % 2u != 0u;
    const MoeBf16Slot slot(up ? up_weight_ptrs : gate_weight_ptrs, up ? up_out : gate_out, expert_indices,
                           up ? sh_up_weight : sh_gate_weight, up ? sh_up_out : sh_gate_out, row, blockIdx.z / 2u, N,
                           top_k);
    moe_bf16_project(A + row * K, slot, N, K);
}

// moe_expert_silu_down_shared_bf16 of each row. Grid (ceil(N / 8), T, top_k + 1), block 128.
extern "C" __global__ void spark_moe_expert_silu_down_shared_bf16_rows(
    const __nv_bfloat16* __restrict__ gate_out, const __nv_bfloat16* __restrict__ up_out,
    const unsigned long long* __restrict__ weight_ptrs, __nv_bfloat16* __restrict__ C,
    const unsigned int* __restrict__ expert_indices, const __nv_bfloat16* __restrict__ sh_gate_in,
    const __nv_bfloat16* __restrict__ sh_up_in, const __nv_bfloat16* __restrict__ sh_down_weight,
    __nv_bfloat16* __restrict__ sh_down_out, unsigned int N, unsigned int K, unsigned int top_k) {
    spark_let_next_start();
    spark_wait_for_previous();
    const MoeBf16Slot slot(weight_ptrs, C, expert_indices, sh_down_weight, sh_down_out, blockIdx.y, blockIdx.z, N,
                           top_k);
    moe_bf16_down((slot.routed ? gate_out : sh_gate_in) + slot.row * K,
                  (slot.routed ? up_out : sh_up_in) + slot.row * K, slot, N, K);
}

// moe_weighted_sum_blend of each row; one gate_weight [K] for all. Grid (ceil(hidden / 256), T), block 256.
extern "C" __global__ void spark_moe_weighted_sum_blend_rows(
    __nv_bfloat16* __restrict__ output, const __nv_bfloat16* __restrict__ expert_out,
    const float* __restrict__ expert_weights, const __nv_bfloat16* __restrict__ shared_out,
    const __nv_bfloat16* __restrict__ input, const __nv_bfloat16* __restrict__ gate_weight, unsigned int hidden,
    unsigned int top_k, unsigned int K) {
    spark_let_next_start();
    spark_wait_for_previous();
    const size_t row = blockIdx.y;
    spark_moe_blend(output + row * hidden, expert_out + row * top_k * hidden, expert_weights + row * top_k,
                    shared_out + row * hidden, input + row * K, gate_weight, hidden, top_k, K);
}
