// SPDX-License-Identifier: AGPL-3.0-only
// Module embed_from_argmax: rows of an embedding table, chosen by token ids that are on the device. Bits are copied.
// Nothing here knows the size of the table: an id beyond it reads other memory.

#include "spark_common.cuh"

// output = embed_table[id], id = *argmax_result, and *token_id_out = id. Grid ceil(hidden_size / 256), block 256.
// token_id_out may be argmax_result: other blocks still read it then, so nothing is written.
extern "C" __global__ void embed_from_argmax(const unsigned int* argmax_result, const __nv_bfloat16* embed_table,
                                             __nv_bfloat16* output, unsigned int* token_id_out,
                                             unsigned int hidden_size) {
    spark_let_next_start();
    spark_wait_for_previous();
    const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const unsigned id = *argmax_result;
    if (i < hidden_size) {
        output[i] = embed_table[static_cast<size_t>(id) * hidden_size + i];
    }
    if (i == 0u && token_id_out != argmax_result) {
        *token_id_out = id;
    }
}

// output[t] = embed_table[token_ids[t]]. Grid (rows), block 256. Rows that start on 16-byte addresses go 8 elements at
// a time.
extern "C" __global__ void batched_embed(const unsigned int* token_ids, const __nv_bfloat16* embed_table,
                                         __nv_bfloat16* output, unsigned int hidden_size) {
    spark_let_next_start();
    spark_wait_for_previous();
    const __nv_bfloat16* from = embed_table + static_cast<size_t>(token_ids[blockIdx.x]) * hidden_size;
    __nv_bfloat16* to = output + static_cast<size_t>(blockIdx.x) * hidden_size;
    unsigned done = 0u;
    if (spark_aligned(from, 16u) && spark_aligned(to, 16u)) {
        const unsigned chunks = hidden_size / 8u;
        for (unsigned c = threadIdx.x; c < chunks; c += blockDim.x) {
            reinterpret_cast<uint4*>(to)[c] = reinterpret_cast<const uint4*>(from)[c];
        }
        done = chunks * 8u;
    }
    for (size_t i = static_cast<size_t>(done) + threadIdx.x; i < hidden_size; i += blockDim.x) {
        to[i] = from[i];
    }
}
