// SPDX-License-Identifier: AGPL-3.0-only
// The products of a row with the BF16 experts that a router chose for it, and with a shared expert.
//
// An output is summed in the order of dense_gemv.cuh: 64 lanes take the 8-element chunks l, l + 64, ... in ascending k;
// each half of the lanes adds up as the tree 16, 8, 4, 2, 1; first half + second. A warp has two outputs, and each of
// its threads is lane l and lane l + 32 of both, so that BF16 rows give the bits of dense_gemv_bf16.
//
// The down projection's row is (g * (1 / (1 + exp(-g)))) * u in FP32, without a rounding to BF16; each product with a
// weight rounds to FP32. Kernels that say so bound g and u by DeepSeek-V4's limit first.
//
// Slot 0 .. top_k - 1 is expert expert_indices[slot], whose weights [N, K] lie at the table's address; slot top_k is
// the shared expert. Where there are no weights (address 0: the expert lives elsewhere) the slot's outputs are zeros.
// A block has 128 threads and eight outputs. K % 8 == 0; rows and weights lie on 16-byte addresses, gate and up on 8.
#pragma once

#include "dense_gemv.cuh"
#include "moe_limit.cuh"

constexpr unsigned MOE_BF16_THREADS = 128u;
constexpr unsigned MOE_BF16_OUTPUTS = 2u;  // a warp
constexpr unsigned MOE_BF16_STEPS = 4u;    // chunks of each output that a thread has in flight
constexpr unsigned MOE_BF16_STRIDE = MOE_BF16_STEPS * SPARK_WARP;
constexpr unsigned MOE_BF16_TILE = 256u;  // chunks of activations in shared memory

static_assert(MOE_BF16_TILE % MOE_BF16_STRIDE == 0u, "a tile has whole strides, so that lanes keep their chunks");
static_assert(MOE_BF16_STEPS % 2u == 0u, "even steps are lane l, odd ones lane l + 32");

typedef unsigned long long moe_address;

// A row in global memory.
struct MoeBf16Row {
    const uint4* chunks;

    __device__ __forceinline__ void load(float (&a)[SPARK_DOT_CHUNK], unsigned chunk) const {
        const uint4 words = chunks[chunk];
        const unsigned word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (unsigned i = 0u; i < 4u; ++i) {
            a[2u * i] = spark_low(word[i]);
            a[2u * i + 1u] = spark_high(word[i]);
        }
    }
};

// A tile of FP32 activations. The halves of the chunks lie apart, so that neighbouring lanes read neighbouring words;
// half a line more between them keeps the writers of both halves on different banks.
struct MoeStagedTile {
    float4 halves[2][MOE_BF16_TILE + 4u];

    __device__ __forceinline__ void load(float (&a)[SPARK_DOT_CHUNK], unsigned chunk) const {
#pragma unroll
        for (unsigned half = 0u; half < 2u; ++half) {
            const float4 four = halves[half][chunk];
            a[4u * half] = four.x;
            a[4u * half + 1u] = four.y;
            a[4u * half + 2u] = four.z;
            a[4u * half + 3u] = four.w;
        }
    }

    template <class Limit>
    static __device__ __forceinline__ float gated(float gate, float up, const Limit& limit) {
        const float g = limit.gate(gate);
        const float u = limit.up(up);
        return g * (1.0f / (1.0f + __expf(-g))) * u;
    }

    // Half a chunk a thread and turn, by all threads of the block.
    template <class Limit>
    __device__ __forceinline__ void fill(const uint2* gate, const uint2* up, unsigned chunks, const Limit& limit) {
        for (unsigned i = threadIdx.x; i < 2u * chunks; i += MOE_BF16_THREADS) {
            const uint2 g = gate[i];
            const uint2 u = up[i];
            halves[i % 2u][i / 2u] = make_float4(
                gated(spark_low(g.x), spark_low(u.x), limit), gated(spark_high(g.x), spark_high(u.x), limit),
                gated(spark_low(g.y), spark_low(u.y), limit), gated(spark_high(g.y), spark_high(u.y), limit));
        }
    }
};

// A warp's two outputs: their weights, and the sums of each thread's two lanes.
struct MoeBf16Outputs {
    const uint4* rows[MOE_BF16_OUTPUTS];
    unsigned count;  // outputs below N; 0 for a warp that has none
    float sums[2][MOE_BF16_OUTPUTS];
    uint4 flying[MOE_BF16_STEPS][MOE_BF16_OUTPUTS];

    __device__ __forceinline__ MoeBf16Outputs(const __nv_bfloat16* weights, size_t first, unsigned n, unsigned chunks)
        : count(0u), sums{} {
        if (first < n) {
            count = n - first < MOE_BF16_OUTPUTS ? 1u : MOE_BF16_OUTPUTS;
        }
#pragma unroll
        for (unsigned o = 0u; o < MOE_BF16_OUTPUTS; ++o) {
            // Past the last output it is read again, and its sum is not stored.
            rows[o] = reinterpret_cast<const uint4*>(weights) + (first + (o < count ? o : 0u)) * chunks;
        }
    }

    // Weights of the chunks from `base` on, as far as they are below `chunks`.
    __device__ __forceinline__ void load(unsigned base, unsigned chunks) {
#pragma unroll
        for (unsigned step = 0u; step < MOE_BF16_STEPS; ++step) {
            const unsigned chunk = base + step * SPARK_WARP + threadIdx.x % SPARK_WARP;
            if (count != 0u && chunk < chunks) {
#pragma unroll
                for (unsigned o = 0u; o < MOE_BF16_OUTPUTS; ++o) {
                    flying[step][o] = rows[o][chunk];
                }
            }
        }
    }

