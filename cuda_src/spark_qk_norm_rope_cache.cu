// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_qk_norm_rope_cache: what comes between the projections and attention, in one launch for rows of any number
// of sequences: the norm of each head of queries and keys, their rotation, and the write of keys and values to the cache.
//
// Every store and every rounding is that of rms_norm (or rms_norm_vanilla), rope_forward and reshape_and_cache one after
// the other, so that the bits are theirs. Grid (num_q_heads + 2 num_kv_heads, rows), block (head_dim): a block makes a
// head, of a query, a key or a value.

#include "rms_norm.cuh"
#include "spark_fp8.cuh"

constexpr unsigned LARGEST_HEAD = 256u;

struct Shape {
    unsigned num_q_heads;
    unsigned num_kv_heads;
    unsigned head_dim;
    unsigned rotary_dim;
    unsigned block_size;
    unsigned q_stride;
    size_t cache_stride;
    float eps;
    float theta;
    bool one_plus;
};

// One head, normed where there is a weight and rotated: store(element, value) takes each element once, rounded to BF16.
// Every thread of the block calls.
template <class Store>
__device__ __forceinline__ void make_head(const __nv_bfloat16* x, const __nv_bfloat16* weight, const Shape& shape,
                                          unsigned position, Store store) {
    __shared__ float normed[LARGEST_HEAD];
    const unsigned i = threadIdx.x;
    const unsigned pairs = spark_pairs(shape.head_dim);
    const unsigned word = i < pairs ? spark_load_pair<false>(x, i, shape.head_dim) : 0u;
    unsigned made = word;
    if (weight != nullptr) {
        const float x0 = spark_low(word);
        const float x1 = spark_high(word);
        const float squares = i < pairs ? x0 * x0 + x1 * x1 : 0.0f;
        const float r = spark_inverse_rms(spark_block_sum(squares), shape.head_dim, shape.eps);
        const unsigned w = i < pairs ? spark_load_pair<false>(weight, i, shape.head_dim) : 0u;
        made = shape.one_plus ? spark_scale_pair<true>(word, r, w) : spark_scale_pair<false>(word, r, w);
    }
    if (i < pairs) {
        normed[2u * i] = spark_low(made);
        if (2u * i + 1u < shape.head_dim) {
            normed[2u * i + 1u] = spark_high(made);
        }
    }
    __syncthreads();
    const unsigned half = shape.rotary_dim / 2u;
    if (i < half) {
        const double exponent = static_cast<double>(2u * i) / static_cast<double>(shape.rotary_dim);
        const double frequency = 1.0 / pow(static_cast<double>(shape.theta), exponent);
        const float angle = static_cast<float>(static_cast<double>(position) * frequency);
        const float c = cosf(angle);
        const float s = sinf(angle);
        const float x0 = normed[i];
        const float x1 = normed[i + half];
        store(i, __float2bfloat16_rn(x0 * c - x1 * s));
        store(i + half, __float2bfloat16_rn(x1 * c + x0 * s));
    } else if (i >= shape.rotary_dim) {
        store(i, __float2bfloat16_rn(normed[i]));
    }
}

// put(to, value, scale) writes an element of a cache.
template <typename Element, class Put>
__device__ __forceinline__ void prepare(__nv_bfloat16* Q, __nv_bfloat16* K, const __nv_bfloat16* V,
                                        const __nv_bfloat16* q_weight, const __nv_bfloat16* k_weight, Element* k_cache,
                                        Element* v_cache, const unsigned* positions, const long long* slots,
                                        unsigned position_stride, unsigned slot_stride, const Shape& shape, Put put) {
    const size_t row = blockIdx.y;
    const unsigned position = positions[row * position_stride];
    if (blockIdx.x < shape.num_q_heads) {
        __nv_bfloat16* x = Q + row * shape.q_stride + static_cast<size_t>(blockIdx.x) * shape.head_dim;
        make_head(x, q_weight, shape, position, [=](unsigned i, __nv_bfloat16 value) { x[i] = value; });
        return;
    }
    const long long slot = slots[row * slot_stride];
    const bool kept = slot >= 0;
    const bool is_key = blockIdx.x - shape.num_q_heads < shape.num_kv_heads;
    const unsigned head = (blockIdx.x - shape.num_q_heads) % shape.num_kv_heads;
    const size_t tokens = static_cast<size_t>(shape.num_kv_heads) * shape.head_dim;
    const size_t block = static_cast<size_t>(slot) / shape.block_size;
    const size_t to = block * shape.cache_stride + (static_cast<size_t>(slot) - block * shape.block_size) * tokens +
                      static_cast<size_t>(head) * shape.head_dim;
    const size_t from = row * tokens + static_cast<size_t>(head) * shape.head_dim;
    if (is_key) {
        __nv_bfloat16* x = K + from;
        make_head(x, k_weight, shape, position, [=](unsigned i, __nv_bfloat16 value) {
            x[i] = value;
            if (kept) {
                put(k_cache + to + i, value, true);
            }
        });
    } else if (kept) {
        put(v_cache + to + threadIdx.x, V[from + threadIdx.x], false);
    }
}

