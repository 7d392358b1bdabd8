// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_fp8_gemv_rows: y = x W^T for one to eight rows x and up to three E4M3 matrices with a scale a row in one
// launch, as fast for eight rows as for one.
//
// A weight is value * scale[n]. Every E4M3 value is a BF16 number and goes as such through tensor-core steps with FP32
// sums; the sum is multiplied by the row's scale and rounded once.
//
// A tile of 16 outputs is a block's. Its eight warps take stripes of 128 k in turn, steps in ascending order of the words
// of four bytes; rows that do not exist add zeros. Warps are added in ascending order. So an output's bits depend on its
// own row of x and of W alone: not on the other rows, the tiles of a block or the matrices of the launch.
//
// Bytes go into shared memory by asynchronous copies, where each warp has a ring of stripes of its own. Lane 4 g + t takes
// of outputs g and g + 8, and of row g of x, 16 elements at a time. Of a word's bytes the pairs (0, 2) and (1, 3) lie where
// one shift brings both to the halves of a word.

#include "spark_mma_step.cuh"

constexpr unsigned FP8_WARPS = 8u;
constexpr unsigned FP8_ROWS = 8u;
constexpr unsigned FP8_TILE = 16u;   // outputs
constexpr unsigned FP8_UNITS = 8u;   // 16-byte chunks of an output in a stripe
constexpr unsigned FP8_STAGES = 2u;  // stripes of a warp's ring
constexpr unsigned FP8_COPIES = FP8_TILE * FP8_UNITS / SPARK_WARP;  // of a lane, for a stripe
constexpr unsigned FP8_RAISE = 0x7b807b80u;                         // 2^120 twice: what bytes come too small by

struct Matrix {
    const uint4* codes;
    const float* scales;
    __nv_bfloat16* out;
    unsigned n;
    unsigned stride;
};

struct Matrices {
    Matrix each[3];
};

__device__ __forceinline__ unsigned tiles_of(unsigned n) { return (n + FP8_TILE - 1u) / FP8_TILE; }

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
    output = tile * FP8_TILE;
    return which == 0u ? all.each[0] : which == 1u ? all.each[1] : all.each[2];
}

// Where chunk `unit` of output `row` lies in a stripe: neighbouring outputs start in different banks.
__device__ __forceinline__ unsigned place(unsigned row, unsigned unit) {
    return row * FP8_UNITS + (unit ^ (row % 2u * 4u));
}

__device__ __forceinline__ unsigned multiply(unsigned a, unsigned b) {
    const __nv_bfloat162 x = *reinterpret_cast<const __nv_bfloat162*>(&a);
    const __nv_bfloat162 y = *reinterpret_cast<const __nv_bfloat162*>(&b);
    const __nv_bfloat162 product = __hmul2(x, y);
    return *reinterpret_cast<const unsigned*>(&product);
}

