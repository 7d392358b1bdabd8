// SPDX-License-Identifier: AGPL-3.0-only
// The dot product of BF16 rows with rows of E4M3 bytes that every FP8 GEMV of this set computes, in one fixed order, so
// that kernels can be bit-equal.
//
// 64 lanes share an output. Lane l adds the products of the 16-element chunks l, l + 64, ... in ascending k, one FP32
// addition for each product. Each warp adds its lanes as the tree 16, 8, 4, 2, 1; the result is first warp + second.
//
// Scaled by row: weights are E4M3 values as they are, and one FP32 factor of the row multiplies what each lane has,
// before the tree. Scaled by block: 128 x 128 weights share an FP32 factor, and a weight is value * factor, rounded.
//
// Chunks are 16 bytes of weights and 32 of activations, in 16-byte loads: K % 16 == 0 and bases on 16-byte addresses.
#pragma once

#include "spark_fp8.cuh"

constexpr unsigned FP8_LANES = 64u;
constexpr unsigned FP8_CHUNK = 16u;
constexpr unsigned FP8_GROUPS = 4u;  // of 64 lanes, in a block of 256 threads
constexpr unsigned FP8_WARPS = 8u;
constexpr unsigned FP8_SCALE_BLOCK = 128u;
constexpr unsigned FP8_SCALE_CHUNKS = FP8_SCALE_BLOCK / FP8_CHUNK;

enum class Fp8Scales { ROW, BLOCK };

// Factors in a row of the table of blocks: ceil(K / 128).
__device__ __forceinline__ unsigned fp8_blocks(unsigned chunks) {
    return (chunks + FP8_SCALE_CHUNKS - 1u) / FP8_SCALE_CHUNKS;
}

// The weights of half a chunk.
template <Fp8Scales SCALES>
__device__ __forceinline__ void fp8_decode(float (&weights)[8], unsigned low, unsigned high, float scale) {
    spark_widen_e4m3(static_cast<unsigned short>(low), weights);
    spark_widen_e4m3(static_cast<unsigned short>(low >> 16), weights + 2);
    spark_widen_e4m3(static_cast<unsigned short>(high), weights + 4);
    spark_widen_e4m3(static_cast<unsigned short>(high >> 16), weights + 6);
    if (SCALES == Fp8Scales::BLOCK) {
#pragma unroll
        for (unsigned i = 0u; i < 8u; ++i) {
            weights[i] = weights[i] * scale;
        }
    }
}

// sum + the 8 products of half a chunk, ascending.
__device__ __forceinline__ float fp8_add(float sum, uint4 a, const float (&weights)[8]) {
    sum = sum + spark_low(a.x) * weights[0];
    sum = sum + spark_high(a.x) * weights[1];
    sum = sum + spark_low(a.y) * weights[2];
    sum = sum + spark_high(a.y) * weights[3];
    sum = sum + spark_low(a.z) * weights[4];
    sum = sum + spark_high(a.z) * weights[5];
    sum = sum + spark_low(a.w) * weights[6];
    return sum + spark_high(a.w) * weights[7];
}

// One chunk of OUTPUTS rows of weights, added to the sums of ROWS rows of activations; `a` is at the chunk, the rows
// are `a_step` words apart.
template <Fp8Scales SCALES, unsigned ROWS, unsigned OUTPUTS>
__device__ __forceinline__ void fp8_add_chunk(float (&sums)[ROWS][OUTPUTS], const uint4* a, size_t a_step,
                                              const uint4 (&codes)[OUTPUTS], float scale) {
#pragma unroll
    for (unsigned half = 0u; half < 2u; ++half) {
        float weights[OUTPUTS][8];
#pragma unroll
        for (unsigned o = 0u; o < OUTPUTS; ++o) {
            fp8_decode<SCALES>(weights[o], half == 0u ? codes[o].x : codes[o].z, half == 0u ? codes[o].y : codes[o].w,
                               scale);
        }
#pragma unroll
        for (unsigned r = 0u; r < ROWS; ++r) {
            const uint4 words = a[r * a_step + half];
#pragma unroll
            for (unsigned o = 0u; o < OUTPUTS; ++o) {
                sums[r][o] = fp8_add(sums[r][o], words, weights[o]);
            }
        }
    }
}

