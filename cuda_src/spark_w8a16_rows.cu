// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_w8a16_rows: y = x W^T with E4M3 weights under one FP32 factor for 128 x 128 of them, for one to eight rows
// and up to two matrices in one launch, or for the groups of a block-diagonal matrix. This project's own kernels.
//
// Every E4M3 value is a BF16 number and goes as such through tensor-core steps with FP32 sums, by the way of
// spark_diagonal.cuh. A warp has OUTPUTS outputs next to each other. A lane takes eight elements of k at a time, l, l + 32,
// ... in ascending order: two steps from zero, whose sum s is added as fmaf(factor, s, sum). Four lanes that share a sum
// have the same factor. The eight sums of an output are added as the tree 16, 8, 4, 2, 1 of a warp and rounded once.
//
// So an output's bits depend on its own row of x and of W alone: neither on other rows and matrices nor on OUTPUTS.

#include "spark_diagonal.cuh"

constexpr unsigned W8_BLOCK = 128u;
constexpr unsigned W8_WARPS = W8_BLOCK / SPARK_WARP;
constexpr unsigned W8_UNIT = 8u;             // elements of k that a lane reads at a time
constexpr unsigned W8_SIDE = 128u;           // of a square with one factor
constexpr unsigned W8_SHORT = 1024u;         // K up to which a single row's warps have four outputs instead of two
constexpr unsigned W8_RAISE = 0x7b807b80u;   // 2^120 twice: what bytes come too small by

// A matrix of a launch.
struct W8Matrix {
    const uint2* codes;
    const float* factors;
    __nv_bfloat16* out;
    unsigned n;
    unsigned stride;
};

// Pairs (0, 2) and (1, 3) of a word of E4M3 bytes, as BF16; exact, but for 0x7f and 0xff, which are no NaN here.
__device__ __forceinline__ void w8_decode(unsigned bytes, unsigned (&pairs)[2]) {
    pairs[0] = spark_multiply_pairs(((bytes << 4) & 0x07f007f0u) | ((bytes << 8) & 0x80008000u), W8_RAISE);
    pairs[1] = spark_multiply_pairs(((bytes >> 4) & 0x07f007f0u) | (bytes & 0x80008000u), W8_RAISE);
}

// All ones where a byte is 0x7f or 0xff, else 0: a pair of BF16 NaN, to be laid over a pair of weights. A NaN weight makes
// its output NaN, whatever it is multiplied by.
__device__ __forceinline__ unsigned w8_nan(uint2 bytes) {
    const unsigned carries = ((bytes.x & 0x7f7f7f7fu) + 0x01010101u) | ((bytes.y & 0x7f7f7f7fu) + 0x01010101u);
    return (carries & 0x80808080u) != 0u ? 0xffffffffu : 0u;
}

// Outputs `output` .. of a matrix for m rows, ROWS at most; x is at the first row's elements, rows lie x_step units apart.
template <unsigned ROWS, unsigned OUTPUTS, unsigned DEPTH>
__device__ __forceinline__ void w8_outputs(const uint4* x, size_t x_step, unsigned m, const W8Matrix& matrix,
                                           unsigned output, unsigned units) {
    constexpr unsigned PAIRS = OUTPUTS / 2u;
    constexpr unsigned SIDE = W8_SIDE / W8_UNIT;
    const unsigned lane = threadIdx.x % SPARK_WARP;
    const float* factors = matrix.factors + static_cast<size_t>(output / W8_SIDE) * ((units + SIDE - 1u) / SIDE);
    const uint2* rows[OUTPUTS];
#pragma unroll
    for (unsigned o = 0u; o < OUTPUTS; ++o) {
        // An output past the last repeats the first one; nobody asks for it.
        rows[o] = matrix.codes + static_cast<size_t>(output + o < matrix.n ? output + o : output) * units;
    }
    float sums[ROWS][PAIRS][4] = {};
    for (unsigned base = 0u; base < units; base += DEPTH * SPARK_WARP) {
        uint2 codes[DEPTH][OUTPUTS] = {};
        float factor[DEPTH] = {};
#pragma unroll
        for (unsigned d = 0u; d < DEPTH; ++d) {
            const unsigned unit = base + d * SPARK_WARP + lane;
            if (unit < units) {
#pragma unroll
                for (unsigned o = 0u; o < OUTPUTS; ++o) {
                    codes[d][o] = rows[o][unit];
                }
            }
            if (unit / 4u * 4u < units) {  // any of four lanes with one sum, which the one that keeps it multiplies
                factor[d] = factors[unit / SIDE];
            }
        }
        if (base == 0u) {
            spark_wait_for_previous();
        }
#pragma unroll
        for (unsigned d = 0u; d < DEPTH; ++d) {
            const unsigned unit = base + d * SPARK_WARP + lane;
            if (base + d * SPARK_WARP >= units) {  // the same for all lanes
                break;
            }
            unsigned a[PAIRS][2][4];  // of both words: pair 0 of either output, pair 1 of either
#pragma unroll
            for (unsigned o = 0u; o < OUTPUTS; ++o) {
                const unsigned nan = w8_nan(codes[d][o]);
#pragma unroll
                for (unsigned word = 0u; word < 2u; ++word) {
                    unsigned pairs[2];
                    w8_decode(word == 0u ? codes[d][o].x : codes[d][o].y, pairs);
                    a[o / 2u][word][o % 2u] = word == 0u ? pairs[0] | nan : pairs[0];
                    a[o / 2u][word][2u + o % 2u] = pairs[1];
                }
            }
#pragma unroll
            for (unsigned r = 0u; r < ROWS; ++r) {
                if (r < m) {
                    uint4 values = {0u, 0u, 0u, 0u};
                    if (unit < units) {
                        values = x[r * x_step + unit];
                    }
#pragma unroll
                    for (unsigned p = 0u; p < PAIRS; ++p) {
                        float part[4] = {};
                        spark_mma(part, a[p][0], {__byte_perm(values.x, values.y, 0x5410u),
                                                  __byte_perm(values.x, values.y, 0x7632u)});
                        spark_mma(part, a[p][1], {__byte_perm(values.z, values.w, 0x5410u),
                                                  __byte_perm(values.z, values.w, 0x7632u)});
#pragma unroll
                        for (unsigned i = 0u; i < 4u; ++i) {
                            sums[r][p][i] = fmaf(factor[d], part[i], sums[r][p][i]);
                        }
                    }
                }
            }
        }
    }
#pragma unroll
    for (unsigned r = 0u; r < ROWS; ++r) {
        if (r < m) {
#pragma unroll
            for (unsigned o = 0u; o < OUTPUTS; ++o) {
                const float sum = spark_diagonal_sum(sums[r][o / 2u], o % 2u);
                if (lane == 0u && output + o < matrix.n) {
                    spark_store(matrix.out + static_cast<size_t>(r) * matrix.stride + output + o, sum);
                }
            }
        }
    }
}

