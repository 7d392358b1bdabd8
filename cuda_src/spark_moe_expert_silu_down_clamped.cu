// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_moe_expert_silu_down_clamped: moe_expert_silu_down_shared with DeepSeek-V4's limit, which holds for the
// routed experts and for the shared one: silu(min(gate, limit)) * clamp(up, -limit, limit), in FP32 throughout. This
// project's own kernels. Order of arithmetic in moe_expert.cuh; where nothing exceeds the limit, the bits are those of
// moe_expert_silu_down_shared.

#include "moe_expert.cuh"

extern __shared__ float4 spark_staged[];

typedef SparkProjection<SparkNvfp4Tables> SparkNvfp4Projection;

// gate_out and up_out [top_k, K], sh_gate_in and sh_up_in [K]; C [top_k, N], sh_down_out [N]. Tables, slots and a NULL
// sh_down_packed as in moe_shared_expert_fused. Grid (ceil(N / 8), top_k + 1, 1), block 128, 4 K bytes of dynamic
// shared memory. K % 16 == 0.
extern "C" __global__ void __launch_bounds__(128) spark_moe_expert_silu_down_clamped(
    const __nv_bfloat16* __restrict__ gate_out, const __nv_bfloat16* __restrict__ up_out,
    const unsigned long long* __restrict__ packed_ptrs, const unsigned long long* __restrict__ scale_ptrs,
    const float* __restrict__ scale2_vals, __nv_bfloat16* __restrict__ C,
    const unsigned int* __restrict__ expert_indices, const __nv_bfloat16* __restrict__ sh_gate_in,
    const __nv_bfloat16* __restrict__ sh_up_in, const unsigned char* __restrict__ sh_down_packed,
    const unsigned char* __restrict__ sh_down_scale, float sh_down_s2, __nv_bfloat16* __restrict__ sh_down_out,
    unsigned int N, unsigned int K, unsigned int top_k, float limit) {
    spark_let_next_start();
    spark_wait_for_previous();
    const SparkNvfp4Projection down = {{packed_ptrs, scale_ptrs, scale2_vals},
                                       C,
                                       {reinterpret_cast<const uint2*>(sh_down_packed), sh_down_scale, sh_down_s2},
                                       sh_down_out};
    spark_expert_down(spark_staged, gate_out, up_out, sh_gate_in, sh_up_in, down, expert_indices, 0u, blockIdx.y, N, K,
                      top_k, SparkLimit{limit});
}

// Several rows, each with the bits of the kernel above: [rows, top_k, ...] and for the shared expert [rows, ...]. Grid
// (ceil(N / 8), rows, top_k + 1).
extern "C" __global__ void __launch_bounds__(128) spark_moe_expert_silu_down_clamped_rows(
    const __nv_bfloat16* __restrict__ gate_out, const __nv_bfloat16* __restrict__ up_out,
    const unsigned long long* __restrict__ packed_ptrs, const unsigned long long* __restrict__ scale_ptrs,
    const float* __restrict__ scale2_vals, __nv_bfloat16* __restrict__ C,
    const unsigned int* __restrict__ expert_indices, const __nv_bfloat16* __restrict__ sh_gate_in,
    const __nv_bfloat16* __restrict__ sh_up_in, const unsigned char* __restrict__ sh_down_packed,
    const unsigned char* __restrict__ sh_down_scale, float sh_down_s2, __nv_bfloat16* __restrict__ sh_down_out,
    unsigned int N, unsigned int K, unsigned int top_k, float limit) {
    spark_let_next_start();
    spark_wait_for_previous();
    const SparkNvfp4Projection down = {{packed_ptrs, scale_ptrs, scale2_vals},
                                       C,
                                       {reinterpret_cast<const uint2*>(sh_down_packed), sh_down_scale, sh_down_s2},
                                       sh_down_out};
    spark_expert_down(spark_staged, gate_out, up_out, sh_gate_in, sh_up_in, down, expert_indices, blockIdx.y,
                      blockIdx.z, N, K, top_k, SparkLimit{limit});
}
