// SPDX-License-Identifier: AGPL-3.0-only
// Root mean square normalisation of one row by one block, alone or after a residual addition; norm.cu,
// rms_norm_vanilla.cu and spark_residual_add_rms_norm_vanilla.cu make kernels of it.
//
// Order of the sum: thread t adds x0*x0 + x1*x1 of the pairs t, t + blockDim.x, ... one term a pair, then the tree of
// spark_block_sum. An odd row ends with half a pair. The narrow form (16-bit accesses, for rows that do not start on a
// 4-byte address, as every second row of odd length) adds in the same order. Pointers may alias: a thread reads
// element i before it writes element i.
//
// The first pairs of a thread stay in registers between the sum and the scaling, and their weights are asked for before
// the kernel waits for the one before it.
#pragma once

#include "spark_common.cuh"

// Elements 2*pair and 2*pair + 1 of a row as one word; beyond the end of an odd row, zero.
template <bool WIDE>
__device__ __forceinline__ unsigned spark_load_pair(const __nv_bfloat16* row, unsigned pair, unsigned size) {
    const bool whole = 2u * pair + 1u < size;
    if (WIDE && whole) {
        return reinterpret_cast<const unsigned*>(row)[pair];
    }
    const unsigned low = __bfloat16_as_ushort(row[2u * pair]);
    const unsigned high = whole ? __bfloat16_as_ushort(row[2u * pair + 1u]) : 0u;
    return low | (high << 16);
}

template <bool WIDE>
__device__ __forceinline__ void spark_store_pair(__nv_bfloat16* row, unsigned pair, unsigned size, unsigned word) {
    const bool whole = 2u * pair + 1u < size;
    if (WIDE && whole) {
        reinterpret_cast<unsigned*>(row)[pair] = word;
        return;
    }
    row[2u * pair] = __ushort_as_bfloat16(static_cast<unsigned short>(word & 0xffffu));
    if (whole) {
        row[2u * pair + 1u] = __ushort_as_bfloat16(static_cast<unsigned short>(word >> 16));
    }
}

__device__ __forceinline__ unsigned spark_pairs(unsigned size) { return size / 2u + (size & 1u); }

__device__ __forceinline__ float spark_inverse_rms(float sum_of_squares, unsigned size, float eps) {
    return rsqrtf(sum_of_squares / static_cast<float>(size) + eps);
}

// (x * r) * weight, or (x * r) * (1 + weight), of the pair in `x`.
template <bool ONE_PLUS>
__device__ __forceinline__ unsigned spark_scale_pair(unsigned x, float r, unsigned weight) {
    const float w0 = ONE_PLUS ? 1.0f + spark_low(weight) : spark_low(weight);
    const float w1 = ONE_PLUS ? 1.0f + spark_high(weight) : spark_high(weight);
    return spark_pack(spark_low(x) * r * w0, spark_high(x) * r * w1);
}

constexpr unsigned RMS_KEPT = 4u;  // pairs that a thread keeps: rows of up to 8192 elements and 1024 threads

// This thread's first pairs of a row: threadIdx.x, + blockDim.x, ...
struct RmsPairs {
    unsigned word[RMS_KEPT];
};

template <bool WIDE>
__device__ __forceinline__ RmsPairs spark_load_pairs(const __nv_bfloat16* row, unsigned pairs, unsigned size) {
    RmsPairs found = {};
#pragma unroll
    for (unsigned turn = 0u; turn < RMS_KEPT; ++turn) {
        const unsigned pair = turn * blockDim.x + threadIdx.x;
        if (pair < pairs) {
            found.word[turn] = spark_load_pair<WIDE>(row, pair, size);
        }
    }
    return found;
}

// Calls kept(pair, turn) for the pairs of this thread that it keeps, and then later(pair) for those beyond.
template <class Kept, class Later>
__device__ __forceinline__ void spark_each_pair(unsigned pairs, const Kept& kept, const Later& later) {
#pragma unroll
    for (unsigned turn = 0u; turn < RMS_KEPT; ++turn) {
        const unsigned pair = turn * blockDim.x + threadIdx.x;
        if (pair < pairs) {
            kept(pair, turn);
        }
    }
    for (unsigned pair = RMS_KEPT * blockDim.x + threadIdx.x; pair < pairs; pair += blockDim.x) {
        later(pair);
    }
}

