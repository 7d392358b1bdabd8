// SPDX-License-Identifier: AGPL-3.0-only
// Manifold-constrained hyper-connections of one token: hc_mult FP32 streams of hidden_size elements, [hc, H].
// hyper_connection.cu makes the engine's kernels of it, one block a token; spark_hyper_connection.cu spreads a token
// over many blocks and gives the same bits.
//
// With x the flattened streams (n = hc H) and F the rows of fn: r = rsqrt(mean(x^2) + norm_eps), m = (F x) r, then
//   pre_i  = sigmoid(m_i scale0 + base_i) + hc_eps                     y_d = sum over i of pre_i x_id
//   post_i = 2 sigmoid(m_{hc+i} scale1 + base_{hc+i})
//   comb   = softmax over j of m_{2hc+i hc+j} scale2 + base_{2hc+i hc+j}, + hc_eps; one column step, then iters - 1
//            times a row step and a column step. A step divides by the sum over the row or column + hc_eps.
// after the sublayer gave o: x'_jd = post_j o_d + sum over i of comb_ij x_id. hc_head: y from rows m_i alone.
//
// Order of a sum over x: the flattened vector in quads of 4 elements; thread t of 256 takes quads t, t + 256, ... and
// adds one product at a time; then the tree of spark_block_sum. A share is what one of the 8 warps adds. Where quads
// cannot be read as 16 bytes (odd sizes, odd addresses) they are read by element: the order is the same.
#pragma once

#include "spark_common.cuh"

constexpr unsigned HC_BLOCK = 256u;
constexpr unsigned HC_SHARES = HC_BLOCK / SPARK_WARP;
constexpr unsigned HC_MAX = 4u;
constexpr unsigned HC_MAX_ROWS = (2u + HC_MAX) * HC_MAX;

// Elements 4 quad .. 4 quad + 3 of a vector of n; zero beyond its end.
template <bool WIDE>
__device__ __forceinline__ float4 hc_quad(const float* v, size_t quad, size_t n) {
    if (WIDE) {
        return reinterpret_cast<const float4*>(v)[quad];
    }
    const size_t k = 4u * quad;
    return make_float4(v[k], k + 1u < n ? v[k + 1u] : 0.0f, k + 2u < n ? v[k + 2u] : 0.0f,
                       k + 3u < n ? v[k + 3u] : 0.0f);
}

__device__ __forceinline__ float hc_add(float sum, float4 a, float4 b) {
    sum += a.x * b.x;
    sum += a.y * b.y;
    sum += a.z * b.z;
    sum += a.w * b.w;
    return sum;
}

__device__ __forceinline__ size_t hc_quads(size_t n) { return n / 4u + (n % 4u != 0u ? 1u : 0u); }

// Of one warp: shares[row * 8 + its share] for ROWS rows of fn, and as row ROWS the squares of x.
template <unsigned ROWS, bool WIDE>
__device__ __forceinline__ void hc_shares(const float* x, const float* fn, size_t n, float* shares) {
    float sums[ROWS + 1u];
#pragma unroll
    for (unsigned row = 0u; row <= ROWS; ++row) {
        sums[row] = 0.0f;
    }
    const size_t quads = hc_quads(n);
    for (size_t quad = threadIdx.x; quad < quads; quad += HC_BLOCK) {
        const float4 values = hc_quad<WIDE>(x, quad, n);
#pragma unroll
        for (unsigned row = 0u; row < ROWS; ++row) {
            sums[row] = hc_add(sums[row], hc_quad<WIDE>(fn + row * n, quad, n), values);
        }
        sums[ROWS] = hc_add(sums[ROWS], values, values);
    }
#pragma unroll
    for (unsigned row = 0u; row <= ROWS; ++row) {
        const float sum = spark_warp_sum(sums[row], SPARK_WARP);
        if (threadIdx.x % SPARK_WARP == 0u) {
            shares[row * HC_SHARES + threadIdx.x / SPARK_WARP] = sum;
        }
    }
}