// The outputs of this warp: those of the first matrix come first.
template <unsigned ROWS, unsigned OUTPUTS, unsigned DEPTH>
__device__ __forceinline__ void w8_warp(const __nv_bfloat16* X, unsigned m, const W8Matrix& first,
                                        const W8Matrix& second, unsigned K, unsigned groups) {
    spark_let_next_start();
    const unsigned units = K / W8_UNIT;
    const unsigned ahead = (first.n + OUTPUTS - 1u) / OUTPUTS;
    unsigned place = blockIdx.x * W8_WARPS + threadIdx.x / SPARK_WARP;
    const bool other = place >= ahead;
    W8Matrix matrix = other ? second : first;
    place -= other ? ahead : 0u;
    if (place >= (matrix.n + OUTPUTS - 1u) / OUTPUTS) {
        spark_wait_for_previous();
        return;
    }
    const unsigned output = place * OUTPUTS;
    const unsigned group = output / (matrix.n / groups);
    const size_t x_step = static_cast<size_t>(groups) * units;
    const uint4* x = reinterpret_cast<const uint4*>(X) + static_cast<size_t>(group) * units;
#pragma unroll 1
    for (unsigned from = 0u; from < m; from += ROWS) {  // weights come from the L2 cache again
        matrix.out += from == 0u ? 0u : static_cast<size_t>(ROWS) * matrix.stride;
        w8_outputs<ROWS, OUTPUTS, DEPTH>(x + from * x_step, x_step, m - from, matrix, output, units);
    }
}

// Yi[m * stride_i + n] = bf16(sum over k of X[m, k] * value_i[n, k] * factor_i[n / 128, k / 128]), codes [Ni, K]; N1 may
// be 0. groups > 1: the first matrix is that many, [N0 / groups, K] each, and group g of it reads X[m, g * K + k]; N1 is 0
// then. K % 8 == 0, N0 / groups % 4 == 0 where groups > 1; X on a 16-byte address, codes on 8-byte ones.

// One row: M is 1. A warp has two outputs, four where K <= 1024. Grid ceil((units of N0 + units of N1) / 4), block 128.
extern "C" __global__ void __launch_bounds__(128, 6)
    spark_w8a16_row(const __nv_bfloat16* __restrict__ X, const unsigned char* __restrict__ W0,
                    const unsigned char* __restrict__ W1, const float* __restrict__ S0, const float* __restrict__ S1,
                    __nv_bfloat16* __restrict__ Y0, __nv_bfloat16* __restrict__ Y1, unsigned int M, unsigned int N0,
                    unsigned int N1, unsigned int K, unsigned int stride0, unsigned int stride1, unsigned int groups) {
    const W8Matrix first = {reinterpret_cast<const uint2*>(W0), S0, Y0, N0, stride0};
    const W8Matrix second = {reinterpret_cast<const uint2*>(W1), S1, Y1, N1, stride1};
    if (K <= W8_SHORT) {
        w8_warp<1u, 4u, 4u>(X, M, first, second, K, groups);
    } else {
        w8_warp<1u, 2u, 8u>(X, M, first, second, K, groups);
    }
}

// One to eight rows, four of them at a time, and four outputs a warp. Grid ceil((ceil(N0 / 4) + ceil(N1 / 4)) / 4), block 128.
extern "C" __global__ void __launch_bounds__(128, 3)
    spark_w8a16_rows(const __nv_bfloat16* __restrict__ X, const unsigned char* __restrict__ W0,
                     const unsigned char* __restrict__ W1, const float* __restrict__ S0, const float* __restrict__ S1,
                     __nv_bfloat16* __restrict__ Y0, __nv_bfloat16* __restrict__ Y1, unsigned int M, unsigned int N0,
                     unsigned int N1, unsigned int K, unsigned int stride0, unsigned int stride1,
                     unsigned int groups) {
    const W8Matrix first = {reinterpret_cast<const uint2*>(W0), S0, Y0, N0, stride0};
    const W8Matrix second = {reinterpret_cast<const uint2*>(W1), S1, Y1, N1, stride1};
    w8_warp<4u, 4u, 4u>(X, M, first, second, K, groups);
}
