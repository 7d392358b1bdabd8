// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_nvfp4_transpose: an NVFP4 weight's bytes in the layout of the tile GEMM. A byte holds two codes that
// follow each other along K, or one scale, so both matrices are transposed as bytes.

#include "spark_common.cuh"

constexpr unsigned TILE = 64u;  // bytes each way
constexpr unsigned WORDS = TILE / 4u;
constexpr unsigned TURN_THREADS = 256u;

// target [columns, ldb] = source [rows, columns] transposed, with zeros from `rows` to ldb. Grid
// (ceil(ldb / 64), ceil(columns / 64)), block 256. ldb % 4 == 0, target on a 4-byte address; source on any.
extern "C" __global__ void __launch_bounds__(TURN_THREADS)
    spark_nvfp4_transpose(const unsigned char* __restrict__ source, unsigned char* __restrict__ target,
                          unsigned int rows, unsigned int columns, unsigned int ldb) {
    // A word more than a row has, so that the rows of a word that is written lie in different banks.
    __shared__ unsigned tile[TILE][WORDS + 1u];
    const size_t first_row = static_cast<size_t>(blockIdx.x) * TILE;
    const size_t first_column = static_cast<size_t>(blockIdx.y) * TILE;
    const bool wide = columns % 4u == 0u && spark_aligned(source, 4u);
    const unsigned word = threadIdx.x % WORDS;
#pragma unroll
    for (unsigned line = threadIdx.x / WORDS; line < TILE; line += TURN_THREADS / WORDS) {
        const size_t row = first_row + line;
        const size_t column = first_column + 4u * word;
        const unsigned char* from = source + row * columns + column;
        unsigned bytes = 0u;
        if (row < rows && wide && column < columns) {
            bytes = *reinterpret_cast<const unsigned*>(from);
        } else if (row < rows) {
            for (unsigned i = 0u; i < 4u && column + i < columns; ++i) {
                bytes |= static_cast<unsigned>(from[i]) << (8u * i);
            }
        }
        tile[line][word] = bytes;
    }
    __syncthreads();
#pragma unroll
    for (unsigned line = threadIdx.x / WORDS; line < TILE; line += TURN_THREADS / WORDS) {
        const size_t column = first_column + line;
        const size_t row = first_row + 4u * word;
        unsigned bytes = 0u;
#pragma unroll
        for (unsigned i = 0u; i < 4u; ++i) {
            bytes |= (tile[4u * word + i][line / 4u] >> (line % 4u * 8u) & 0xffu) << (8u * i);
        }
        if (column < columns && row < ldb) {
            *reinterpret_cast<unsigned*>(target + column * ldb + row) = bytes;
        }
    }
}
