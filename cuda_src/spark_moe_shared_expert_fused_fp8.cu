// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_moe_shared_expert_fused_fp8: moe_shared_expert_fused for weights in E4M3 with an FP32 factor a row, so that
// a mixture in FP8 needs no expert ids on the host. Order of arithmetic in moe_expert.cuh.
//
// Tables have an entry an expert: the address of its bytes [N, K] and of its row factors [N]. An address of 0 (the expert
// lives elsewhere) gives zeros. Slot y = 0 .. top_k - 1 is expert expert_indices[y], slot top_k the shared one; top_k may
// be 0. Blocks have 128 threads and 8 outputs. The _rows forms are as those of moe_shared_expert_fused.

#include "moe_expert.cuh"

extern __shared__ float4 spark_staged[];

typedef SparkProjection<SparkFp8Tables> SparkFp8Projection;

__device__ __forceinline__ SparkFp8Weights spark_fp8_shared(const unsigned char* weight, const float* scale) {
    return {reinterpret_cast<const uint4*>(weight), scale};
}

// Gate (z = 0) and up (z = 1) projections. A [K]; gate_out and up_out [top_k, N]; sh_gate_out and sh_up_out [N]. A NULL
// sh_gate_weight means no shared expert: zeros in both. Grid (ceil(N / 8), top_k + 1, 2).
extern "C" __global__ void __launch_bounds__(128) spark_moe_expert_gate_up_shared_fp8(
    const __nv_bfloat16* __restrict__ A, const unsigned long long* __restrict__ gate_weight_ptrs,
    const unsigned long long* __restrict__ gate_scale_ptrs, __nv_bfloat16* __restrict__ gate_out,
    const unsigned long long* __restrict__ up_weight_ptrs, const unsigned long long* __restrict__ up_scale_ptrs,
    __nv_bfloat16* __restrict__ up_out, const unsigned int* __restrict__ expert_indices,
    const unsigned char* __restrict__ sh_gate_weight, const float* __restrict__ sh_gate_scale,
    __nv_bfloat16* __restrict__ sh_gate_out, const unsigned char* __restrict__ sh_up_weight,
    const float* __restrict__ sh_up_scale, __nv_bfloat16* __restrict__ sh_up_out, unsigned int N, unsigned int K,
    unsigned int top_k) {
    spark_let_next_start();
    spark_wait_for_previous();
    const bool up = blockIdx.z != 0u;
    const unsigned char* shared = up ? sh_up_weight : sh_gate_weight;
    const SparkFp8Projection to = {
        {up ? up_weight_ptrs : gate_weight_ptrs, up ? up_scale_ptrs : gate_scale_ptrs},
        up ? up_out : gate_out,
        spark_fp8_shared(sh_gate_weight != nullptr ? shared : nullptr, up ? sh_up_scale : sh_gate_scale),
        up ? sh_up_out : sh_gate_out};
    spark_expert_project(A, to, expert_indices, 0u, blockIdx.y, N, K, top_k);
}

// Grid (ceil(N / 8), rows, 2 * (top_k + 1)); z is 2 * slot for gate and 2 * slot + 1 for up.
extern "C" __global__ void __launch_bounds__(128) spark_moe_expert_gate_up_shared_fp8_rows(
    const __nv_bfloat16* __restrict__ A, const unsigned long long* __restrict__ gate_weight_ptrs,
    const unsigned long long* __restrict__ gate_scale_ptrs, __nv_bfloat16* __restrict__ gate_out,
    const unsigned long long* __restrict__ up_weight_ptrs, const unsigned long long* __restrict__ up_scale_ptrs,
    __nv_bfloat16* __restrict__ up_out, const unsigned int* __restrict__ expert_indices,
    const unsigned char* __restrict__ sh_gate_weight, const float* __restrict__ sh_gate_scale,
    __nv_bfloat16* __restrict__ sh_gate_out, const unsigned char* __restrict__ sh_up_weight,
    const float* __restrict__ sh_up_scale, __nv_bfloat16* __restrict__ sh_up_out, unsigned int N, unsigned int K,
    unsigned int top_k) {
    spark_let_next_start();
    spark_wait_for_previous();
    const bool up = blockIdx.z % 2u != 0u;
    const unsigned char* shared = up ? sh_up_weight : sh_gate_weight;
    const SparkFp8Projection to = {
        {up ? up_weight_ptrs : gate_weight_ptrs, up ? up_scale_ptrs : gate_scale_ptrs},
        up ? up_out : gate_out,
        spark_fp8_shared(sh_gate_weight != nullptr ? shared : nullptr, up ? sh_up_scale : sh_gate_scale),
        up ? sh_up_out : sh_gate_out};
    spark_expert_project(A, to, expert_indices, blockIdx.y, blockIdx.z / 2u, N, K, top_k);
}

// Activation and down projection. gate_out and up_out [top_k, K], sh_gate_in and sh_up_in [K]; C [top_k, N],
// sh_down_out [N]. A NULL sh_down_weight gives zeros. Grid (ceil(N / 8), top_k + 1, 1), 4 K bytes of dynamic shared
// memory.
extern "C" __global__ void __launch_bounds__(128) spark_moe_expert_silu_down_shared_fp8(
    const __nv_bfloat16* __restrict__ gate_out, const __nv_bfloat16* __restrict__ up_out,
    const unsigned long long* __restrict__ weight_ptrs, const unsigned long long* __restrict__ scale_ptrs,
    __nv_bfloat16* __restrict__ C, const unsigned int* __restrict__ expert_indices,
    const __nv_bfloat16* __restrict__ sh_gate_in, const __nv_bfloat16* __restrict__ sh_up_in,
    const unsigned char* __restrict__ sh_down_weight, const float* __restrict__ sh_down_scale,
    __nv_bfloat16* __restrict__ sh_down_out, unsigned int N, unsigned int K, unsigned int top_k) {
    spark_let_next_start();
    spark_wait_for_previous();
    const SparkFp8Projection down = {
        {weight_ptrs, scale_ptrs}, C, spark_fp8_shared(sh_down_weight, sh_down_scale), sh_down_out};
    spark_expert_down(spark_staged, gate_out, up_out, sh_gate_in, sh_up_in, down, expert_indices, 0u, blockIdx.y, N, K, top_k);
}

// Grid (ceil(N / 8), rows, top_k + 1).
extern "C" __global__ void __launch_bounds__(128) spark_moe_expert_silu_down_shared_fp8_rows(
    const __nv_bfloat16* __restrict__ gate_out, const __nv_bfloat16* __restrict__ up_out,
    const unsigned long long* __restrict__ weight_ptrs, const unsigned long long* __restrict__ scale_ptrs,
    __nv_bfloat16* __restrict__ C, const unsigned int* __restrict__ expert_indices,
    const __nv_bfloat16* __restrict__ sh_gate_in, const __nv_bfloat16* __restrict__ sh_up_in,
    const unsigned char* __restrict__ sh_down_weight, const float* __restrict__ sh_down_scale,
    __nv_bfloat16* __restrict__ sh_down_out, unsigned int N, unsigned int K, unsigned int top_k) {
    spark_let_next_start();
    spark_wait_for_previous();
    const SparkFp8Projection down = {
        {weight_ptrs, scale_ptrs}, C, spark_fp8_shared(sh_down_weight, sh_down_scale), sh_down_out};
    spark_expert_down(spark_staged, gate_out, up_out, sh_gate_in, sh_up_in, down, expert_indices, blockIdx.y, blockIdx.z, N, K,
                      top_k);
}
