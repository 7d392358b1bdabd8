// SPDX-License-Identifier: AGPL-3.0-only
// y = x W^T for one to eight rows x and up to three matrices in one launch, as fast for eight rows as for one. A format says
// how 16 bytes of weights become operands of tensor-core steps; one that takes arithmetic for it is for
// spark_gemv_pairs.cuh.
//
// A tile of 16 outputs is a block's. Its eight warps take stripes of eight 16-byte chunks of each output in turn; the steps
// of a stripe have FP32 sums in ascending order, to which rows that do not exist add zeros. Warps are added in ascending
// order and the sum is rounded once. So an output's bits depend on its own row of x and of W alone: not on the other rows,
// the tiles of a block or the matrices of the launch.
//
// A weight is read once, 128 bytes of an output by eight lanes, into shared memory, where each warp has a ring of stripes
// of its own: what it waits for is its own copies, and no barrier but those of a tile. Copies run ahead of the sums, across
// tiles. Lane 4 g + t takes chunks t and 4 + t of outputs g and g + 8, and the same elements of row g of x: which element
// of k lies where in a step is free as long as both sides agree. Blocks stay and take tiles in turn, so that every block
// has as much to do as the others.
#pragma once

#include "spark_mma_step.cuh"

constexpr unsigned GEMV_WARPS = 8u;
constexpr unsigned GEMV_ROWS = 8u;
constexpr unsigned GEMV_TILE = 16u;   // outputs
constexpr unsigned GEMV_UNITS = 8u;   // 16-byte chunks of an output in a stripe: a whole line of the cache
constexpr unsigned GEMV_STAGES = 2u;  // stripes of a warp's ring
constexpr unsigned GEMV_PIECES = GEMV_UNITS / 4u;                      // of a stripe: four chunks, one for each t
constexpr unsigned GEMV_COPIES = GEMV_TILE * GEMV_UNITS / SPARK_WARP;  // of a lane, for a stripe

// A matrix of a launch: n outputs, whose row m lies at out + m * stride.
struct GemvMatrix {
    const uint4* weights;
    __nv_bfloat16* out;
    unsigned n;
    unsigned stride;
};

// A launch's matrices, each a GemvMatrix or what a format makes of it; n is 0 of those that are not there.
template <class Matrix>
struct GemvMatrices {
    Matrix each[3];
};

// Where outputs go: take(matrix, row, output, sum) of each, rounded once. Here to their matrix.
struct GemvStore {
    template <class Matrix>
    __device__ __forceinline__ void take(const Matrix& matrix, unsigned row, unsigned output, float sum) const {
        spark_store(matrix.out + static_cast<size_t>(row) * matrix.stride + output, sum);
    }
};

// What a format has whose matrices all have the launch's rows. Every format has besides
//   Matrix: GemvMatrix, or derived from it
//   CHUNK: elements in 16 bytes; KEEPS: whether addresses are kept in registers, which pays where arithmetic decides
//   BUFFERS: 2 where a tile's sums may be written while those of the tile before are read, at the cost of 4 KiB; else 1
//   read_x(x, first, chunks, live): row g of x where it is `live`, for the lane's chunks first and first + 4
//   multiply(sum, p, low, high): the steps of chunk p of the lane's two
//   scaled(matrix, output, sum): what is rounded
struct GemvFormat {
    // Whether a matrix has row `row` of the launch's.
    template <class Matrix>
    static __device__ __forceinline__ bool holds(const Matrix&, unsigned) {
        return true;
    }
    // Sums are of tile `tile` from now on.
    template <class Matrix>
    __device__ __forceinline__ void begin(const GemvMatrices<Matrix>&, unsigned, unsigned) {}
};

__device__ __forceinline__ unsigned tiles_of(unsigned n) { return (n + GEMV_TILE - 1u) / GEMV_TILE; }

// Tile `tile` of a launch: the matrix it belongs to, and its first output there.
template <class Matrix>
__device__ __forceinline__ Matrix find(const GemvMatrices<Matrix>& all, unsigned tile, unsigned& output) {
    unsigned which = 0u;
#pragma unroll
    for (unsigned i = 0u; i < 2u; ++i) {
        const unsigned tiles = tiles_of(all.each[i].n);
        if (which == i && tile >= tiles) {
            tile -= tiles;
            which = i + 1u;
        }
    }
    output = tile * GEMV_TILE;
    return which == 0u ? all.each[0] : which == 1u ? all.each[1] : all.each[2];
}

