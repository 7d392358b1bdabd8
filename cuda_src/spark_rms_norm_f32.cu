// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_rms_norm_f32: RMS norm with the plain weight of FP32 rows, rounded to BF16 once: what a drafter reads of
// residual streams. A kernel of this project. Grid (rows), block min(hidden_size, 1024). Sums are those of rms_norm.cuh
// in the same order, so that a row of BF16 numbers has the bits that rms_norm_vanilla gives.

#include "rms_norm.cuh"

// Elements 2*pair and 2*pair + 1 of a row; beyond the end of an odd row, zero.
template <bool WIDE>
__device__ __forceinline__ float2 spark_f32_pair(const float* row, unsigned pair, unsigned size) {
    const bool whole = 2u * pair + 1u < size;
    if (WIDE && whole) {
        return reinterpret_cast<const float2*>(row)[pair];
    }
    return make_float2(row[2u * pair], whole ? row[2u * pair + 1u] : 0.0f);
}

template <bool WIDE>
__device__ __forceinline__ void spark_f32_norm_row(const float* x, const __nv_bfloat16* weight, __nv_bfloat16* y,
                                                   unsigned size, float eps) {
    const unsigned pairs = spark_pairs(size);
    float squares = 0.0f;
    for (unsigned pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
        const float2 v = spark_f32_pair<WIDE>(x, pair, size);
        squares += v.x * v.x + v.y * v.y;
    }
    const float r = spark_inverse_rms(spark_block_sum(squares), size, eps);
    for (unsigned pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
        const float2 v = spark_f32_pair<WIDE>(x, pair, size);
        const unsigned w = spark_load_pair<WIDE>(weight, pair, size);
        spark_store_pair<WIDE>(y, pair, size, spark_pack(v.x * r * spark_low(w), v.y * r * spark_high(w)));
    }
}

// Row `row` of FP32 rows.
__device__ __forceinline__ void spark_f32_norm(const float* input, const __nv_bfloat16* weight, __nv_bfloat16* output,
                                               size_t row, unsigned hidden_size, float eps) {
    const float* x = input + row * hidden_size;
    __nv_bfloat16* y = output + row * hidden_size;
    if (spark_aligned(x, 8u) && spark_aligned(weight, 4u) && spark_aligned(y, 4u)) {
        spark_f32_norm_row<true>(x, weight, y, hidden_size, eps);
    } else {
        spark_f32_norm_row<false>(x, weight, y, hidden_size, eps);
    }
}

// output = bf16((x * r) * weight), r = rsqrt(mean(x^2) + eps). Any hidden_size >= 1.
extern "C" __global__ void spark_rms_norm_f32(const float* __restrict__ input,
                                              const __nv_bfloat16* __restrict__ weight,
                                              __nv_bfloat16* __restrict__ output, unsigned int hidden_size, float eps) {
    spark_let_next_start();
    spark_wait_for_previous();
    spark_f32_norm(input, weight, output, blockIdx.x, hidden_size, eps);
}

// What a drafter reads of T tokens in one launch: rms_norm_vanilla of `embed` [T, H], and spark_rms_norm_f32 of `streams`
// [T, hc, H]. Grid (T (hc + 1)), block min(H, 1024): of hc + 1 blocks the first has the token's row.
extern "C" __global__ void spark_rms_norm_both(const __nv_bfloat16* embed, const __nv_bfloat16* embed_weight,
                                               __nv_bfloat16* embed_out, const float* streams,
                                               const __nv_bfloat16* stream_weight, __nv_bfloat16* streams_out,
                                               unsigned int hidden_size, unsigned int hc_mult, float eps) {
    spark_let_next_start();
    const size_t token = blockIdx.x / (hc_mult + 1u);
    const unsigned stream = blockIdx.x % (hc_mult + 1u);
    if (stream > 0u) {
        spark_wait_for_previous();
        spark_f32_norm(streams, stream_weight, streams_out, token * hc_mult + stream - 1u, hidden_size, eps);
        return;
    }
    const __nv_bfloat16* x = embed + token * hidden_size;
    __nv_bfloat16* y = embed_out + token * hidden_size;
    if (spark_aligned(x, 4u) && spark_aligned(embed_weight, 4u) && spark_aligned(y, 4u)) {
        spark_rms_norm_row<true, false>(x, embed_weight, y, nullptr, hidden_size, eps);
    } else {
        spark_rms_norm_row<false, false>(x, embed_weight, y, nullptr, hidden_size, eps);
    }
}
