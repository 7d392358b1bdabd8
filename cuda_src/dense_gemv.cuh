// SPDX-License-Identifier: AGPL-3.0-only
// The dot product that every BF16 GEMV of this set computes, in one fixed order, so that kernels can be bit-equal.
//
// 64 threads share an output. Thread l adds the 8-element chunks l, l + 64, ... in ascending k, one FP32 addition for
// each product (which is exact unless it underflows: two BF16 have 16 significant bits between them). Each warp adds
// its lanes as the tree 16, 8, 4, 2, 1; the result is first warp + second. Chunks are 16-byte loads: K % 8 == 0 and
// bases on 16-byte addresses.
#pragma once

#include "spark_common.cuh"

constexpr unsigned SPARK_DOT_THREADS = 64u;
constexpr unsigned SPARK_DOT_CHUNK = 8u;

__device__ __forceinline__ float spark_dot_word(float sum, unsigned a, unsigned b) {
    sum = sum + spark_low(a) * spark_low(b);
    return sum + spark_high(a) * spark_high(b);
}

// sum + the 8 products of a chunk, ascending.
__device__ __forceinline__ float spark_dot_chunk(float sum, uint4 a, uint4 b) {
    sum = spark_dot_word(sum, a.x, b.x);
    sum = spark_dot_word(sum, a.y, b.y);
    sum = spark_dot_word(sum, a.z, b.z);
    return spark_dot_word(sum, a.w, b.w);
}

// `sum` and the share of a thread of a row of `chunks` chunks, from chunk c on: its lane (0..63) for the whole share. Four
// chunks are in flight at a time.
__device__ __forceinline__ float spark_dot_share(const uint4* a, const uint4* b, unsigned chunks, unsigned c,
                                                 float sum = 0.0f) {
    constexpr unsigned DEPTH = 4u;
    for (; c + (DEPTH - 1u) * SPARK_DOT_THREADS < chunks; c += DEPTH * SPARK_DOT_THREADS) {
        uint4 wa[DEPTH];
        uint4 wb[DEPTH];
#pragma unroll
        for (unsigned d = 0u; d < DEPTH; ++d) {
            wb[d] = b[c + d * SPARK_DOT_THREADS];
            wa[d] = a[c + d * SPARK_DOT_THREADS];
        }
#pragma unroll
        for (unsigned d = 0u; d < DEPTH; ++d) {
            sum = spark_dot_chunk(sum, wa[d], wb[d]);
        }
    }
    for (; c < chunks; c += SPARK_DOT_THREADS) {
        sum = spark_dot_chunk(sum, a[c], b[c]);
    }
    return sum;
}
