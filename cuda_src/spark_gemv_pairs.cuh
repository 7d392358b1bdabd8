// SPDX-License-Identifier: AGPL-3.0-only
// spark_gemv_rows.cuh for formats whose weights take arithmetic to become operands: what instructions a weight costs
// decides there, so that what is not about weights is done once for 32 outputs.
//
// Each tile of 16 outputs has the stripes, the steps and the sums of spark_gemv_rows.cuh, and an output's bits depend on its
// own row of x and of W and on the number of warps alone. Two neighbouring tiles of a matrix are taken at a time: a stripe
// of the first, then the same stripe of the second, by the same registers of x, which are put in the order of the steps
// once. x is read a piece ahead. A block has neighbouring tiles, one more than another at most; of an odd number the first
// is taken alone, while the others of the multiprocessor still work, as is one that is left over at a matrix's end.
#pragma once

#include "spark_gemv_rows.cuh"

constexpr unsigned PAIR_WARPS = 8u;  // at most
constexpr unsigned PAIR_OUTPUTS = 2u * GEMV_TILE;
constexpr unsigned PAIR_SLOT = GEMV_TILE * GEMV_UNITS;  // 16-byte chunks of a tile's stripe

// Blocks of 256 on a multiprocessor. Code for later architectures spills with as few registers as two leave.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr unsigned PAIR_BLOCKS = 1u;
#else
constexpr unsigned PAIR_BLOCKS = 2u;
#endif

// A value that the compiler keeps in a register where it could make it again and again.
__device__ __forceinline__ unsigned kept(unsigned value) {
#ifndef SPARK_EMULATED
    asm volatile("" : "+r"(value));
#endif
    return value;
}

__device__ __forceinline__ const uint4* kept(const uint4* value) {
#ifndef SPARK_EMULATED
    asm volatile("" : "+l"(value));
#endif
    return value;
}

// What a format without scales of its own for each stripe has. Every format has besides:
//   Matrix: GemvMatrix, or derived from it
//   CHUNK: elements in 16 bytes; WHOLE: whether K is whole stripes
//   ready(x): eight elements of x in the order in which multiply() wants them
//   multiply(sum, h, p, low, high, x, used): the steps of chunk p of the lane's two, of tile h of a pair; used(w) after
//     those of x[w]
//   scaled(matrix, output, sum): what is rounded
struct PairFormat {
    // Copies are of `matrix` and its outputs from `output` on, from now on: of the warp's first stripe. `outputs`: 32 for
    // a pair, 16 for a tile alone.
    template <class Matrix>
    __device__ __forceinline__ void enter(const Matrix&, unsigned output, unsigned outputs, unsigned row_stripes) {}
    // Starts copies of what else a stripe of both tiles needs, for `left` outputs; the next ones are `step` further on.
    __device__ __forceinline__ void copy(unsigned left, unsigned step) {}
    // The same for a tile alone, into half `slot` of the room.
    __device__ __forceinline__ void copy_alone(unsigned slot, unsigned left, unsigned step) {}
    // Reads what half `half` holds for the lane's chunks, as tile h.
    __device__ __forceinline__ void read(unsigned half, unsigned h) {}
};

