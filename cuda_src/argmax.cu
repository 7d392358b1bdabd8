// SPDX-License-Identifier: AGPL-3.0-only
// Module argmax: the index of the largest of n BF16 logits of a row, one block of 1024 threads a row.
//
// Equal maxima: the lowest index. NaN never wins; +0 and -0 are equal. A row of NaN and -Inf gives the lowest index
// that is not NaN, a row of NaN alone gives 0, so the index is always below n. Elements past n are never read.

#include "spark_common.cuh"

constexpr unsigned ARGMAX_BLOCK = 1024u;
constexpr unsigned ARGMAX_NONE = 0xffffffffu;
constexpr unsigned MINUS_INF_BITS = 0xff800000u;
constexpr unsigned PLUS_INF_BITS = 0x7f800000u;
constexpr unsigned NAN_BITS = 0x7fc00000u;

// The best element so far, and sum = the sum of exp(v - value) over all elements so far.
struct Best {
    float value;
    unsigned index;
    float sum;
};

// exp(v - top) for v <= top; 1 where they are equal, infinities included. NaN gives NaN.
__device__ __forceinline__ float weight_of(float v, float top) { return v == top ? 1.0f : __expf(v - top); }

// Eight more elements, from index `first` upwards; a thread's indices ascend, so only a larger value replaces.
template <bool LOGPROB>
__device__ __forceinline__ void take(Best& best, const float (&v)[8], unsigned first) {
    float top = v[0];
#pragma unroll
    for (unsigned j = 1u; j < 8u; ++j) {
        top = fmaxf(top, v[j]);
    }
    const float before = best.value;
    if (top > before || (top == before && best.index == ARGMAX_NONE)) {
        best.value = top;
#pragma unroll
        for (unsigned j = 8u; j-- > 0u;) {
            best.index = v[j] == top ? first + j : best.index;
        }
    }
    if (LOGPROB) {
        float added = 0.0f;
#pragma unroll
        for (unsigned j = 0u; j < 8u; ++j) {
            added += weight_of(v[j], best.value);
        }
        best.sum = best.sum * weight_of(before, best.value) + added;
    }
}

template <bool LOGPROB>
__device__ __forceinline__ void take_one(Best& best, float v, unsigned index) {
    const float before = best.value;
    if (v > before || (v == before && best.index == ARGMAX_NONE)) {
        best.value = v;
        best.index = index;
    }
    if (LOGPROB) {
        best.sum = best.sum * weight_of(before, best.value) + weight_of(v, best.value);
    }
}

template <bool LOGPROB>
__device__ __forceinline__ void take_chunk(Best& best, uint4 words, unsigned first) {
    const float v[8] = {spark_low(words.x), spark_high(words.x), spark_low(words.y), spark_high(words.y),
                        spark_low(words.z), spark_high(words.z), spark_low(words.w), spark_high(words.w)};
    take<LOGPROB>(best, v, first);
}

// What a thread sees of a row: single elements up to the first 16-byte address, chunks of 8, single elements.
template <bool LOGPROB>
__device__ __forceinline__ Best scan_row(const __nv_bfloat16* row, unsigned n) {
    constexpr unsigned DEPTH = 4u;
    Best best = {__uint_as_float(MINUS_INF_BITS), ARGMAX_NONE, 0.0f};
    const unsigned past = static_cast<unsigned>(reinterpret_cast<size_t>(row) % 16u) / 2u;
    const unsigned to_boundary = (8u - past) % 8u;
    const unsigned head = to_boundary < n ? to_boundary : n;
    if (threadIdx.x < head) {
        take_one<LOGPROB>(best, spark_load(row + threadIdx.x), threadIdx.x);
    }
    const uint4* body = reinterpret_cast<const uint4*>(row + head);
    const unsigned chunks = (n - head) / 8u;
    unsigned c = threadIdx.x;
    for (; c + (DEPTH - 1u) * ARGMAX_BLOCK < chunks; c += DEPTH * ARGMAX_BLOCK) {
        uint4 words[DEPTH];
#pragma unroll
        for (unsigned d = 0u; d < DEPTH; ++d) {
            words[d] = body[c + d * ARGMAX_BLOCK];
        }
#pragma unroll
        for (unsigned d = 0u; d < DEPTH; ++d) {
            take_chunk<LOGPROB>(best, words[d], head + (c + d * ARGMAX_BLOCK) * 8u);
        }
    }
    for (; c < chunks; c += ARGMAX_BLOCK) {
        take_chunk<LOGPROB>(best, body[c], head + c * 8u);
    }
    const unsigned tail = head + chunks * 8u;
    if (threadIdx.x < n - tail) {
        take_one<LOGPROB>(best, spark_load(row + tail + threadIdx.x), tail + threadIdx.x);
    }
    return best;
}

