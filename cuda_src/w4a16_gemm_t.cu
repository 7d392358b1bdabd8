// SPDX-License-Identifier: AGPL-3.0-only
// Module w4a16, the tile GEMM over transposed NVFP4 weights: C [M, N] = A [M, K] W^T on tensor cores, for a few rows
// and many outputs, as the LM head of a batch of drafts.
//
// Layout: packed [K / 2, ldb], byte (i, n) = W[n, 2 i] in the low nibble and W[n, 2 i + 1] in the high one; scales
// [K / 16, ldb] in E4M3. Bytes from N to ldb are read and left out of C.
//
// Arithmetic: code * scale has 6 significant bits, so a weight without its global factor is exact in BF16. A stays
// BF16. Products are exact; tensor cores add them in FP32; scale2 multiplies the sum, which is then rounded to BF16.
// NaN scales make NaN of their outputs. No element of A or W is narrowed to FP8.
//
// A block has 128 outputs, which are the rows of the MMA, and up to 32 rows of A at a time, its columns: no work is
// spent on more than a multiple of 8 rows. Its four warps take every fourth chunk of 64 along K, and their sums are
// added at the end as (first + second) + (third + fourth), so the bits of a row do not depend on how many there are.
//
// What the MMA calls k and row is ours to choose. Lane 4 g + t has the 16 k from 16 t on, whose weights share a scale,
// and the 16 outputs from 16 g on: 16-byte loads all, whose bytes the lane itself decodes. So nothing is exchanged,
// each thread's part of shared memory is its own, and the main loop has no barrier.

#include "spark_mma.cuh"

constexpr unsigned OUTPUTS = 128u;       // a block
constexpr unsigned BLOCK_ROWS = 64u;     // a block of the grid
constexpr unsigned PASS_ROWS = 32u;      // while the weights are read once
constexpr unsigned WARPS = 4u;
constexpr unsigned GEMM_THREADS = WARPS * SPARK_WARP;
constexpr unsigned GROUP = 16u;          // weights to a scale
constexpr unsigned CHUNK = 4u * GROUP;   // along K, a warp
constexpr unsigned STEP = GROUP / 2u;    // along K, a lane: what is loaded at a time
constexpr unsigned CODE_WORDS = STEP / 2u;
constexpr unsigned SHARED_WORDS = 24u;   // of 16 bytes, a thread: all that a launch gets without asking

// A lane's scales as factors: scale * 2^119 in BF16, two outputs to a word. A code's bits at those of BF16 mean
// code * 2^-126, so that a product of the two is code * scale * 2^-7, exactly.
constexpr float REST = 128.0f;

__device__ __forceinline__ unsigned times(unsigned x, unsigned y) {
    const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&x),
                                           *reinterpret_cast<const __nv_bfloat162*>(&y));
    return *reinterpret_cast<const unsigned*>(&product);
}

// The E4M3 codes in the high byte of each half.
__device__ __forceinline__ unsigned factors(unsigned codes) {
    constexpr unsigned TO_ONE = 0x7b807b80u;  // 2^120: the bits of E4M3 at those of BF16 are so much too small
    constexpr unsigned UP = 0x7b007b00u;      // 2^119
    const unsigned bits = (codes & 0x80008000u) | ((codes >> 4) & 0x07f007f0u);
    // 0x7f carries into the bit above, which then makes the largest exponent an infinite one: NaN.
    const unsigned nan = ((bits + 0x00100010u) >> 4) & 0x00800080u;
    return times(times(bits, TO_ONE), UP) | nan;
}