// C[r * out_stride + n] = bf16(A[r] . B[n]) for ROWS rows and the 4 * OUTPUTS outputs of a block of 256 threads. A
// group of 64 lanes takes OUTPUTS outputs next to each other, so that what it loads of A serves all of them; each byte
// of B is loaded once. `scales` is [N], or [ceil(N / 128), ceil(K / 128)] where outputs of a block share a row of it.
template <Fp8Scales SCALES, unsigned ROWS, unsigned OUTPUTS>
__device__ __forceinline__ void fp8_gemv_block(const __nv_bfloat16* A, const unsigned char* B, const float* scales,
                                               __nv_bfloat16* C, unsigned N, unsigned K, size_t out_stride,
                                               float (*warp_sums)[FP8_WARPS]) {
    constexpr unsigned BLOCK_OUTPUTS = FP8_GROUPS * OUTPUTS;
    constexpr unsigned DEPTH = 4u / OUTPUTS;  // chunks of an output that a lane loads before it uses the first
    static_assert(FP8_SCALE_BLOCK % BLOCK_OUTPUTS == 0u, "a block of threads would need two rows of factors");
    const unsigned group = threadIdx.x / FP8_LANES;
    const unsigned lane = threadIdx.x % FP8_LANES;
    const unsigned chunks = K / FP8_CHUNK;
    const size_t block_output = static_cast<size_t>(blockIdx.x) * BLOCK_OUTPUTS;
    const size_t output = block_output + group * OUTPUTS;
    const uint4* a = reinterpret_cast<const uint4*>(A);
    float sums[ROWS][OUTPUTS] = {};
    // Threads past N have nothing to add but do reach the barrier.
    if (output < N) {
        const uint4* codes_of[OUTPUTS];
#pragma unroll
        for (unsigned o = 0u; o < OUTPUTS; ++o) {
            // An output past N repeats the first one; nobody asks for it.
            codes_of[o] = reinterpret_cast<const uint4*>(B) + (output + o < N ? output + o : output) * chunks;
        }
        const float* factors = scales;
        if (SCALES == Fp8Scales::BLOCK) {
            factors += block_output / FP8_SCALE_BLOCK * fp8_blocks(chunks);
        }
        for (unsigned first = lane; first < chunks; first += DEPTH * FP8_LANES) {
            uint4 codes[DEPTH][OUTPUTS] = {};
            float factor[DEPTH] = {};
#pragma unroll
            for (unsigned d = 0u; d < DEPTH; ++d) {
                const unsigned chunk = first + d * FP8_LANES;
                if (chunk < chunks) {
#pragma unroll
                    for (unsigned o = 0u; o < OUTPUTS; ++o) {
                        codes[d][o] = codes_of[o][chunk];
                    }
                    if (SCALES == Fp8Scales::BLOCK) {
                        factor[d] = factors[chunk / FP8_SCALE_CHUNKS];
                    }
                }
            }
#pragma unroll
            for (unsigned d = 0u; d < DEPTH; ++d) {
                const unsigned chunk = first + d * FP8_LANES;
                if (chunk < chunks) {
                    fp8_add_chunk<SCALES>(sums, a + 2u * static_cast<size_t>(chunk), 2u * static_cast<size_t>(chunks),
                                          codes[d], factor[d]);
                }
            }
        }
        if (SCALES == Fp8Scales::ROW) {
#pragma unroll
            for (unsigned o = 0u; o < OUTPUTS; ++o) {
                const float factor = scales[output + o < N ? output + o : output];
#pragma unroll
                for (unsigned r = 0u; r < ROWS; ++r) {
                    sums[r][o] = sums[r][o] * factor;
                }
            }
        }
    }
#pragma unroll
    for (unsigned r = 0u; r < ROWS; ++r) {
#pragma unroll
        for (unsigned o = 0u; o < OUTPUTS; ++o) {
            const float sum = spark_warp_sum(sums[r][o], SPARK_WARP);
            if (threadIdx.x % SPARK_WARP == 0u) {
                warp_sums[r * OUTPUTS + o][threadIdx.x / SPARK_WARP] = sum;
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

constexpr unsigned FP8_BATCH_ROWS = 8u;
constexpr unsigned FP8_BATCH_OUTPUTS = 2u;

// The same for M rows, 1 to 8, and eight outputs a block.
template <Fp8Scales SCALES>
__device__ __forceinline__ void fp8_gemv_rows(const __nv_bfloat16* A, const unsigned char* B, const float* scales,
                                              __nv_bfloat16* C, unsigned M, unsigned N, unsigned K,
                                              unsigned out_stride) {
    __shared__ float warp_sums[FP8_BATCH_ROWS * FP8_BATCH_OUTPUTS][FP8_WARPS];
    switch (M) {
#define FP8_ROWS(rows)                                                                                \
    case rows:                                                                                        \
        fp8_gemv_block<SCALES, rows, FP8_BATCH_OUTPUTS>(A, B, scales, C, N, K, out_stride, warp_sums); \
        break;
        FP8_ROWS(1u)
        FP8_ROWS(2u)
        FP8_ROWS(3u)
        FP8_ROWS(4u)
        FP8_ROWS(5u)
        FP8_ROWS(6u)
        FP8_ROWS(7u)
        FP8_ROWS(8u)
#undef FP8_ROWS
        default:
            break;
    }
}