// Yi[m * stride_i + n] = bf16(scaled(sum over k of X[m, k] * Wi[n, k])): tiled_gemv_rows. Grid any number of blocks, block
// 128 or 256.
template <class Format, class Sink = GemvStore>
__device__ __forceinline__ void paired_gemv_rows(Format format, const __nv_bfloat16* X,
                                                 const GemvMatrices<typename Format::Matrix>& all, unsigned M,
                                                 unsigned K, unsigned head_dim, Sink&& sink = Sink{}) {
    __shared__ uint4 ring[PAIR_WARPS * 2u * PAIR_SLOT];
    __shared__ float sums[PAIR_WARPS][PAIR_OUTPUTS][GEMV_ROWS];  // of four warps there are two at a time
    using Matrix = typename Format::Matrix;
    constexpr unsigned WORDS = Format::CHUNK / 8u;  // of x, for a chunk
    const unsigned warps = blockDim.x / SPARK_WARP;
    spark_let_next_start();
    const unsigned lane = threadIdx.x % SPARK_WARP;
    const unsigned warp = threadIdx.x / SPARK_WARP;
    const unsigned g = lane / 4u;
    const unsigned t = lane % 4u;
    const unsigned chunks = K / Format::CHUNK;
    const unsigned row_stripes = (chunks + GEMV_UNITS - 1u) / GEMV_UNITS;
    const unsigned stripes = kept(row_stripes > warp ? (row_stripes - warp + warps - 1u) / warps : 0u);
    const unsigned tiles = tiles_of(all.each[0].n) + tiles_of(all.each[1].n) + tiles_of(all.each[2].n);
    const unsigned more = tiles % gridDim.x;  // blocks with a tile more than the others
    const unsigned begin = blockIdx.x * (tiles / gridDim.x) + min(blockIdx.x, more);
    const unsigned end = begin + tiles / gridDim.x + (blockIdx.x < more ? 1u : 0u);
    const unsigned to = kept(warp * 2u * PAIR_SLOT + place(lane / GEMV_UNITS, lane % GEMV_UNITS));
    const unsigned mine = kept(warp * 2u * PAIR_SLOT + place(g, t));

    // Outputs that are taken at a time from tile `tile` on: more than 16 are of a pair.
    const auto outputs_from = [&](unsigned size, unsigned tile, unsigned output) {
        return min(size - output, (end - tile) % 2u == 0u ? PAIR_OUTPUTS : GEMV_TILE);
    };

    // What is copied next. A lane copies chunk lane % 8 of outputs lane / 8, + 4, + 8 and + 12 of a tile.
    unsigned ahead_tile = begin;
    unsigned ahead = 0u;
    const uint4* from = nullptr;
    unsigned left = 0u;
    const auto enter = [&](unsigned tile) {
        unsigned output;
        const Matrix matrix = find(all, tile, output);
        from = matrix.weights + static_cast<size_t>(output + lane / GEMV_UNITS) * chunks + warp * GEMV_UNITS +
               lane % GEMV_UNITS;
        left = outputs_from(matrix.n, tile, output);
        format.enter(matrix, output, left > GEMV_TILE ? PAIR_OUTPUTS : GEMV_TILE, row_stripes);
        ahead_tile = tile;
        ahead = 0u;
    };
    // A stripe of the tile that starts `output` outputs further on.
    const auto copy_tile = [&](unsigned slot, unsigned output) {
        const unsigned chunk = (ahead * warps + warp) * GEMV_UNITS + lane % GEMV_UNITS;
        const int inside = static_cast<int>(Format::WHOLE || chunk < chunks ? left : 0u);
        const int have = inside - static_cast<int>(lane / GEMV_UNITS);
#pragma unroll
        for (unsigned i = 0u; i < GEMV_COPIES; ++i) {
            const unsigned row = i * (SPARK_WARP / GEMV_UNITS);
            spark_copy_16(&ring[to + slot * PAIR_SLOT + row * GEMV_UNITS], from + (output + row) * chunks,
                          static_cast<int>(output + row) < have);
        }
    };
    // Of a pair: after both tiles' last stripe come those of the next pair, if one follows.
    const auto copy = [&](unsigned h) {
        if (ahead < stripes) {
            copy_tile(h, h * GEMV_TILE);
            if (h == 0u) {
                format.copy(left, warps);
            } else {
                from += warps * GEMV_UNITS;
                ahead += 1u;
                if (ahead == stripes && ahead_tile + 2u < end) {
                    enter(ahead_tile + 2u);
                    ahead = left > GEMV_TILE ? 0u : stripes;
                }
            }
        }
        spark_copies_end();
    };
    const auto copy_alone = [&](unsigned slot) {
        if (ahead < stripes) {
            copy_tile(slot, 0u);
            format.copy_alone(slot, left, warps);
            from += warps * GEMV_UNITS;
            ahead += 1u;
        }
        spark_copies_end();
    };
    const auto fill = [&](unsigned tile) {
        enter(tile);
        if (left > GEMV_TILE) {
            copy(0u);
            copy(1u);
        } else {
            copy_alone(0u);
            copy_alone(1u);
        }
    };

    if (begin < end) {
        fill(begin);
    }
    spark_wait_for_previous();

    const uint4* const x = kept(reinterpret_cast<const uint4*>(X) + static_cast<size_t>(g < M ? g : 0u) * (K / 8u));
    const unsigned first_chunk = kept(warp * GEMV_UNITS + t);
    uint4 raw[WORDS] = {};  // zeros of a row that does not exist
    const auto read_x = [&](unsigned w, unsigned stripe, unsigned p) {
        const unsigned chunk = first_chunk + stripe * warps * GEMV_UNITS + 4u * p;
        if (!Format::WHOLE) {
            raw[w] = make_uint4(0u, 0u, 0u, 0u);
        }
        spark_load_16(raw[w], x + chunk * WORDS + w, g < M && (Format::WHOLE || chunk < chunks));
    };
    // The steps of what slot `slot` holds; where x is not `ready` it is made so, and what comes next is read.
    const auto multiply = [&](float(&sum)[4], unsigned h, const uint4(&low)[GEMV_PIECES], const uint4(&high)[GEMV_PIECES],
                              uint4(&ready)[GEMV_PIECES][WORDS], bool fresh, unsigned stripe) {
        const unsigned next = stripe + 1u < stripes ? stripe + 1u : 0u;
#pragma unroll
        for (unsigned p = 0u; p < GEMV_PIECES; ++p) {
            if (fresh) {
#pragma unroll
                for (unsigned w = 0u; w < WORDS; ++w) {
                    ready[p][w] = Format::ready(raw[w]);
                }
            }
            const bool last = p + 1u == GEMV_PIECES;
            format.multiply(sum, h, p, low[p], high[p], ready[p], [&](unsigned w) {
                if (fresh) {
                    read_x(w, last ? next : stripe, last ? 0u : p + 1u);
                }
            });
        }
    };
    if (stripes > 0u) {
#pragma unroll
        for (unsigned w = 0u; w < WORDS; ++w) {
            read_x(w, 0u, 0u);
        }
    }
    unsigned buffer = 0u;
    bool filled = true;
    for (unsigned tile = begin; tile < end;) {
        unsigned first;
        const unsigned size = find(all, tile, first).n;
        const unsigned outputs = outputs_from(size, tile, first);
        if (!filled) {
            fill(tile);
        }
        float sum[2][4] = {};
        uint4 low[GEMV_PIECES];
        uint4 high[GEMV_PIECES];
        uint4 ready[GEMV_PIECES][WORDS];
        const auto read_slot = [&](unsigned slot) {
            spark_copies_wait<1u>();
            __syncwarp();
#pragma unroll
            for (unsigned p = 0u; p < GEMV_PIECES; ++p) {
                low[p] = ring[(mine ^ (4u * p)) + slot * PAIR_SLOT];
                high[p] = ring[(mine ^ (4u * p)) + slot * PAIR_SLOT + 8u * GEMV_UNITS];
            }
        };
        if (outputs > GEMV_TILE) {
            for (unsigned stripe = 0u; stripe < stripes; ++stripe) {
#pragma unroll
                for (unsigned h = 0u; h < 2u; ++h) {
                    read_slot(h);
                    if (h == 0u) {
                        format.read(0u, 0u);
                        format.read(1u, 1u);
                    }
                    __syncwarp();
                    copy(h);
                    multiply(sum[h], h, low, high, ready, h == 0u, stripe);
                }
            }
            filled = left > GEMV_TILE;
        } else {
#pragma unroll 1
            for (unsigned stripe = 0u; stripe < stripes; ++stripe) {
                read_slot(stripe % 2u);
                format.read(stripe % 2u, 0u);
                __syncwarp();
                copy_alone(stripe % 2u);
                multiply(sum[0], 0u, low, high, ready, true, stripe);
            }
            filled = false;
        }
#pragma unroll
        for (unsigned i = 0u; i < 4u; ++i) {
            float(*parts)[GEMV_ROWS] = sums[buffer + warp];
            parts[i / 2u * 8u + g][2u * t + i % 2u] = sum[0][i];
            parts[i / 2u * 8u + g + GEMV_TILE][2u * t + i % 2u] = sum[1][i];
        }
        __syncthreads();
        const unsigned at = threadIdx.x % PAIR_OUTPUTS;
#pragma unroll 1
        for (unsigned row = threadIdx.x / PAIR_OUTPUTS; row < M && at < outputs; row += warps) {
            unsigned output;
            const Matrix matrix = find(all, tile, output);
            output += at;
            float total = sums[buffer][at][row];
            for (unsigned w = 1u; w < warps; ++w) {
                total = total + sums[buffer + w][at][row];
            }
            total = Format::scaled(matrix, output, total);
            if (head_dim > 0u && tile < tiles_of(all.each[0].n)) {
                const unsigned half = output / head_dim % 2u;
                output = output / (2u * head_dim) * head_dim + half * (all.each[0].n / 2u) + output % head_dim;
            }
            sink.take(matrix, row, output, total);
        }
        if (2u * warps <= PAIR_WARPS) {
            buffer ^= warps;
        } else {
            __syncthreads();  // sums have been read
        }
        tile += outputs > GEMV_TILE ? 2u : 1u;
    }
}
