// SPDX-License-Identifier: AGPL-3.0-only
// The dot product of BF16 activations with NVFP4 weights: the two orders of arithmetic that kernels share, so that they
// can be bit-equal.
//
// A row of K weights is K / 2 bytes of E2M1 codes (low nibble first) and K / 16 block scales in E4M3; a chunk is the 16
// values under one scale. A weight is code * (scale * scale2); the factor in brackets is rounded once. 64 lanes share an
// output; each warp of them adds up as the tree 16, 8, 4, 2, 1, and the result is first warp + second.
//
// Scaled by chunk: lane l has two accumulators; number p adds the chunks 2 l + p + 128 j, j ascending. A chunk is one
// chain of 16 fused multiply-adds over a * code, k ascending from 0, and one more that adds factor * chain. The lane's
// value is accumulator 0 + accumulator 1.
//
// Scaled by weight: lane l adds the half chunks l, l + 64, ... in ascending k; factor * code, its product with a, and
// the sum each round.
//
// Rows of A lie on 16-byte addresses and rows of codes on 8-byte ones: K % 16 == 0 and aligned bases. 4-byte addresses
// are enough for codes that are scaled by weight.
#pragma once

#include "spark_common.cuh"

constexpr unsigned SPARK_W4_LANES = 64u;
constexpr unsigned SPARK_W4_CHUNK = 16u;

// An E2M1 code: its three bits of exponent and fraction mean the same in FP32, 2^126 times smaller, subnormal included.
__device__ __forceinline__ float spark_e2m1(unsigned code) {
    return __uint_as_float(((code & 8u) << 28) | ((code & 7u) << 22)) * 0x1p126f;
}

// An E4M3 number: likewise, 2^120 times smaller; 0x7f and 0xff are NaN.
__device__ __forceinline__ float spark_e4m3(unsigned code) {
    const float value = __uint_as_float(((code & 0x80u) << 24) | ((code & 0x7fu) << 20)) * 0x1p120f;
    return (code & 0x7fu) == 0x7fu ? __uint_as_float(0x7fffffffu) : value;
}

// The 8 values of a word of codes.
__device__ __forceinline__ void spark_w4_decode(float (&values)[8], unsigned codes) {
#pragma unroll
    for (unsigned i = 0u; i < 8u; ++i) {
        values[i] = spark_e2m1(codes >> (4u * i));
    }
}

// part + the 8 products of half a chunk, ascending, each fused.
__device__ __forceinline__ float spark_w4_fused(float part, uint4 a, const float (&codes)[8]) {
    part = fmaf(spark_low(a.x), codes[0], part);
    part = fmaf(spark_high(a.x), codes[1], part);
    part = fmaf(spark_low(a.y), codes[2], part);
    part = fmaf(spark_high(a.y), codes[3], part);
    part = fmaf(spark_low(a.z), codes[4], part);
    part = fmaf(spark_high(a.z), codes[5], part);
    part = fmaf(spark_low(a.w), codes[6], part);
    return fmaf(spark_high(a.w), codes[7], part);
}

// Some rows of A and some rows of weights, the latter next to each other.
struct SparkW4Rows {
    const uint4* a;  // two words a chunk
    size_t a_step;   // words from one row to the next
    unsigned rows;
    const uint2* codes;  // one a chunk
    const unsigned char* scales;
    unsigned outputs;
    float scale2;
    unsigned chunks;  // in a row
};

// Adds one chunk to an accumulator of each of the first `rows` x `outputs` sums; ROWS and OUTPUTS are the most there
// can be.
template <unsigned ROWS, unsigned OUTPUTS>
__device__ __forceinline__ void spark_w4_chunk(float (&sums)[ROWS][OUTPUTS], const SparkW4Rows& from, unsigned chunk) {
    uint2 codes[OUTPUTS] = {};
    float factor[OUTPUTS] = {};
#pragma unroll
    for (unsigned o = 0u; o < OUTPUTS; ++o) {
        if (o < from.outputs) {
            const size_t at = static_cast<size_t>(o) * from.chunks + chunk;
            codes[o] = from.codes[at];
            factor[o] = spark_e4m3(from.scales[at]) * from.scale2;
        }
    }
    float parts[ROWS][OUTPUTS] = {};
#pragma unroll
    for (unsigned half = 0u; half < 2u; ++half) {
        float values[OUTPUTS][8];
#pragma unroll
        for (unsigned o = 0u; o < OUTPUTS; ++o) {
            spark_w4_decode(values[o], half == 0u ? codes[o].x : codes[o].y);
        }
#pragma unroll
        for (unsigned r = 0u; r < ROWS; ++r) {
            if (r < from.rows) {
                const uint4 a = from.a[r * from.a_step + 2u * static_cast<size_t>(chunk) + half];
#pragma unroll
                for (unsigned o = 0u; o < OUTPUTS; ++o) {
                    parts[r][o] = spark_w4_fused(parts[r][o], a, values[o]);
                }
            }
        }
    }
#pragma unroll
    for (unsigned r = 0u; r < ROWS; ++r) {
#pragma unroll
        for (unsigned o = 0u; o < OUTPUTS; ++o) {
            sums[r][o] = fmaf(factor[o], parts[r][o], sums[r][o]);
        }
    }
}

