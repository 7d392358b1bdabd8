// SPDX-License-Identifier: AGPL-3.0-only
// Module rope: rotary position embedding, rotate-half pairs, in place on Q and K.

#include "spark_common.cuh"

// Pairs (i, i + half), i < half = rotary_dim / 2, of every head of Q [batch, seq_len, num_q_heads, head_dim] and
// K [batch, seq_len, num_kv_heads, head_dim]:
//   y[i] = x[i] * cos - x[i + half] * sin,   y[i + half] = x[i + half] * cos + x[i] * sin
// with angle = positions[token] / theta^(2 i / rotary_dim), in FP64 up to the cast of the angle. Elements from
// rotary_dim on stay. Grid (num_q_heads + num_kv_heads, ceil(seq_len / tokens), batch) with tokens = max(1, 128 / half)
// to a block, block 128. Any even rotary_dim up to head_dim: where half does not divide 128 the last threads have
// nothing to do, and where half > 128 each thread takes several pairs.
extern "C" __global__ void rope_forward(__nv_bfloat16* Q, __nv_bfloat16* K, const unsigned int* positions,
                                        unsigned int seq_len, unsigned int num_q_heads, unsigned int num_kv_heads,
                                        unsigned int head_dim, unsigned int rotary_dim, float theta) {
    spark_let_next_start();
    spark_wait_for_previous();
    const unsigned half = rotary_dim / 2u;
    const unsigned tokens = half < blockDim.x ? blockDim.x / half : 1u;
    const bool is_query = blockIdx.x < num_q_heads;
    const unsigned head = is_query ? blockIdx.x : blockIdx.x - num_q_heads;
    const unsigned heads = is_query ? num_q_heads : num_kv_heads;
    __nv_bfloat16* rows = is_query ? Q : K;
    for (unsigned work = threadIdx.x; work < tokens * half; work += blockDim.x) {
        const unsigned pair = work % half;
        const size_t in_sequence = static_cast<size_t>(blockIdx.y) * tokens + work / half;
        if (in_sequence >= seq_len) {
            break;
        }
        const size_t token = static_cast<size_t>(blockIdx.z) * seq_len + in_sequence;
        const double exponent = static_cast<double>(2u * pair) / static_cast<double>(rotary_dim);
        const double frequency = 1.0 / pow(static_cast<double>(theta), exponent);
        const float angle = static_cast<float>(static_cast<double>(positions[token]) * frequency);
        const float c = cosf(angle);
        const float s = sinf(angle);
        __nv_bfloat16* x = rows + (token * heads + head) * head_dim + pair;
        const float x0 = spark_load(x);
        const float x1 = spark_load(x + half);
        spark_store(x, x0 * c - x1 * s);
        spark_store(x + half, x1 * c + x0 * s);
    }
}
