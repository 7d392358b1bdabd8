// SPDX-License-Identifier: AGPL-3.0-only
// spark_gemv_rows.cuh for formats whose weights take arithmetic to become operands: what instructions a weight costs
// decides there, so that what is not about weights is done once for 32 outputs.
//
// Each tile of 16 outputs has the stripes, the steps and the sums of spark_gemv_rows.cuh, by four warps, and an output's
// bits depend on its own row of x and of W alone there too. Two neighbouring tiles of a matrix are taken at a time: a
// stripe of the first, then the same stripe of the second, by the same registers of x, which are put in the order of the
// steps once. x is read a piece ahead. A block has neighbouring tiles, one more than another at most, and takes an odd one
// at the end, or at the end of a matrix, alone.
#pragma once

#include "spark_gemv_rows.cuh"

constexpr unsigned PAIR_WARPS = 4u;
constexpr unsigned PAIR_OUTPUTS = 2u * GEMV_TILE;
constexpr unsigned PAIR_SLOT = GEMV_TILE * GEMV_UNITS;  // 16-byte chunks of a tile's stripe

__device__ __forceinline__ const uint4* kept(const uint4* value) {
#ifndef SPARK_EMULATED
    asm volatile("" : "+l"(value));
#endif
    return value;
}

// A format has
//   Matrix: GemvMatrix, or derived from it
//   CHUNK: elements in 16 bytes, of which K is whole stripes
//   enter(matrix, output, row_stripes): copies are of `matrix` and its outputs from `output` on, from now on: of the warp's
//     first stripe
//   copy(left): starts copies of what else a stripe of both tiles needs, for `left` outputs; the next ones are of the next
//   read(): reads it for the lane's chunks
//   ready(x): eight elements of x in the order in which multiply() wants them
//   multiply(sum, h, p, low, high, x, used): the steps of chunk p of the lane's two, of tile h of a pair; used(w) after
//     those of x[w]
//   scaled(matrix, output, sum): what is rounded

