// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_residual_add_rms_norm_vanilla: residual addition and RMS norm with the plain weight in one pass. A kernel of this
// project, with the parameters, geometry and rounding of norm::residual_add_rms_norm. Grid (rows), block
// min(hidden_size, 1024).

#include "rms_norm.cuh"

// s = hidden + src in FP32. hidden = residual = bf16(s); output = (bf16(s) * r) * weight, r = rsqrt(mean(s^2) + eps).
// src may be output. Any hidden_size >= 1.
extern "C" __global__ void spark_residual_add_rms_norm_vanilla(__nv_bfloat16* hidden, const __nv_bfloat16* src,
                                                               const __nv_bfloat16* weight, __nv_bfloat16* output,
                                                               __nv_bfloat16* residual, unsigned int hidden_size,
                                                               float eps) {
    spark_let_next_start();
    spark_residual_add_rms_norm<false>(hidden, src, weight, output, residual, hidden_size, eps);
}
