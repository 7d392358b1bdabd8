// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_w4a16_gemv_rows: y = x W^T for one to eight rows x and up to three NVFP4 matrices in one launch, as fast for
// eight rows as for one.
//
// A row of K weights is K / 2 bytes of E2M1 codes (low nibble first) and K / 16 block scales in E4M3; a weight is
// code * scale * scale2. code * scale has six significant bits, so it is a BF16 number, and goes as such, 2^9 times
// smaller, through tensor-core steps with FP32 sums. The sum is multiplied by 2^9 scale2 and rounded once.
//
// A tile of 16 outputs is a block's. Its eight warps take stripes of 256 k in turn, steps in ascending order of the
// words of eight codes; rows that do not exist add zeros. Warps are added in ascending order. So an output's bits depend
// on its own row of x and of W alone: not on the other rows, the tiles of a block or the matrices of the launch.
//
// Codes and scales go into shared memory by asynchronous copies, where each warp has a ring of stripes of its own. Lane
// 4 g + t takes of outputs g and g + 8, and of row g of x, the 32 elements from 32 t on. Of a word's codes 0 .. 7 the
// pairs (0, 4), (1, 5), (2, 6) and (3, 7) lie where one shift brings both to the halves of a word.

#include "spark_mma_step.cuh"

constexpr unsigned W4_WARPS = 8u;
constexpr unsigned W4_ROWS = 8u;
constexpr unsigned W4_TILE = 16u;    // outputs
constexpr unsigned W4_UNITS = 8u;    // 16-byte chunks of an output's codes in a stripe
constexpr unsigned W4_STAGES = 2u;   // stripes of a warp's ring
constexpr unsigned W4_COPIES = W4_TILE * W4_UNITS / SPARK_WARP;  // of a lane, for a stripe
constexpr float W4_RAISED = 0x1p117f;  // of a scale: codes come 2^126 times too small, and stay 2^9 times so
constexpr float W4_LOWERED = 512.0f;

struct Matrix {
    const uint4* codes;
    const uint4* scales;
    __nv_bfloat16* out;
    unsigned n;
    unsigned stride;
    float scale2;
};

struct Matrices {
    Matrix each[3];
};

__device__ __forceinline__ unsigned tiles_of(unsigned n) { return (n + W4_TILE - 1u) / W4_TILE; }

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
    output = tile * W4_TILE;
    return which == 0u ? all.each[0] : which == 1u ? all.each[1] : all.each[2];
}

// Where chunk `unit` of output `row` lies in a stripe: neighbouring outputs start in different banks.
__device__ __forceinline__ unsigned place(unsigned row, unsigned unit) {
    return row * W4_UNITS + (unit ^ (row % 2u * 4u));
}

__device__ __forceinline__ unsigned multiply(unsigned a, unsigned b) {
    const __nv_bfloat162 x = *reinterpret_cast<const __nv_bfloat162*>(&a);
    const __nv_bfloat162 y = *reinterpret_cast<const __nv_bfloat162*>(&b);
    const __nv_bfloat162 product = __hmul2(x, y);
    return *reinterpret_cast<const unsigned*>(&product);
}

// An E4M3 scale, raised, as BF16 in both halves of a word. Exact; 0x7f and 0xff are NaN.
__device__ __forceinline__ unsigned raised(unsigned code) {
    const float value = __uint_as_float(((code & 0x80u) << 24) | ((code & 0x7fu) << 20)) * 0x1p120f * W4_RAISED;
    const unsigned word = (code & 0x7fu) == 0x7fu ? 0x7fff7fffu : __float_as_uint(value);
    return __byte_perm(word, word, 0x3232u);
}

// Pairs (0, 4), (1, 5), (2, 6), (3, 7) of a word of codes times a scale: codes' three low bits are exponent and fraction.
__device__ __forceinline__ void decode(unsigned codes, unsigned scale, unsigned (&pairs)[4]) {
#pragma unroll
    for (unsigned j = 0u; j < 4u; ++j) {
        const unsigned magnitude = j < 2u ? codes << (6u - 4u * j) : codes >> (4u * j - 6u);
        const unsigned sign = codes << (12u - 4u * j);
        pairs[j] = multiply((magnitude & 0x01c001c0u) | (sign & 0x80008000u), scale);
    }
}

