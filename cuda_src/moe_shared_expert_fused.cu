// SPDX-License-Identifier: AGPL-3.0-only
// Module moe_shared_expert_fused: the NVFP4 experts of a SwiGLU mixture that a router chose, and the shared expert, in
// one launch. Order of arithmetic in moe_expert.cuh.
//
// Tables have an entry an expert: the address of its packed codes [N, K / 2], of its block scales [N, K / 16], and its
// factor. An address of 0 (the expert lives elsewhere) gives zeros. Slot y = 0 .. top_k - 1 is expert expert_indices[y],
// slot top_k the shared one; top_k may be 0. Blocks have 128 threads and 8 outputs.
//
// The spark_..._rows forms have the same parameters and for every row the bits of the kernel for one: A [rows, K],
// expert_indices and the routed results [rows, top_k, ...], the shared expert's [rows, ...]. Rows are in grid y and slots
// in grid z, so that the blocks that read the shared expert's weights follow each other and find them in the L2 cache.

#include "moe_expert.cuh"

extern __shared__ float4 spark_staged[];

typedef SparkProjection<SparkNvfp4Tables> SparkNvfp4Projection;

__device__ __forceinline__ SparkNvfp4Weights spark_nvfp4_shared(const unsigned char* packed,
                                                                const unsigned char* scale, float s2) {
    return {reinterpret_cast<const uint2*>(packed), scale, s2};
}

// Gate (z = 0) and up (z = 1) projections. A [K]; gate_out and up_out [top_k, N]; sh_gate_out and sh_up_out [N]. A NULL
// sh_gate_packed means no shared expert: zeros in both. Grid (ceil(N / 8), top_k + 1, 2).
extern "C" __global__ void __launch_bounds__(128) moe_expert_gate_up_shared(
    const __nv_bfloat16* __restrict__ A, const unsigned long long* __restrict__ gate_packed_ptrs,
    const unsigned long long* __restrict__ gate_scale_ptrs, const float* __restrict__ gate_scale2_vals,
    __nv_bfloat16* __restrict__ gate_out, const unsigned long long* __restrict__ up_packed_ptrs,
    const unsigned long long* __restrict__ up_scale_ptrs, const float* __restrict__ up_scale2_vals,
    __nv_bfloat16* __restrict__ up_out, const unsigned int* __restrict__ expert_indices,
    const unsigned char* __restrict__ sh_gate_packed, const unsigned char* __restrict__ sh_gate_scale,
    float sh_gate_s2, __nv_bfloat16* __restrict__ sh_gate_out, const unsigned char* __restrict__ sh_up_packed,
    const unsigned char* __restrict__ sh_up_scale, float sh_up_s2, __nv_bfloat16* __restrict__ sh_up_out,
    unsigned int N, unsigned int K, unsigned int top_k) {
    spark_let_next_start();
    spark_wait_for_previous();
    const bool up = blockIdx.z != 0u;
    const unsigned char* shared = up ? sh_up_packed : sh_gate_packed;
    const SparkNvfp4Projection to = {
        {up ? up_packed_ptrs : gate_packed_ptrs, up ? up_scale_ptrs : gate_scale_ptrs,
         up ? up_scale2_vals : gate_scale2_vals},
        up ? up_out : gate_out,
        spark_nvfp4_shared(sh_gate_packed != nullptr ? shared : nullptr, up ? sh_up_scale : sh_gate_scale,
                           up ? sh_up_s2 : sh_gate_s2),
        up ? sh_up_out : sh_gate_out};
    spark_expert_project(A, to, expert_indices, 0u, blockIdx.y, N, K, top_k);
}

