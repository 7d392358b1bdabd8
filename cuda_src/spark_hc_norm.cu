// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_hc_norm: what stands beside hyper-connections in a layer of DeepSeek-V4, in the same launch: the sum that
// starts the streams, and the norm of a sublayer's input. This project's own kernels, with the bits of the chains of
// kernels that they take the place of.
//
// A row y of spark_hc_pre_finish or spark_hc_head_finish is normalised as rms_norm_vanilla does it: by one block of
// min(hidden_size, 1024) threads, in that kernel's order. hidden_size % 64 == 0; rows on 16-byte addresses.

#include "hyper_connection.cuh"
#include "rms_norm.cuh"

// The sum of two branches of BF16, rounded, in FP32.
__device__ __forceinline__ float4 branches(uint2 a, uint2 b) {
    const unsigned low = spark_pack(spark_low(a.x) + spark_low(b.x), spark_high(a.x) + spark_high(b.x));
    const unsigned high = spark_pack(spark_low(a.y) + spark_low(b.y), spark_high(a.y) + spark_high(b.y));
    return make_float4(spark_low(low), spark_high(low), spark_low(high), spark_high(high));
}

// streams [T, hc, H]: stream s of a token is bf16(own + common), own [T, hc, H] where `apart` is not 0, else [T, H] for all
// streams, common [T, H]: bf16_residual_add, then hc_expand. Grid (ceil(H / 1024), hc, T), block 256.
extern "C" __global__ void __launch_bounds__(256)
    spark_hc_expand_sum(const __nv_bfloat16* __restrict__ own, const __nv_bfloat16* __restrict__ common,
                        float* __restrict__ streams, unsigned int hidden_size, unsigned int hc_mult,
                        unsigned int apart) {
    spark_let_next_start();
    spark_wait_for_previous();
    const size_t quads = hidden_size / 4u;
    const size_t quad = static_cast<size_t>(blockIdx.x) * HC_BLOCK + threadIdx.x;
    if (quad < quads) {
        const size_t token = blockIdx.z;
        const size_t stream = token * hc_mult + blockIdx.y;
        const uint2 a = reinterpret_cast<const uint2*>(own)[(apart != 0u ? stream : token) * quads + quad];
        const uint2 b = reinterpret_cast<const uint2*>(common)[token * quads + quad];
        reinterpret_cast<float4*>(streams)[stream * quads + quad] = branches(a, b);
    }
}

// raw = the mixed streams of a token, output = bf16((raw * r) * weight); they may be one row.
template <unsigned HC>
__device__ __forceinline__ void mixed_norm(const float* x, const float* weights, const __nv_bfloat16* weight,
                                           __nv_bfloat16* raw, __nv_bfloat16* output, unsigned size, float eps) {
    const unsigned pairs = size / 2u;
    float squares = 0.0f;
    for (unsigned pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
        float2 values[HC];
#pragma unroll
        for (unsigned i = 0u; i < HC; ++i) {
            values[i] = reinterpret_cast<const float2*>(x + static_cast<size_t>(i) * size)[pair];
        }
        float2 sum = make_float2(weights[0] * values[0].x, weights[0] * values[0].y);
#pragma unroll
        for (unsigned i = 1u; i < HC; ++i) {
            sum.x += weights[i] * values[i].x;
            sum.y += weights[i] * values[i].y;
        }
        const unsigned word = spark_pack(sum.x, sum.y);
        reinterpret_cast<unsigned*>(raw)[pair] = word;
        const float x0 = spark_low(word);
        const float x1 = spark_high(word);
        squares += x0 * x0 + x1 * x1;
    }
    const float r = spark_inverse_rms(spark_block_sum(squares), size, eps);
    for (unsigned pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
        const unsigned word = reinterpret_cast<const unsigned*>(raw)[pair];
        const unsigned w = reinterpret_cast<const unsigned*>(weight)[pair];
        reinterpret_cast<unsigned*>(output)[pair] = spark_scale_pair<false>(word, r, w);
    }
}

