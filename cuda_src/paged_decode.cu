// SPDX-License-Identifier: AGPL-3.0-only
// Module paged_decode: attention of one query row a sequence over a paged BF16 cache.

#include "paged_decode.cuh"

template <unsigned WIDTH>
struct Vector;
template <>
struct Vector<1u> {
    using type = unsigned short;
};
template <>
struct Vector<2u> {
    using type = unsigned;
};
template <>
struct Vector<4u> {
    using type = uint2;
};
template <>
struct Vector<8u> {
    using type = uint4;
};

struct Bf16Rows {
    using Element = __nv_bfloat16;
    template <unsigned WIDTH>
    using Word = typename Vector<WIDTH>::type;

    __device__ static __forceinline__ void widen(unsigned short word, float* to) {
        to[0] = __uint_as_float(static_cast<unsigned>(word) << 16);
    }
    __device__ static __forceinline__ void widen(unsigned word, float* to) {
        to[0] = spark_low(word);
        to[1] = spark_high(word);
    }
    __device__ static __forceinline__ void widen(uint2 words, float* to) {
        widen(words.x, to);
        widen(words.y, to + 2);
    }
    __device__ static __forceinline__ void widen(uint4 words, float* to) {
        widen(words.x, to);
        widen(words.y, to + 2);
        widen(words.z, to + 4);
        widen(words.w, to + 6);
    }
};

// A walk over a sequence's rows: where the head's row of one position after the other lies, in elements.
struct Walk {
    const int* block;  // of the block table
    unsigned in_block;
    unsigned block_size;
    size_t token_stride;  // elements from a slot to the next
    size_t head_start;

    __device__ __forceinline__ size_t next() {
        const size_t slot = static_cast<size_t>(*block) * block_size + in_block;
        in_block += 1u;
        if (in_block == block_size) {
            in_block = 0u;
            block += 1;
        }
        return slot * token_stride + head_start;
    }
};

// O[seq, head] = softmax(Q[seq, head] . K * inv_sqrt_d) V over the positions [w, L) of sequence seq, L = seq_lens[seq],
// w = L - sliding_window where 0 < sliding_window < L, else 0. A sequence of length 0 (or less) leaves its rows of O as
// they are. Query head h reads cache head h / (num_q_heads / num_kv_heads). Row of Q at seq * q_stride elements, O packed
// [seqs, num_q_heads, head_dim]; position p in block block_tables[seq, p / block_size]. Grid (num_q_heads, seqs), block
// 256. head_dim a multiple of 32, 512 at most; caches on 16-byte addresses. Score and weights accurate to expf.
extern "C" __global__ void __launch_bounds__(256, 2)
    paged_decode_attn(const __nv_bfloat16* Q, const __nv_bfloat16* K_cache, const __nv_bfloat16* V_cache,
                      __nv_bfloat16* O, const int* block_tables, const int* seq_lens, unsigned int max_blocks_per_seq,
                      unsigned int num_q_heads, unsigned int num_kv_heads, unsigned int head_dim,
                      unsigned int block_size, float inv_sqrt_d, unsigned int q_stride, unsigned int sliding_window) {
    spark_let_next_start();
    spark_wait_for_previous();
    const unsigned head = blockIdx.x;
    const size_t sequence = blockIdx.y;
    const int length = seq_lens[sequence];
    if (length <= 0) {
        return;
    }
    const unsigned end = static_cast<unsigned>(length);
    const unsigned begin = sliding_window > 0u && end > sliding_window ? end - sliding_window : 0u;
    const size_t cache_head = head / (num_q_heads / num_kv_heads);
    const Walk walk = {block_tables + sequence * max_blocks_per_seq, 0u, block_size,
                       static_cast<size_t>(num_kv_heads) * head_dim, cache_head * head_dim};
    const __nv_bfloat16* q = Q + sequence * q_stride + static_cast<size_t>(head) * head_dim;
    __nv_bfloat16* out = O + (sequence * num_q_heads + head) * head_dim;
    spark_paged_decode<Bf16Rows>(q, K_cache, V_cache, out, walk, begin, end, head_dim, inv_sqrt_d, 1.0f);
}
