// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_gemv_rows: y = x W^T for one to eight rows x and up to three BF16 matrices in one launch, as fast for
// eight rows as for one.
//
// A tile of 16 outputs is a block's. Its eight warps take stripes of 64 k in turn; a stripe is two pieces of 32 k, a piece
// two tensor-core steps with FP32 sums in ascending order, to which rows that do not exist add zeros. Warps are added in
// ascending order and the sum is rounded once. So an output's bits depend on its own row of x and of W alone: not on the
// other rows, the tiles of a block or the matrices of the launch.
//
// A weight is read once, 128 bytes of an output by eight lanes, into shared memory, where each warp has a ring of stripes
// of its own: what it waits for is its own copies, and no barrier but one a tile. Copies run ahead of the sums, across
// tiles. Lane 4 g + t takes from a piece the elements 8 t .. of outputs g and g + 8, and of row g of x: which element of k
// lies where in a step is free as long as both sides agree. Blocks stay and take tiles in turn, so that every block has as
// much to do as the others.

#include "spark_mma_step.cuh"

constexpr unsigned GEMV_WARPS = 8u;
constexpr unsigned GEMV_ROWS = 8u;
constexpr unsigned GEMV_TILE = 16u;   // outputs
constexpr unsigned GEMV_UNITS = 8u;   // 16-byte chunks of an output in a stripe: a whole line of the cache
constexpr unsigned GEMV_STAGES = 2u;  // stripes of a warp's ring
constexpr unsigned GEMV_PIECES = GEMV_UNITS / 4u;
constexpr unsigned GEMV_COPIES = GEMV_TILE * GEMV_UNITS / SPARK_WARP;  // of a lane, for a stripe

// A matrix of a launch: N outputs, whose row m lies at m * stride.
struct Matrix {
    const uint4* weights;
    __nv_bfloat16* out;
    unsigned n;
    unsigned stride;
};

struct Matrices {
    Matrix each[3];
};

__device__ __forceinline__ unsigned tiles_of(unsigned n) { return (n + GEMV_TILE - 1u) / GEMV_TILE; }