template <unsigned HC>
__device__ __forceinline__ void pre_norm(const float* streams, const float* all_shares, const float* scale,
                                         const float* base, const __nv_bfloat16* weight, __nv_bfloat16* output,
                                         float* post, float* comb, unsigned size, unsigned iters, float norm_eps,
                                         float hc_eps, float eps) {
    constexpr unsigned ROWS = (2u + HC) * HC;
    const size_t token = blockIdx.y;
    const size_t n = static_cast<size_t>(HC) * size;
    const float* shares = all_shares + token * ((ROWS + 1u) * HC_SHARES);
    const float r = hc_inverse_rms(shares, ROWS, n, norm_eps);
    if (blockIdx.x != 0u) {  // one warp works beside the block that has the row
        if (threadIdx.x < SPARK_WARP) {
            hc_post_and_comb<HC>(shares, r, scale, base, iters, hc_eps, post + token * HC, comb + token * (HC * HC));
        }
        return;
    }
    float weights[HC];
    hc_stream_weights<HC>(shares, r, scale[0], base, hc_eps, weights);
    __nv_bfloat16* y = output + token * size;
    mixed_norm<HC>(streams + token * n, weights, weight, y, y, size, eps);
}

// spark_hc_pre_finish and rms_norm_vanilla of its y_out with `weight`: output BF16 [T, H], post_out, comb_out. Grid (2, T),
// block min(H, 1024).
extern "C" __global__ void __launch_bounds__(1024, 1)
    spark_hc_pre_norm(const float* __restrict__ streams, const float* __restrict__ shares,
                      const float* __restrict__ hc_scale, const float* __restrict__ hc_base,
                      const __nv_bfloat16* __restrict__ weight, __nv_bfloat16* output, float* __restrict__ post_out,
                      float* __restrict__ comb_out, unsigned int hidden_size, unsigned int hc_mult,
                      unsigned int sinkhorn_iters, float norm_eps, float hc_eps, float eps) {
    spark_let_next_start();
    spark_wait_for_previous();
    HC_DISPATCH(pre_norm, streams, shares, hc_scale, hc_base, weight, output, post_out, comb_out, hidden_size,
                sinkhorn_iters, norm_eps, hc_eps, eps)
}

template <unsigned HC>
__device__ __forceinline__ void head_norm(const float* streams, const float* all_shares, const float* scale,
                                          const float* base, const __nv_bfloat16* weight, __nv_bfloat16* y,
                                          __nv_bfloat16* output, unsigned size, float norm_eps, float hc_eps,
                                          float eps) {
    const size_t token = blockIdx.x;
    const size_t n = static_cast<size_t>(HC) * size;
    const float* shares = all_shares + token * ((HC + 1u) * HC_SHARES);
    float weights[HC];
    hc_stream_weights<HC>(shares, hc_inverse_rms(shares, HC, n, norm_eps), scale[0], base, hc_eps, weights);
    mixed_norm<HC>(streams + token * n, weights, weight, y + token * size, output + token * size, size, eps);
}

// spark_hc_head_finish and rms_norm_vanilla of its y_out with `weight`: y_out and output BF16 [T, H]. Grid (T), block
// min(H, 1024).
extern "C" __global__ void __launch_bounds__(1024, 1)
    spark_hc_head_norm(const float* __restrict__ streams, const float* __restrict__ shares,
                       const float* __restrict__ head_scale, const float* __restrict__ head_base,
                       const __nv_bfloat16* __restrict__ weight, __nv_bfloat16* y_out, __nv_bfloat16* output,
                       unsigned int hidden_size, unsigned int hc_mult, float norm_eps, float hc_eps, float eps) {
    spark_let_next_start();
    spark_wait_for_previous();
    HC_DISPATCH(head_norm, streams, shares, head_scale, head_base, weight, y_out, output, hidden_size, norm_eps, hc_eps,
                eps)
}