// A row's sum over its 8 shares, in spark_block_sum's tree.
__device__ __forceinline__ float hc_total(const float* shares, unsigned row) {
    const float* s = shares + row * HC_SHARES;
    return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}

__device__ __forceinline__ float hc_inverse_rms(const float* shares, unsigned rows, size_t n, float norm_eps) {
    return rsqrtf(hc_total(shares, rows) / static_cast<float>(n) + norm_eps);
}

__device__ __forceinline__ float hc_sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// The HC weights of the streams in y, the same in every lane of a warp.
template <unsigned HC>
__device__ __forceinline__ void hc_stream_weights(const float* shares, float r, float scale, const float* base,
                                                  float hc_eps, float* weights) {
    const unsigned lane = threadIdx.x % SPARK_WARP;
    float weight = 0.0f;
    if (lane < HC) {
        weight = hc_sigmoid(hc_total(shares, lane) * r * scale + base[lane]) + hc_eps;
    }
#pragma unroll
    for (unsigned i = 0u; i < HC; ++i) {
        weights[i] = __shfl_sync(SPARK_FULL_MASK, weight, static_cast<int>(i));
    }
}

// y_d of the elements first, first + step, ... in quads: weights[0] x_0d + weights[1] x_1d + ..., rounded once.
template <unsigned HC>
__device__ __forceinline__ void hc_mixed(const float* x, const float* weights, __nv_bfloat16* y, size_t size,
                                         size_t first, size_t step) {
    if (size % 4u == 0u && spark_aligned(x, 16u) && spark_aligned(y, 8u)) {
        for (size_t quad = first; quad < size / 4u; quad += step) {
            float4 values[HC];
#pragma unroll
            for (unsigned i = 0u; i < HC; ++i) {
                values[i] = reinterpret_cast<const float4*>(x + i * size)[quad];
            }
            float4 sum = make_float4(weights[0] * values[0].x, weights[0] * values[0].y, weights[0] * values[0].z,
                                     weights[0] * values[0].w);
#pragma unroll
            for (unsigned i = 1u; i < HC; ++i) {
                sum.x += weights[i] * values[i].x;
                sum.y += weights[i] * values[i].y;
                sum.z += weights[i] * values[i].z;
                sum.w += weights[i] * values[i].w;
            }
            reinterpret_cast<uint2*>(y)[quad] = make_uint2(spark_pack(sum.x, sum.y), spark_pack(sum.z, sum.w));
        }
        return;
    }
    for (size_t d = first; d < size; d += step) {
        float sum = weights[0] * x[d];
#pragma unroll
        for (unsigned i = 1u; i < HC; ++i) {
            sum += weights[i] * x[i * size + d];
        }
        spark_store(y + d, sum);
    }
}

// Sum over the 4 lanes whose numbers differ in the bits of `step` and 2 `step`; all of them get it.
template <unsigned STEP>
__device__ __forceinline__ float hc_sum_of_four(float value) {
    value += __shfl_xor_sync(SPARK_FULL_MASK, value, STEP);
    value += __shfl_xor_sync(SPARK_FULL_MASK, value, 2u * STEP);
    return value;
}

// post [HC] and comb [HC, HC] by one whole warp. comb_ij is lane 4 i + j's; lanes that stand for none hold 0.
template <unsigned HC>
__device__ __forceinline__ void hc_post_and_comb(const float* shares, float r, const float* scale, const float* base,
                                                 unsigned iters, float hc_eps, float* post, float* comb) {
    const unsigned lane = threadIdx.x % SPARK_WARP;
    if (lane < HC) {
        post[lane] = 2.0f * hc_sigmoid(hc_total(shares, HC + lane) * r * scale[1] + base[HC + lane]);
    }
    const unsigned i = lane / 4u;
    const unsigned j = lane % 4u;
    const bool live = i < HC && j < HC;
    const unsigned at = i * HC + j;
    float logit = __uint_as_float(0xff800000u);  // -infinity: no part of a softmax
    if (live) {
        logit = hc_total(shares, 2u * HC + at) * r * scale[2] + base[2u * HC + at];
    }
    float top = fmaxf(logit, __shfl_xor_sync(SPARK_FULL_MASK, logit, 1u));
    top = fmaxf(top, __shfl_xor_sync(SPARK_FULL_MASK, top, 2u));
    float c = live ? expf(logit - top) : 0.0f;
    const float whole = hc_sum_of_four<1u>(c);
    c = live ? c / whole + hc_eps : 0.0f;
    float column = hc_sum_of_four<4u>(c);
    c = live ? c / (column + hc_eps) : 0.0f;
    for (unsigned turn = 1u; turn < iters; ++turn) {
        const float row = hc_sum_of_four<1u>(c);
        c = live ? c / (row + hc_eps) : 0.0f;
        column = hc_sum_of_four<4u>(c);
        c = live ? c / (column + hc_eps) : 0.0f;
    }
    if (live) {
        comb[at] = c;
    }
}

