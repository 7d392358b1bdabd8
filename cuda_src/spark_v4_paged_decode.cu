// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_v4_paged_decode: DeepSeek-V4's attention of one query row a sequence over a paged pool of latent rows.
//
// All query heads share one head of the cache, and a row of the pool is its key and its value both, so a warp reads
// each row once for both uses. A block has one query head: with two, rows would be read half as often, but a single
// sequence would keep half as many multiprocessors busy. Order of the sums, which depends on the sequence alone: eight
// warps take contiguous chunks of ceil(visible / 8) positions, four positions at a time; a score is each lane's
// products in ascending order, then the tree 16, 8, 4, 2, 1; warps are merged in ascending order, the sink last.
// Products of a score are exact, so fmaf there only saves an instruction; in the sums over positions it also saves a
// rounding.
//
// The output's tail is turned back before it is rounded: a launch of its own would read and write all heads again, and
// round twice.

#include "spark_fp8.cuh"
#include "spark_v4.cuh"

constexpr unsigned DECODE_WARPS = 8u;
constexpr unsigned DECODE_HEADS = 1u;  // of a block, in every warp
constexpr unsigned DECODE_AHEAD = 4u;  // rows in flight
constexpr float DECODE_LOWEST = -1.0e30f;

struct Bf16Rows {
    using Vector = uint4;
    __device__ static __forceinline__ void widen(uint4 words, float* to) { v4_widen(words, to); }
};

struct E4m3Rows {
    using Vector = uint2;
    __device__ static __forceinline__ void widen(uint2 bytes, float* to) {
        spark_widen_e4m3(static_cast<unsigned short>(bytes.x & 0xffffu), to);
        spark_widen_e4m3(static_cast<unsigned short>(bytes.x >> 16), to + 2);
        spark_widen_e4m3(static_cast<unsigned short>(bytes.y & 0xffffu), to + 4);
        spark_widen_e4m3(static_cast<unsigned short>(bytes.y >> 16), to + 6);
    }
};

// A walk over a sequence's positions: the slot of one after the other.
struct Walk {
    const int* block;  // of the block table
    unsigned in_block;
    unsigned block_size;

    __device__ __forceinline__ size_t next() {
        const size_t slot = static_cast<size_t>(*block) * block_size + in_block;
        in_block += 1u;
        if (in_block == block_size) {
            in_block = 0u;
            block += 1;
        }
        return slot;
    }
};

// What the warps of a block leave for its merge.
struct Partial {
    float output[DECODE_WARPS][DECODE_HEADS][V4_MAX_HEAD_DIM];
    float top[DECODE_WARPS][DECODE_HEADS];
    float weight[DECODE_WARPS][DECODE_HEADS];
    float2 turns[V4_MAX_PAIRS];
};

// The heads of a block across the lanes of a warp: lane l owns the vectors of eight elements l, l + 32, ... of each.
template <typename Rows, unsigned VECTORS>
struct Heads {
    static constexpr unsigned PER = VECTORS * V4_WIDTH;
    using Vector = typename Rows::Vector;

    float query[DECODE_HEADS][PER];
    float output[DECODE_HEADS][PER];
    float top[DECODE_HEADS];
    float weight[DECODE_HEADS];
    unsigned vectors;  // of a row

    __device__ static __forceinline__ unsigned vector(unsigned v) { return v * SPARK_WARP + threadIdx.x % SPARK_WARP; }

    // `second` is where the other head starts, in elements.
    __device__ __forceinline__ Heads(const __nv_bfloat16* q, size_t second, unsigned head_dim)
        : vectors(head_dim / V4_WIDTH) {
#pragma unroll
        for (unsigned h = 0u; h < DECODE_HEADS; ++h) {
            const uint4* row = reinterpret_cast<const uint4*>(q + h * second);
            top[h] = DECODE_LOWEST;
            weight[h] = 0.0f;
#pragma unroll
            for (unsigned v = 0u; v < VECTORS; ++v) {
                uint4 words = {};
                if (vector(v) < vectors) {
                    words = row[vector(v)];
                }
                v4_widen(words, query[h] + v * V4_WIDTH);
            }
#pragma unroll
            for (unsigned i = 0u; i < PER; ++i) {
                output[h][i] = 0.0f;
            }
        }
    }

