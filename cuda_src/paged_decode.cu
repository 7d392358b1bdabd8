// SPDX-License-Identifier: AGPL-3.0-only
// Module paged_decode: attention of one query row a sequence over a paged BF16 cache, softmax online in FP32.
//
// Order of the sums, which depends on the sequence alone: eight warps take contiguous chunks of ceil(length / 8)
// positions. A warp takes its positions eight at a time (four, where a head is wider than 128, two, where it is wider than
// 256); a score is each lane's products in ascending order, then the tree 16, 8, 4, 2, 1. Warps are merged in ascending
// order. Only positions below the length are read.

#include "spark_common.cuh"

constexpr unsigned DECODE_WARPS = 8u;
constexpr unsigned DECODE_MAX_HEAD_DIM = 512u;
constexpr float DECODE_LOWEST = -1.0e30f;

template <unsigned WORDS>
struct Vector;
template <>
struct Vector<1u> {
    using type = unsigned short;
};
template <>
struct Vector<2u> {
    using type = unsigned;
};
template <>
struct Vector<4u> {
    using type = uint2;
};
template <>
struct Vector<8u> {
    using type = uint4;
};

__device__ __forceinline__ void widen(unsigned short word, float* to) {
    to[0] = __uint_as_float(static_cast<unsigned>(word) << 16);
}
__device__ __forceinline__ void widen(unsigned word, float* to) {
    to[0] = spark_low(word);
    to[1] = spark_high(word);
}
__device__ __forceinline__ void widen(uint2 words, float* to) {
    widen(words.x, to);
    widen(words.y, to + 2);
}
__device__ __forceinline__ void widen(uint4 words, float* to) {
    widen(words.x, to);
    widen(words.y, to + 2);
    widen(words.z, to + 4);
    widen(words.w, to + 6);
}

// Sum over a warp as the tree 16, 8, 4, 2, 1; the same bits in every lane.
__device__ __forceinline__ float sum_everywhere(float value) {
#pragma unroll
    for (unsigned step = SPARK_WARP / 2u; step > 0u; step /= 2u) {
        value += __shfl_xor_sync(SPARK_FULL_MASK, value, static_cast<int>(step));
    }
    return value;
}

// A walk over a sequence's rows: where the head's row of one position after the other lies, in elements.
struct Walk {
    const int* block;     // of the block table
    unsigned in_block;
    unsigned block_size;
    size_t token_stride;  // elements from a slot to the next
    size_t head_start;

    __device__ __forceinline__ size_t next() {
        const size_t slot = static_cast<size_t>(*block) * block_size + in_block;
        in_block += 1u;
        if (in_block == block_size) {
            in_block = 0u;
            block += 1;
        }
        return slot * token_stride + head_start;
    }
};

// Attention of one head of 32 * PER elements. A lane owns PER of them, as PER / WIDTH vectors of WIDTH that lie 32
// vectors apart, so that a warp reads a row without gaps.
template <unsigned PER>
struct Head {
    static constexpr unsigned WIDTH = PER % 8u == 0u ? 8u : PER % 4u == 0u ? 4u : PER % 2u == 0u ? 2u : 1u;
    static constexpr unsigned VECTORS = PER / WIDTH;
    static constexpr unsigned TOGETHER = PER > 8u ? 2u : PER > 4u ? 4u : 8u;
    using Word = typename Vector<WIDTH>::type;

    float query[PER];
    float output[PER];
    float top = DECODE_LOWEST;
    float weight = 0.0f;

    // The element of the head that the lane's element i is.
    __device__ static __forceinline__ unsigned element(unsigned i) {
        return (i / WIDTH * SPARK_WARP + threadIdx.x % SPARK_WARP) * WIDTH + i % WIDTH;
    }

    __device__ __forceinline__ explicit Head(const __nv_bfloat16* q) {
#pragma unroll
        for (unsigned i = 0u; i < PER; ++i) {
            query[i] = spark_load(q + element(i));
            output[i] = 0.0f;
        }
    }