// Grid (ceil(N / 8), rows, 2 * (top_k + 1)); z is 2 * slot for gate and 2 * slot + 1 for up.
extern "C" __global__ void __launch_bounds__(128) spark_moe_expert_gate_up_shared_rows(
    const __nv_bfloat16* __restrict__ A, const unsigned long long* __restrict__ gate_packed_ptrs,
    const unsigned long long* __restrict__ gate_scale_ptrs, const float* __restrict__ gate_scale2_vals,
    __nv_bfloat16* __restrict__ gate_out, const unsigned long long* __restrict__ up_packed_ptrs,
    const unsigned long long* __restrict__ up_scale_ptrs, const float* __restrict__ up_scale2_vals,
    __nv_bfloat16* __restrict__ up_out, const unsigned int* __restrict__ expert_indices,
    const unsigned char* __restrict__ sh_gate_packed, const unsigned char* __restrict__ sh_gate_scale,
    float sh_gate_s2, __nv_bfloat16* __restrict__ sh_gate_out, const unsigned char* __restrict__ sh_up_packed,
    const unsigned char* __restrict__ sh_up_scale, float sh_up_s2, __nv_bfloat16* __restrict__ sh_up_out,
    unsigned int N, unsigned int K, unsigned int top_k) {
    spark_let_next_start();
    spark_wait_for_previous();
    const bool up = blockIdx.z % 2u != 0u;
    const unsigned char* shared = up ? sh_up_packed : sh_gate_packed;
    const SparkNvfp4Projection to = {
        {up ? up_packed_ptrs : gate_packed_ptrs, up ? up_scale_ptrs : gate_scale_ptrs,
         up ? up_scale2_vals : gate_scale2_vals},
        up ? up_out : gate_out,
        spark_nvfp4_shared(sh_gate_packed != nullptr ? shared : nullptr, up ? sh_up_scale : sh_gate_scale,
                           up ? sh_up_s2 : sh_gate_s2),
        up ? sh_up_out : sh_gate_out};
    spark_expert_project(A, to, expert_indices, blockIdx.y, blockIdx.z / 2u, N, K, top_k);
}

// Activation and down projection. gate_out and up_out [top_k, K], sh_gate_in and sh_up_in [K]; C [top_k, N],
// sh_down_out [N]. A NULL sh_down_packed gives zeros. Grid (ceil(N / 8), top_k + 1, 1), 4 K bytes of dynamic shared
// memory.
extern "C" __global__ void __launch_bounds__(128) moe_expert_silu_down_shared(
    const __nv_bfloat16* __restrict__ gate_out, const __nv_bfloat16* __restrict__ up_out,
    const unsigned long long* __restrict__ packed_ptrs, const unsigned long long* __restrict__ scale_ptrs,
    const float* __restrict__ scale2_vals, __nv_bfloat16* __restrict__ C,
    const unsigned int* __restrict__ expert_indices, const __nv_bfloat16* __restrict__ sh_gate_in,
    const __nv_bfloat16* __restrict__ sh_up_in, const unsigned char* __restrict__ sh_down_packed,
    const unsigned char* __restrict__ sh_down_scale, float sh_down_s2, __nv_bfloat16* __restrict__ sh_down_out,
    unsigned int N, unsigned int K, unsigned int top_k) {
    spark_let_next_start();
    spark_wait_for_previous();
    const SparkNvfp4Projection down = {{packed_ptrs, scale_ptrs, scale2_vals},
                                       C,
                                       spark_nvfp4_shared(sh_down_packed, sh_down_scale, sh_down_s2),
                                       sh_down_out};
    spark_expert_down(spark_staged, gate_out, up_out, sh_gate_in, sh_up_in, down, expert_indices, 0u, blockIdx.y, N, K, top_k);
}

// Grid (ceil(N / 8), rows, top_k + 1).
extern "C" __global__ void __launch_bounds__(128) spark_moe_expert_silu_down_shared_rows(
    const __nv_bfloat16* __restrict__ gate_out, const __nv_bfloat16* __restrict__ up_out,
    const unsigned long long* __restrict__ packed_ptrs, const unsigned long long* __restrict__ scale_ptrs,
    const float* __restrict__ scale2_vals, __nv_bfloat16* __restrict__ C,
    const unsigned int* __restrict__ expert_indices, const __nv_bfloat16* __restrict__ sh_gate_in,
    const __nv_bfloat16* __restrict__ sh_up_in, const unsigned char* __restrict__ sh_down_packed,
    const unsigned char* __restrict__ sh_down_scale, float sh_down_s2, __nv_bfloat16* __restrict__ sh_down_out,
    unsigned int N, unsigned int K, unsigned int top_k) {
    spark_let_next_start();
    spark_wait_for_previous();
    const SparkNvfp4Projection down = {{packed_ptrs, scale_ptrs, scale2_vals},
                                       C,
                                       spark_nvfp4_shared(sh_down_packed, sh_down_scale, sh_down_s2),
                                       sh_down_out};
    spark_expert_down(spark_staged, gate_out, up_out, sh_gate_in, sh_up_in, down, expert_indices, blockIdx.y, blockIdx.z, N, K,
                      top_k);
}