    // The next DECODE_AHEAD positions, or the `count` that are left; what is beyond counts for nothing.
    __device__ __forceinline__ void take(const Vector* pool, Walk& walk, unsigned count, float scale) {
        Vector words[DECODE_AHEAD][VECTORS] = {};
#pragma unroll
        for (unsigned j = 0u; j < DECODE_AHEAD; ++j) {
            if (j < count) {
                const Vector* row = pool + walk.next() * vectors;
#pragma unroll
                for (unsigned v = 0u; v < VECTORS; ++v) {
                    if (vector(v) < vectors) {
                        words[j][v] = row[vector(v)];
                    }
                }
            }
        }
        float score[DECODE_HEADS][DECODE_AHEAD];
#pragma unroll
        for (unsigned j = 0u; j < DECODE_AHEAD; ++j) {
            float dot[DECODE_HEADS] = {};
#pragma unroll
            for (unsigned v = 0u; v < VECTORS; ++v) {
                float x[V4_WIDTH];
                Rows::widen(words[j][v], x);
#pragma unroll
                for (unsigned i = 0u; i < V4_WIDTH; ++i) {
#pragma unroll
                    for (unsigned h = 0u; h < DECODE_HEADS; ++h) {
                        dot[h] = fmaf(query[h][v * V4_WIDTH + i], x[i], dot[h]);
                    }
                }
            }
#pragma unroll
            for (unsigned h = 0u; h < DECODE_HEADS; ++h) {
                const float sum = v4_warp_sum(dot[h]) * scale;
                score[h][j] = j < count ? sum : DECODE_LOWEST;
            }
        }
#pragma unroll
        for (unsigned h = 0u; h < DECODE_HEADS; ++h) {
            float highest = top[h];
#pragma unroll
            for (unsigned j = 0u; j < DECODE_AHEAD; ++j) {
                highest = fmaxf(highest, score[h][j]);
            }
            const float faded = expf(top[h] - highest);
            top[h] = highest;
            weight[h] = weight[h] * faded;
#pragma unroll
            for (unsigned i = 0u; i < PER; ++i) {
                output[h][i] = output[h][i] * faded;
            }
#pragma unroll
            for (unsigned j = 0u; j < DECODE_AHEAD; ++j) {
                score[h][j] = j < count ? expf(score[h][j] - highest) : 0.0f;  // from here on a weight
                weight[h] = weight[h] + score[h][j];
            }
        }
#pragma unroll
        for (unsigned j = 0u; j < DECODE_AHEAD; ++j) {
#pragma unroll
            for (unsigned v = 0u; v < VECTORS; ++v) {
                float x[V4_WIDTH];
                Rows::widen(words[j][v], x);
#pragma unroll
                for (unsigned i = 0u; i < V4_WIDTH; ++i) {
#pragma unroll
                    for (unsigned h = 0u; h < DECODE_HEADS; ++h) {
                        output[h][v * V4_WIDTH + i] = fmaf(score[h][j], x[i], output[h][v * V4_WIDTH + i]);
                    }
                }
            }
        }
    }