// out_jd = post_j o_d + comb_0j x_0d + comb_1j x_1d + ..., added in that order, of the elements first, first + step,
// ... in quads. `out` may be `x`: a thread reads every stream of its elements before it writes one.
template <unsigned HC>
__device__ __forceinline__ void hc_spread(const __nv_bfloat16* o, const float* x, const float* post, const float* comb,
                                          float* out, size_t size, size_t first, size_t step) {
    float p[HC];
    float c[HC * HC];
#pragma unroll
    for (unsigned j = 0u; j < HC; ++j) {
        p[j] = post[j];
    }
#pragma unroll
    for (unsigned at = 0u; at < HC * HC; ++at) {
        c[at] = comb[at];
    }
    if (size % 4u == 0u && spark_aligned(o, 8u) && spark_aligned(x, 16u) && spark_aligned(out, 16u)) {
        for (size_t quad = first; quad < size / 4u; quad += step) {
            const uint2 words = reinterpret_cast<const uint2*>(o)[quad];
            float4 values[HC];
#pragma unroll
            for (unsigned i = 0u; i < HC; ++i) {
                values[i] = reinterpret_cast<const float4*>(x + i * size)[quad];
            }
#pragma unroll
            for (unsigned j = 0u; j < HC; ++j) {
                float4 sum = make_float4(p[j] * spark_low(words.x), p[j] * spark_high(words.x),
                                         p[j] * spark_low(words.y), p[j] * spark_high(words.y));
#pragma unroll
                for (unsigned i = 0u; i < HC; ++i) {
                    sum.x += c[i * HC + j] * values[i].x;
                    sum.y += c[i * HC + j] * values[i].y;
                    sum.z += c[i * HC + j] * values[i].z;
                    sum.w += c[i * HC + j] * values[i].w;
                }
                reinterpret_cast<float4*>(out + j * size)[quad] = sum;
            }
        }
        return;
    }
    for (size_t d = first; d < size; d += step) {
        const float block = spark_load(o + d);
        float values[HC];
#pragma unroll
        for (unsigned i = 0u; i < HC; ++i) {
            values[i] = x[i * size + d];
        }
#pragma unroll
        for (unsigned j = 0u; j < HC; ++j) {
            float sum = p[j] * block;
#pragma unroll
            for (unsigned i = 0u; i < HC; ++i) {
                sum += c[i * HC + j] * values[i];
            }
            out[j * size + d] = sum;
        }
    }
}

// Call FUNCTION<hc_mult>(...). Other numbers of streams than 1 to 4 write nothing; the launchers refuse them.
#define HC_DISPATCH(FUNCTION, ...)        \
    switch (hc_mult) {                    \
        case 1u:                          \
            FUNCTION<1u>(__VA_ARGS__);    \
            break;                        \
        case 2u:                          \
            FUNCTION<2u>(__VA_ARGS__);    \
            break;                        \
        case 3u:                          \
            FUNCTION<3u>(__VA_ARGS__);    \
            break;                        \
        case 4u:                          \
            FUNCTION<4u>(__VA_ARGS__);    \
            break;                        \
        default:                          \
            break;                        \
    }