// The values of lane `lane` (0..63), scaled by chunk.
template <unsigned ROWS, unsigned OUTPUTS>
__device__ __forceinline__ void spark_w4_lane(float (&values)[ROWS][OUTPUTS], const SparkW4Rows& from, unsigned lane) {
    float first[ROWS][OUTPUTS] = {};
    float second[ROWS][OUTPUTS] = {};
    for (unsigned chunk = 2u * lane; chunk < from.chunks; chunk += 2u * SPARK_W4_LANES) {
        spark_w4_chunk(first, from, chunk);
        if (chunk + 1u < from.chunks) {
            spark_w4_chunk(second, from, chunk + 1u);
        }
    }
#pragma unroll
    for (unsigned r = 0u; r < ROWS; ++r) {
#pragma unroll
        for (unsigned o = 0u; o < OUTPUTS; ++o) {
            values[r][o] = first[r][o] + second[r][o];
        }
    }
}

// C[m, n] = bf16(A[m] . B[n]), scaled by chunk, for OUTPUTS outputs of up to ROWS rows: the work of a block of 256
// threads, four groups of 64 lanes. ROW_GROUPS of them take turns at the rows, the others share the outputs, so that
// each weight and each activation that a thread loads is used several times. Rows beyond ROWS are left out.
template <unsigned ROWS, unsigned ROW_GROUPS, unsigned OUTPUTS>
__device__ __forceinline__ void spark_w4_block(const __nv_bfloat16* a, const unsigned char* packed,
                                               const unsigned char* scales, float scale2, __nv_bfloat16* c, unsigned m,
                                               unsigned n, unsigned k) {
    constexpr unsigned GROUPS = 4u;
    constexpr unsigned OWN_ROWS = (ROWS + ROW_GROUPS - 1u) / ROW_GROUPS;
    constexpr unsigned OWN_OUTPUTS = OUTPUTS * ROW_GROUPS / GROUPS;
    __shared__ float warp_sums[ROWS * OUTPUTS][2];
    const unsigned group = threadIdx.x / SPARK_W4_LANES;
    const unsigned lane = threadIdx.x % SPARK_W4_LANES;
    const unsigned rows = m < ROWS ? m : ROWS;
    const size_t block_output = static_cast<size_t>(blockIdx.x) * OUTPUTS;
    const unsigned outputs = block_output < n ? n - static_cast<unsigned>(block_output) : 0u;
    const unsigned row = group % ROW_GROUPS;
    const unsigned output = group / ROW_GROUPS * OWN_OUTPUTS;

    // Threads without a row or an output have nothing to add but do reach the barrier.
    if (row < rows && output < outputs) {
        SparkW4Rows mine;
        mine.chunks = k / SPARK_W4_CHUNK;
        mine.a = reinterpret_cast<const uint4*>(a) + 2u * static_cast<size_t>(row) * mine.chunks;
        mine.a_step = 2u * static_cast<size_t>(ROW_GROUPS) * mine.chunks;
        mine.rows = (rows - row + ROW_GROUPS - 1u) / ROW_GROUPS;
        mine.codes = reinterpret_cast<const uint2*>(packed) + (block_output + output) * mine.chunks;
        mine.scales = scales + (block_output + output) * mine.chunks;
        mine.outputs = outputs - output;
        mine.scale2 = scale2;
        float values[OWN_ROWS][OWN_OUTPUTS];
        spark_w4_lane(values, mine, lane);
#pragma unroll
        for (unsigned r = 0u; r < OWN_ROWS; ++r) {
            if (r < mine.rows) {
#pragma unroll
                for (unsigned o = 0u; o < OWN_OUTPUTS; ++o) {
                    const float sum = spark_warp_sum(values[r][o], SPARK_WARP);
                    if (lane % SPARK_WARP == 0u) {
                        warp_sums[(row + r * ROW_GROUPS) * OUTPUTS + output + o][lane / SPARK_WARP] = sum;
                    }
                }
            }
        }
    }
    __syncthreads();
    static_assert(ROWS * OUTPUTS <= GROUPS * SPARK_W4_LANES, "a thread stores one output");
    if (threadIdx.x < rows * OUTPUTS && threadIdx.x % OUTPUTS < outputs) {
        const float* halves = warp_sums[threadIdx.x];
        const size_t at = static_cast<size_t>(threadIdx.x / OUTPUTS) * n + block_output + threadIdx.x % OUTPUTS;
        spark_store(c + at, halves[0] + halves[1]);
    }
}

