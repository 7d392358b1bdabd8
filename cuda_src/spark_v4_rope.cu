// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_v4_rope: rotary position embedding of neighbours on the tail of each head, in place, either way.

#include "spark_v4.cuh"

constexpr unsigned ROPE_HEADS = 8u;  // of a block; with 64 elements to rotate, a warp has one head

// Each head of x [rows, heads, head_dim] ends with rope_dim elements t; its pairs i < rope_dim / 2 become
//   t[2i] = t[2i] * cos - t[2i + 1] * sin,   t[2i + 1] = t[2i] * sin + t[2i + 1] * cos
// with angle = positions[row] / theta^(2 i / rope_dim), or its negative with inverse != 0; FP32, rounded once. What
// lies before the tail stays. Grid (rows, ceil(heads / 8)), block 256; the cosines of a row are computed once a block.
// head_dim and rope_dim even, rope_dim at most 512 and head_dim, x on a 4-byte address.
extern "C" __global__ void spark_v4_rope(__nv_bfloat16* x, const unsigned int* positions, unsigned int heads,
                                         unsigned int head_dim, unsigned int rope_dim, float theta,
                                         unsigned int inverse) {
    spark_let_next_start();
    const double own = v4_own_frequency(rope_dim, theta);
    spark_wait_for_previous();
    __shared__ float2 turns[V4_MAX_PAIRS];
    const size_t row = blockIdx.x;
    v4_turns(turns, positions[row], rope_dim, theta, inverse != 0u, own);
    __syncthreads();
    const unsigned pairs = rope_dim / 2u;
    const unsigned first = blockIdx.y * ROPE_HEADS;
    const unsigned live = heads - first < ROPE_HEADS ? heads - first : ROPE_HEADS;
    for (unsigned work = threadIdx.x; work < live * pairs; work += blockDim.x) {
        const unsigned pair = work % pairs;
        const size_t head = row * heads + first + work / pairs;
        unsigned* word = reinterpret_cast<unsigned*>(x + (head + 1u) * head_dim - rope_dim) + pair;
        const unsigned before = *word;
        const float2 y = v4_turn(spark_low(before), spark_high(before), turns[pair]);
        *word = spark_pack(y.x, y.y);
    }
}