// Pairs (0, 2) and (1, 3) of a word of E4M3 bytes, as BF16. Exact; 0x7f and 0xff are NaN.
__device__ __forceinline__ void decode(unsigned bytes, unsigned (&pairs)[2]) {
    pairs[0] = multiply(((bytes << 4) & 0x07f007f0u) | ((bytes << 8) & 0x80008000u), FP8_RAISE);
    pairs[1] = multiply(((bytes >> 4) & 0x07f007f0u) | (bytes & 0x80008000u), FP8_RAISE);
    // Bit 7 of a byte that is NaN. Seldom any is.
    const unsigned nan = ((bytes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
    if (nan != 0u) {
        pairs[0] |= (nan & 0x00000080u) != 0u ? 0x00007fffu : 0u;
        pairs[0] |= (nan & 0x00800000u) != 0u ? 0x7fff0000u : 0u;
        pairs[1] |= (nan & 0x00008000u) != 0u ? 0x00007fffu : 0u;
        pairs[1] |= (nan & 0x80000000u) != 0u ? 0x7fff0000u : 0u;
    }
}

// Yi[m * stride_i + n] = bf16(scale_i[n] * sum over k of X[m, k] * value_i[n, k]) for M rows, 1 to 8, X [M, K], codes
// [Ni, K], scales FP32 [Ni]; N1 and N2 may be 0. head_dim > 0: outputs of the first matrix are [query | gate] of a head
// after the other, 2 head_dim each, and are stored as the queries of all heads, then the gates of all. Grid any number of
// blocks, block 256. K % 16 == 0; X and codes on 16-byte addresses.
extern "C" __global__ void __launch_bounds__(256, 3)
    spark_fp8_gemv_rows(const __nv_bfloat16* __restrict__ X, const unsigned char* __restrict__ W0,
                        const unsigned char* __restrict__ W1, const unsigned char* __restrict__ W2,
                        const float* __restrict__ S0, const float* __restrict__ S1, const float* __restrict__ S2,
                        __nv_bfloat16* __restrict__ Y0, __nv_bfloat16* __restrict__ Y1,
                        __nv_bfloat16* __restrict__ Y2, unsigned int M, unsigned int N0, unsigned int N1,
                        unsigned int N2, unsigned int K, unsigned int stride0, unsigned int stride1,
                        unsigned int stride2, unsigned int head_dim) {
    __shared__ uint4 rings[FP8_WARPS][FP8_STAGES][FP8_TILE * FP8_UNITS];
    __shared__ float sums[FP8_WARPS][FP8_TILE][FP8_ROWS];
    const Matrices all = {{{reinterpret_cast<const uint4*>(W0), S0, Y0, N0, stride0},
                           {reinterpret_cast<const uint4*>(W1), S1, Y1, N1, stride1},
                           {reinterpret_cast<const uint4*>(W2), S2, Y2, N2, stride2}}};
    const unsigned lane = threadIdx.x % SPARK_WARP;
    const unsigned warp = threadIdx.x / SPARK_WARP;
    const unsigned g = lane / 4u;
    const unsigned t = lane % 4u;
    const unsigned chunks = K / 16u;
    const unsigned row_stripes = (chunks + FP8_UNITS - 1u) / FP8_UNITS;
    const unsigned tiles = tiles_of(N0) + tiles_of(N1) + tiles_of(N2);
    uint4(*ring)[FP8_TILE * FP8_UNITS] = rings[warp];
    const unsigned stripes = row_stripes > warp ? (row_stripes - warp + FP8_WARPS - 1u) / FP8_WARPS : 0u;
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
        from = matrix.codes + static_cast<size_t>(output + lane / FP8_UNITS) * chunks;
        left = matrix.n - output;
    };
    const auto copy_next = [&]() {
        if (ahead_tile < tiles && stripes > 0u) {
            const unsigned chunk = (ahead * FP8_WARPS + warp) * FP8_UNITS + lane % FP8_UNITS;
#pragma unroll
            for (unsigned i = 0u; i < FP8_COPIES; ++i) {
                constexpr unsigned STEP = SPARK_WARP / FP8_UNITS;
                const unsigned row = lane / FP8_UNITS + i * STEP;
                const bool live = chunk < chunks && row < left;
                const uint4* source = from + static_cast<size_t>(i * STEP) * chunks + chunk;
                spark_copy_16(&ring[slot_ahead][place(row, lane % FP8_UNITS)], live ? source : from, live);
            }
            slot_ahead = slot_ahead + 1u == FP8_STAGES ? 0u : slot_ahead + 1u;
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
    for (unsigned s = 0u; s < FP8_STAGES; ++s) {
        copy_next();
    }
    unsigned slot = 0u;
    for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        float sum[4] = {};
        for (unsigned stripe = 0u; stripe < stripes; ++stripe) {
            const unsigned first = (stripe * FP8_WARPS + warp) * FP8_UNITS + t;
            uint4 rows[2][2] = {};
#pragma unroll
            for (unsigned p = 0u; p < 2u; ++p) {
                if (g < M && first + 4u * p < chunks) {
                    rows[p][0] = x[2u * (first + 4u * p)];
                    rows[p][1] = x[2u * (first + 4u * p) + 1u];
                }
            }
            spark_copies_wait<FP8_STAGES - 1u>();
            __syncwarp();
            uint4 low[2];
            uint4 high[2];
#pragma unroll
            for (unsigned p = 0u; p < 2u; ++p) {
                low[p] = ring[slot][place(g, 4u * p + t)];
                high[p] = ring[slot][place(g + 8u, 4u * p + t)];
            }
            __syncwarp();
            copy_next();
            slot = slot + 1u == FP8_STAGES ? 0u : slot + 1u;
#pragma unroll
            for (unsigned p = 0u; p < 2u; ++p) {
                const unsigned low_words[4] = {low[p].x, low[p].y, low[p].z, low[p].w};
                const unsigned high_words[4] = {high[p].x, high[p].y, high[p].z, high[p].w};
#pragma unroll
                for (unsigned w = 0u; w < 4u; ++w) {
                    const uint4 a = rows[p][w / 2u];
                    const unsigned even = w % 2u == 0u ? a.x : a.z;
                    const unsigned odd = w % 2u == 0u ? a.y : a.w;
                    unsigned lower[2];
                    unsigned upper[2];
                    decode(low_words[w], lower);
                    decode(high_words[w], upper);
                    spark_mma(sum, {lower[0], upper[0], lower[1], upper[1]},
                              {__byte_perm(even, odd, 0x5410u), __byte_perm(even, odd, 0x7632u)});
                }
            }
        }
        float(*mine)[FP8_ROWS] = sums[warp];
        mine[g][2u * t] = sum[0];
        mine[g][2u * t + 1u] = sum[1];
        mine[g + 8u][2u * t] = sum[2];
        mine[g + 8u][2u * t + 1u] = sum[3];
        __syncthreads();
        unsigned first;
        const Matrix matrix = find(all, tile, first);
        const unsigned row = threadIdx.x / FP8_TILE;
        unsigned output = first + threadIdx.x % FP8_TILE;
        if (row < M && output < matrix.n) {
            float total = sums[0][output - first][row];
#pragma unroll
            for (unsigned w = 1u; w < FP8_WARPS; ++w) {
                total = total + sums[w][output - first][row];
            }
            const float scale = matrix.scales[output];
            if (head_dim > 0u && tile < tiles_of(N0)) {
                const unsigned half = output / head_dim % 2u;
                output = output / (2u * head_dim) * head_dim + half * (N0 / 2u) + output % head_dim;
            }
            spark_store(matrix.out + static_cast<size_t>(row) * matrix.stride + output, total * scale);
        }
        __syncthreads();  // sums have been read
    }
}