// Rows of `size` elements. `copy`, where given, receives the bits of the input row.
template <bool WIDE, bool ONE_PLUS>
__device__ __forceinline__ void spark_rms_norm_row(const __nv_bfloat16* x, const __nv_bfloat16* weight,
                                                   __nv_bfloat16* y, __nv_bfloat16* copy, unsigned size, float eps) {
    const unsigned pairs = spark_pairs(size);
    const RmsPairs weights = spark_load_pairs<WIDE>(weight, pairs, size);
    spark_wait_for_previous();
    const RmsPairs words = spark_load_pairs<WIDE>(x, pairs, size);
    float squares = 0.0f;
    const auto add = [&](unsigned pair, unsigned word) {
        if (copy != nullptr) {
            spark_store_pair<WIDE>(copy, pair, size, word);
        }
        const float x0 = spark_low(word);
        const float x1 = spark_high(word);
        squares += x0 * x0 + x1 * x1;
    };
    spark_each_pair(
        pairs, [&](unsigned pair, unsigned turn) { add(pair, words.word[turn]); },
        [&](unsigned pair) { add(pair, spark_load_pair<WIDE>(x, pair, size)); });
    const float r = spark_inverse_rms(spark_block_sum(squares), size, eps);
    const auto scale = [&](unsigned pair, unsigned word, unsigned w) {
        spark_store_pair<WIDE>(y, pair, size, spark_scale_pair<ONE_PLUS>(word, r, w));
    };
    spark_each_pair(
        pairs, [&](unsigned pair, unsigned turn) { scale(pair, words.word[turn], weights.word[turn]); },
        [&](unsigned pair) {
            scale(pair, spark_load_pair<WIDE>(x, pair, size), spark_load_pair<WIDE>(weight, pair, size));
        });
}

// The row of this block. `copy` may be NULL.
template <bool ONE_PLUS>
__device__ __forceinline__ void spark_rms_norm(const __nv_bfloat16* input, const __nv_bfloat16* weight,
                                               __nv_bfloat16* output, __nv_bfloat16* copy, unsigned size, float eps) {
    const size_t start = static_cast<size_t>(blockIdx.x) * size;
    const __nv_bfloat16* x = input + start;
    __nv_bfloat16* y = output + start;
    __nv_bfloat16* kept = copy == nullptr ? nullptr : copy + start;
    if (spark_aligned(x, 4u) && spark_aligned(weight, 4u) && spark_aligned(y, 4u) && spark_aligned(kept, 4u)) {
        spark_rms_norm_row<true, ONE_PLUS>(x, weight, y, kept, size, eps);
    } else {
        spark_rms_norm_row<false, ONE_PLUS>(x, weight, y, kept, size, eps);
    }
}

// s = hidden + src in FP32. hidden = residual = bf16(s); r comes from the unrounded s, the numerator is the rounded
// one: output = (bf16(s) * r) * weight, or * (1 + weight). src may be output.
template <bool WIDE, bool ONE_PLUS>
__device__ __forceinline__ void spark_add_norm_row(__nv_bfloat16* hidden, const __nv_bfloat16* src,
                                                   const __nv_bfloat16* weight, __nv_bfloat16* output,
                                                   __nv_bfloat16* residual, unsigned size, float eps) {
    const unsigned pairs = spark_pairs(size);
    const RmsPairs weights = spark_load_pairs<WIDE>(weight, pairs, size);
    spark_wait_for_previous();
    RmsPairs sums = spark_load_pairs<WIDE>(hidden, pairs, size);
    const RmsPairs added = spark_load_pairs<WIDE>(src, pairs, size);
    float squares = 0.0f;
    const auto add = [&](unsigned pair, unsigned h, unsigned s) {
        const float s0 = spark_low(h) + spark_low(s);
        const float s1 = spark_high(h) + spark_high(s);
        const unsigned rounded = spark_pack(s0, s1);
        spark_store_pair<WIDE>(hidden, pair, size, rounded);
        spark_store_pair<WIDE>(residual, pair, size, rounded);
        squares += s0 * s0 + s1 * s1;
        return rounded;
    };
    spark_each_pair(
        pairs,
        [&](unsigned pair, unsigned turn) { sums.word[turn] = add(pair, sums.word[turn], added.word[turn]); },
        [&](unsigned pair) {
            add(pair, spark_load_pair<WIDE>(hidden, pair, size), spark_load_pair<WIDE>(src, pair, size));
        });
    const float r = spark_inverse_rms(spark_block_sum(squares), size, eps);
    const auto scale = [&](unsigned pair, unsigned h, unsigned w) {
        spark_store_pair<WIDE>(output, pair, size, spark_scale_pair<ONE_PLUS>(h, r, w));
    };
    spark_each_pair(
        pairs, [&](unsigned pair, unsigned turn) { scale(pair, sums.word[turn], weights.word[turn]); },
        [&](unsigned pair) {
            scale(pair, spark_load_pair<WIDE>(hidden, pair, size), spark_load_pair<WIDE>(weight, pair, size));
        });
}

// The row of this block.
template <bool ONE_PLUS>
__device__ __forceinline__ void spark_residual_add_rms_norm(__nv_bfloat16* hidden, const __nv_bfloat16* src,
                                                            const __nv_bfloat16* weight, __nv_bfloat16* output,
                                                            __nv_bfloat16* residual, unsigned size, float eps) {
    const size_t start = static_cast<size_t>(blockIdx.x) * size;
    __nv_bfloat16* h = hidden + start;
    const __nv_bfloat16* s = src + start;
    __nv_bfloat16* y = output + start;
    __nv_bfloat16* kept = residual + start;
    if (spark_aligned(h, 4u) && spark_aligned(s, 4u) && spark_aligned(weight, 4u) && spark_aligned(y, 4u) &&
        spark_aligned(kept, 4u)) {
        spark_add_norm_row<true, ONE_PLUS>(h, s, weight, y, kept, size, eps);
    } else {
        spark_add_norm_row<false, ONE_PLUS>(h, s, weight, y, kept, size, eps);
    }
}