// Tile `tile` of a launch: the matrix it belongs to, and its first output there.
__device__ __forceinline__ Matrix find(const Matrices& all, unsigned tile, unsigned& output) {
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

// Where chunk `unit` of output `row` lies in a stripe: neighbouring outputs start in different banks.
__device__ __forceinline__ unsigned place(unsigned row, unsigned unit) {
    return row * GEMV_UNITS + (unit ^ (row % 2u * 4u));
}

// Yi[m * stride_i + n] = bf16(sum over k of X[m, k] * Wi[n, k]) for M rows, 1 to 8, X [M, K], Wi [Ni, K]; N1 and N2 may
// be 0. head_dim > 0: outputs of W0 are [query | gate] of a head after the other, 2 head_dim each, and are stored as the
// queries of all heads, then the gates of all. Grid any number of blocks, block 256. K % 8 == 0; X and Wi on 16-byte
// addresses.
extern "C" __global__ void __launch_bounds__(256, 4)
    spark_gemv_rows(const __nv_bfloat16* __restrict__ X, const __nv_bfloat16* __restrict__ W0,
                    const __nv_bfloat16* __restrict__ W1, const __nv_bfloat16* __restrict__ W2,
                    __nv_bfloat16* __restrict__ Y0, __nv_bfloat16* __restrict__ Y1, __nv_bfloat16* __restrict__ Y2,
                    unsigned int M, unsigned int N0, unsigned int N1, unsigned int N2, unsigned int K,
                    unsigned int stride0, unsigned int stride1, unsigned int stride2, unsigned int head_dim) {
    __shared__ uint4 rings[GEMV_WARPS][GEMV_STAGES][GEMV_TILE * GEMV_UNITS];
    __shared__ float sums[2][GEMV_WARPS][GEMV_TILE][GEMV_ROWS];
    const Matrices all = {{{reinterpret_cast<const uint4*>(W0), Y0, N0, stride0},
                           {reinterpret_cast<const uint4*>(W1), Y1, N1, stride1},
                           {reinterpret_cast<const uint4*>(W2), Y2, N2, stride2}}};
    const unsigned lane = threadIdx.x % SPARK_WARP;
    const unsigned warp = threadIdx.x / SPARK_WARP;
    const unsigned g = lane / 4u;
    const unsigned t = lane % 4u;
    const unsigned chunks = K / 8u;
    const unsigned tiles = tiles_of(N0) + tiles_of(N1) + tiles_of(N2);
    uint4(*ring)[GEMV_TILE * GEMV_UNITS] = rings[warp];
    constexpr unsigned ROUND = GEMV_WARPS * GEMV_UNITS;  // chunks that the warps take in turn
    const unsigned start = warp * GEMV_UNITS;
    const unsigned stripes = chunks > start ? (chunks - start + ROUND - 1u) / ROUND : 0u;
    const uint4* x = reinterpret_cast<const uint4*>(X) + static_cast<size_t>(g < M ? g : 0u) * chunks;

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
            const unsigned chunk = ahead * ROUND + start + lane % GEMV_UNITS;
#pragma unroll
            for (unsigned i = 0u; i < GEMV_COPIES; ++i) {
                constexpr unsigned STEP = SPARK_WARP / GEMV_UNITS;
                const unsigned row = lane / GEMV_UNITS + i * STEP;
                const bool live = chunk < chunks && row < left;
                const uint4* source = from + static_cast<size_t>(i * STEP) * chunks + chunk;
                spark_copy_16(&ring[slot_ahead][place(row, lane % GEMV_UNITS)], live ? source : from, live);
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

    if (ahead_tile < tiles) {
        enter();
    }
#pragma unroll
    for (unsigned s = 0u; s < GEMV_STAGES; ++s) {
        copy_next();
    }
    unsigned parity = 0u;
    unsigned slot = 0u;
    for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        float sum[4] = {};
        for (unsigned stripe = 0u; stripe < stripes; ++stripe) {
            uint4 rows[GEMV_PIECES] = {};
#pragma unroll
            for (unsigned p = 0u; p < GEMV_PIECES; ++p) {
                const unsigned chunk = stripe * ROUND + start + 4u * p + t;
                if (g < M && chunk < chunks) {
                    rows[p] = x[chunk];
                }
            }
            spark_copies_wait<GEMV_STAGES - 1u>();
            __syncwarp();
            uint4 low[GEMV_PIECES];
            uint4 high[GEMV_PIECES];
#pragma unroll
            for (unsigned p = 0u; p < GEMV_PIECES; ++p) {
                low[p] = ring[slot][place(g, 4u * p + t)];
                high[p] = ring[slot][place(g + 8u, 4u * p + t)];
            }
            __syncwarp();
            copy_next();
            slot = slot + 1u == GEMV_STAGES ? 0u : slot + 1u;
#pragma unroll
            for (unsigned p = 0u; p < GEMV_PIECES; ++p) {
                spark_mma(sum, {low[p].x, high[p].x, low[p].y, high[p].y}, {rows[p].x, rows[p].y});
                spark_mma(sum, {low[p].z, high[p].z, low[p].w, high[p].w}, {rows[p].z, rows[p].w});
            }
        }
        float(*mine)[GEMV_ROWS] = sums[parity][warp];
        mine[g][2u * t] = sum[0];
        mine[g][2u * t + 1u] = sum[1];
        mine[g + 8u][2u * t] = sum[2];
        mine[g + 8u][2u * t + 1u] = sum[3];
        __syncthreads();
        unsigned first;
        const Matrix matrix = find(all, tile, first);
        const unsigned row = threadIdx.x / GEMV_TILE;
        unsigned output = first + threadIdx.x % GEMV_TILE;
        if (row < M && output < matrix.n) {
            float total = sums[parity][0][output - first][row];
#pragma unroll
            for (unsigned w = 1u; w < GEMV_WARPS; ++w) {
                total = total + sums[parity][w][output - first][row];
            }
            if (head_dim > 0u && tile < tiles_of(N0)) {
                const unsigned half = output / head_dim % 2u;
                output = output / (2u * head_dim) * head_dim + half * (N0 / 2u) + output % head_dim;
            }
            spark_store(matrix.out + static_cast<size_t>(row) * matrix.stride + output, total);
        }
        parity ^= 1u;
    }
}
