// SPDX-License-Identifier: AGPL-3.0-only
// Module ssm_preprocess: splits the rows of a joint query and gate projection.

#include "spark_common.cuh"

extern __shared__ uint4 spark_row[];

// Row [Q0 G0 Q1 G1 ...] of 2 * num_heads pieces of head_dim elements becomes [Q0 Q1 ... | G0 G1 ...], in place, Word by
// Word: the whole row waits in shared memory while it is written back.
template <typename Word>
__device__ __forceinline__ void deinterleave(__nv_bfloat16* data, unsigned num_heads, unsigned head_dim) {
    const unsigned piece = head_dim * sizeof(__nv_bfloat16) / sizeof(Word);
    const unsigned count = 2u * num_heads * piece;
    Word* row = reinterpret_cast<Word*>(data);
    Word* held = reinterpret_cast<Word*>(spark_row);
    for (unsigned i = threadIdx.x; i < count; i += blockDim.x) {
        held[i] = row[i];
    }
    __syncthreads();
    for (unsigned i = threadIdx.x; i < count; i += blockDim.x) {
        const unsigned target = i / piece;
        const unsigned source = target < num_heads ? 2u * target : 2u * (target - num_heads) + 1u;
        row[i] = held[source * piece + i % piece];
    }
}

// Rows of data are `stride` elements apart. Grid (rows), block 256, 4 * num_heads * head_dim bytes of dynamic shared
// memory.
extern "C" __global__ void deinterleave_qg(__nv_bfloat16* data, unsigned int num_heads, unsigned int head_dim,
                                           unsigned int stride) {
    spark_let_next_start();
    spark_wait_for_previous();
    __nv_bfloat16* row = data + static_cast<size_t>(blockIdx.x) * stride;
    if (head_dim % 8u == 0u && spark_aligned(row, 16u)) {
        deinterleave<uint4>(row, num_heads, head_dim);
    } else {
        deinterleave<unsigned short>(row, num_heads, head_dim);
    }
}