// Queries BF16, rows q_stride elements apart, and K BF16 [rows, num_kv_heads, head_dim], in place; K and V, of K's shape,
// into slots of the caches, whose blocks lie cache_stride elements apart; a negative slot is none. A weight that is NULL
// means no norm; one_plus: weights are used as 1 + w. Positions u32 position_stride apart, slots i64 slot_stride apart.
// head_dim up to 256.
extern "C" __global__ void __launch_bounds__(256)
    spark_qk_norm_rope_cache(__nv_bfloat16* Q, __nv_bfloat16* K, const __nv_bfloat16* V,
                             const __nv_bfloat16* q_weight, const __nv_bfloat16* k_weight, __nv_bfloat16* k_cache,
                             __nv_bfloat16* v_cache, const unsigned int* positions, const long long* slots,
                             unsigned int position_stride, unsigned int slot_stride, unsigned int num_q_heads,
                             unsigned int num_kv_heads, unsigned int head_dim, unsigned int rotary_dim,
                             unsigned int block_size, unsigned int q_stride, unsigned long long cache_stride,
                             unsigned int one_plus, float eps, float theta) {
    spark_let_next_start();
    spark_wait_for_previous();
    const Shape shape = {num_q_heads, num_kv_heads, head_dim, rotary_dim,    block_size,
                         q_stride,    cache_stride, eps,      theta,         one_plus != 0u};
    prepare(Q, K, V, q_weight, k_weight, k_cache, v_cache, positions, slots, position_stride, slot_stride, shape,
            [](__nv_bfloat16* to, __nv_bfloat16 value, bool) { *to = value; });
}

// The same into caches of E4M3: an element is its BF16 value times (1 / scale), rounded to FP32, then to E4M3 (nearest,
// ties to even, saturating at 448).
extern "C" __global__ void __launch_bounds__(256)
    spark_qk_norm_rope_cache_fp8(__nv_bfloat16* Q, __nv_bfloat16* K, const __nv_bfloat16* V,
                                 const __nv_bfloat16* q_weight, const __nv_bfloat16* k_weight, unsigned char* k_cache,
                                 unsigned char* v_cache, const unsigned int* positions, const long long* slots,
                                 unsigned int position_stride, unsigned int slot_stride, unsigned int num_q_heads,
                                 unsigned int num_kv_heads, unsigned int head_dim, unsigned int rotary_dim,
                                 unsigned int block_size, unsigned int q_stride, unsigned long long cache_stride,
                                 unsigned int one_plus, float eps, float theta, float k_scale, float v_scale) {
    spark_let_next_start();
    spark_wait_for_previous();
    const Shape shape = {num_q_heads, num_kv_heads, head_dim, rotary_dim,    block_size,
                         q_stride,    cache_stride, eps,      theta,         one_plus != 0u};
    const float k_inverse = 1.0f / k_scale;
    const float v_inverse = 1.0f / v_scale;
    prepare(Q, K, V, q_weight, k_weight, k_cache, v_cache, positions, slots, position_stride, slot_stride, shape,
            [=](unsigned char* to, __nv_bfloat16 value, bool key) {
                *to = spark_to_e4m3(spark_load(&value) * (key ? k_inverse : v_inverse));
            });
}