// Yi[m * stride_i + n] = bf16(scale2_i * sum over k of X[m, k] * code_i[n, k] * scale_i[n, k / 16]) for M rows, 1 to 8, X
// [M, K]; N1 and N2 may be 0. head_dim > 0: outputs of the first matrix are [query | gate] of a head after the other,
// 2 head_dim each, and are stored as the queries of all heads, then the gates of all. Grid any number of blocks, block
// 256. K % 256 == 0; X, codes and scales on 16-byte addresses.
extern "C" __global__ void __launch_bounds__(256, 3)
    spark_w4a16_gemv_rows(const __nv_bfloat16* __restrict__ X, const unsigned char* __restrict__ W0,
                          const unsigned char* __restrict__ W1, const unsigned char* __restrict__ W2,
                          const unsigned char* __restrict__ S0, const unsigned char* __restrict__ S1,
                          const unsigned char* __restrict__ S2, __nv_bfloat16* __restrict__ Y0,
                          __nv_bfloat16* __restrict__ Y1, __nv_bfloat16* __restrict__ Y2, unsigned int M,
                          unsigned int N0, unsigned int N1, unsigned int N2, unsigned int K, unsigned int stride0,
                          unsigned int stride1, unsigned int stride2, float scale2_0, float scale2_1, float scale2_2,
                          unsigned int head_dim) {
    __shared__ uint4 rings[W4_WARPS][W4_STAGES][W4_TILE * W4_UNITS];
    __shared__ uint4 scale_rings[W4_WARPS][W4_STAGES][W4_TILE];
    __shared__ float sums[W4_WARPS][W4_TILE][W4_ROWS];
    const Matrices all = {
        {{reinterpret_cast<const uint4*>(W0), reinterpret_cast<const uint4*>(S0), Y0, N0, stride0, scale2_0},
         {reinterpret_cast<const uint4*>(W1), reinterpret_cast<const uint4*>(S1), Y1, N1, stride1, scale2_1},
         {reinterpret_cast<const uint4*>(W2), reinterpret_cast<const uint4*>(S2), Y2, N2, stride2, scale2_2}}};
    const unsigned lane = threadIdx.x % SPARK_WARP;
    const unsigned warp = threadIdx.x / SPARK_WARP;
    const unsigned g = lane / 4u;
    const unsigned t = lane % 4u;
    const unsigned row_stripes = K / 256u;
    const unsigned tiles = tiles_of(N0) + tiles_of(N1) + tiles_of(N2);
    uint4(*ring)[W4_TILE * W4_UNITS] = rings[warp];
    uint4(*scale_ring)[W4_TILE] = scale_rings[warp];
    const unsigned stripes = row_stripes > warp ? (row_stripes - warp + W4_WARPS - 1u) / W4_WARPS : 0u;
    const uint4* x = reinterpret_cast<const uint4*>(X) + static_cast<size_t>(g < M ? g : 0u) * (K / 8u);

    // What is copied next: a stripe of a tile. A lane copies chunk lane % 8 of outputs lane / 8, + 4, + 8 and + 12, and
    // the scales of output lane.
    unsigned ahead_tile = blockIdx.x;
    unsigned ahead = 0u;
    unsigned slot_ahead = 0u;
    const uint4* from = nullptr;
    const uint4* scales_from = nullptr;
    unsigned left = 0u;  // outputs of the tile
    const auto enter = [&]() {
        unsigned output;
        const Matrix matrix = find(all, ahead_tile, output);
        from = matrix.codes + static_cast<size_t>(output + lane / W4_UNITS) * (K / 32u);
        scales_from = matrix.scales + static_cast<size_t>(output + lane % W4_TILE) * row_stripes;
        left = matrix.n - output;
    };
    const auto copy_next = [&]() {
        if (ahead_tile < tiles && stripes > 0u) {
            const unsigned stripe = ahead * W4_WARPS + warp;
#pragma unroll
            for (unsigned i = 0u; i < W4_COPIES; ++i) {
                constexpr unsigned STEP = SPARK_WARP / W4_UNITS;
                const unsigned row = lane / W4_UNITS + i * STEP;
                const uint4* source =
                    from + static_cast<size_t>(i * STEP) * (K / 32u) + stripe * W4_UNITS + lane % W4_UNITS;
                spark_copy_16(&ring[slot_ahead][place(row, lane % W4_UNITS)], row < left ? source : from, row < left);
            }
            if (lane < W4_TILE) {
                const bool live = lane < left;
                spark_copy_16(&scale_ring[slot_ahead][lane], live ? scales_from + stripe : from, live);
            }
            slot_ahead = slot_ahead + 1u == W4_STAGES ? 0u : slot_ahead + 1u;
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
    for (unsigned s = 0u; s < W4_STAGES; ++s) {
        copy_next();
    }
    unsigned slot = 0u;
    for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        float sum[4] = {};
        for (unsigned stripe = 0u; stripe < stripes; ++stripe) {
            const uint4* row = x + (stripe * W4_WARPS + warp) * 32u + 4u * t;
            spark_copies_wait<W4_STAGES - 1u>();
            __syncwarp();
            uint4 low[2];
            uint4 high[2];
            unsigned scale[2][2];  // of output g and g + 8: two E4M3 each
            const unsigned short* codes_scale = reinterpret_cast<const unsigned short*>(scale_ring[slot]);
#pragma unroll
            for (unsigned p = 0u; p < 2u; ++p) {
                low[p] = ring[slot][place(g, 4u * p + t)];
                high[p] = ring[slot][place(g + 8u, 4u * p + t)];
                scale[p][0] = codes_scale[g * 8u + 4u * p + t];
                scale[p][1] = codes_scale[(g + 8u) * 8u + 4u * p + t];
            }
            __syncwarp();
            copy_next();
            slot = slot + 1u == W4_STAGES ? 0u : slot + 1u;
#pragma unroll
            for (unsigned p = 0u; p < 2u; ++p) {
                const unsigned low_words[4] = {low[p].x, low[p].y, low[p].z, low[p].w};
                const unsigned high_words[4] = {high[p].x, high[p].y, high[p].z, high[p].w};
#pragma unroll
                for (unsigned w = 0u; w < 4u; ++w) {
                    uint4 a = {0u, 0u, 0u, 0u};
                    if (g < M) {
                        a = row[16u * p + w];
                    }
                    const unsigned shift = w / 2u * 8u;
                    unsigned first[4];
                    unsigned second[4];
                    decode(low_words[w], raised((scale[p][0] >> shift) & 0xffu), first);
                    decode(high_words[w], raised((scale[p][1] >> shift) & 0xffu), second);
                    spark_mma(sum, {first[0], second[0], first[1], second[1]},
                              {__byte_perm(a.x, a.z, 0x5410u), __byte_perm(a.x, a.z, 0x7632u)});
                    spark_mma(sum, {first[2], second[2], first[3], second[3]},
                              {__byte_perm(a.y, a.w, 0x5410u), __byte_perm(a.y, a.w, 0x7632u)});
                }
            }
        }
        float(*mine)[W4_ROWS] = sums[warp];
        mine[g][2u * t] = sum[0];
        mine[g][2u * t + 1u] = sum[1];
        mine[g + 8u][2u * t] = sum[2];
        mine[g + 8u][2u * t + 1u] = sum[3];
        __syncthreads();
        unsigned first;
        const Matrix matrix = find(all, tile, first);
        const unsigned row = threadIdx.x / W4_TILE;
        unsigned output = first + threadIdx.x % W4_TILE;
        if (row < M && output < matrix.n) {
            float total = sums[0][output - first][row];
#pragma unroll
            for (unsigned w = 1u; w < W4_WARPS; ++w) {
                total = total + sums[w][output - first][row];
            }
            if (head_dim > 0u && tile < tiles_of(N0)) {
                const unsigned half = output / head_dim % 2u;
                output = output / (2u * head_dim) * head_dim + half * (N0 / 2u) + output % head_dim;
            }
            const float factor = W4_LOWERED * matrix.scale2;
            spark_store(matrix.out + static_cast<size_t>(row) * matrix.stride + output, total * factor);
        }
        __syncthreads();  // sums have been read
    }
}
