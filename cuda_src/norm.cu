// SPDX-License-Identifier: AGPL-3.0-only
// Module norm: RMS norm with weight 1 + w, alone, with a copy of its input, and after a residual addition.
// Grid (rows), block min(hidden_size, 1024). Any hidden_size >= 1.

#include "rms_norm.cuh"

// output = (x * r) * (1 + weight), r = rsqrt(mean(x^2) + eps). output may be input.
extern "C" __global__ void rms_norm(const __nv_bfloat16* input, const __nv_bfloat16* weight, __nv_bfloat16* output,
                                    unsigned int hidden_size, float eps) {
    spark_rms_norm<true>(input, weight, output, nullptr, hidden_size, eps);
}

// As rms_norm; residual receives the bits of input.
extern "C" __global__ void rms_norm_residual(const __nv_bfloat16* input, const __nv_bfloat16* weight,
                                             __nv_bfloat16* output, __nv_bfloat16* residual, unsigned int hidden_size,
                                             float eps) {
    spark_rms_norm<true>(input, weight, output, residual, hidden_size, eps);
}

// s = hidden + src in FP32. hidden = residual = bf16(s); r comes from the unrounded s, the numerator is the rounded
// one: output = (bf16(s) * r) * (1 + weight). src may be output.
template <bool WIDE>
__device__ __forceinline__ void add_norm_row(__nv_bfloat16* hidden, const __nv_bfloat16* src,
                                             const __nv_bfloat16* weight, __nv_bfloat16* output,
                                             __nv_bfloat16* residual, unsigned size, float eps) {
    const unsigned pairs = spark_pairs(size);
    float squares = 0.0f;
    for (unsigned pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
        const unsigned h = spark_load_pair<WIDE>(hidden, pair, size);
        const unsigned s = spark_load_pair<WIDE>(src, pair, size);
        const float s0 = spark_low(h) + spark_low(s);
        const float s1 = spark_high(h) + spark_high(s);
        const unsigned rounded = spark_pack(s0, s1);
        spark_store_pair<WIDE>(hidden, pair, size, rounded);
        spark_store_pair<WIDE>(residual, pair, size, rounded);
        squares += s0 * s0 + s1 * s1;
    }
    const float r = spark_inverse_rms(spark_block_sum(squares), size, eps);
    for (unsigned pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
        const unsigned h = spark_load_pair<WIDE>(hidden, pair, size);
        const unsigned w = spark_load_pair<WIDE>(weight, pair, size);
        spark_store_pair<WIDE>(output, pair, size, spark_scale_pair<true>(h, r, w));
    }
}

extern "C" __global__ void residual_add_rms_norm(__nv_bfloat16* hidden, const __nv_bfloat16* src,
                                                 const __nv_bfloat16* weight, __nv_bfloat16* output,
                                                 __nv_bfloat16* residual, unsigned int hidden_size, float eps) {
    const size_t start = static_cast<size_t>(blockIdx.x) * hidden_size;
    __nv_bfloat16* h = hidden + start;
    const __nv_bfloat16* s = src + start;
    __nv_bfloat16* y = output + start;
    __nv_bfloat16* kept = residual + start;
    if (spark_aligned(h, 4u) && spark_aligned(s, 4u) && spark_aligned(weight, 4u) && spark_aligned(y, 4u) &&
        spark_aligned(kept, 4u)) {
        add_norm_row<true>(h, s, weight, y, kept, hidden_size, eps);
    } else {
        add_norm_row<false>(h, s, weight, y, kept, hidden_size, eps);
    }
}
