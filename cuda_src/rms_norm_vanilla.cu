// SPDX-License-Identifier: AGPL-3.0-only
// Module rms_norm_vanilla: RMS norm with the plain weight. Grid (rows), block min(hidden_size, 1024).

#include "rms_norm.cuh"

// output = (x * r) * weight, r = rsqrt(mean(x^2) + eps). output may be input. Any hidden_size >= 1.
extern "C" __global__ void rms_norm_vanilla(const __nv_bfloat16* input, const __nv_bfloat16* weight,
                                            __nv_bfloat16* output, unsigned int hidden_size, float eps) {
    spark_let_next_start();
    spark_rms_norm<false>(input, weight, output, nullptr, hidden_size, eps);
}