    __device__ __forceinline__ void leave(Partial& partial) const {
        const unsigned warp = threadIdx.x / SPARK_WARP;
#pragma unroll
        for (unsigned h = 0u; h < DECODE_HEADS; ++h) {
#pragma unroll
            for (unsigned v = 0u; v < VECTORS; ++v) {
                if (vector(v) < vectors) {
                    const float* o = output[h] + v * V4_WIDTH;
                    float4* to = reinterpret_cast<float4*>(partial.output[warp][h]) + 2u * vector(v);
                    to[0] = make_float4(o[0], o[1], o[2], o[3]);
                    to[1] = make_float4(o[4], o[5], o[6], o[7]);
                }
            }
            if (threadIdx.x % SPARK_WARP == 0u) {
                partial.top[warp][h] = top[h];
                partial.weight[warp][h] = weight[h];
            }
        }
    }
};

template <typename Rows, unsigned VECTORS>
__device__ __forceinline__ void attend(const __nv_bfloat16* q, size_t second, const typename Rows::Vector* pool,
                                       Walk walk, unsigned begin, unsigned end, unsigned head_dim, float scale,
                                       Partial& partial) {
    const unsigned chunk = (end - begin + DECODE_WARPS - 1u) / DECODE_WARPS;
    const unsigned before = threadIdx.x / SPARK_WARP * chunk;
    const unsigned mine = before >= end - begin ? 0u : end - begin - before < chunk ? end - begin - before : chunk;
    walk.block += (begin + before) / walk.block_size;
    walk.in_block = (begin + before) % walk.block_size;
    Heads<Rows, VECTORS> heads(q, second, head_dim);
    for (unsigned done = 0u; done < mine; done += DECODE_AHEAD) {
        heads.take(pool, walk, mine - done, scale);
    }
    heads.leave(partial);
}

// Two elements of a head's output, from `element` on, before the last rounding.
__device__ __forceinline__ float2 merge(const Partial& partial, unsigned h, unsigned element, const float* sink) {
    float top = sink == nullptr ? DECODE_LOWEST : *sink;
#pragma unroll
    for (unsigned w = 0u; w < DECODE_WARPS; ++w) {
        top = fmaxf(top, partial.top[w][h]);
    }
    float weight = 0.0f;
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (unsigned w = 0u; w < DECODE_WARPS; ++w) {
        const float share = expf(partial.top[w][h] - top);
        const float2 part = *reinterpret_cast<const float2*>(partial.output[w][h] + element);
        weight = fmaf(share, partial.weight[w][h], weight);
        sum.x = fmaf(share, part.x, sum.x);
        sum.y = fmaf(share, part.y, sum.y);
    }
    weight = sink == nullptr ? weight : weight + expf(*sink - top);
    return weight == 0.0f ? make_float2(0.0f, 0.0f) : make_float2(sum.x / weight, sum.y / weight);
}

template <typename Rows, typename Element>
__device__ __forceinline__ void decode(const __nv_bfloat16* Q, const Element* pool, __nv_bfloat16* O,
                                       const int* block_tables, const int* seq_lens, const unsigned* positions,
                                       const float* sinks, unsigned max_blocks_per_seq, unsigned num_heads,
                                       unsigned head_dim, unsigned rope_dim, unsigned block_size, float inv_sqrt_d,
                                       float theta, unsigned sliding_window, double own) {
    __shared__ Partial partial;
    const size_t sequence = blockIdx.y;
    const int length = seq_lens[sequence];
    if (length <= 0) {
        return;
    }
    const unsigned end = static_cast<unsigned>(length);
    const unsigned begin = sliding_window > 0u && end > sliding_window ? end - sliding_window : 0u;
    const unsigned first = blockIdx.x * DECODE_HEADS;
    const unsigned live = num_heads - first < DECODE_HEADS ? num_heads - first : DECODE_HEADS;
    const size_t start = (sequence * num_heads + first) * head_dim;
    // A head that is not there is computed as the first and not stored.
    const size_t second = live == DECODE_HEADS ? head_dim : 0u;
    const Walk walk = {block_tables + sequence * max_blocks_per_seq, 0u, block_size};
    const typename Rows::Vector* rows = reinterpret_cast<const typename Rows::Vector*>(pool);
    v4_turns(partial.turns, positions[sequence], rope_dim, theta, true, own);
    if (head_dim <= V4_WIDTH * SPARK_WARP) {
        attend<Rows, 1u>(Q + start, second, rows, walk, begin, end, head_dim, inv_sqrt_d, partial);
    } else {
        attend<Rows, 2u>(Q + start, second, rows, walk, begin, end, head_dim, inv_sqrt_d, partial);
    }
    __syncthreads();
    const unsigned tail = (head_dim - rope_dim) / 2u;
    for (unsigned i = threadIdx.x; i < live * (head_dim / 2u); i += blockDim.x) {
        const unsigned h = i / (head_dim / 2u);
        const unsigned pair = i % (head_dim / 2u);
        float2 y = merge(partial, h, 2u * pair, sinks == nullptr ? nullptr : sinks + first + h);
        if (pair >= tail) {
            y = v4_turn(y.x, y.y, partial.turns[pair - tail]);
        }
        reinterpret_cast<unsigned*>(O + start)[i] = spark_pack(y.x, y.y);
    }
}

