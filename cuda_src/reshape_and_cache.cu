// SPDX-License-Identifier: AGPL-3.0-only
// Module reshape_and_cache: writes new key and value rows into the pages of a KV cache, bit for bit.

#include "spark_common.cuh"

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
