// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_v4_qkv: queries and rows of the cache of DeepSeek-V4, normalised and rotated in one pass.
//
// A head x of head_dim elements becomes, all in FP32,
//   n = (x * r) * w,   r = rsqrt(mean(x^2) + eps),
// w being 1 for a query and the element of kv_norm for a cache row; the last rope_dim elements of n are turned as
// spark_v4_rope turns them; the result is rounded once, where it is stored. (A chain of norm and rotation would round n
// to BF16 in between.) One warp a head: lane l holds the vectors of eight elements l and l + 32, adds its squares in
// ascending order, and the lanes add up as the tree 16, 8, 4, 2, 1.
//
// head_dim a multiple of 8, 512 at most; rope_dim even, at most head_dim; rows on 16-byte addresses.

#include "spark_fp8.cuh"
#include "spark_v4.cuh"

constexpr unsigned QKV_VECTORS = V4_MAX_HEAD_DIM / (V4_WIDTH * SPARK_WARP);  // of a lane
constexpr unsigned QUERY_HEADS = 8u;                                        // of a block: a warp each

// A head across the lanes of a warp.
struct V4Head {
    float values[QKV_VECTORS][V4_WIDTH];
    unsigned vectors;  // of the head

    __device__ static __forceinline__ unsigned vector(unsigned v) { return v * SPARK_WARP + threadIdx.x % SPARK_WARP; }

    // x, normalised; `weight` may be NULL.
    __device__ __forceinline__ V4Head(const __nv_bfloat16* x, const __nv_bfloat16* weight, unsigned size, float eps)
        : vectors(size / V4_WIDTH) {
        float squares = 0.0f;
#pragma unroll
        for (unsigned v = 0u; v < QKV_VECTORS; ++v) {
            uint4 words = {};
            if (vector(v) < vectors) {
                words = reinterpret_cast<const uint4*>(x)[vector(v)];
            }
            v4_widen(words, values[v]);
#pragma unroll
            for (unsigned i = 0u; i < V4_WIDTH; ++i) {
                squares = squares + values[v][i] * values[v][i];
            }
        }
        const float r = rsqrtf(v4_warp_sum(squares) / static_cast<float>(size) + eps);
#pragma unroll
        for (unsigned v = 0u; v < QKV_VECTORS; ++v) {
            float w[V4_WIDTH];
            if (weight != nullptr && vector(v) < vectors) {
                v4_widen(reinterpret_cast<const uint4*>(weight)[vector(v)], w);
            }
#pragma unroll
            for (unsigned i = 0u; i < V4_WIDTH; ++i) {
                const float n = values[v][i] * r;
                values[v][i] = weight != nullptr && vector(v) < vectors ? n * w[i] : n;
            }
        }
    }

    // The elements from `start` on, turned; a pair never lies in two vectors.
    __device__ __forceinline__ void turn(const float2* turns, unsigned start) {
#pragma unroll
        for (unsigned v = 0u; v < QKV_VECTORS; ++v) {
#pragma unroll
            for (unsigned i = 0u; i < V4_WIDTH; i += 2u) {
                const unsigned element = vector(v) * V4_WIDTH + i;
                if (vector(v) < vectors && element >= start) {
                    const float2 y = v4_turn(values[v][i], values[v][i + 1u], turns[(element - start) / 2u]);
                    values[v][i] = y.x;
                    values[v][i + 1u] = y.y;
                }
            }
        }
    }

    __device__ __forceinline__ void store(__nv_bfloat16* to) const {
#pragma unroll
        for (unsigned v = 0u; v < QKV_VECTORS; ++v) {
            if (vector(v) < vectors) {
                const float* y = values[v];
                reinterpret_cast<uint4*>(to)[vector(v)] = make_uint4(spark_pack(y[0], y[1]), spark_pack(y[2], y[3]),
                                                                    spark_pack(y[4], y[5]), spark_pack(y[6], y[7]));
            }
        }
    }

    // As E4M3: nearest, ties to even, saturating at 448; NaN is 0x7f.
    __device__ __forceinline__ void store(unsigned char* to) const {
#pragma unroll
        for (unsigned v = 0u; v < QKV_VECTORS; ++v) {
            if (vector(v) < vectors) {
                const float* y = values[v];
                reinterpret_cast<uint2*>(to)[vector(v)] =
                    make_uint2(spark_pack_e4m3(y[0], y[1]) | spark_pack_e4m3(y[2], y[3]) << 16,
                               spark_pack_e4m3(y[4], y[5]) | spark_pack_e4m3(y[6], y[7]) << 16);
            }
        }
    }
};

// Every head of q [rows, heads, head_dim], in place, without weights. Grid (rows, ceil(heads / 8)), block 256.
extern "C" __global__ void __launch_bounds__(256)
    spark_v4_q_norm_rope(__nv_bfloat16* q, const unsigned int* positions, unsigned int heads, unsigned int head_dim,
                         unsigned int rope_dim, float eps, float theta) {
    spark_let_next_start();
    const double own = v4_own_frequency(rope_dim, theta);
    spark_wait_for_previous();
    __shared__ float2 turns[V4_MAX_PAIRS];
    const size_t row = blockIdx.x;
    const unsigned mine = blockIdx.y * QUERY_HEADS + threadIdx.x / SPARK_WARP;
    // Warps past the last head work on it too, and store nothing: all reach the barrier.
    const __nv_bfloat16* x = q + (row * heads + (mine < heads ? mine : heads - 1u)) * head_dim;
    V4Head head(x, nullptr, head_dim, eps);
    v4_turns(turns, positions[row], rope_dim, theta, false, own);
    __syncthreads();
    head.turn(turns, head_dim - rope_dim);
    if (mine < heads) {
        head.store(q + (row * heads + mine) * head_dim);
    }
}