// Yi[m * stride_i + n] = bf16(scaled(sum over k of X[m, k] * Wi[n, k])): tiled_gemv_rows. Grid any number of blocks, block
// 128.
template <class Format, class Sink = GemvStore>
__device__ __forceinline__ void paired_gemv_rows(Format format, const __nv_bfloat16* X,
                                                 const GemvMatrices<typename Format::Matrix>& all, unsigned M,
                                                 unsigned K, unsigned head_dim, Sink&& sink = Sink{}) {
    __shared__ uint4 ring[PAIR_WARPS * 2u * PAIR_SLOT];
    __shared__ float sums[2][PAIR_WARPS][PAIR_OUTPUTS][GEMV_ROWS];
    using Matrix = typename Format::Matrix;
    constexpr unsigned WORDS = Format::CHUNK / 8u;  // of x, for a chunk
    spark_let_next_start();
    const unsigned lane = threadIdx.x % SPARK_WARP;
    const unsigned warp = threadIdx.x / SPARK_WARP;
    const unsigned g = lane / 4u;
    const unsigned t = lane % 4u;
    const unsigned chunks = K / Format::CHUNK;
    const unsigned row_stripes = chunks / GEMV_UNITS;
    const unsigned stripes = kept(row_stripes > warp ? (row_stripes - warp + PAIR_WARPS - 1u) / PAIR_WARPS : 0u);
    const unsigned tiles = tiles_of(all.each[0].n) + tiles_of(all.each[1].n) + tiles_of(all.each[2].n);
    const unsigned more = tiles % gridDim.x;  // blocks with a tile more than the others
    const unsigned begin = blockIdx.x * (tiles / gridDim.x) + min(blockIdx.x, more);
    const unsigned end = begin + tiles / gridDim.x + (blockIdx.x < more ? 1u : 0u);
    const unsigned to = kept(warp * 2u * PAIR_SLOT + place(lane / GEMV_UNITS, lane % GEMV_UNITS));
    const unsigned mine = kept(warp * 2u * PAIR_SLOT + place(g, t));

    // Outputs that are taken at a time from tile `tile` on, `size` being the matrix's: more than 16 are of a pair.
    const auto outputs_from = [&](unsigned tile, unsigned output, unsigned size) {
        return min(min(size - output, (end - tile) * GEMV_TILE), PAIR_OUTPUTS);
    };

    // What is copied next: a stripe of a pair. A lane copies chunk lane % 8 of outputs lane / 8, + 4, + 8 and + 12.
    unsigned ahead_tile = begin;
    unsigned ahead = 0u;
    const uint4* from = nullptr;
    unsigned left = 0u;  // outputs of the pair
    const auto enter = [&](unsigned tile) {
        unsigned output;
        const Matrix matrix = find(all, tile, output);
        from = matrix.weights + static_cast<size_t>(output + lane / GEMV_UNITS) * chunks + warp * GEMV_UNITS +
               lane % GEMV_UNITS;
        format.enter(matrix, output, row_stripes);
        left = outputs_from(tile, output, matrix.n);
    };
    const auto copy = [&](unsigned h) {
        if (ahead_tile < end && stripes > 0u) {
            const int have = static_cast<int>(left) - static_cast<int>(lane / GEMV_UNITS);
            // Of a tile alone nothing goes to the second slot, not even zeros: nobody waits for those.
            if (h == 0u || left > GEMV_TILE) {
#pragma unroll
                for (unsigned i = 0u; i < GEMV_COPIES; ++i) {
                    const unsigned row = i * (SPARK_WARP / GEMV_UNITS);
                    const unsigned output = h * GEMV_TILE + row;
                    spark_copy_16(&ring[to + h * PAIR_SLOT + row * GEMV_UNITS], from + output * chunks,
                                  static_cast<int>(output) < have);
                }
            }
            if (h == 0u) {
                format.copy(left);
            } else {
                from += PAIR_WARPS * GEMV_UNITS;
                ahead += 1u;
                if (ahead == stripes) {
                    ahead = 0u;
                    ahead_tile += left > GEMV_TILE ? 2u : 1u;
                    if (ahead_tile < end) {
                        enter(ahead_tile);
                    }
                }
            }
        }
        spark_copies_end();
    };

    if (begin < end) {
        enter(begin);
    }
    copy(0u);
    copy(1u);
    spark_wait_for_previous();

    const uint4* const x = kept(reinterpret_cast<const uint4*>(X) + static_cast<size_t>(g < M ? g : 0u) * (K / 8u));
    const unsigned first_chunk = kept(warp * GEMV_UNITS + t);
    uint4 raw[WORDS] = {};  // zeros of a row that does not exist
    const auto read_x = [&](unsigned w, unsigned stripe, unsigned p) {
        const unsigned chunk = first_chunk + stripe * PAIR_WARPS * GEMV_UNITS + 4u * p;
        spark_load_16(raw[w], x + chunk * WORDS + w, g < M);
    };
    if (stripes > 0u) {
#pragma unroll
        for (unsigned w = 0u; w < WORDS; ++w) {
            read_x(w, 0u, 0u);
        }
    }
    unsigned buffer = 0u;
    for (unsigned tile = begin; tile < end;) {
        unsigned first;
        const unsigned size = find(all, tile, first).n;
        const unsigned outputs = outputs_from(tile, first, size);
        float sum[2][4] = {};
        for (unsigned stripe = 0u; stripe < stripes; ++stripe) {
            uint4 ready[GEMV_PIECES][WORDS];
#pragma unroll
            for (unsigned h = 0u; h < 2u; ++h) {
                if (h > 0u && outputs <= GEMV_TILE) {
                    copy(h);
                    break;
                }
                spark_copies_wait<1u>();
                __syncwarp();
                uint4 low[GEMV_PIECES];
                uint4 high[GEMV_PIECES];
#pragma unroll
                for (unsigned p = 0u; p < GEMV_PIECES; ++p) {
                    low[p] = ring[(mine ^ (4u * p)) + h * PAIR_SLOT];
                    high[p] = ring[(mine ^ (4u * p)) + h * PAIR_SLOT + 8u * GEMV_UNITS];
                }
                if (h == 0u) {
                    format.read();
                }
                __syncwarp();
                copy(h);
#pragma unroll
                for (unsigned p = 0u; p < GEMV_PIECES; ++p) {
                    if (h == 0u) {
#pragma unroll
                        for (unsigned w = 0u; w < WORDS; ++w) {
                            ready[p][w] = Format::ready(raw[w]);
                        }
                    }
                    const bool last = p + 1u == GEMV_PIECES;
                    const unsigned next = !last ? stripe : stripe + 1u < stripes ? stripe + 1u : 0u;
                    format.multiply(sum[h], h, p, low[p], high[p], ready[p], [&](unsigned w) {
                        if (h == 0u) {
                            read_x(w, next, last ? 0u : p + 1u);
                        }
                    });
                }
            }
        }
#pragma unroll
        for (unsigned i = 0u; i < 4u; ++i) {
            float(*parts)[GEMV_ROWS] = sums[buffer][warp];
            parts[i / 2u * 8u + g][2u * t + i % 2u] = sum[0][i];
            parts[i / 2u * 8u + g + GEMV_TILE][2u * t + i % 2u] = sum[1][i];
        }
        __syncthreads();
        const unsigned at = threadIdx.x % PAIR_OUTPUTS;
#pragma unroll 1
        for (unsigned row = threadIdx.x / PAIR_OUTPUTS; row < M && at < outputs; row += PAIR_WARPS) {
            unsigned output;
            const Matrix matrix = find(all, tile, output);
            output += at;
            float total = sums[buffer][0][at][row];
#pragma unroll
            for (unsigned w = 1u; w < PAIR_WARPS; ++w) {
                total = total + sums[buffer][w][at][row];
            }
            total = Format::scaled(matrix, output, total);
            if (head_dim > 0u && tile < tiles_of(all.each[0].n)) {
                const unsigned half = output / head_dim % 2u;
                output = output / (2u * head_dim) * head_dim + half * (all.each[0].n / 2u) + output % head_dim;
            }
            sink.take(matrix, row, output, total);
        }
        buffer ^= 1u;
        tile += outputs > GEMV_TILE ? 2u : 1u;
    }
}