// The 16 factors of a lane: outputs 2 i and 2 i + 1 in word i.
__device__ __forceinline__ void decode_scales(unsigned (&to)[8], uint4 scales) {
    const unsigned words[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
    for (unsigned i = 0u; i < 4u; ++i) {
        to[2u * i] = factors(__byte_perm(words[i], 0u, 0x1404u));
        to[2u * i + 1u] = factors(__byte_perm(words[i], 0u, 0x3424u));
    }
}

// The rows of the MMA for two outputs: `codes` has the codes of one i in the low half and of i + 1 in the high one, a
// byte an output. k in the order of pairs is (2 i, 2 i + 2), (2 i + 1, 2 i + 3).
__device__ __forceinline__ void decode_codes(unsigned (&to)[4], unsigned codes, unsigned factor_pair) {
    constexpr unsigned SIGN = 0x80008000u;
    constexpr unsigned MAGNITUDE = 0x01c001c0u;
    const unsigned first = __byte_perm(factor_pair, 0u, 0x1010u);
    const unsigned second = __byte_perm(factor_pair, 0u, 0x3232u);
    to[0] = times(((codes << 12) & SIGN) | ((codes << 6) & MAGNITUDE), first);
    to[1] = times(((codes << 4) & SIGN) | ((codes >> 2) & MAGNITUDE), second);
    to[2] = times(((codes << 8) & SIGN) | ((codes << 2) & MAGNITUDE), first);
    to[3] = times((codes & SIGN) | ((codes >> 6) & MAGNITUDE), second);
}

struct Operands {
    const __nv_bfloat16* a;
    const unsigned char* packed;
    const unsigned char* scales;
    unsigned rows;  // of A, from this pass's first on
    unsigned depth;
    unsigned ldb;
};

// What a thread reads, for 8 TILES rows of A. `first_output` is its block's.
template <unsigned TILES>
struct Lane {
    static constexpr unsigned WORDS = CODE_WORDS + TILES;
    static constexpr unsigned STAGES = SHARED_WORDS / WORDS < 4u ? SHARED_WORDS / WORDS : 4u;

    const Operands& from;
    uint4* shared;
    size_t output;
    unsigned g;
    unsigned t;
    unsigned warp;

    __device__ __forceinline__ Lane(const Operands& operands, uint4* storage, size_t first_output)
        : from(operands),
          shared(storage + threadIdx.x),
          output(first_output + threadIdx.x % SPARK_WARP / 4u * GROUP),
          g(threadIdx.x % SPARK_WARP / 4u),
          t(threadIdx.x % 4u),
          warp(threadIdx.x / SPARK_WARP) {}

    // Steps of this warp: two a chunk.
    __device__ __forceinline__ unsigned steps() const {
        const unsigned chunks = (from.depth - 1u) / CHUNK + 1u;
        return 2u * ((chunks + WARPS - 1u - warp) / WARPS);
    }

    // The lane's first k of a chunk of this warp; 64 bits, since chunks are also asked for beyond the last.
    __device__ __forceinline__ size_t first_k(unsigned chunk) const {
        return (static_cast<size_t>(chunk) * WARPS + warp) * CHUNK + t * GROUP;
    }

    __device__ __forceinline__ uint4 load_scales(unsigned chunk) const {
        const size_t k = first_k(chunk);
        if (k < from.depth && output < from.ldb) {
            return *reinterpret_cast<const uint4*>(from.scales + k / GROUP * from.ldb + output);
        }
        return make_uint4(0u, 0u, 0u, 0u);
    }

    __device__ __forceinline__ uint4* word(unsigned stage, unsigned number) const {
        return shared + (stage * WORDS + number) * GEMM_THREADS;
    }

    // Starts the copies of a step. Beyond K, beyond ldb and beyond M, zeros.
    __device__ __forceinline__ void start(unsigned stage, unsigned step) const {
        const size_t k = first_k(step / 2u) + step % 2u * STEP;
        const bool inside = k < from.depth;
        const bool codes = inside && output < from.ldb;
        const unsigned char* column = codes ? from.packed + k / 2u * from.ldb + output : from.packed;
#pragma unroll
        for (unsigned i = 0u; i < CODE_WORDS; ++i) {
            spark_copy_async(word(stage, i), codes ? column + static_cast<size_t>(i) * from.ldb : column, codes);
        }
#pragma unroll
        for (unsigned tile = 0u; tile < TILES; ++tile) {
            const unsigned row = 8u * tile + g;
            const bool live = inside && row < from.rows;
            const size_t at = live ? static_cast<size_t>(row) * from.depth + k : 0u;
            spark_copy_async(word(stage, CODE_WORDS + tile), from.a + at, live);
        }
    }
};

__device__ __forceinline__ unsigned part(const uint4& word, unsigned i) {
    return i == 0u ? word.x : i == 1u ? word.y : i == 2u ? word.z : word.w;
}

// One step: 8 k of 16 outputs, a lane. sums[i] has the outputs 2 i and 2 i + 1.
template <unsigned TILES>
__device__ __forceinline__ void multiply(float (&sums)[8][TILES][4], const Lane<TILES>& lane, unsigned stage,
                                         const unsigned (&factor_pairs)[8]) {
#pragma unroll
    for (unsigned half = 0u; half < 2u; ++half) {
        const uint4 low = *lane.word(stage, 2u * half);
        const uint4 high = *lane.word(stage, 2u * half + 1u);
        unsigned b[TILES][2];
#pragma unroll
        for (unsigned tile = 0u; tile < TILES; ++tile) {
            // k in the order in which the codes come.
            const uint2 a = reinterpret_cast<const uint2*>(lane.word(stage, CODE_WORDS + tile))[half];
            b[tile][0] = __byte_perm(a.x, a.y, 0x5410u);
            b[tile][1] = __byte_perm(a.x, a.y, 0x7632u);
        }
#pragma unroll
        for (unsigned i = 0u; i < 8u; ++i) {
            unsigned rows[4];
            const unsigned pick = i % 2u == 0u ? 0x5410u : 0x7632u;
            decode_codes(rows, __byte_perm(part(low, i / 2u), part(high, i / 2u), pick), factor_pairs[i]);
#pragma unroll
            for (unsigned tile = 0u; tile < TILES; ++tile) {
                spark_mma(sums[i][tile], rows, b[tile]);
            }
        }
    }
}

// This warp's sums over its chunks.
template <unsigned TILES>
__device__ __forceinline__ void add_chunks(float (&sums)[8][TILES][4], const Lane<TILES>& lane) {
    constexpr unsigned STAGES = Lane<TILES>::STAGES;
    const unsigned steps = lane.steps();
#pragma unroll
    for (unsigned stage = 0u; stage + 1u < STAGES; ++stage) {
        lane.start(stage, stage);
        spark_copy_group();
    }
    uint4 scales = lane.load_scales(0u);
    unsigned factor_pairs[8];
    unsigned reading = 0u;
    unsigned filling = STAGES - 1u;
    for (unsigned step = 0u; step < steps; ++step) {
        if (step % 2u == 0u) {
            decode_scales(factor_pairs, scales);
            scales = lane.load_scales(step / 2u + 1u);
        }
        // What this thread read of the stage to fill, it has used: the step before multiplied it.
        lane.start(filling, step + STAGES - 1u);
        spark_copy_group();
        spark_copy_wait<STAGES - 1>();
        multiply(sums, lane, reading, factor_pairs);
        reading = reading + 1u == STAGES ? 0u : reading + 1u;
        filling = filling + 1u == STAGES ? 0u : filling + 1u;
    }
    spark_copy_wait<0>();
}

// Where a warp puts the sum of a row of a tile and an output for the others: four outputs at a time change places with
// the row, so that the lanes that store together meet no bank twice.
__device__ __forceinline__ unsigned place(unsigned row, unsigned output) {
    return row * OUTPUTS + (output ^ (row / 2u * 4u));
}

// The outputs of a block for from.rows rows, at most 8 TILES.
template <unsigned TILES>
__device__ __forceinline__ void compute(const Operands& from, uint4* storage, size_t first_output, float scale2,
                                        __nv_bfloat16* c, unsigned n) {
    const Lane<TILES> lane(from, storage, first_output);
    float sums[8][TILES][4] = {};
    add_chunks(sums, lane);
    float* shared = reinterpret_cast<float*>(storage);
#pragma unroll
    for (unsigned tile = 0u; tile < TILES; ++tile) {
        __syncthreads();  // the copies, or the tile before, have been read
        float* own = shared + lane.warp * 8u * OUTPUTS;
#pragma unroll
        for (unsigned i = 0u; i < 8u; i += 2u) {
#pragma unroll
            for (unsigned column = 0u; column < 2u; ++column) {
                const unsigned at = place(2u * lane.t + column, lane.g * GROUP + 2u * i);
                *reinterpret_cast<float4*>(own + at) =
                    make_float4(sums[i][tile][column], sums[i][tile][2u + column], sums[i + 1u][tile][column],
                                sums[i + 1u][tile][2u + column]);
            }
        }
        __syncthreads();
        const size_t output = first_output + threadIdx.x;
#pragma unroll
        for (unsigned row = 0u; row < 8u; ++row) {
            const float* first = shared + place(row, threadIdx.x);
            const float total = (first[0] + first[8u * OUTPUTS]) + (first[16u * OUTPUTS] + first[24u * OUTPUTS]);
            if (8u * tile + row < from.rows && output < n) {
                spark_store(c + static_cast<size_t>(8u * tile + row) * n + output, total * REST * scale2);
            }
        }
    }
    __syncthreads();  // the next pass copies into what was read here
}

// Grid (ceil(N / 128), ceil(M / 64)), block 128. K % 16 == 0, ldb % 16 == 0, ldb >= N; A, B_packed and B_scale on
// 16-byte addresses. Weights are read once for 32 rows.
extern "C" __global__ void __launch_bounds__(GEMM_THREADS)
    w4a16_gemm_t(const __nv_bfloat16* __restrict__ A, const unsigned char* __restrict__ B_packed,
                 const unsigned char* __restrict__ B_scale, float scale2, __nv_bfloat16* __restrict__ C, unsigned int M,
                 unsigned int N, unsigned int K, unsigned int ldb) {
    __shared__ __align__(16) uint4 storage[SHARED_WORDS * GEMM_THREADS];
    const size_t first_output = static_cast<size_t>(blockIdx.x) * OUTPUTS;
    const size_t first_row = static_cast<size_t>(blockIdx.y) * BLOCK_ROWS;
    const size_t last_row = first_row + BLOCK_ROWS < M ? first_row + BLOCK_ROWS : M;
    for (size_t row = first_row; row < last_row; row += PASS_ROWS) {
        const unsigned rows = static_cast<unsigned>(last_row - row < PASS_ROWS ? last_row - row : PASS_ROWS);
        const Operands from = {A + row * K, B_packed, B_scale, rows, K, ldb};
        __nv_bfloat16* c = C + row * N;
        if (rows <= 8u) {
            compute<1u>(from, storage, first_output, scale2, c, N);
        } else if (rows <= 16u) {
            compute<2u>(from, storage, first_output, scale2, c, N);
        } else {
            compute<4u>(from, storage, first_output, scale2, c, N);
        }
    }
}