// O[seq, head] = turn back(sum over p of w_p row_p) over the positions p of [L - sliding_window, L) that are not
// negative (all of [0, L) with a window of 0), L = seq_lens[seq] with the query's own row included;
//   s_p = (Q[seq, head] . row_p) * inv_sqrt_d,
//   w_p = exp(s_p - m) / (sum over p of exp(s_p - m) + exp(sinks[head] - m)),
// and the last rope_dim elements of the sum turned by the angle of -positions[seq], the query's position. A sink has no
// value: it is in the denominator alone; without sinks (NULL) that term is gone. A sequence of length 0 (or less)
// leaves its rows of O as they are. Q and O packed [seqs, num_heads, head_dim], pool [blocks, block_size, head_dim];
// position p in block block_tables[seq, p / block_size]. Grid (num_heads, seqs), block 256. head_dim a
// multiple of 8, 512 at most; rope_dim even, head_dim at most; Q and pool on 16-byte addresses, O on a 4-byte address.
extern "C" __global__ void __launch_bounds__(256)
    spark_v4_paged_decode(const __nv_bfloat16* Q, const __nv_bfloat16* pool, __nv_bfloat16* O, const int* block_tables,
                          const int* seq_lens, const unsigned int* positions, const float* sinks,
                          unsigned int max_blocks_per_seq, unsigned int num_heads, unsigned int head_dim,
                          unsigned int rope_dim, unsigned int block_size, float inv_sqrt_d, float theta,
                          unsigned int sliding_window) {
    spark_let_next_start();
    const double own = v4_own_frequency(rope_dim, theta);
    spark_wait_for_previous();
    decode<Bf16Rows>(Q, pool, O, block_tables, seq_lens, positions, sinks, max_blocks_per_seq, num_heads, head_dim,
                     rope_dim, block_size, inv_sqrt_d, theta, sliding_window, own);
}

// The same over a pool of E4M3 with a scale of 1, on an 8-byte address. The values of a BF16 pool give the same bits.
extern "C" __global__ void __launch_bounds__(256)
    spark_v4_paged_decode_fp8(const __nv_bfloat16* Q, const unsigned char* pool, __nv_bfloat16* O,
                              const int* block_tables, const int* seq_lens, const unsigned int* positions,
                              const float* sinks, unsigned int max_blocks_per_seq, unsigned int num_heads,
                              unsigned int head_dim, unsigned int rope_dim, unsigned int block_size, float inv_sqrt_d,
                              float theta, unsigned int sliding_window) {
    spark_let_next_start();
    const double own = v4_own_frequency(rope_dim, theta);
    spark_wait_for_previous();
    decode<E4m3Rows>(Q, pool, O, block_tables, seq_lens, positions, sinks, max_blocks_per_seq, num_heads, head_dim,
                     rope_dim, block_size, inv_sqrt_d, theta, sliding_window, own);
}