    __device__ static __forceinline__ void read(const __nv_bfloat16* row, Word (&words)[VECTORS]) {
#pragma unroll
        for (unsigned v = 0u; v < VECTORS; ++v) {
            words[v] = reinterpret_cast<const Word*>(row)[v * SPARK_WARP + threadIdx.x % SPARK_WARP];
        }
    }

    __device__ static __forceinline__ void widen_all(const Word (&words)[VECTORS], float (&values)[PER]) {
#pragma unroll
        for (unsigned v = 0u; v < VECTORS; ++v) {
            widen(words[v], values + v * WIDTH);
        }
    }

    // The next TOGETHER positions, or the `count` that are left; what is beyond counts for nothing.
    __device__ __forceinline__ void take(const __nv_bfloat16* keys, const __nv_bfloat16* values, Walk& walk,
                                         unsigned count, float scale) {
        Word k[TOGETHER][VECTORS] = {};
        Word v[TOGETHER][VECTORS] = {};
#pragma unroll
        for (unsigned j = 0u; j < TOGETHER; ++j) {
            if (j < count) {
                const size_t row = walk.next();
                read(keys + row, k[j]);
                read(values + row, v[j]);
            }
        }
        float score[TOGETHER];
        float highest = top;
#pragma unroll
        for (unsigned j = 0u; j < TOGETHER; ++j) {
            float elements[PER];
            widen_all(k[j], elements);
            float dot = 0.0f;
#pragma unroll
            for (unsigned i = 0u; i < PER; ++i) {
                dot = dot + query[i] * elements[i];
            }
            score[j] = j < count ? sum_everywhere(dot) * scale : DECODE_LOWEST;
            highest = fmaxf(highest, score[j]);
        }
        const float faded = expf(top - highest);
        top = highest;
        weight = weight * faded;
#pragma unroll
        for (unsigned i = 0u; i < PER; ++i) {
            output[i] = output[i] * faded;
        }
#pragma unroll
        for (unsigned j = 0u; j < TOGETHER; ++j) {
            const float share = j < count ? expf(score[j] - highest) : 0.0f;
            weight = weight + share;
            float elements[PER];
            widen_all(v[j], elements);
#pragma unroll
            for (unsigned i = 0u; i < PER; ++i) {
                output[i] = output[i] + share * elements[i];
            }
        }
    }
};

template <unsigned PER>
__device__ __forceinline__ void attend(const __nv_bfloat16* q, const __nv_bfloat16* keys, const __nv_bfloat16* values,
                                       __nv_bfloat16* out, Walk walk, unsigned begin, unsigned end, float scale,
                                       float (*outputs)[DECODE_MAX_HEAD_DIM], float* tops, float* weights) {
    constexpr unsigned HEAD_DIM = PER * SPARK_WARP;
    const unsigned warp = threadIdx.x / SPARK_WARP;
    const unsigned chunk = (end - begin + DECODE_WARPS - 1u) / DECODE_WARPS;
    const unsigned before = warp * chunk;
    const unsigned mine = before >= end - begin ? 0u : end - begin - before < chunk ? end - begin - before : chunk;
    walk.block += (begin + before) / walk.block_size;
    walk.in_block = (begin + before) % walk.block_size;
    Head<PER> head(q);
    for (unsigned done = 0u; done < mine; done += Head<PER>::TOGETHER) {
        head.take(keys, values, walk, mine - done, scale);
    }
#pragma unroll
    for (unsigned i = 0u; i < PER; ++i) {
        outputs[warp][Head<PER>::element(i)] = head.output[i];
    }
    if (threadIdx.x % SPARK_WARP == 0u) {
        tops[warp] = head.top;
        weights[warp] = head.weight;
    }
    __syncthreads();
    float top = DECODE_LOWEST;
#pragma unroll
    for (unsigned w = 0u; w < DECODE_WARPS; ++w) {
        top = fmaxf(top, tops[w]);
    }
    float share[DECODE_WARPS];
    float weight = 0.0f;
#pragma unroll
    for (unsigned w = 0u; w < DECODE_WARPS; ++w) {
        share[w] = expf(tops[w] - top);
        weight = weight + share[w] * weights[w];
    }
    for (unsigned d = threadIdx.x; d < HEAD_DIM; d += blockDim.x) {
        float sum = 0.0f;
#pragma unroll
        for (unsigned w = 0u; w < DECODE_WARPS; ++w) {
            sum = sum + share[w] * outputs[w][d];
        }
        spark_store(out + d, weight == 0.0f ? 0.0f : sum / weight);
    }
}

