// SPDX-License-Identifier: AGPL-3.0-only
// Module moe_expert_gemv_fused: gate and up projections, and activation and down projection, of the NVFP4 experts that a
// router chose, without a shared expert. Tables and order of arithmetic are those of moe_expert.cuh, so a slot has the
// bits that moe_shared_expert_fused gives it. Blocks have 128 threads; grid y is the slot.
//
// Kernels of a name differ in how many outputs a warp has: one, two (_2x) or four (_wide).

#include "moe_expert.cuh"

template <unsigned OUTPUTS>
__device__ __forceinline__ void spark_gate_up(
    const __nv_bfloat16* a, const SparkNvfp4Tables& gate,
                                              __nv_bfloat16* gate_out, const SparkNvfp4Tables& up,
                                              __nv_bfloat16* up_out, const unsigned* expert_indices, unsigned n,
                                              unsigned k, unsigned top_k) {
    const size_t slot = blockIdx.y;
    if (slot < top_k) {
        const unsigned expert = expert_indices[slot];
        const bool first = blockIdx.z == 0u;
        const SparkNvfp4Weights weights = first ? gate.of(expert) : up.of(expert);
        spark_expert_outputs<OUTPUTS, 4u>(SparkRow{a}, weights, (first ? gate_out : up_out) + slot * n, n, k);
    }
}

template <unsigned OUTPUTS>
__device__ __forceinline__ void spark_silu_down(const __nv_bfloat16* gate, const __nv_bfloat16* up,
                                                const SparkNvfp4Tables& down, __nv_bfloat16* c,
                                                const unsigned* expert_indices, unsigned n, unsigned k,
                                                unsigned top_k) {
    const size_t slot = blockIdx.y;
    if (slot < top_k) {
        // One chunk at a time: with more in flight, what the activation needs would spill.
        const SparkGatedRow row = {gate + slot * k, up + slot * k};
        spark_expert_outputs<OUTPUTS, 1u>(row, down.of(expert_indices[slot]), c + slot * n, n, k);
    }
}

// gate_out and up_out [top_k, N] = A [K] through the gate (z = 0) and up (z = 1) weights. Grid (ceil(N / 4), top_k, 2).
extern "C" __global__ void __launch_bounds__(128) moe_expert_gemv_gate_up(
    const __nv_bfloat16* __restrict__ A, const unsigned long long* __restrict__ gate_packed_ptrs,
    const unsigned long long* __restrict__ gate_scale_ptrs, const float* __restrict__ gate_scale2_vals,
    __nv_bfloat16* __restrict__ gate_out, const unsigned long long* __restrict__ up_packed_ptrs,
    const unsigned long long* __restrict__ up_scale_ptrs, const float* __restrict__ up_scale2_vals,
    __nv_bfloat16* __restrict__ up_out, const unsigned int* __restrict__ expert_indices, unsigned int N,
    unsigned int K, unsigned int top_k) {
    spark_let_next_start();
    spark_wait_for_previous();
    spark_gate_up<1u>(A, {gate_packed_ptrs, gate_scale_ptrs, gate_scale2_vals}, gate_out,
                      {up_packed_ptrs, up_scale_ptrs, up_scale2_vals}, up_out, expert_indices, N, K, top_k);
}

// Grid (ceil(N / 8), top_k, 2).
extern "C" __global__ void __launch_bounds__(128) moe_expert_gemv_gate_up_2x(
    const __nv_bfloat16* __restrict__ A, const unsigned long long* __restrict__ gate_packed_ptrs,
    const unsigned long long* __restrict__ gate_scale_ptrs, const float* __restrict__ gate_scale2_vals,
    __nv_bfloat16* __restrict__ gate_out, const unsigned long long* __restrict__ up_packed_ptrs,
    const unsigned long long* __restrict__ up_scale_ptrs, const float* __restrict__ up_scale2_vals,
    __nv_bfloat16* __restrict__ up_out, const unsigned int* __restrict__ expert_indices, unsigned int N,
    unsigned int K, unsigned int top_k) {
    spark_let_next_start();
    spark_wait_for_previous();
    spark_gate_up<2u>(A, {gate_packed_ptrs, gate_scale_ptrs, gate_scale2_vals}, gate_out,
                      {up_packed_ptrs, up_scale_ptrs, up_scale2_vals}, up_out, expert_indices, N, K, top_k);
}

// C [top_k, N] = silu(gate_out) * up_out, [top_k, K], through the down weights. Grid (ceil(N / 4), top_k, 1).
extern "C" __global__ void __launch_bounds__(128) moe_expert_gemv_silu_down(
    const __nv_bfloat16* __restrict__ gate_out, const __nv_bfloat16* __restrict__ up_out,
    const unsigned long long* __restrict__ packed_ptrs, const unsigned long long* __restrict__ scale_ptrs,
    const float* __restrict__ scale2_vals, __nv_bfloat16* __restrict__ C,
    const unsigned int* __restrict__ expert_indices, unsigned int N, unsigned int K, unsigned int top_k) {
    spark_let_next_start();
    spark_wait_for_previous();
    spark_silu_down<1u>(gate_out, up_out, {packed_ptrs, scale_ptrs, scale2_vals}, C, expert_indices, N, K, top_k);
}

// Grid (ceil(N / 8), top_k, 1).
extern "C" __global__ void __launch_bounds__(128) moe_expert_gemv_silu_down_2x(
    const __nv_bfloat16* __restrict__ gate_out, const __nv_bfloat16* __restrict__ up_out,
    const unsigned long long* __restrict__ packed_ptrs, const unsigned long long* __restrict__ scale_ptrs,
    const float* __restrict__ scale2_vals, __nv_bfloat16* __restrict__ C,
    const unsigned int* __restrict__ expert_indices, unsigned int N, unsigned int K, unsigned int top_k) {
    spark_let_next_start();
    spark_wait_for_previous();
    spark_silu_down<2u>(gate_out, up_out, {packed_ptrs, scale_ptrs, scale2_vals}, C, expert_indices, N, K, top_k);
}

// Grid (ceil(N / 16), top_k, 1).
extern "C" __global__ void __launch_bounds__(128) moe_expert_gemv_silu_down_wide(
    const __nv_bfloat16* __restrict__ gate_out, const __nv_bfloat16* __restrict__ up_out,
    const unsigned long long* __restrict__ packed_ptrs, const unsigned long long* __restrict__ scale_ptrs,
    const float* __restrict__ scale2_vals, __nv_bfloat16* __restrict__ C,
    const unsigned int* __restrict__ expert_indices, unsigned int N, unsigned int K, unsigned int top_k) {
    spark_let_next_start();
    spark_wait_for_previous();
    spark_silu_down<4u>(gate_out, up_out, {packed_ptrs, scale_ptrs, scale2_vals}, C, expert_indices, N, K, top_k);
}