    // Their products with a row whose chunk `row_base` is `base`.
    template <class Row>
    __device__ __forceinline__ void add(const Row& row, unsigned row_base, unsigned base, unsigned chunks) {
#pragma unroll
        for (unsigned step = 0u; step < MOE_BF16_STEPS; ++step) {
            const unsigned lane = step * SPARK_WARP + threadIdx.x % SPARK_WARP;
            if (count != 0u && base + lane < chunks) {
                float a[SPARK_DOT_CHUNK];
                row.load(a, row_base + lane);
#pragma unroll
                for (unsigned o = 0u; o < MOE_BF16_OUTPUTS; ++o) {
                    const uint4 words = flying[step][o];
                    const unsigned word[4] = {words.x, words.y, words.z, words.w};
                    float sum = sums[step % 2u][o];
#pragma unroll
                    for (unsigned i = 0u; i < 4u; ++i) {
                        sum = sum + a[2u * i] * spark_low(word[i]);
                        sum = sum + a[2u * i + 1u] * spark_high(word[i]);
                    }
                    sums[step % 2u][o] = sum;
                }
            }
        }
    }

    __device__ __forceinline__ void store(__nv_bfloat16* out, size_t first) {
#pragma unroll
        for (unsigned o = 0u; o < MOE_BF16_OUTPUTS; ++o) {
            const float sum = spark_warp_sum(sums[0][o], SPARK_WARP) + spark_warp_sum(sums[1][o], SPARK_WARP);
            if (o < count && threadIdx.x % SPARK_WARP == 0u) {
                spark_store(out + first + o, sum);
            }
        }
    }
};

// Which weights and results belong to a slot of row t. Routed results are [rows, top_k, N], the shared ones [rows, N].
struct MoeBf16Slot {
    size_t row;  // of the results, and of what a down projection reads
    bool routed;
    const __nv_bfloat16* weights;
    __nv_bfloat16* out;

    __device__ __forceinline__ MoeBf16Slot(const moe_address* table, __nv_bfloat16* routed_out,
                                           const unsigned* expert_indices, const __nv_bfloat16* shared,
                                           __nv_bfloat16* shared_out, size_t t, unsigned slot, unsigned n,
                                           unsigned top_k)
        : routed(slot < top_k) {
        row = routed ? t * top_k + slot : t;
        weights = routed ? reinterpret_cast<const __nv_bfloat16*>(table[expert_indices[row]]) : shared;
        out = (routed ? routed_out : shared_out) + row * n;
    }

    // Zeros in the block's outputs.
    __device__ __forceinline__ void clear(unsigned n) const {
        constexpr unsigned OUTPUTS = MOE_BF16_THREADS / SPARK_WARP * MOE_BF16_OUTPUTS;
        const size_t at = static_cast<size_t>(blockIdx.x) * OUTPUTS + threadIdx.x;
        if (threadIdx.x < OUTPUTS && at < n) {
            spark_store(out + at, 0.0f);
        }
    }
};

// The first output of a warp.
__device__ __forceinline__ size_t moe_bf16_first() {
    const unsigned warp = threadIdx.x / SPARK_WARP;
    return (static_cast<size_t>(blockIdx.x) * (MOE_BF16_THREADS / SPARK_WARP) + warp) * MOE_BF16_OUTPUTS;
}

// out[n] = bf16(x . weights[n]) for the block's outputs; x [K].
__device__ __forceinline__ void moe_bf16_project(const __nv_bfloat16* x, const MoeBf16Slot& slot, unsigned n,
                                                 unsigned k) {
    if (slot.weights == nullptr) {
        slot.clear(n);
        return;
    }
    const unsigned chunks = k / SPARK_DOT_CHUNK;
    const MoeBf16Row row = {reinterpret_cast<const uint4*>(x)};
    MoeBf16Outputs outputs(slot.weights, moe_bf16_first(), n, chunks);
    for (unsigned base = 0u; base < chunks; base += MOE_BF16_STRIDE) {
        outputs.load(base, chunks);
        outputs.add(row, base, base, chunks);
    }
    outputs.store(slot.out, moe_bf16_first());
}

// out[n] = bf16((silu(gate) * up) . weights[n]) for the block's outputs; gate and up [K]. The block computes a tile of
// activations at a time, while the tile's first weights are on their way.
template <class Limit = SparkNoLimit>
__device__ __forceinline__ void moe_bf16_down(const __nv_bfloat16* gate, const __nv_bfloat16* up,
                                              const MoeBf16Slot& slot, unsigned n, unsigned k,
                                              const Limit& limit = Limit()) {
    __shared__ MoeStagedTile tile;
    if (slot.weights == nullptr) {  // the same for the whole block
        slot.clear(n);
        return;
    }
    const unsigned chunks = k / SPARK_DOT_CHUNK;
    MoeBf16Outputs outputs(slot.weights, moe_bf16_first(), n, chunks);
    for (unsigned start = 0u; start < chunks; start += MOE_BF16_TILE) {
        const unsigned end = chunks - start < MOE_BF16_TILE ? chunks : start + MOE_BF16_TILE;
        outputs.load(start, end);
        if (start != 0u) {
            __syncthreads();  // all have read the tile before
        }
        tile.fill(reinterpret_cast<const uint2*>(gate) + 2u * start, reinterpret_cast<const uint2*>(up) + 2u * start,
                  end - start, limit);
        __syncthreads();
        outputs.add(tile, 0u, start, end);
        for (unsigned base = start + MOE_BF16_STRIDE; base < end; base += MOE_BF16_STRIDE) {
            outputs.load(base, end);
            outputs.add(tile, base - start, base, end);
        }
    }
    outputs.store(slot.out, moe_bf16_first());
}