// O[seq, head] = softmax(Q[seq, head] . K * inv_sqrt_d) V over the positions [w, L) of sequence seq, L = seq_lens[seq],
// w = L - sliding_window where 0 < sliding_window < L, else 0. A sequence of length 0 (or less) leaves its rows of O as
// they are. Query head h reads cache head h / (num_q_heads / num_kv_heads). Row of Q at seq * q_stride elements, O packed
// [seqs, num_q_heads, head_dim]; position p in block block_tables[seq, p / block_size]. Grid (num_q_heads, seqs), block
// 256. head_dim a multiple of 32, 512 at most; caches on 16-byte addresses. Score and weights accurate to expf.
extern "C" __global__ void __launch_bounds__(256, 2)
    paged_decode_attn(const __nv_bfloat16* Q, const __nv_bfloat16* K_cache, const __nv_bfloat16* V_cache,
                      __nv_bfloat16* O, const int* block_tables, const int* seq_lens, unsigned int max_blocks_per_seq,
                      unsigned int num_q_heads, unsigned int num_kv_heads, unsigned int head_dim,
                      unsigned int block_size, float inv_sqrt_d, unsigned int q_stride, unsigned int sliding_window) {
    __shared__ float outputs[DECODE_WARPS][DECODE_MAX_HEAD_DIM];
    __shared__ float tops[DECODE_WARPS];
    __shared__ float weights[DECODE_WARPS];
    const unsigned head = blockIdx.x;
    const size_t sequence = blockIdx.y;
    const int length = seq_lens[sequence];
    if (length <= 0) {
        return;
    }
    const unsigned end = static_cast<unsigned>(length);
    const unsigned begin = sliding_window > 0u && end > sliding_window ? end - sliding_window : 0u;
    const size_t cache_head = head / (num_q_heads / num_kv_heads);
    const Walk walk = {block_tables + sequence * max_blocks_per_seq, 0u, block_size,
                       static_cast<size_t>(num_kv_heads) * head_dim, cache_head * head_dim};
    const __nv_bfloat16* q = Q + sequence * q_stride + static_cast<size_t>(head) * head_dim;
    __nv_bfloat16* out = O + (sequence * num_q_heads + head) * head_dim;
    switch (head_dim / SPARK_WARP) {
#define SPARK_HEAD(per)                                                                                 \
    case per:                                                                                           \
        attend<per>(q, K_cache, V_cache, out, walk, begin, end, inv_sqrt_d, outputs, tops, weights); \
        break;
        SPARK_HEAD(1)
        SPARK_HEAD(2)
        SPARK_HEAD(3)
        SPARK_HEAD(4)
        SPARK_HEAD(5)
        SPARK_HEAD(6)
        SPARK_HEAD(7)
        SPARK_HEAD(8)
        SPARK_HEAD(9)
        SPARK_HEAD(10)
        SPARK_HEAD(11)
        SPARK_HEAD(12)
        SPARK_HEAD(13)
        SPARK_HEAD(14)
        SPARK_HEAD(15)
        SPARK_HEAD(16)
#undef SPARK_HEAD
        default:
            break;
    }
}
