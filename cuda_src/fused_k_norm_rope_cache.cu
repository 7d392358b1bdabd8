// SPDX-License-Identifier: AGPL-3.0-only
// Module fused_k_norm_rope_cache: new key rows are normalised, rotated and written to their cache slots in one pass.
//
// A head x of k_in [T, num_kv_heads, head_dim] becomes, all in FP32,
//   n = (x * r) * (1 + k_norm_weight),   r = rsqrt(mean(x^2) + rms_eps),
//   y[i] = n[i] * cos - n[i + half] * sin,   y[i + half] = n[i + half] * cos + n[i] * sin,   i < half = rotary_dim / 2,
// and y[i] = n[i] from rotary_dim on. y is rounded once, where it is stored: a chain of norm, rope and cache write
// rounds n to BF16 in between, which deep layers notice. Angles are those of rope_forward:
// position / theta^(2 i / rotary_dim) in FP64 up to the cast of the angle.
//
// Grid (T, num_kv_heads), block (head_dim), head_dim <= 256. Slot = block * block_size + offset, and blocks lie without
// a gap; a negative slot skips the row.

#include "spark_common.cuh"
#include "spark_fp8.cuh"

constexpr unsigned LARGEST_HEAD = 256u;

struct KeyHead {
    const __nv_bfloat16* in;
    const __nv_bfloat16* weight;
    unsigned size;
    unsigned rotary_dim;
    float eps;
    float theta;
};

// The head of this block; every thread of the block calls. position(pair) gives the position that turns a pair, and
// store(element, value) takes each element of y once.
template <class Position, class Store>
__device__ __forceinline__ void make_key(const KeyHead& head, Position position, Store store) {
    __shared__ float normed[LARGEST_HEAD];
    const unsigned i = threadIdx.x;
    const size_t row = static_cast<size_t>(blockIdx.x) * gridDim.y + blockIdx.y;
    const float x = spark_load(head.in + row * head.size + i);
    const float mean = spark_block_sum(x * x) / static_cast<float>(head.size);
    normed[i] = x * rsqrtf(mean + head.eps) * (1.0f + spark_load(head.weight + i));
    __syncthreads();
    const unsigned half = head.rotary_dim / 2u;
    if (i < half) {
        const double exponent = static_cast<double>(2u * i) / static_cast<double>(head.rotary_dim);
        const double frequency = 1.0 / pow(static_cast<double>(head.theta), exponent);
        const float angle = static_cast<float>(static_cast<double>(position(i)) * frequency);
        const float c = cosf(angle);
        const float s = sinf(angle);
        const float n0 = normed[i];
        const float n1 = normed[i + half];
        store(i, n0 * c - n1 * s);
        store(i + half, n1 * c + n0 * s);
    } else if (i >= head.rotary_dim) {
        store(i, normed[i]);
    }
}

// Where the head goes in a cache, in elements.
__device__ __forceinline__ size_t key_start(long long slot, unsigned num_kv_heads, unsigned head_dim) {
    return (static_cast<size_t>(slot) * num_kv_heads + blockIdx.y) * head_dim;
}

extern "C" __global__ void fused_k_norm_rope_cache_write_bf16(
    const __nv_bfloat16* k_in, const __nv_bfloat16* k_norm_weight, const unsigned int* positions,
    __nv_bfloat16* k_cache, const long long* slot_mapping, unsigned int num_kv_heads, unsigned int head_dim,
    unsigned int rotary_dim, unsigned int block_size, float rms_eps, float theta) {
    spark_let_next_start();
    spark_wait_for_previous();
    const long long slot = slot_mapping[blockIdx.x];
    if (slot < 0) {
        return;
    }
    __nv_bfloat16* to = k_cache + key_start(slot, num_kv_heads, head_dim);
    make_key({k_in, k_norm_weight, head_dim, rotary_dim, rms_eps, theta},
             [=](unsigned) { return positions[blockIdx.x]; },
             [=](unsigned i, float y) { spark_store(to + i, y); });
}

// Three positions a token: pair i is turned by pos_t, pos_h and pos_w for i % 3 = 0, 1 and 2.
extern "C" __global__ void fused_k_norm_rope_mrope_cache_write_bf16(
    const __nv_bfloat16* k_in, const __nv_bfloat16* k_norm_weight, const unsigned int* pos_t, const unsigned int* pos_h,
    const unsigned int* pos_w, __nv_bfloat16* k_cache, const long long* slot_mapping, unsigned int num_kv_heads,
    unsigned int head_dim, unsigned int rotary_dim, unsigned int block_size, float rms_eps, float theta) {
    spark_let_next_start();
    spark_wait_for_previous();
    const long long slot = slot_mapping[blockIdx.x];
    if (slot < 0) {
        return;
    }
    __nv_bfloat16* to = k_cache + key_start(slot, num_kv_heads, head_dim);
    make_key({k_in, k_norm_weight, head_dim, rotary_dim, rms_eps, theta},
             [=](unsigned i) {
                 const unsigned int* stream = i % 3u == 0u ? pos_t : i % 3u == 1u ? pos_h : pos_w;
                 return stream[blockIdx.x];
             },
             [=](unsigned i, float y) { spark_store(to + i, y); });
}

// E4M3(y * inv_scale): nearest, ties to even, saturating at 448; NaN is 0x7f.
extern "C" __global__ void fused_k_norm_rope_cache_write_fp8(
    const __nv_bfloat16* k_in, const __nv_bfloat16* k_norm_weight, const unsigned int* positions,
    unsigned char* k_cache_fp8, const long long* slot_mapping, unsigned int num_kv_heads, unsigned int head_dim,
    unsigned int rotary_dim, unsigned int block_size, float rms_eps, float theta, float inv_scale) {
    spark_let_next_start();
    spark_wait_for_previous();
    const long long slot = slot_mapping[blockIdx.x];
    if (slot < 0) {
        return;
    }
    unsigned char* to = k_cache_fp8 + key_start(slot, num_kv_heads, head_dim);
    make_key({k_in, k_norm_weight, head_dim, rotary_dim, rms_eps, theta},
             [=](unsigned) { return positions[blockIdx.x]; },
             [=](unsigned i, float y) { to[i] = spark_to_e4m3(y * inv_scale); });
}
