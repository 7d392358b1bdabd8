// SPDX-License-Identifier: AGPL-3.0-only
// The dot product of rows with MXFP4 weights, in the one order of arithmetic that all kernels of the format share, so
// that they are bit-equal.
//
// A row of K weights is K / 2 bytes of E2M1 codes (low nibble first) and K / 32 scales in E8M0: byte b is 2^(b - 127),
// 0xff is NaN. A chunk is the 32 values under one scale, 16 bytes of codes. No factor of the tensor.
//
// 64 lanes share an output. Lane l has two accumulators; number p adds half p of the chunks l, l + 64, ... ascending. A
// half is one chain of 16 fused multiply-adds over a * code, k ascending from 0, and one more that adds scale * chain.
// The lane's value is accumulator 0 + accumulator 1; each warp of lanes adds up as the tree 16, 8, 4, 2, 1; the result
// is first warp + second. That is the order of w4a16_gemv: weights that NVFP4 can hold as well have the same bits
// there.
//
// K % 32 == 0. Rows of BF16 and of codes lie on 16-byte addresses.
#pragma once

#include "w4a16.cuh"

constexpr unsigned MXFP4_LANES = 64u;
constexpr unsigned MXFP4_CHUNK = 32u;
constexpr unsigned MXFP4_WORDS = MXFP4_CHUNK / 8u;  // of eight values, in a chunk

// An E8M0 scale. 2^-127 is subnormal in FP32.
__device__ __forceinline__ float mxfp4_scale(unsigned byte) {
    const unsigned bits = byte == 0u ? 0x00400000u : byte << 23;
    return __uint_as_float(byte == 0xffu ? 0x7fffffffu : bits);
}

__device__ __forceinline__ unsigned mxfp4_word(uint4 codes, unsigned word) {
    return word == 0u ? codes.x : word == 1u ? codes.y : word == 2u ? codes.z : codes.w;
}

// BF16 rows of K, next to each other, 8 at most: the index of a word fits in 32 bits, which saves registers.
struct Mxfp4Rows {
    const uint4* words;
    unsigned step;  // words of a row

    // Eight values of row r in FP32.
    __device__ __forceinline__ void load(float (&a)[8], unsigned r, unsigned word) const {
        const uint4 bits = words[r * step + word];
        a[0] = spark_low(bits.x);
        a[1] = spark_high(bits.x);
        a[2] = spark_low(bits.y);
        a[3] = spark_high(bits.y);
        a[4] = spark_low(bits.z);
        a[5] = spark_high(bits.z);
        a[6] = spark_low(bits.w);
        a[7] = spark_high(bits.w);
    }
};

// Weight rows next to each other.
struct Mxfp4Weights {
    const uint4* codes;  // one a chunk
    const unsigned char* scales;
    unsigned outputs;
    unsigned chunks;  // in a row
};

// Adds a chunk of each of OUTPUTS weight rows to both accumulators of ROWS x OUTPUTS sums.
template <unsigned ROWS, unsigned OUTPUTS, class Rows>
__device__ __forceinline__ void mxfp4_chunk(float (&sums)[ROWS][OUTPUTS][2], const Rows& rows, unsigned chunk,
                                            const uint4 (&codes)[OUTPUTS], const unsigned (&scales)[OUTPUTS]) {
#pragma unroll
    for (unsigned half = 0u; half < 2u; ++half) {
        float parts[ROWS][OUTPUTS] = {};
#pragma unroll
        for (unsigned word = 2u * half; word < 2u * half + 2u; ++word) {
            float values[OUTPUTS][8];
#pragma unroll
            for (unsigned o = 0u; o < OUTPUTS; ++o) {
                spark_w4_decode(values[o], mxfp4_word(codes[o], word));
            }
#pragma unroll
            for (unsigned r = 0u; r < ROWS; ++r) {
                float a[8];
                rows.load(a, r, MXFP4_WORDS * chunk + word);
#pragma unroll
                for (unsigned o = 0u; o < OUTPUTS; ++o) {
#pragma unroll
                    for (unsigned i = 0u; i < 8u; ++i) {
                        parts[r][o] = fmaf(a[i], values[o][i], parts[r][o]);
                    }
                }
            }
        }
#pragma unroll
        for (unsigned o = 0u; o < OUTPUTS; ++o) {
            const float scale = mxfp4_scale(scales[o]);
#pragma unroll
            for (unsigned r = 0u; r < ROWS; ++r) {
                sums[r][o][half] = fmaf(scale, parts[r][o], sums[r][o][half]);
            }
        }
    }
}

