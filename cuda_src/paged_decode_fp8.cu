// SPDX-License-Identifier: AGPL-3.0-only
// Module paged_decode_fp8: attention of one query row a sequence over a paged E4M3 cache with one scale a side.

#include "paged_decode.cuh"
#include "spark_fp8.cuh"

template <unsigned WIDTH>
struct Vector;
template <>
struct Vector<1u> {
    using type = unsigned char;
};
template <>
struct Vector<2u> {
    using type = unsigned short;
};
template <>
struct Vector<4u> {
    using type = unsigned;
};
template <>
struct Vector<8u> {
    using type = uint2;
};

struct E4m3Rows {
    using Element = unsigned char;
    template <unsigned WIDTH>
    using Word = typename Vector<WIDTH>::type;

    __device__ static __forceinline__ void widen(unsigned char byte, float* to) { to[0] = spark_from_e4m3(byte); }
    __device__ static __forceinline__ void widen(unsigned short bytes, float* to) { spark_widen_e4m3(bytes, to); }
    __device__ static __forceinline__ void widen(unsigned bytes, float* to) {
        spark_widen_e4m3(static_cast<unsigned short>(bytes & 0xffffu), to);
        spark_widen_e4m3(static_cast<unsigned short>(bytes >> 16), to + 2);
    }
    __device__ static __forceinline__ void widen(uint2 bytes, float* to) {
        widen(bytes.x, to);
        widen(bytes.y, to + 4);
    }
};

// A walk over a sequence's rows, in blocks that may lie apart.
struct Walk {
    const int* block;  // of the block table
    unsigned in_block;
    unsigned block_size;
    size_t block_stride;  // elements from a block to the next
    size_t token_stride;  // elements from a slot to the next
    size_t head_start;

    __device__ __forceinline__ size_t next() {
        const size_t row = static_cast<size_t>(*block) * block_stride + in_block * token_stride + head_start;
        in_block += 1u;
        if (in_block == block_size) {
            in_block = 0u;
            block += 1;
        }
        return row;
    }
};

// O[seq, head] = softmax(Q[seq, head] . K * (inv_sqrt_d * k_scale)) V * v_scale over the positions below seq_lens[seq],
// K and V being the values of the bytes; the output is scaled once, in FP32. A sequence of length 0 (or less) leaves its
// rows of O as they are. Query head h reads cache head h / (num_q_heads / num_kv_heads). Row of Q at seq * q_stride
// elements, O packed [seqs, num_q_heads, head_dim]; position p in block block_tables[seq, p / block_size], blocks
// cache_stride elements apart. Grid (num_q_heads, seqs), block 256. head_dim a multiple of 32, 512 at most; caches on
// 8-byte addresses, cache_stride a multiple of 8. Score and weights accurate to expf.
extern "C" __global__ void __launch_bounds__(256, 2)
    paged_decode_attn_fp8(const __nv_bfloat16* Q, const unsigned char* K_cache, const unsigned char* V_cache,
                          __nv_bfloat16* O, const int* block_tables, const int* seq_lens,
                          unsigned int max_blocks_per_seq, unsigned int num_q_heads, unsigned int num_kv_heads,
                          unsigned int head_dim, unsigned int block_size, float inv_sqrt_d, float k_scale,
                          float v_scale, unsigned int q_stride, unsigned long long cache_stride) {
    spark_let_next_start();
    spark_wait_for_previous();
    const unsigned head = blockIdx.x;
    const size_t sequence = blockIdx.y;
    const int length = seq_lens[sequence];
    if (length <= 0) {
        return;
    }
    const unsigned end = static_cast<unsigned>(length);
    const size_t cache_head = head / (num_q_heads / num_kv_heads);
    const Walk walk = {block_tables + sequence * max_blocks_per_seq, 0u, block_size, cache_stride,
                       static_cast<size_t>(num_kv_heads) * head_dim, cache_head * head_dim};
    const __nv_bfloat16* q = Q + sequence * q_stride + static_cast<size_t>(head) * head_dim;
    __nv_bfloat16* out = O + (sequence * num_q_heads + head) * head_dim;
    spark_paged_decode<E4m3Rows>(q, K_cache, V_cache, out, walk, 0u, end, head_dim, inv_sqrt_d * k_scale, v_scale);
}
