// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_hyper_connection: hc_pre, hc_post and hc_head with many blocks a token, the same bits as module
// hyper_connection. One block reads the 1.5 MB of a V4 hc_fn in tens of microseconds; here a warp takes one row's share.
//
// hc_pre is spark_hc_mix (rows of fn), then spark_hc_pre_finish; hc_head is spark_hc_mix, then spark_hc_head_finish.
// Between the two stand the shares: FP32 [T, rows + 1, 8], the last row of a token that of its squares.

#include "hyper_connection.cuh"

constexpr unsigned MIX_BLOCK = 64u;
constexpr unsigned MIX_SPLIT = HC_BLOCK / MIX_BLOCK;  // blocks a row
constexpr unsigned MIX_DEEP = 16u;                    // pairs of loads in flight: all of DeepSeek-V4's

// The share of one warp in one row's sum, which is row `x` times row `f`, or times itself where f is NULL: as hc_shares.
// The first elements of f, a weight, are asked for before the kernel waits for the one before it.
template <bool WIDE>
__device__ __forceinline__ float mix_share(const float* x, const float* f, size_t n, unsigned thread) {
    const size_t quads = hc_quads(n);
    float4 a[MIX_DEEP];
    float4 b[MIX_DEEP];
#pragma unroll
    for (unsigned i = 0u; i < MIX_DEEP; ++i) {
        a[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (f != nullptr && thread + i * HC_BLOCK < quads) {
            a[i] = hc_quad<WIDE>(f, thread + i * HC_BLOCK, n);
        }
    }
    spark_wait_for_previous();
#pragma unroll
    for (unsigned i = 0u; i < MIX_DEEP; ++i) {
        b[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (thread + i * HC_BLOCK < quads) {
            b[i] = hc_quad<WIDE>(x, thread + i * HC_BLOCK, n);
        }
    }
    float sum = 0.0f;
#pragma unroll
    for (unsigned i = 0u; i < MIX_DEEP; ++i) {
        if (thread + i * HC_BLOCK < quads) {
            sum = hc_add(sum, f != nullptr ? a[i] : b[i], b[i]);
        }
    }
    for (size_t quad = thread + MIX_DEEP * HC_BLOCK; quad < quads; quad += HC_BLOCK) {
        const float4 values = hc_quad<WIDE>(x, quad, n);
        sum = hc_add(sum, f != nullptr ? hc_quad<WIDE>(f, quad, n) : values, values);
    }
    return spark_warp_sum(sum, SPARK_WARP);
}

// shares [T, rows + 1, 8] of streams [T, hc, H] and fn [rows, hc*H]. Grid ((rows + 1) * 4, T), block 64.
extern "C" __global__ void __launch_bounds__(64, 1)
    spark_hc_mix(const float* __restrict__ streams, const float* __restrict__ fn, float* __restrict__ shares,
                 unsigned int hidden_size, unsigned int hc_mult, unsigned int rows) {
    spark_let_next_start();
    const size_t n = static_cast<size_t>(hc_mult) * hidden_size;
    const size_t token = blockIdx.y;
    const unsigned row = blockIdx.x / MIX_SPLIT;
    const unsigned thread = blockIdx.x % MIX_SPLIT * MIX_BLOCK + threadIdx.x;
    const float* x = streams + token * n;
    const float* f = row == rows ? nullptr : fn + row * n;
    const bool wide = n % 4u == 0u && spark_aligned(x, 16u) && spark_aligned(f, 16u);
    const float sum = wide ? mix_share<true>(x, f, n, thread) : mix_share<false>(x, f, n, thread);
    if (threadIdx.x % SPARK_WARP == 0u) {
        shares[(token * (rows + 1u) + row) * HC_SHARES + thread / SPARK_WARP] = sum;
    }
}

template <unsigned HC>
__device__ __forceinline__ void pre_finish(const float* streams, const float* all_shares, const float* scale,
                                           const float* base, __nv_bfloat16* y, float* post, float* comb, size_t size,
                                           unsigned iters, float norm_eps, float hc_eps) {
    constexpr unsigned ROWS = (2u + HC) * HC;
    const size_t token = blockIdx.y;
    const size_t n = HC * size;
    const float* shares = all_shares + token * ((ROWS + 1u) * HC_SHARES);
    const float r = hc_inverse_rms(shares, ROWS, n, norm_eps);
    if (blockIdx.x == gridDim.x - 1u) {  // the last block has no elements: its one warp works while the others mix
        if (threadIdx.x < SPARK_WARP) {
            hc_post_and_comb<HC>(shares, r, scale, base, iters, hc_eps, post + token * HC, comb + token * (HC * HC));
        }
        return;
    }
    float weights[HC];
    hc_stream_weights<HC>(shares, r, scale[0], base, hc_eps, weights);
    const size_t first = static_cast<size_t>(blockIdx.x) * HC_BLOCK + threadIdx.x;
    hc_mixed<HC>(streams + token * n, weights, y + token * size, size, first,
                 static_cast<size_t>(gridDim.x - 1u) * HC_BLOCK);
}

// hc_pre after spark_hc_mix. Grid (ceil(H / 1024) + 1, T), block 256.
extern "C" __global__ void __launch_bounds__(256, 1)
    spark_hc_pre_finish(const float* __restrict__ streams, const float* __restrict__ shares,
                        const float* __restrict__ hc_scale, const float* __restrict__ hc_base,
                        __nv_bfloat16* __restrict__ y_out, float* __restrict__ post_out, float* __restrict__ comb_out,
                        unsigned int hidden_size, unsigned int hc_mult, unsigned int sinkhorn_iters, float norm_eps,
                        float hc_eps) {
    spark_let_next_start();
    spark_wait_for_previous();
    HC_DISPATCH(pre_finish, streams, shares, hc_scale, hc_base, y_out, post_out, comb_out, hidden_size, sinkhorn_iters,
                norm_eps, hc_eps)
}

template <unsigned HC>
__device__ __forceinline__ void head_finish(const float* streams, const float* all_shares, const float* scale,
                                            const float* base, __nv_bfloat16* y, size_t size, float norm_eps,
                                            float hc_eps) {
    const size_t token = blockIdx.y;
    const size_t n = HC * size;
    const float* shares = all_shares + token * ((HC + 1u) * HC_SHARES);
    float weights[HC];
    hc_stream_weights<HC>(shares, hc_inverse_rms(shares, HC, n, norm_eps), scale[0], base, hc_eps, weights);
    const size_t first = static_cast<size_t>(blockIdx.x) * HC_BLOCK + threadIdx.x;
    hc_mixed<HC>(streams + token * n, weights, y + token * size, size, first,
                 static_cast<size_t>(gridDim.x) * HC_BLOCK);
}

// hc_head after spark_hc_mix. Grid (ceil(H / 1024), T), block 256.
extern "C" __global__ void __launch_bounds__(256, 1)
    spark_hc_head_finish(const float* __restrict__ streams, const float* __restrict__ shares,
                         const float* __restrict__ head_scale, const float* __restrict__ head_base,
                         __nv_bfloat16* __restrict__ y_out, unsigned int hidden_size, unsigned int hc_mult,
                         float norm_eps, float hc_eps) {
    spark_let_next_start();
    spark_wait_for_previous();
    HC_DISPATCH(head_finish, streams, shares, head_scale, head_base, y_out, hidden_size, norm_eps, hc_eps)
}

template <unsigned HC>
__device__ __forceinline__ void post_blocks(const __nv_bfloat16* block_out, const float* residual, const float* post,
                                            const float* comb, float* out, size_t size) {
    const size_t token = blockIdx.y;
    const size_t start = token * (HC * size);
    const size_t first = static_cast<size_t>(blockIdx.x) * HC_BLOCK + threadIdx.x;
    hc_spread<HC>(block_out + token * size, residual + start, post + token * HC, comb + token * (HC * HC), out + start,
                  size, first, static_cast<size_t>(gridDim.x) * HC_BLOCK);
}

// hc_post with more blocks; out may be residual. Grid (ceil(H / 1024), T), block 256.
extern "C" __global__ void __launch_bounds__(256, 1)
    spark_hc_post(const __nv_bfloat16* block_out, const float* residual, const float* post, const float* comb,
                  float* out, unsigned int hidden_size, unsigned int hc_mult) {
    spark_let_next_start();
    spark_wait_for_previous();
    HC_DISPATCH(post_blocks, block_out, residual, post, comb, out, hidden_size)
}
