// SPDX-License-Identifier: AGPL-3.0-only
// Module norm: RMS norm with weight 1 + w, alone, with a copy of its input, and after a residual addition.
// Grid (rows), block min(hidden_size, 1024). Any hidden_size >= 1.

#include "rms_norm.cuh"

// output = (x * r) * (1 + weight), r = rsqrt(mean(x^2) + eps). output may be input.
extern "C" __global__ void rms_norm(const __nv_bfloat16* input, const __nv_bfloat16* weight, __nv_bfloat16* output,
                                    unsigned int hidden_size, float eps) {
    spark_let_next_start();
    spark_rms_norm<true>(input, weight, output, nullptr, hidden_size, eps);
}

// As rms_norm; residual receives the bits of input.
extern "C" __global__ void rms_norm_residual(const __nv_bfloat16* input, const __nv_bfloat16* weight,
                                             __nv_bfloat16* output, __nv_bfloat16* residual, unsigned int hidden_size,
                                             float eps) {
    spark_let_next_start();
    spark_rms_norm<true>(input, weight, output, residual, hidden_size, eps);
}

// hidden += src; residual = hidden; output = RMS norm of hidden with 1 + weight. src may be output.
extern "C" __global__ void residual_add_rms_norm(__nv_bfloat16* hidden, const __nv_bfloat16* src,
                                                 const __nv_bfloat16* weight, __nv_bfloat16* output,
                                                 __nv_bfloat16* residual, unsigned int hidden_size, float eps) {
    spark_let_next_start();
    spark_residual_add_rms_norm<true>(hidden, src, weight, output, residual, hidden_size, eps);
}