// Row kv[row] goes to slot slot_mapping[row] of the pool; a negative slot skips the row. Slot = block * block_size +
// offset and blocks lie without a gap, so a slot alone gives the address.
template <typename Element>
__device__ __forceinline__ void assemble(const __nv_bfloat16* kv, const __nv_bfloat16* weight,
                                         const unsigned* positions, Element* pool, const long long* slot_mapping,
                                         unsigned head_dim, unsigned rope_dim, float eps, float theta, double own) {
    __shared__ float2 turns[V4_MAX_PAIRS];
    const size_t row = blockIdx.x;
    const long long slot = slot_mapping[row];
    if (slot < 0) {
        return;
    }
    V4Head head(kv + row * head_dim, weight, head_dim, eps);
    v4_turns(turns, positions[row], rope_dim, theta, false, own);
    __syncthreads();
    head.turn(turns, head_dim - rope_dim);
    head.store(pool + static_cast<size_t>(slot) * head_dim);
}

// kv [rows, head_dim] and kv_norm weight [head_dim] into a pool of BF16. Grid (rows), block 32.
extern "C" __global__ void __launch_bounds__(32)
    spark_v4_kv_assemble(const __nv_bfloat16* kv, const __nv_bfloat16* weight, const unsigned int* positions,
                         __nv_bfloat16* pool, const long long* slot_mapping, unsigned int head_dim,
                         unsigned int rope_dim, float eps, float theta) {
    spark_let_next_start();
    const double own = v4_own_frequency(rope_dim, theta);
    spark_wait_for_previous();
    assemble(kv, weight, positions, pool, slot_mapping, head_dim, rope_dim, eps, theta, own);
}

// The same into a pool of E4M3 with a scale of 1, the rotated tail too. Grid (rows), block 32.
extern "C" __global__ void __launch_bounds__(32)
    spark_v4_kv_assemble_fp8(const __nv_bfloat16* kv, const __nv_bfloat16* weight, const unsigned int* positions,
                             unsigned char* pool, const long long* slot_mapping, unsigned int head_dim,
                             unsigned int rope_dim, float eps, float theta) {
    spark_let_next_start();
    const double own = v4_own_frequency(rope_dim, theta);
    spark_wait_for_previous();
    assemble(kv, weight, positions, pool, slot_mapping, head_dim, rope_dim, eps, theta, own);
}

// Queries and the row of the cache in one launch: the blocks of the last y have the row, all others eight heads each.
template <typename Element>
__device__ __forceinline__ void queries_and_row(__nv_bfloat16* q, unsigned heads, const __nv_bfloat16* kv,
                                                const __nv_bfloat16* weight, const unsigned* positions, Element* pool,
                                                const long long* slot_mapping, unsigned head_dim, unsigned rope_dim,
                                                float eps, float theta, double own) {
    __shared__ float2 turns[V4_MAX_PAIRS];
    const size_t row = blockIdx.x;
    const unsigned warp = threadIdx.x / SPARK_WARP;
    const bool of_query = blockIdx.y + 1u < gridDim.y;
    const unsigned mine = blockIdx.y * QUERY_HEADS + warp;
    // Warps past the last head, or the row's first warp, work on it too, and store nothing: all reach the barrier.
    __nv_bfloat16* query = q + (row * heads + (of_query && mine < heads ? mine : heads - 1u)) * head_dim;
    const __nv_bfloat16* x = of_query ? query : kv + row * head_dim;
    V4Head head(x, of_query ? nullptr : weight, head_dim, eps);
    v4_turns(turns, positions[row], rope_dim, theta, false, own);
    __syncthreads();
    head.turn(turns, head_dim - rope_dim);
    if (of_query) {
        if (mine < heads) {
            head.store(query);
        }
        return;
    }
    const long long at = slot_mapping[row];
    if (warp == 0u && at >= 0) {
        head.store(pool + static_cast<size_t>(at) * head_dim);
    }
}

// spark_v4_q_norm_rope and spark_v4_kv_assemble. Grid (rows, ceil(heads / 8) + 1), block 256.
extern "C" __global__ void __launch_bounds__(256)
    spark_v4_q_and_kv(__nv_bfloat16* q, const __nv_bfloat16* kv, const __nv_bfloat16* weight,
                      const unsigned int* positions, __nv_bfloat16* pool, const long long* slot_mapping,
                      unsigned int heads, unsigned int head_dim, unsigned int rope_dim, float eps, float theta) {
    spark_let_next_start();
    const double own = v4_own_frequency(rope_dim, theta);
    spark_wait_for_previous();
    queries_and_row(q, heads, kv, weight, positions, pool, slot_mapping, head_dim, rope_dim, eps, theta, own);
}

// The same with spark_v4_kv_assemble_fp8. Grid (rows, ceil(heads / 8) + 1), block 256.
extern "C" __global__ void __launch_bounds__(256)
    spark_v4_q_and_kv_fp8(__nv_bfloat16* q, const __nv_bfloat16* kv, const __nv_bfloat16* weight,
                          const unsigned int* positions, unsigned char* pool, const long long* slot_mapping,
                          unsigned int heads, unsigned int head_dim, unsigned int rope_dim, float eps, float theta) {
    spark_let_next_start();
    const double own = v4_own_frequency(rope_dim, theta);
    spark_wait_for_previous();
    queries_and_row(q, heads, kv, weight, positions, pool, slot_mapping, head_dim, rope_dim, eps, theta, own);
}
