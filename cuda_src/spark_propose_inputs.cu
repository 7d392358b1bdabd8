// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_propose_inputs: what a captured propose needs of the host, fetched by the graph's first kernel from
// page-locked host memory, so that a propose queues nothing but its graph. Own ABI. Bits are copied.
//
// Three parts, one for each z of the grid; every part is dealt out to all of its blocks.
//   0: slab = the first 16 * *used bytes of given: positions, slots, lengths, block tables
//   1: hidden[y] = row_bytes bytes at address sources[y], a hidden row of the target
//   2: embed[y] = row tokens[y] of embed_table
// A block waits for the host's memory once for its address or token and not for each thread: reads there pass the bus.
// Nothing here knows what an address points at or how many rows the table has.

#include "spark_common.cuh"

// Copies `bytes` bytes, an even number, by the blocks 0 to blocks - 1 of which this is `block`: 16 at a time where both
// ends and the length allow it, else 2.
__device__ __forceinline__ void copy_row(void* to, const void* from, unsigned bytes, unsigned block, unsigned blocks) {
    const size_t first = static_cast<size_t>(block) * blockDim.x + threadIdx.x;
    const size_t step = static_cast<size_t>(blocks) * blockDim.x;
    if (bytes % 16u == 0u && spark_aligned(to, 16u) && spark_aligned(from, 16u)) {
        for (size_t i = first; i < bytes / 16u; i += step) {
            static_cast<uint4*>(to)[i] = static_cast<const uint4*>(from)[i];
        }
        return;
    }
    for (size_t i = first; i < bytes / 2u; i += step) {
        static_cast<unsigned short*>(to)[i] = static_cast<const unsigned short*>(from)[i];
    }
}

// Grid (ceil(max(row_bytes, 2 * hidden_size) / 4096), rows, 3), block 256. row_bytes is even; given, slab on 16-byte
// addresses.
extern "C" __global__ void spark_propose_inputs(const unsigned char* given, const unsigned int* used,
                                                const unsigned long long* sources, const unsigned int* tokens,
                                                const __nv_bfloat16* embed_table, unsigned char* slab,
                                                unsigned char* hidden, __nv_bfloat16* embed, unsigned int row_bytes,
                                                unsigned int hidden_size) {
    spark_let_next_start();
    spark_wait_for_previous();
    __shared__ size_t word;
    const unsigned row = blockIdx.y;
    const unsigned part = blockIdx.z;
    if (threadIdx.x == 0u) {
        word = part == 0u ? *used : part == 1u ? static_cast<size_t>(sources[row]) : tokens[row];
    }
    __syncthreads();
    if (part == 0u) {
        copy_row(slab, given, static_cast<unsigned>(word) * 16u, row * gridDim.x + blockIdx.x, gridDim.x * gridDim.y);
    } else if (part == 1u) {
        copy_row(hidden + static_cast<size_t>(row) * row_bytes, reinterpret_cast<const void*>(word), row_bytes,
                 blockIdx.x, gridDim.x);
    } else {
        copy_row(embed + static_cast<size_t>(row) * hidden_size, embed_table + word * hidden_size, hidden_size * 2u,
                 blockIdx.x, gridDim.x);
    }
}