// A value that the compiler keeps in a register where it could make it again and again.
__device__ __forceinline__ unsigned kept(unsigned value) {
#ifndef SPARK_EMULATED
    asm volatile("" : "+r"(value));
#endif
    return value;
}

// Where chunk `unit` of output `row` lies in a stripe: neighbouring outputs start in different banks.
__device__ __forceinline__ unsigned place(unsigned row, unsigned unit) {
    return row * GEMV_UNITS + (unit ^ (row % 2u * 4u));
}

// Yi[m * stride_i + n] = bf16(scaled(sum over k of X[m, k] * Wi[n, k])) for M rows, 1 to 8, X [M, K], Wi [Ni, K]; N1 and
// N2 may be 0. head_dim > 0: outputs of the first matrix are [query | gate] of a head after the other, 2 head_dim each,
// and are stored as the queries of all heads, then the gates of all. Grid any number of blocks, block 256.
// K % CHUNK == 0; X and weights on 16-byte addresses.
template <class Format, class Sink = GemvStore>
__device__ __forceinline__ void tiled_gemv_rows(Format format, const __nv_bfloat16* X,
                                                const GemvMatrices<typename Format::Matrix>& all, unsigned M,
                                                unsigned K, unsigned head_dim, Sink&& sink = Sink{}) {
    constexpr unsigned SLOT = GEMV_TILE * GEMV_UNITS;
    __shared__ uint4 rings[GEMV_WARPS][GEMV_STAGES][SLOT];
    __shared__ float sums[Format::BUFFERS][GEMV_WARPS][GEMV_TILE][GEMV_ROWS];
    using Matrix = typename Format::Matrix;
    const unsigned lane = threadIdx.x % SPARK_WARP;
    const unsigned warp = threadIdx.x / SPARK_WARP;
    const unsigned g = lane / 4u;
    const unsigned t = lane % 4u;
    const unsigned chunks = K / Format::CHUNK;
    const unsigned row_stripes = (chunks + GEMV_UNITS - 1u) / GEMV_UNITS;
    const unsigned tiles = tiles_of(all.each[0].n) + tiles_of(all.each[1].n) + tiles_of(all.each[2].n);
    uint4(*ring)[SLOT] = rings[warp];
    uint4* const chunks_of_all = rings[0][0];
    unsigned stripes = row_stripes > warp ? (row_stripes - warp + GEMV_WARPS - 1u) / GEMV_WARPS : 0u;
    unsigned to = 0u;
    unsigned mine = 0u;
    if constexpr (Format::KEEPS) {
        stripes = kept(stripes);
        to = kept(warp * GEMV_STAGES * SLOT + place(lane / GEMV_UNITS, lane % GEMV_UNITS));
        mine = kept(warp * GEMV_STAGES * SLOT + place(g, t));
    }
    // Where chunk lane % 8 of output `row` is copied to, and chunk 4 p + t of outputs g and g + 8 is read.
    const auto copied = [&](unsigned slot, unsigned row) {
        if constexpr (Format::KEEPS) {
            return &chunks_of_all[to + slot * SLOT + (row - lane / GEMV_UNITS) * GEMV_UNITS];
        } else {
            return &ring[slot][place(row, lane % GEMV_UNITS)];
        }
    };
    const auto taken = [&](unsigned slot, unsigned p, unsigned above) {
        if constexpr (Format::KEEPS) {
            return chunks_of_all[(mine ^ (4u * p)) + slot * SLOT + above * GEMV_UNITS];
        } else {
            return ring[slot][place(g + above, 4u * p + t)];
        }
    };
    const uint4* x = reinterpret_cast<const uint4*>(X) + static_cast<size_t>(g < M ? g : 0u) * (K / 8u);

    // What is copied next: a stripe of a tile. A lane copies chunk lane % 8 of outputs lane / 8, + 4, + 8 and + 12.
    unsigned ahead_tile = blockIdx.x;
    unsigned ahead = 0u;
    unsigned slot_ahead = 0u;
    const uint4* from = nullptr;
    unsigned left = 0u;  // outputs of the tile
    const auto enter = [&]() {
        unsigned output;
        const Matrix matrix = find(all, ahead_tile, output);
        from = matrix.weights + static_cast<size_t>(output + lane / GEMV_UNITS) * chunks;
        left = matrix.n - output;
    };
    const auto copy_next = [&]() {
        if (ahead_tile < tiles && stripes > 0u) {
            const unsigned stripe = ahead * GEMV_WARPS + warp;
            const unsigned chunk = stripe * GEMV_UNITS + lane % GEMV_UNITS;
#pragma unroll
            for (unsigned i = 0u; i < GEMV_COPIES; ++i) {
                constexpr unsigned STEP = SPARK_WARP / GEMV_UNITS;
                const unsigned row = lane / GEMV_UNITS + i * STEP;
                const bool live = chunk < chunks && row < left;
                const uint4* source = from + static_cast<size_t>(i * STEP) * chunks + chunk;
                spark_copy_16(copied(slot_ahead, row), live ? source : from, live);
            }
            slot_ahead = slot_ahead + 1u == GEMV_STAGES ? 0u : slot_ahead + 1u;
            ahead += 1u;
            if (ahead == stripes) {
                ahead = 0u;
                ahead_tile += gridDim.x;
                if (ahead_tile < tiles) {
                    enter();
                }
            }
        }
        spark_copies_end();
    };

    spark_let_next_start();
    if (ahead_tile < tiles) {
        enter();
    }
#pragma unroll
    for (unsigned s = 0u; s < GEMV_STAGES; ++s) {
        copy_next();
    }
    spark_wait_for_previous();
    unsigned buffer = 0u;
    unsigned slot = 0u;
    for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        float sum[4] = {};
        format.begin(all, tile, K);
        for (unsigned stripe = 0u; stripe < stripes; ++stripe) {
            format.read_x(x, (stripe * GEMV_WARPS + warp) * GEMV_UNITS + t, chunks, g < M);
            spark_copies_wait<GEMV_STAGES - 1u>();
            __syncwarp();
            uint4 low[GEMV_PIECES];
            uint4 high[GEMV_PIECES];
#pragma unroll
            for (unsigned p = 0u; p < GEMV_PIECES; ++p) {
                low[p] = taken(slot, p, 0u);
                high[p] = taken(slot, p, 8u);
            }
            __syncwarp();
            copy_next();
            slot = slot + 1u == GEMV_STAGES ? 0u : slot + 1u;
#pragma unroll
            for (unsigned p = 0u; p < GEMV_PIECES; ++p) {
                format.multiply(sum, p, low[p], high[p]);
            }
        }
        float(*parts)[GEMV_ROWS] = sums[buffer][warp];
        parts[g][2u * t] = sum[0];
        parts[g][2u * t + 1u] = sum[1];
        parts[g + 8u][2u * t] = sum[2];
        parts[g + 8u][2u * t + 1u] = sum[3];
        __syncthreads();
        unsigned first;
        const Matrix matrix = find(all, tile, first);
        const unsigned row = threadIdx.x / GEMV_TILE;
        unsigned output = first + threadIdx.x % GEMV_TILE;
        if (row < M && output < matrix.n && Format::holds(matrix, row)) {
            float total = sums[buffer][0][output - first][row];
#pragma unroll
            for (unsigned w = 1u; w < GEMV_WARPS; ++w) {
                total = total + sums[buffer][w][output - first][row];
            }
            total = Format::scaled(matrix, output, total);
            if (head_dim > 0u && tile < tiles_of(all.each[0].n)) {
                const unsigned half = output / head_dim % 2u;
                output = output / (2u * head_dim) * head_dim + half * (all.each[0].n / 2u) + output % head_dim;
            }
            sink.take(matrix, row, output, total);
        }
        if constexpr (Format::BUFFERS == 2u) {
            buffer ^= 1u;
        } else {
            __syncthreads();  // sums have been read
        }
    }
}