// The better of two: larger value, then lower index. Sums are brought to the common maximum.
template <bool LOGPROB>
__device__ __forceinline__ Best merge(Best a, Best b) {
    const bool second = b.value > a.value || (b.value == a.value && b.index < a.index);
    Best best = second ? b : a;
    if (LOGPROB) {
        best.sum = a.sum * weight_of(a.value, best.value) + b.sum * weight_of(b.value, best.value);
    }
    return best;
}

// The best of a warp, right in lane 0.
template <bool LOGPROB>
__device__ __forceinline__ Best merge_warp(Best best) {
#pragma unroll
    for (unsigned step = SPARK_WARP / 2u; step > 0u; step /= 2u) {
        Best other = {__shfl_down_sync(SPARK_FULL_MASK, best.value, step),
                      __shfl_down_sync(SPARK_FULL_MASK, best.index, step), 0.0f};
        if (LOGPROB) {
            other.sum = __shfl_down_sync(SPARK_FULL_MASK, best.sum, step);
        }
        best = merge<LOGPROB>(best, other);
    }
    return best;
}

// The best of a row, right in thread 0.
template <bool LOGPROB>
__device__ __forceinline__ Best argmax_row(const __nv_bfloat16* row, unsigned n) {
    __shared__ float values[SPARK_WARP];
    __shared__ unsigned indices[SPARK_WARP];
    __shared__ float sums[SPARK_WARP];
    const unsigned lane = threadIdx.x % SPARK_WARP;
    const unsigned warp = threadIdx.x / SPARK_WARP;
    Best best = merge_warp<LOGPROB>(scan_row<LOGPROB>(row, n));
    if (lane == 0u) {
        values[warp] = best.value;
        indices[warp] = best.index;
        sums[warp] = best.sum;
    }
    __syncthreads();
    if (warp == 0u) {
        best = {values[lane], indices[lane], sums[lane]};
        best = merge_warp<LOGPROB>(best);
    }
    return best;
}

__device__ __forceinline__ unsigned index_of(const Best& best) { return best.index == ARGMAX_NONE ? 0u : best.index; }

// ln of the winner's probability: -ln of the sum. NaN where it is undefined: a NaN in the row, two or more +Inf, or
// nothing above -Inf. One +Inf is certain: 0.
__device__ __forceinline__ float logprob_of(const Best& best) {
    if (best.value == __uint_as_float(MINUS_INF_BITS)) {
        return __uint_as_float(NAN_BITS);
    }
    if (best.value == __uint_as_float(PLUS_INF_BITS)) {
        return best.sum == 1.0f ? 0.0f : __uint_as_float(NAN_BITS);
    }
    return 0.0f - logf(best.sum);
}

// *out = argmax of n logits. Grid 1, block 1024.
extern "C" __global__ void argmax_bf16(const __nv_bfloat16* logits, unsigned int* out, unsigned int n) {
    spark_let_next_start();
    spark_wait_for_previous();
    const Best best = argmax_row<false>(logits, n);
    if (threadIdx.x == 0u) {
        *out = index_of(best);
    }
}

// out[r] = argmax of the n logits at logits + r * row_stride. Grid (rows), block 1024.
extern "C" __global__ void argmax_bf16_batch(const __nv_bfloat16* logits, unsigned int* out, unsigned int n,
                                             unsigned int row_stride) {
    spark_let_next_start();
    spark_wait_for_previous();
    const Best best = argmax_row<false>(logits + static_cast<size_t>(blockIdx.x) * row_stride, n);
    if (threadIdx.x == 0u) {
        out[blockIdx.x] = index_of(best);
    }
}

// As argmax_bf16_batch, and out_logprob[r] = ln softmax of the winner.
extern "C" __global__ void argmax_bf16_batch_lp(const __nv_bfloat16* logits, unsigned int* out, float* out_logprob,
                                                unsigned int n, unsigned int row_stride) {
    spark_let_next_start();
    spark_wait_for_previous();
    const Best best = argmax_row<true>(logits + static_cast<size_t>(blockIdx.x) * row_stride, n);
    if (threadIdx.x == 0u) {
        out[blockIdx.x] = index_of(best);
        out_logprob[blockIdx.x] = logprob_of(best);
    }
}
