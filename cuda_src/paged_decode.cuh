// SPDX-License-Identifier: AGPL-3.0-only
// Attention of one query row over the paged rows of a cache, softmax online in FP32; paged_decode.cu and
// paged_decode_fp8.cu make kernels of it.
//
// Order of the sums, which depends on the sequence alone: eight warps take contiguous chunks of ceil(length / 8)
// positions. A warp takes its positions eight at a time (four, where a head is wider than 128, two, where it is wider than
// 256); a score is each lane's products in ascending order, then the tree 16, 8, 4, 2, 1. Warps are merged in ascending
// order. Only positions below the length are read. Caches of other elements with the same values give the same bits.
//
// Rows says what a cache holds: Element, one of its elements; Word<WIDTH>, WIDTH of them as one load; widen(word, to),
// their values, exact. Walk says where: block (a pointer into the block table), in_block, block_size, and next(), which
// steps to the next position and returns the element where the head's row of this one starts.
#pragma once

#include "spark_common.cuh"

constexpr unsigned DECODE_WARPS = 8u;
constexpr unsigned DECODE_MAX_HEAD_DIM = 512u;
constexpr float DECODE_LOWEST = -1.0e30f;

// Sum over a warp as the tree 16, 8, 4, 2, 1; the same bits in every lane.
__device__ __forceinline__ float sum_everywhere(float value) {
#pragma unroll
    for (unsigned step = SPARK_WARP / 2u; step > 0u; step /= 2u) {
        value += __shfl_xor_sync(SPARK_FULL_MASK, value, static_cast<int>(step));
    }
    return value;
}

// Attention of one head of 32 * PER elements. A lane owns PER of them, as PER / WIDTH vectors of WIDTH that lie 32
// vectors apart, so that a warp reads a row without gaps.
template <typename Rows, unsigned PER>
struct Head {
    static constexpr unsigned WIDTH = PER % 8u == 0u ? 8u : PER % 4u == 0u ? 4u : PER % 2u == 0u ? 2u : 1u;
    static constexpr unsigned VECTORS = PER / WIDTH;
    static constexpr unsigned TOGETHER = PER > 8u ? 2u : PER > 4u ? 4u : 8u;
    using Element = typename Rows::Element;
    using Word = typename Rows::template Word<WIDTH>;

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

    __device__ static __forceinline__ void read(const Element* row, Word (&words)[VECTORS]) {
#pragma unroll
        for (unsigned v = 0u; v < VECTORS; ++v) {
            words[v] = reinterpret_cast<const Word*>(row)[v * SPARK_WARP + threadIdx.x % SPARK_WARP];
        }
    }

    __device__ static __forceinline__ void widen_all(const Word (&words)[VECTORS], float (&values)[PER]) {
#pragma unroll
        for (unsigned v = 0u; v < VECTORS; ++v) {
            Rows::widen(words[v], values + v * WIDTH);
        }
    }

    // The next TOGETHER positions, or the `count` that are left; what is beyond counts for nothing.
    template <typename Walk>
    __device__ __forceinline__ void take(const Element* keys, const Element* values, Walk& walk, unsigned count,
                                         float scale) {
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

template <typename Rows, unsigned PER, typename Walk>
__device__ __forceinline__ void attend(const __nv_bfloat16* q, const typename Rows::Element* keys,
                                       const typename Rows::Element* values, __nv_bfloat16* out, Walk walk,
                                       unsigned begin, unsigned end, float scale, float output_scale,
                                       float (*outputs)[DECODE_MAX_HEAD_DIM], float* tops, float* weights) {
    constexpr unsigned HEAD_DIM = PER * SPARK_WARP;
    const unsigned warp = threadIdx.x / SPARK_WARP;
    const unsigned chunk = (end - begin + DECODE_WARPS - 1u) / DECODE_WARPS;
    const unsigned before = warp * chunk;
    const unsigned mine = before >= end - begin ? 0u : end - begin - before < chunk ? end - begin - before : chunk;
    walk.block += (begin + before) / walk.block_size;
    walk.in_block = (begin + before) % walk.block_size;
    Head<Rows, PER> head(q);
    for (unsigned done = 0u; done < mine; done += Head<Rows, PER>::TOGETHER) {
        head.take(keys, values, walk, mine - done, scale);
    }
#pragma unroll
    for (unsigned i = 0u; i < PER; ++i) {
        outputs[warp][Head<Rows, PER>::element(i)] = head.output[i];
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
        spark_store(out + d, (weight == 0.0f ? 0.0f : sum / weight) * output_scale);
    }
}

// One head of one query, by a block of 256 threads: out = softmax(q . keys * scale) values * output_scale over the
// positions [begin, end), end > begin, all rounding but the last in FP32. `walk` stands at position 0. head_dim is a
// multiple of 32, 512 at most; for any other, nothing is written.
template <typename Rows, typename Walk>
__device__ __forceinline__ void spark_paged_decode(const __nv_bfloat16* q, const typename Rows::Element* keys,
                                                   const typename Rows::Element* values, __nv_bfloat16* out,
                                                   const Walk& walk, unsigned begin, unsigned end, unsigned head_dim,
                                                   float scale, float output_scale) {
    __shared__ float outputs[DECODE_WARPS][DECODE_MAX_HEAD_DIM];
    __shared__ float tops[DECODE_WARPS];
    __shared__ float weights[DECODE_WARPS];
    switch (head_dim / SPARK_WARP) {
#define SPARK_HEAD(per)                                                                                         \
    case per:                                                                                                   \
        attend<Rows, per>(q, keys, values, out, walk, begin, end, scale, output_scale, outputs, tops, weights); \
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
