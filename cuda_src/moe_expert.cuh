// SPDX-License-Identifier: AGPL-3.0-only
// The products of a row with the experts that a router chose for it: what the expert kernels in NVFP4 and FP8 share, so
// that those for one row, for several, with and without a shared expert are bit-equal.
//
// A warp has an output. Lane l adds the 16-element chunks l, l + 32, ... of a weight row in ascending k; the lanes add up
// as the tree 16, 8, 4, 2, 1. NVFP4: factor * code rounds, the products of elements 2 i and 2 i + 1 are added to each
// other first and then to the sum, and every step rounds. FP8: the product of a BF16 and an E4M3 is exact in FP32, so
// each is one fused multiply-add, in ascending k; the row's scale multiplies a lane's sum before the tree.
//
// A row is BF16, or silu(gate) * up of two BF16 rows, which stays FP32: (g * (1 / (1 + exp(-g)))) * u. Kernels that
// say so bound g and u by DeepSeek-V4's limit first.
//
// K % 16 == 0. Rows of activations and of FP8 weights lie on 16-byte addresses, packed NVFP4 rows on 8-byte ones.
#pragma once

#include "moe_limit.cuh"
#include "spark_fp8.cuh"
#include "w4a16.cuh"

constexpr unsigned SPARK_EXPERT_THREADS = 128u;
constexpr unsigned SPARK_EXPERT_WARPS = SPARK_EXPERT_THREADS / SPARK_WARP;
constexpr unsigned SPARK_EXPERT_CHUNK = 16u;

typedef unsigned long long spark_address;

// ---- Weights: which row of which matrix, a chunk of it, and what it adds to a sum.

struct SparkNvfp4Weights {
    const uint2* codes;  // one a chunk
    const unsigned char* scales;
    float scale2;

    struct Chunk {
        uint2 codes;
        unsigned scale;
    };

    __device__ __forceinline__ bool absent() const { return codes == nullptr; }

    __device__ __forceinline__ Chunk load(size_t row, unsigned chunks, unsigned chunk) const {
        const size_t at = row * chunks + chunk;
        return {codes[at], scales[at]};
    }

    static __device__ __forceinline__ float half(float sum, const float* a, unsigned codes, float factor) {
        float values[8];
        spark_w4_decode(values, codes);
#pragma unroll
        for (unsigned i = 0u; i < 8u; i += 2u) {
            sum = sum + (a[i] * (values[i] * factor) + a[i + 1u] * (values[i + 1u] * factor));
        }
        return sum;
    }

    __device__ __forceinline__ float add(float sum, const float (&a)[SPARK_EXPERT_CHUNK], Chunk w) const {
        const float factor = spark_e4m3(w.scale) * scale2;
        return half(half(sum, a, w.codes.x, factor), a + 8, w.codes.y, factor);
    }

    __device__ __forceinline__ float scaled(float sum, size_t row) const { return sum; }
};

struct SparkFp8Weights {
    const uint4* codes;  // one a chunk
    const float* scales;  // one a row

    typedef uint4 Chunk;

    __device__ __forceinline__ bool absent() const { return codes == nullptr; }

    __device__ __forceinline__ Chunk load(size_t row, unsigned chunks, unsigned chunk) const {
        return codes[row * chunks + chunk];
    }

    static __device__ __forceinline__ float quarter(float sum, const float* a, unsigned codes) {
        float w[4];
        spark_widen_e4m3(static_cast<unsigned short>(codes), w);
        spark_widen_e4m3(static_cast<unsigned short>(codes >> 16), w + 2);
        sum = fmaf(a[0], w[0], sum);
        sum = fmaf(a[1], w[1], sum);
        sum = fmaf(a[2], w[2], sum);
        return fmaf(a[3], w[3], sum);
    }

    __device__ __forceinline__ float add(float sum, const float (&a)[SPARK_EXPERT_CHUNK], Chunk w) const {
        sum = quarter(sum, a, w.x);
        sum = quarter(sum, a + 4, w.y);
        sum = quarter(sum, a + 8, w.z);
        return quarter(sum, a + 12, w.w);
    }

    __device__ __forceinline__ float scaled(float sum, size_t row) const { return sum * scales[row]; }
};

// ---- Tables with an entry an expert; without an id, the shared expert.

struct SparkNvfp4Tables {
    typedef SparkNvfp4Weights Weights;

    const spark_address* packed;
    const spark_address* scales;
    const float* scale2;

    __device__ __forceinline__ Weights of(unsigned expert) const {
        return {reinterpret_cast<const uint2*>(packed[expert]), reinterpret_cast<const unsigned char*>(scales[expert]),
                scale2[expert]};
    }

    __device__ __forceinline__ Weights of(const unsigned* expert, const Weights& shared) const {
        return expert == nullptr ? Weights{shared.codes, shared.scales, shared.scale2} : of(*expert);
    }
};