// The accumulators of a thread that is OWN lanes: lane, lane + 64 / OWN, ... DEPTH chunks of each weight row are loaded
// before the first is used. Where there are fewer than OUTPUTS weight rows, the first stands in for those past the
// last.
template <unsigned OWN, unsigned ROWS, unsigned OUTPUTS, unsigned DEPTH, class Rows>
__device__ __forceinline__ void mxfp4_lanes(float (&sums)[OWN][ROWS][OUTPUTS][2], const Rows& rows,
                                            const Mxfp4Weights& weights, unsigned lane) {
    constexpr unsigned STEP = MXFP4_LANES / OWN;
    static_assert(DEPTH % OWN == 0u, "a turn has to begin with the first lane");
    for (unsigned first = lane; first < weights.chunks; first += DEPTH * STEP) {
        uint4 codes[DEPTH][OUTPUTS] = {};
        unsigned scales[DEPTH][OUTPUTS] = {};
#pragma unroll
        for (unsigned d = 0u; d < DEPTH; ++d) {
            const unsigned chunk = first + d * STEP;
            if (chunk < weights.chunks) {
#pragma unroll
                for (unsigned o = 0u; o < OUTPUTS; ++o) {
                    const size_t at = static_cast<size_t>(o < weights.outputs ? o : 0u) * weights.chunks + chunk;
                    codes[d][o] = weights.codes[at];
                    scales[d][o] = weights.scales[at];
                }
            }
        }
#pragma unroll
        for (unsigned d = 0u; d < DEPTH; ++d) {
            const unsigned chunk = first + d * STEP;
            if (chunk < weights.chunks) {
                mxfp4_chunk(sums[d % OWN], rows, chunk, codes[d], scales[d]);
            }
        }
    }
}

constexpr unsigned MXFP4_GROUPS = 4u;  // of 64 lanes, in a block of 256 threads

// C[r * out_stride + n] = bf16(A[r] . B[n]) for ROWS rows and the 4 * OUTPUTS outputs of a block of 256 threads. A
// group of 64 lanes takes OUTPUTS outputs next to each other, TOGETHER of them at a time; each byte of B is loaded
// once.
template <unsigned ROWS, unsigned OUTPUTS, unsigned TOGETHER, unsigned DEPTH>
__device__ __forceinline__ void mxfp4_block(const __nv_bfloat16* A, const unsigned char* packed,
                                            const unsigned char* scales, __nv_bfloat16* C, unsigned N, unsigned K,
                                            size_t out_stride, float (*warp_sums)[2u * MXFP4_GROUPS]) {
    constexpr unsigned BLOCK_OUTPUTS = MXFP4_GROUPS * OUTPUTS;
    const unsigned lane = threadIdx.x % MXFP4_LANES;
    const unsigned chunks = K / MXFP4_CHUNK;
    const size_t block_output = static_cast<size_t>(blockIdx.x) * BLOCK_OUTPUTS;
    const Mxfp4Rows rows = {reinterpret_cast<const uint4*>(A), MXFP4_WORDS * chunks};
#pragma unroll 1
    for (unsigned from = 0u; from < OUTPUTS; from += TOGETHER) {
        const size_t output = block_output + threadIdx.x / MXFP4_LANES * OUTPUTS + from;
        float sums[1][ROWS][TOGETHER][2] = {};
        // Threads past N have nothing to add but do reach the barrier.
        if (output < N) {
            const size_t at = output * chunks;
            const Mxfp4Weights weights = {reinterpret_cast<const uint4*>(packed) + at, scales + at,
                                          N - static_cast<unsigned>(output), chunks};
            mxfp4_lanes<1u, ROWS, TOGETHER, DEPTH>(sums, rows, weights, lane);
        }
#pragma unroll
        for (unsigned r = 0u; r < ROWS; ++r) {
#pragma unroll
            for (unsigned o = 0u; o < TOGETHER; ++o) {
                const float sum = spark_warp_sum(sums[0][r][o][0] + sums[0][r][o][1], SPARK_WARP);
                if (threadIdx.x % SPARK_WARP == 0u) {
                    warp_sums[r * OUTPUTS + from + o][threadIdx.x / SPARK_WARP] = sum;
                }
            }
        }
    }
    __syncthreads();
    if (threadIdx.x < ROWS * BLOCK_OUTPUTS) {
        const unsigned row = threadIdx.x / BLOCK_OUTPUTS;
        const unsigned at = threadIdx.x % BLOCK_OUTPUTS;
        if (block_output + at < N) {
            const float* halves = warp_sums[row * OUTPUTS + at % OUTPUTS] + 2u * (at / OUTPUTS);
            spark_store(C + row * out_stride + block_output + at, halves[0] + halves[1]);
        }
    }
}