// The same for one row and a warp an output, eight outputs a block: each thread is two lanes, 32 apart.
__device__ __forceinline__ void spark_w4_warps(const __nv_bfloat16* a, const unsigned char* packed,
                                               const unsigned char* scales, float scale2, __nv_bfloat16* c, unsigned n,
                                               unsigned k) {
    constexpr unsigned WARPS = 8u;
    const unsigned lane = threadIdx.x % SPARK_WARP;
    const size_t output = static_cast<size_t>(blockIdx.x) * WARPS + threadIdx.x / SPARK_WARP;
    if (output >= n) {
        return;
    }
    const unsigned chunks = k / SPARK_W4_CHUNK;
    const SparkW4Rows mine = {reinterpret_cast<const uint4*>(a),
                              0u,
                              1u,
                              reinterpret_cast<const uint2*>(packed) + output * chunks,
                              scales + output * chunks,
                              1u,
                              scale2,
                              chunks};
    float first[1][1];
    float second[1][1];
    spark_w4_lane(first, mine, lane);
    spark_w4_lane(second, mine, lane + SPARK_WARP);
    const float half = spark_warp_sum(first[0][0], SPARK_WARP);
    const float sum = half + spark_warp_sum(second[0][0], SPARK_WARP);
    if (lane == 0u) {
        spark_store(c + output, sum);
    }
}

// sum + two products of weights that are scaled first.
__device__ __forceinline__ float spark_w4_pair(float sum, unsigned a, float factor, float low, float high) {
    sum = sum + spark_low(a) * (low * factor);
    return sum + spark_high(a) * (high * factor);
}

__device__ __forceinline__ float spark_w4_both(const float* halves) { return halves[0] + halves[1]; }

// A[r] . B[output] of ROWS rows, scaled by weight, in FP32: four outputs a block of 256 threads, right in lane 0 of
// each 64. One call a kernel, by every thread.
template <unsigned ROWS>
__device__ __forceinline__ void spark_w4_by_weight(float (&totals)[ROWS], const __nv_bfloat16* a,
                                                   const unsigned char* packed, const unsigned char* scales,
                                                   float scale2, size_t output, unsigned n, unsigned k) {
    __shared__ float warp_sums[ROWS][8];
    const unsigned lane = threadIdx.x % SPARK_W4_LANES;
    const unsigned words = output < n ? k / 8u : 0u;
    const uint4* rows = reinterpret_cast<const uint4*>(a);
    const unsigned* codes = reinterpret_cast<const unsigned*>(packed) + output * words;
    const unsigned char* row_scales = scales + output * (words / 2u);
    float sums[ROWS] = {};
    for (unsigned word = lane; word < words; word += SPARK_W4_LANES) {
        const float factor = spark_e4m3(row_scales[word / 2u]) * scale2;
        float w[8];
        spark_w4_decode(w, codes[word]);
#pragma unroll
        for (unsigned r = 0u; r < ROWS; ++r) {
            const uint4 x = rows[static_cast<size_t>(r) * words + word];
            sums[r] = spark_w4_pair(sums[r], x.x, factor, w[0], w[1]);
            sums[r] = spark_w4_pair(sums[r], x.y, factor, w[2], w[3]);
            sums[r] = spark_w4_pair(sums[r], x.z, factor, w[4], w[5]);
            sums[r] = spark_w4_pair(sums[r], x.w, factor, w[6], w[7]);
        }
    }
#pragma unroll
    for (unsigned r = 0u; r < ROWS; ++r) {
        const float sum = spark_warp_sum(sums[r], SPARK_WARP);
        if (threadIdx.x % SPARK_WARP == 0u) {
            warp_sums[r][threadIdx.x / SPARK_WARP] = sum;
        }
    }
    __syncthreads();
#pragma unroll
    for (unsigned r = 0u; r < ROWS; ++r) {
        totals[r] = spark_w4_both(warp_sums[r] + threadIdx.x / SPARK_W4_LANES * 2u);
    }
}

// The same for one row.
__device__ __forceinline__ float spark_w4_by_weight(const __nv_bfloat16* a, const unsigned char* packed,
                                                    const unsigned char* scales, float scale2, size_t output,
                                                    unsigned n, unsigned k) {
    float total[1];
    spark_w4_by_weight(total, a, packed, scales, scale2, output, n, k);
    return total[0];
}

// Where output n of a joint projection goes, whose rows are each head's query and then its gate: all queries, then all
// gates.
__device__ __forceinline__ size_t spark_w4_apart(size_t output, unsigned num_heads, unsigned head_dim) {
    const size_t head = output / (2u * head_dim);
    const size_t element = output % (2u * head_dim);
    const size_t at = element < head_dim ? element : static_cast<size_t>(num_heads) * head_dim + element - head_dim;
    return head * head_dim + at;
}