struct SparkFp8Tables {
    typedef SparkFp8Weights Weights;

    const spark_address* weights;
    const spark_address* scales;

    __device__ __forceinline__ Weights of(unsigned expert) const {
        return {reinterpret_cast<const uint4*>(weights[expert]), reinterpret_cast<const float*>(scales[expert])};
    }

    __device__ __forceinline__ Weights of(const unsigned* expert, const Weights& shared) const {
        return expert == nullptr ? Weights{shared.codes, shared.scales} : of(*expert);
    }
};

// ---- Rows: a chunk of activations in FP32.

__device__ __forceinline__ void spark_widen_bf16(uint4 words, float* to) {
    to[0] = spark_low(words.x);
    to[1] = spark_high(words.x);
    to[2] = spark_low(words.y);
    to[3] = spark_high(words.y);
    to[4] = spark_low(words.z);
    to[5] = spark_high(words.z);
    to[6] = spark_low(words.w);
    to[7] = spark_high(words.w);
}

struct SparkRow {
    const __nv_bfloat16* row;

    __device__ __forceinline__ void load(float (&a)[SPARK_EXPERT_CHUNK], unsigned chunk) const {
        const uint4* words = reinterpret_cast<const uint4*>(row) + 2u * chunk;
        spark_widen_bf16(words[0], a);
        spark_widen_bf16(words[1], a + 8);
    }
};

// silu(gate) * up of 8 elements.
template <class Limit = SparkNoLimit>
__device__ __forceinline__ void spark_gated(const uint4 gate, const uint4 up, float* to, const Limit& limit = Limit()) {
    float g[8];
    spark_widen_bf16(gate, g);
    spark_widen_bf16(up, to);
#pragma unroll
    for (unsigned i = 0u; i < 8u; ++i) {
        g[i] = limit.gate(g[i]);
        to[i] = limit.up(to[i]);
        to[i] = g[i] * (1.0f / (1.0f + __expf(-g[i]))) * to[i];
    }
}

// silu(gate) * up, computed where it is used.
struct SparkGatedRow {
    const __nv_bfloat16* gate;
    const __nv_bfloat16* up;

    __device__ __forceinline__ void load(float (&a)[SPARK_EXPERT_CHUNK], unsigned chunk) const {
        const uint4* g = reinterpret_cast<const uint4*>(gate) + 2u * chunk;
        const uint4* u = reinterpret_cast<const uint4*>(up) + 2u * chunk;
        spark_gated(g[0], u[0], a);
        spark_gated(g[1], u[1], a + 8);
    }
};

// silu(gate) * up that the block computed once. Four elements of each chunk lie together, then those of the next chunk,
// so that the lanes of a warp read neighbouring words.
struct SparkStagedRow {
    const float4* staged;
    unsigned chunks;

    __device__ __forceinline__ void load(float (&a)[SPARK_EXPERT_CHUNK], unsigned chunk) const {
#pragma unroll
        for (unsigned quarter = 0u; quarter < 4u; ++quarter) {
            const float4 four = staged[quarter * chunks + chunk];
            a[4u * quarter] = four.x;
            a[4u * quarter + 1u] = four.y;
            a[4u * quarter + 2u] = four.z;
            a[4u * quarter + 3u] = four.w;
        }
    }
};

// Fills `staged`, 4 K bytes, by all threads of the block; ends with a barrier.
template <class Limit>
__device__ __forceinline__ SparkStagedRow spark_stage_gated(float4* staged, const __nv_bfloat16* gate,
                                                            const __nv_bfloat16* up, unsigned k, const Limit& limit) {
    const unsigned chunks = k / SPARK_EXPERT_CHUNK;
    const uint4* g = reinterpret_cast<const uint4*>(gate);
    const uint4* u = reinterpret_cast<const uint4*>(up);
    for (unsigned word = threadIdx.x; word < 2u * chunks; word += SPARK_EXPERT_THREADS) {
        float values[8];
        spark_gated(g[word], u[word], values, limit);
        float4* to = staged + (word % 2u) * 2u * chunks + word / 2u;
        to[0] = make_float4(values[0], values[1], values[2], values[3]);
        to[chunks] = make_float4(values[4], values[5], values[6], values[7]);
    }
    __syncthreads();
    return {staged, chunks};
}

// ---- Products.

