// SPDX-License-Identifier: AGPL-3.0-only
// Module reshape_and_cache: writes new key and value rows into the pages of a KV cache, bit for bit or as E4M3.

#include "spark_common.cuh"
#include "spark_fp8.cuh"

// `count` elements by the threads of a block, Word at a time; both rows lie on addresses that Word allows.
template <typename Word>
__device__ __forceinline__ void copy_words(const __nv_bfloat16* from, __nv_bfloat16* to, unsigned count) {
    constexpr unsigned PER_WORD = sizeof(Word) / sizeof(__nv_bfloat16);
    const unsigned words = count / PER_WORD;
    for (unsigned w = threadIdx.x; w < words; w += blockDim.x) {
        reinterpret_cast<Word*>(to)[w] = reinterpret_cast<const Word*>(from)[w];
    }
    const unsigned tail = words * PER_WORD + threadIdx.x;
    if (tail < count) {
        to[tail] = from[tail];
    }
}

// The widest word that both addresses allow.
__device__ __forceinline__ void copy_row(const __nv_bfloat16* from, __nv_bfloat16* to, unsigned count) {
    if (spark_aligned(from, 16u) && spark_aligned(to, 16u)) {
        copy_words<uint4>(from, to, count);
    } else if (spark_aligned(from, 8u) && spark_aligned(to, 8u)) {
        copy_words<uint2>(from, to, count);
    } else {
        copy_words<unsigned short>(from, to, count);
    }
}

// Row t of key and of value (rows key_stride and value_stride elements apart, num_kv_heads * head_dim elements long)
// goes to slot slot_mapping[t] of k_cache and v_cache; a negative slot skips the row. Slot = block * block_size + offset
// and blocks lie without a gap, so a slot alone gives the address. Grid (rows), block 256.
extern "C" __global__ void reshape_and_cache_flash(const __nv_bfloat16* key, const __nv_bfloat16* value,
                                                   __nv_bfloat16* k_cache, __nv_bfloat16* v_cache,
                                                   const long long* slot_mapping, unsigned int num_kv_heads,
                                                   unsigned int head_dim, unsigned int block_size,
                                                   unsigned int key_stride, unsigned int value_stride) {
    spark_let_next_start();
    spark_wait_for_previous();
    const long long slot = slot_mapping[blockIdx.x];
    if (slot < 0) {
        return;
    }
    const unsigned count = num_kv_heads * head_dim;
    const size_t token = blockIdx.x;
    const size_t to = static_cast<size_t>(slot) * count;
    copy_row(key + token * key_stride, k_cache + to, count);
    copy_row(value + token * value_stride, v_cache + to, count);
}

// Two BF16 of a word, times `inverse`, as two E4M3.
__device__ __forceinline__ unsigned quantise_pair(unsigned word, float inverse) {
    return spark_pack_e4m3(spark_low(word) * inverse, spark_high(word) * inverse);
}

// `count` elements by the threads of a block, eight at a time where the addresses allow it.
__device__ __forceinline__ void quantise_row(const __nv_bfloat16* from, unsigned char* to, unsigned count,
                                             float inverse) {
    constexpr unsigned WIDE = 8u;
    const unsigned words = spark_aligned(from, 16u) && spark_aligned(to, 8u) ? count / WIDE : 0u;
    for (unsigned w = threadIdx.x; w < words; w += blockDim.x) {
        const uint4 x = reinterpret_cast<const uint4*>(from)[w];
        uint2 bytes;
        bytes.x = quantise_pair(x.x, inverse) | quantise_pair(x.y, inverse) << 16;
        bytes.y = quantise_pair(x.z, inverse) | quantise_pair(x.w, inverse) << 16;
        reinterpret_cast<uint2*>(to)[w] = bytes;
    }
    for (unsigned i = words * WIDE + threadIdx.x; i < count; i += blockDim.x) {
        to[i] = spark_to_e4m3(spark_load(from + i) * inverse);
    }
}

// The same into caches of E4M3: an element is x * (1 / scale), rounded to FP32, then to E4M3 (nearest, ties to even,
// saturating at 448; NaN stays NaN). Blocks lie cache_stride elements apart, which may be more than
// block_size * num_kv_heads * head_dim. Rows on any address. Grid (rows), block 256.
extern "C" __global__ void reshape_and_cache_flash_fp8(const __nv_bfloat16* key, const __nv_bfloat16* value,
                                                       unsigned char* k_cache, unsigned char* v_cache,
                                                       const long long* slot_mapping, unsigned int num_kv_heads,
                                                       unsigned int head_dim, unsigned int block_size, float k_scale,
                                                       float v_scale, unsigned int key_stride,
                                                       unsigned int value_stride, unsigned long long cache_stride) {
    spark_let_next_start();
    spark_wait_for_previous();
    const long long slot = slot_mapping[blockIdx.x];
    if (slot < 0) {
        return;
    }
    const unsigned count = num_kv_heads * head_dim;
    const size_t token = blockIdx.x;
    const size_t block = static_cast<size_t>(slot) / block_size;
    const size_t to = block * cache_stride + (static_cast<size_t>(slot) - block * block_size) * count;
    quantise_row(key + token * key_stride, k_cache + to, count, 1.0f / k_scale);
    quantise_row(value + token * value_stride, v_cache + to, count, 1.0f / v_scale);
}
