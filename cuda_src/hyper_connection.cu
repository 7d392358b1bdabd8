// SPDX-License-Identifier: AGPL-3.0-only
// Module hyper_connection: the engine's four kernels of hyper-connections (DeepSeek-V4), in the official maths, which
// hyper_connection.cuh writes out. Streams FP32 [T, hc, H], hc 1 to 4; grid T, block 256: one block a token. Parameters
// and geometry are the engine's.

#include "hyper_connection.cuh"

// streams_sd = hidden_d for every stream: hidden BF16 [T, H].
extern "C" __global__ void __launch_bounds__(256, 1)
    hc_expand(const __nv_bfloat16* __restrict__ hidden, float* __restrict__ streams, unsigned int hidden_size,
              unsigned int hc_mult) {
    spark_let_next_start();
    spark_wait_for_previous();
    const size_t size = hidden_size;
    const __nv_bfloat16* h = hidden + blockIdx.x * size;
    float* x = streams + blockIdx.x * (hc_mult * size);
    if (size % 4u == 0u && spark_aligned(h, 8u) && spark_aligned(x, 16u)) {
        for (size_t quad = threadIdx.x; quad < size / 4u; quad += HC_BLOCK) {
            const uint2 words = reinterpret_cast<const uint2*>(h)[quad];
            const float4 values =
                make_float4(spark_low(words.x), spark_high(words.x), spark_low(words.y), spark_high(words.y));
            for (unsigned s = 0u; s < hc_mult; ++s) {
                reinterpret_cast<float4*>(x + s * size)[quad] = values;
            }
        }
        return;
    }
    for (size_t d = threadIdx.x; d < size; d += HC_BLOCK) {
        for (unsigned s = 0u; s < hc_mult; ++s) {
            x[s * size + d] = spark_load(h + d);
        }
    }
}

// Every row's shares of a token by its block, 16 bytes at a time where the addresses allow it.
template <unsigned ROWS>
__device__ __forceinline__ void hc_block_shares(const float* x, const float* fn, size_t n, float* shares) {
    if (n % 4u == 0u && spark_aligned(x, 16u) && spark_aligned(fn, 16u)) {
        hc_shares<ROWS, true>(x, fn, n, shares);
    } else {
        hc_shares<ROWS, false>(x, fn, n, shares);
    }
    __syncthreads();
}

template <unsigned HC>
__device__ __forceinline__ void hc_pre_token(const float* streams, const float* fn, const float* scale,
                                             const float* base, __nv_bfloat16* y, float* post, float* comb,
                                             size_t size, unsigned iters, float norm_eps, float hc_eps,
                                             float* shares) {
    constexpr unsigned ROWS = (2u + HC) * HC;
    const size_t token = blockIdx.x;
    const size_t n = HC * size;
    const float* x = streams + token * n;
    hc_block_shares<ROWS>(x, fn, n, shares);
    const float r = hc_inverse_rms(shares, ROWS, n, norm_eps);
    float weights[HC];
    hc_stream_weights<HC>(shares, r, scale[0], base, hc_eps, weights);
    if (threadIdx.x < SPARK_WARP) {
        hc_post_and_comb<HC>(shares, r, scale, base, iters, hc_eps, post + token * HC, comb + token * (HC * HC));
    }
    hc_mixed<HC>(x, weights, y + token * size, size, threadIdx.x, HC_BLOCK);
}

// hc_fn [(2+hc)hc, hc*H], hc_scale [3], hc_base [(2+hc)hc] give y_out BF16 [T, H], post_out [T, hc] and comb_out
// [T, hc, hc]. sinkhorn_iters counts column steps; 0 is as 1.
extern "C" __global__ void __launch_bounds__(256, 1)
    hc_pre(const float* __restrict__ streams, const float* __restrict__ hc_fn, const float* __restrict__ hc_scale,
           const float* __restrict__ hc_base, __nv_bfloat16* __restrict__ y_out, float* __restrict__ post_out,
           float* __restrict__ comb_out, unsigned int hidden_size, unsigned int hc_mult, unsigned int sinkhorn_iters,
           float norm_eps, float hc_eps) {
    spark_let_next_start();
    spark_wait_for_previous();
    __shared__ float shares[(HC_MAX_ROWS + 1u) * HC_SHARES];
    HC_DISPATCH(hc_pre_token, streams, hc_fn, hc_scale, hc_base, y_out, post_out, comb_out, hidden_size,
                sinkhorn_iters, norm_eps, hc_eps, shares)
}

template <unsigned HC>
__device__ __forceinline__ void hc_post_token(const __nv_bfloat16* block_out, const float* residual, const float* post,
                                              const float* comb, float* out, size_t size) {
    const size_t token = blockIdx.x;
    const size_t start = token * (HC * size);
    hc_spread<HC>(block_out + token * size, residual + start, post + token * HC, comb + token * (HC * HC), out + start,
                  size, threadIdx.x, HC_BLOCK);
}

// block_out BF16 [T, H] into the streams: residual [T, hc, H] gives out, which may be residual.
extern "C" __global__ void __launch_bounds__(256, 1)
    hc_post(const __nv_bfloat16* block_out, const float* residual, const float* post, const float* comb, float* out,
            unsigned int hidden_size, unsigned int hc_mult) {
    spark_let_next_start();
    spark_wait_for_previous();
    HC_DISPATCH(hc_post_token, block_out, residual, post, comb, out, hidden_size)
}

template <unsigned HC>
__device__ __forceinline__ void hc_head_token(const float* streams, const float* fn, const float* scale,
                                              const float* base, __nv_bfloat16* y, size_t size, float norm_eps,
                                              float hc_eps, float* shares) {
    const size_t token = blockIdx.x;
    const size_t n = HC * size;
    const float* x = streams + token * n;
    hc_block_shares<HC>(x, fn, n, shares);
    float weights[HC];
    hc_stream_weights<HC>(shares, hc_inverse_rms(shares, HC, n, norm_eps), scale[0], base, hc_eps, weights);
    hc_mixed<HC>(x, weights, y + token * size, size, threadIdx.x, HC_BLOCK);
}

// The streams as one row: head_fn [hc, hc*H], head_scale [1], head_base [hc] give y_out BF16 [T, H].
extern "C" __global__ void __launch_bounds__(256, 1)
    hc_head(const float* __restrict__ streams, const float* __restrict__ head_fn,
            const float* __restrict__ head_scale, const float* __restrict__ head_base,
            __nv_bfloat16* __restrict__ y_out, unsigned int hidden_size, unsigned int hc_mult, float norm_eps,
            float hc_eps) {
    spark_let_next_start();
    spark_wait_for_previous();
    __shared__ float shares[(HC_MAX + 1u) * HC_SHARES];
    HC_DISPATCH(hc_head_token, streams, head_fn, head_scale, head_base, y_out, hidden_size, norm_eps, hc_eps, shares)
}