// out[n] = bf16(row . weights[n]) for the block's 4 * OUTPUTS outputs, OUTPUTS next to each other a warp; zeros where
// there are no weights. DEPTH chunks of each are in flight at a time.
template <unsigned OUTPUTS, unsigned DEPTH, class Row, class Weights>
__device__ __forceinline__ void spark_expert_outputs(const Row& row, const Weights& weights, __nv_bfloat16* out,
                                                     unsigned n, unsigned k) {
    const unsigned lane = threadIdx.x % SPARK_WARP;
    const size_t first = (static_cast<size_t>(blockIdx.x) * SPARK_EXPERT_WARPS + threadIdx.x / SPARK_WARP) * OUTPUTS;
    if (first >= n) {
        return;
    }
    const unsigned outputs = n - static_cast<unsigned>(first) < OUTPUTS ? n - static_cast<unsigned>(first) : OUTPUTS;
    if (weights.absent()) {
        if (lane < outputs) {
            spark_store(out + first + lane, 0.0f);
        }
        return;
    }
    const unsigned chunks = k / SPARK_EXPERT_CHUNK;
    float sums[OUTPUTS] = {};
    unsigned chunk = lane;
    for (; chunk + (DEPTH - 1u) * SPARK_WARP < chunks; chunk += DEPTH * SPARK_WARP) {
        typename Weights::Chunk w[DEPTH][OUTPUTS];
#pragma unroll
        for (unsigned d = 0u; d < DEPTH; ++d) {
#pragma unroll
            for (unsigned o = 0u; o < OUTPUTS; ++o) {
                // Past the last output it is read again, and its sum is not stored.
                w[d][o] = weights.load(first + (o < outputs ? o : outputs - 1u), chunks, chunk + d * SPARK_WARP);
            }
        }
#pragma unroll
        for (unsigned d = 0u; d < DEPTH; ++d) {
            float a[SPARK_EXPERT_CHUNK];
            row.load(a, chunk + d * SPARK_WARP);
#pragma unroll
            for (unsigned o = 0u; o < OUTPUTS; ++o) {
                sums[o] = weights.add(sums[o], a, w[d][o]);
            }
        }
    }
    for (; chunk < chunks; chunk += SPARK_WARP) {
        float a[SPARK_EXPERT_CHUNK];
        row.load(a, chunk);
#pragma unroll
        for (unsigned o = 0u; o < OUTPUTS; ++o) {
            sums[o] = weights.add(sums[o], a, weights.load(first + (o < outputs ? o : outputs - 1u), chunks, chunk));
        }
    }
#pragma unroll
    for (unsigned o = 0u; o < OUTPUTS; ++o) {
        const size_t at = first + (o < outputs ? o : outputs - 1u);
        const float sum = spark_warp_sum(weights.scaled(sums[o], at), SPARK_WARP);
        if (lane == 0u && o < outputs) {
            spark_store(out + at, sum);
        }
    }
}

// ---- Kernels with a shared expert: a slot is a routed expert below top_k, the shared one at top_k.

// One projection: the routed experts' weights and where their results [rows, top_k, N] go, the shared expert's [rows, N].
template <class Tables>
struct SparkProjection {
    Tables tables;
    __nv_bfloat16* out;
    typename Tables::Weights shared;
    __nv_bfloat16* sh_out;
};

// Row t of A [rows, K] through a slot. expert_indices [rows, top_k].
template <class Tables>
__device__ __forceinline__ void spark_expert_project(const __nv_bfloat16* a, const SparkProjection<Tables>& to,
                                                     const unsigned* expert_indices, unsigned t, unsigned slot,
                                                     unsigned n, unsigned k, unsigned top_k) {
    const bool routed = slot < top_k;
    const size_t at = routed ? static_cast<size_t>(t) * top_k + slot : t;
    const typename Tables::Weights weights = to.tables.of(routed ? expert_indices + at : nullptr, to.shared);
    const SparkRow row = {a + static_cast<size_t>(t) * k};
    spark_expert_outputs<2u, 4u>(row, weights, (routed ? to.out : to.sh_out) + at * n, n, k);
}

// silu(gate) * up of row t, [rows, top_k, K] or for the shared expert [rows, K], through a slot. `staged` holds 4 K bytes.
template <class Tables, class Limit = SparkNoLimit>
__device__ __forceinline__ void spark_expert_down(float4* staged, const __nv_bfloat16* gate, const __nv_bfloat16* up,
                                                  const __nv_bfloat16* sh_gate, const __nv_bfloat16* sh_up,
                                                  const SparkProjection<Tables>& to, const unsigned* expert_indices,
                                                  unsigned t, unsigned slot, unsigned n, unsigned k, unsigned top_k,
                                                  const Limit& limit = Limit()) {
    const bool routed = slot < top_k;
    const size_t at = routed ? static_cast<size_t>(t) * top_k + slot : t;
    const typename Tables::Weights weights = to.tables.of(routed ? expert_indices + at : nullptr, to.shared);
    SparkStagedRow row = {staged, k / SPARK_EXPERT_CHUNK};
    if (!weights.absent()) {  // the same for the whole block
        row = spark_stage_gated(staged, (routed ? gate : sh_gate) + at * k, (routed ? up : sh_up) + at * k, k, limit);
    }
    spark_expert_outputs<2u, 4u>(row, weights, (routed ? to.out : to.sh_out) + at * n, n, k);
}
