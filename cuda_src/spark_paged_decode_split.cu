// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_paged_decode_split: attention of one query row a sequence over a paged cache, split along the sequence.
//
// What the engine's paged_decode_attn computes, O[seq, head] = softmax(Q[seq, head] . K * scale) V, in two launches that
// fill a GPU also for one sequence. A block takes one split of one sequence for up to eight query heads of a cache head,
// so that K and V are read once; it leaves the sum of its weights, its largest score and its weighted values in FP32. A
// second kernel merges the splits in ascending order.
//
// Splits depend on the numbers of positions seen and of query heads alone, never on the batch or the GPU: a row has the same bits in every
// batch. Both products are tensor-core steps with FP32 sums; a weight goes in as the sum of two BF16, which leaves 2^-17
// of it behind. Cache values must be finite.

#include "spark_fp8.cuh"
#include "spark_mma_step.cuh"

constexpr unsigned SPLIT_WARPS = 4u;
constexpr unsigned SPLIT_HEADS = 8u;     // query heads of a block
constexpr unsigned SPLIT_STEP = 16u;     // positions that a warp takes at a time
constexpr unsigned SPLIT_SHORTEST = 64u;  // positions of a split: a step of each warp
constexpr unsigned SPLIT_ENOUGH = 256u;   // positions of a split from which on there may be 64 splits
constexpr unsigned SPLIT_FEW_HEADS = 16u;  // query heads up to which there may be 64 splits of any length
constexpr unsigned SPLIT_MOST = 64u;     // splits of a sequence
constexpr unsigned SPLIT_CHUNK = 64u;    // elements of a head that eight lanes hold eight each of
constexpr unsigned SPLIT_LARGEST = 256u;  // elements of a head
constexpr float SPLIT_LOWEST = -1.0e30f;

__device__ __forceinline__ unsigned whole_steps(unsigned positions) {
    return (positions + SPLIT_STEP - 1u) / SPLIT_STEP * SPLIT_STEP;
}

// Positions of every split but the last, where `seen` are to be taken: as many as make 32 splits do, but at least 64; from
// 256 on, as many as make 64 splits do. Few splits cost less to merge, and long ones less to begin and end. But 32 splits
// of 16 query heads, two blocks each where a cache head has eight, would leave half of a large GPU idle: these get 64.
__device__ __forceinline__ unsigned split_length(unsigned seen, unsigned num_q_heads) {
    const unsigned most = num_q_heads > SPLIT_FEW_HEADS ? SPLIT_MOST / 2u : SPLIT_MOST;
    const unsigned few = whole_steps((seen + most - 1u) / most);
    const unsigned many = whole_steps((seen + SPLIT_MOST - 1u) / SPLIT_MOST);
    const unsigned enough = many < SPLIT_ENOUGH ? SPLIT_ENOUGH : many;
    const unsigned length = few < enough ? few : enough;
    return length < SPLIT_SHORTEST ? SPLIT_SHORTEST : length;
}

// The positions of a sequence that are seen: [begin, end), and none where its length is 0 or less.
__device__ __forceinline__ void seen_positions(int length, unsigned window, unsigned& begin, unsigned& end) {
    end = length > 0 ? static_cast<unsigned>(length) : 0u;
    begin = window > 0u && end > window ? end - window : 0u;
}

// A row is read once, in pieces of 64 bytes by four lanes: the rest of its line may come along into the L2.
__device__ __forceinline__ uint4 load_once(const uint4* p) {
#ifndef SPARK_EMULATED
    uint4 word;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
                 : "l"(p));
    return word;
#else
    return *p;
#endif
}

__device__ __forceinline__ uint2 load_once(const uint2* p) {
#ifndef SPARK_EMULATED
    uint2 word;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];" : "=r"(word.x), "=r"(word.y) : "l"(p));
    return word;
#else
    return *p;
#endif
}

// Asks for the 32 bytes at `p` to be in the L2: no value is taken, so that it may come before the wait for others' stores.
__device__ __forceinline__ void ask_for(const int* p) {
#ifndef SPARK_EMULATED
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#else
    static_cast<void>(p);
#endif
}

// Asks for what a split reads first: the sequence's length and, before that is known, the share of its block table that
// is the split's where the sequence fills it. The splits of a sequence together ask for all of it.
__device__ __forceinline__ void ask_for_table(const int* block_tables, const int* seq_lens, unsigned table_stride,
                                              unsigned lens_stride) {
    constexpr unsigned ENTRIES = 8u;  // in 32 bytes
    const unsigned begin = static_cast<unsigned>(static_cast<size_t>(blockIdx.y) * table_stride / SPLIT_MOST);
    const unsigned share = table_stride / SPLIT_MOST + ENTRIES;
    if (threadIdx.x == 0u) {
        ask_for(seq_lens + static_cast<size_t>(blockIdx.z) * lens_stride);
    }
    const unsigned entry = threadIdx.x * ENTRIES;
    if (entry < share && begin + entry < table_stride) {
        ask_for(block_tables + static_cast<size_t>(blockIdx.z) * table_stride + begin + entry);
    }
}

// Eight elements of a row: as they lie in memory, and as four words of two BF16.
struct Bf16Rows {
    using Element = __nv_bfloat16;
    using Raw = uint4;
    __device__ static __forceinline__ void words(uint4 raw, unsigned (&to)[4]) {
        to[0] = raw.x;
        to[1] = raw.y;
        to[2] = raw.z;
        to[3] = raw.w;
    }
};

struct E4m3Rows {
    using Element = unsigned char;
    using Raw = uint2;
    // Every E4M3 value is a BF16 value: the low halves of the FP32 words are zero.
    __device__ static __forceinline__ unsigned pair(unsigned bytes) {
        float values[2];
        spark_widen_e4m3(static_cast<unsigned short>(bytes), values);
        return __byte_perm(__float_as_uint(values[0]), __float_as_uint(values[1]), 0x7632u);
    }
    __device__ static __forceinline__ void words(uint2 raw, unsigned (&to)[4]) {
        to[0] = pair(raw.x & 0xffffu);
        to[1] = pair(raw.x >> 16);
        to[2] = pair(raw.y & 0xffffu);
        to[3] = pair(raw.y >> 16);
    }
};

__device__ __forceinline__ void add_share(float4& sum, float share, float4 part) {
    sum.x = sum.x + share * part.x;
    sum.y = sum.y + share * part.y;
    sum.z = sum.z + share * part.z;
    sum.w = sum.w + share * part.w;
}

struct Pool {
    const int* table;
    unsigned block_size;
    size_t block_stride;  // elements from a block to the next
    size_t token_stride;  // elements from a slot to the next
    size_t head_start;

    __device__ __forceinline__ size_t row(unsigned position) const {
        const unsigned block = position / block_size;
        return static_cast<size_t>(table[block]) * block_stride + (position - block * block_size) * token_stride +
               head_start;
    }
};

// Whether the next step's K is under way while this step's V is multiplied: 254 registers on Hopper, but more than there
// are elsewhere, where compilers would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr bool SPLIT_KEYS_EARLY = true;
#else
constexpr bool SPLIT_KEYS_EARLY = false;
#endif

struct Merge {
    float outputs[SPLIT_WARPS][SPLIT_HEADS][SPLIT_LARGEST + 4u];  // rows start in different banks
    float tops[SPLIT_WARPS][SPLIT_HEADS];
    float weights[SPLIT_WARPS][SPLIT_HEADS];
};

// One split of heads of 64 * CHUNKS elements: positions [begin, end), end > begin, for `heads` heads from q on.
// A warp's steps are SPLIT_WARPS steps apart. Lane 4 g + t holds of K the elements 32 i + 8 t .. of positions g and
// g + 8 of the step, of V the elements 64 c + 8 g .. of positions 2t, 2t + 1, 2t + 8 and 2t + 9, of scores those of
// head g at these four. Which element of a product lies where in a tensor-core step is free as long as both sides agree.
template <typename Rows, unsigned CHUNKS>
__device__ __forceinline__ void split_attend(const __nv_bfloat16* q, unsigned heads,
                                             const typename Rows::Element* keys,
                                             const typename Rows::Element* values, const Pool& pool, unsigned begin,
                                             unsigned end, float scale, float* partial, float* sums,
                                             size_t head_stride, uint4 (*queries)[SPARK_WARP], Merge& merge) {
    using Raw = typename Rows::Raw;
    constexpr unsigned DIMS = CHUNKS * SPLIT_CHUNK;
    constexpr unsigned PIECES = 2u * CHUNKS;  // of 32 elements
    const unsigned lane = threadIdx.x % SPARK_WARP;
    const unsigned warp = threadIdx.x / SPARK_WARP;
    const unsigned g = lane / 4u;
    const unsigned t = lane % 4u;
    for (unsigned i = threadIdx.x; i < PIECES * SPARK_WARP; i += SPLIT_WARPS * SPARK_WARP) {
        const unsigned head = i % SPARK_WARP / 4u;
        const unsigned piece = i / SPARK_WARP * 4u + i % 4u;
        const uint4 none = {0u, 0u, 0u, 0u};
        queries[i / SPARK_WARP][i % SPARK_WARP] =
            head < heads ? reinterpret_cast<const uint4*>(q + static_cast<size_t>(head) * DIMS)[piece] : none;
    }
    __syncthreads();

    float output[CHUNKS][4][4] = {};
    float top = SPLIT_LOWEST;
    float weight = 0.0f;  // of this lane's positions
    Raw k[2][PIECES];
    Raw v[4][CHUNKS];

    // The row of position lane % 16 of the step at `first`; 0, which is never read, past the end.
    const auto rows_of = [&](unsigned first) {
        const unsigned position = first + lane % SPLIT_STEP;
        return position < end ? pool.row(position) : static_cast<size_t>(0u);
    };
    const auto load_keys = [&](size_t rows, unsigned first) {
#pragma unroll
        for (unsigned half = 0u; half < 2u; ++half) {
            const unsigned at = g + 8u * half;
            const size_t row = __shfl_sync(SPARK_FULL_MASK, rows, static_cast<int>(at));
#pragma unroll
            for (unsigned i = 0u; i < PIECES; ++i) {
                k[half][i] = {};
                if (first + at < end) {
                    k[half][i] = load_once(reinterpret_cast<const Raw*>(keys + row) + 4u * i + t);
                }
            }
        }
    };
    const auto load_values = [&](size_t rows, unsigned first) {
#pragma unroll
        for (unsigned r = 0u; r < 4u; ++r) {
            const unsigned at = 2u * t + r % 2u + r / 2u * 8u;
            const size_t row = __shfl_sync(SPARK_FULL_MASK, rows, static_cast<int>(at));
#pragma unroll
            for (unsigned c = 0u; c < CHUNKS; ++c) {
                v[r][c] = {};
                if (first + at < end) {
                    v[r][c] = load_once(reinterpret_cast<const Raw*>(values + row) + 8u * c + g);
                }
            }
        }
    };

    unsigned first = begin + warp * SPLIT_STEP;
    size_t rows = rows_of(first);
    if (first < end) {
        load_keys(rows, first);
        load_values(rows, first);
    }
    for (; first < end; first += SPLIT_WARPS * SPLIT_STEP) {
        const unsigned following = first + SPLIT_WARPS * SPLIT_STEP;
        rows = rows_of(following);
        float score[2][4] = {};  // of positions 8 half + 2t, + 1; the other two are of heads that do not exist
#pragma unroll
        for (unsigned i = 0u; i < PIECES; ++i) {
            const uint4 query = queries[i][lane];
            const unsigned low[4] = {query.x, 0u, query.y, 0u};
            const unsigned high[4] = {query.z, 0u, query.w, 0u};
#pragma unroll
            for (unsigned half = 0u; half < 2u; ++half) {
                unsigned words[4];
                Rows::words(k[half][i], words);
                spark_mma(score[half], low, {words[0], words[1]});
                spark_mma(score[half], high, {words[2], words[3]});
            }
        }
        if (SPLIT_KEYS_EARLY) {
            load_keys(rows, following);
        }

        float highest = top;
#pragma unroll
        for (unsigned i = 0u; i < 4u; ++i) {
            float& each = score[i / 2u][i % 2u];
            const bool live = first + 8u * (i / 2u) + 2u * t + i % 2u < end;
            each = live ? each * scale : SPLIT_LOWEST;
            highest = fmaxf(highest, each);
        }
        highest = fmaxf(highest, __shfl_xor_sync(SPARK_FULL_MASK, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(SPARK_FULL_MASK, highest, 2));
        const float faded = expf(top - highest);
        top = highest;
        unsigned coarse[2];
        unsigned fine[2];
        weight = weight * faded;
#pragma unroll
        for (unsigned half = 0u; half < 2u; ++half) {
            float share[2];
#pragma unroll
            for (unsigned i = 0u; i < 2u; ++i) {
                const bool live = first + 8u * half + 2u * t + i < end;
                share[i] = live ? expf(score[half][i] - highest) : 0.0f;
                weight = weight + share[i];
            }
            coarse[half] = spark_pack(share[0], share[1]);
            fine[half] = spark_pack(share[0] - spark_low(coarse[half]), share[1] - spark_high(coarse[half]));
        }
        const float even = __shfl_sync(SPARK_FULL_MASK, faded, static_cast<int>(8u * t));
        const float odd = __shfl_sync(SPARK_FULL_MASK, faded, static_cast<int>(8u * t + 4u));
#pragma unroll
        for (unsigned c = 0u; c < CHUNKS; ++c) {
            unsigned words[4][4];
#pragma unroll
            for (unsigned r = 0u; r < 4u; ++r) {
                Rows::words(v[r][c], words[r]);
            }
#pragma unroll
            for (unsigned j = 0u; j < 4u; ++j) {
                float(&sum)[4] = output[c][j];
                sum[0] = sum[0] * even;
                sum[1] = sum[1] * odd;
                sum[2] = sum[2] * even;
                sum[3] = sum[3] * odd;
                const unsigned pick = j % 2u == 0u ? 0x5410u : 0x7632u;
                const unsigned a[4] = {__byte_perm(words[0][j / 2u], words[1][j / 2u], pick),
                                       __byte_perm(words[0][j / 2u + 2u], words[1][j / 2u + 2u], pick),
                                       __byte_perm(words[2][j / 2u], words[3][j / 2u], pick),
                                       __byte_perm(words[2][j / 2u + 2u], words[3][j / 2u + 2u], pick)};
                spark_mma(sum, a, coarse);
                spark_mma(sum, a, fine);
            }
        }
        if (!SPLIT_KEYS_EARLY) {
            load_keys(rows, following);
        }
        load_values(rows, following);
    }

    // Not before: blocks of the merge would come where a multiprocessor has room left, many to one.
    spark_let_next_start();
    weight = weight + __shfl_xor_sync(SPARK_FULL_MASK, weight, 1);
    weight = weight + __shfl_xor_sync(SPARK_FULL_MASK, weight, 2);
    if (t == 0u) {
        merge.tops[warp][g] = top;
        merge.weights[warp][g] = weight;
    }
#pragma unroll
    for (unsigned c = 0u; c < CHUNKS; ++c) {
#pragma unroll
        for (unsigned i = 0u; i < 4u; ++i) {
            float* to = &merge.outputs[warp][2u * t + i % 2u][SPLIT_CHUNK * c + 8u * g + i / 2u * 4u];
            *reinterpret_cast<float4*>(to) =
                make_float4(output[c][0][i], output[c][1][i], output[c][2][i], output[c][3][i]);
        }
    }
    __syncthreads();
    constexpr unsigned QUADS = DIMS / 4u;
    for (unsigned i = threadIdx.x; i < heads * QUADS; i += SPLIT_WARPS * SPARK_WARP) {
        const unsigned head = i / QUADS;
        const unsigned quad = i % QUADS;
        float highest = SPLIT_LOWEST;
#pragma unroll
        for (unsigned w = 0u; w < SPLIT_WARPS; ++w) {
            highest = fmaxf(highest, merge.tops[w][head]);
        }
        float total = 0.0f;
        float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (unsigned w = 0u; w < SPLIT_WARPS; ++w) {
            const float share = expf(merge.tops[w][head] - highest);
            add_share(sum, share, reinterpret_cast<const float4*>(merge.outputs[w][head])[quad]);
            total = total + share * merge.weights[w][head];
        }
        reinterpret_cast<float4*>(partial + head * head_stride * DIMS)[quad] = sum;
        if (quad == 0u) {
            sums[head * head_stride * 2u] = highest;
            sums[head * head_stride * 2u + 1u] = total;
        }
    }
}

template <typename Rows>
__device__ __forceinline__ void split_kernel(const __nv_bfloat16* Q, const typename Rows::Element* K_cache,
                                             const typename Rows::Element* V_cache, float* partial, float* sums,
                                             const int* block_tables, const int* seq_lens, unsigned table_stride,
                                             unsigned lens_stride, unsigned num_q_heads, unsigned num_kv_heads,
                                             unsigned head_dim, unsigned block_size, float scale, unsigned q_stride,
                                             size_t cache_stride, unsigned sliding_window) {
    __shared__ uint4 queries[SPLIT_LARGEST / 32u][SPARK_WARP];
    __shared__ Merge merge;
    const size_t sequence = blockIdx.z;
    unsigned begin;
    unsigned end;
    seen_positions(seq_lens[sequence * lens_stride], sliding_window, begin, end);
    const unsigned length = split_length(end - begin, num_q_heads);
    // Splits past the sequence have nothing to do; the whole block leaves.
    if (blockIdx.y * length >= end - begin) {
        spark_let_next_start();
        return;
    }
    begin += blockIdx.y * length;
    end = end - begin < length ? end : begin + length;
    const unsigned group = num_q_heads / num_kv_heads;
    const unsigned parts = (group + SPLIT_HEADS - 1u) / SPLIT_HEADS;
    const unsigned cache_head = blockIdx.x / parts;
    const unsigned before = blockIdx.x % parts * SPLIT_HEADS;
    const unsigned heads = group - before < SPLIT_HEADS ? group - before : SPLIT_HEADS;
    const size_t head = static_cast<size_t>(cache_head) * group + before;
    const Pool pool = {block_tables + sequence * table_stride, block_size, cache_stride,
                       static_cast<size_t>(num_kv_heads) * head_dim, static_cast<size_t>(cache_head) * head_dim};
    const __nv_bfloat16* q = Q + sequence * q_stride + head * head_dim;
    const size_t place = (sequence * num_q_heads + head) * SPLIT_MOST + blockIdx.y;
    partial += place * head_dim;
    sums += place * 2u;
    switch (head_dim / SPLIT_CHUNK) {
#define SPARK_CHUNKS(chunks)                                                                                     \
    case chunks:                                                                                                 \
        split_attend<Rows, chunks>(q, heads, K_cache, V_cache, pool, begin, end, scale, partial, sums, SPLIT_MOST, \
                                   queries, merge);                                                              \
        break;
        SPARK_CHUNKS(1)
        SPARK_CHUNKS(2)
        SPARK_CHUNKS(3)
        SPARK_CHUNKS(4)
#undef SPARK_CHUNKS
        default:
            break;
    }
}

// The splits of every sequence over a BF16 cache: partial FP32 [seqs, num_q_heads, 64, head_dim] and sums FP32 [seqs,
// num_q_heads, 64, 2] (largest score, sum of weights), as far as a sequence has splits. Lengths lens_stride and block
// tables table_stride int32 apart, rows of Q q_stride elements, blocks of a cache cache_stride elements. Grid
// (num_kv_heads * ceil(num_q_heads / num_kv_heads / 8), 64, seqs), block 128. head_dim is 64, 128, 192 or 256; Q and the
// caches on 16-byte addresses, q_stride and cache_stride multiples of 8.
extern "C" __global__ void __launch_bounds__(128, 2)
    spark_paged_decode_split(const __nv_bfloat16* Q, const __nv_bfloat16* K_cache, const __nv_bfloat16* V_cache,
                             float* partial, float* sums, const int* block_tables, const int* seq_lens,
                             unsigned int table_stride, unsigned int lens_stride, unsigned int num_q_heads,
                             unsigned int num_kv_heads, unsigned int head_dim, unsigned int block_size, float scale,
                             unsigned int q_stride, unsigned long long cache_stride, unsigned int sliding_window) {
    ask_for_table(block_tables, seq_lens, table_stride, lens_stride);
    spark_wait_for_previous();
    split_kernel<Bf16Rows>(Q, K_cache, V_cache, partial, sums, block_tables, seq_lens, table_stride, lens_stride,
                           num_q_heads, num_kv_heads, head_dim, block_size, scale, q_stride, cache_stride,
                           sliding_window);
}

// The same over a cache of E4M3 bytes, on 8-byte addresses.
extern "C" __global__ void __launch_bounds__(128, 2)
    spark_paged_decode_split_fp8(const __nv_bfloat16* Q, const unsigned char* K_cache, const unsigned char* V_cache,
                                 float* partial, float* sums, const int* block_tables, const int* seq_lens,
                                 unsigned int table_stride, unsigned int lens_stride, unsigned int num_q_heads,
                                 unsigned int num_kv_heads, unsigned int head_dim, unsigned int block_size, float scale,
                                 unsigned int q_stride, unsigned long long cache_stride, unsigned int sliding_window) {
    ask_for_table(block_tables, seq_lens, table_stride, lens_stride);
    spark_wait_for_previous();
    split_kernel<E4m3Rows>(Q, K_cache, V_cache, partial, sums, block_tables, seq_lens, table_stride, lens_stride,
                           num_q_heads, num_kv_heads, head_dim, block_size, scale, q_stride, cache_stride,
                           sliding_window);
}

// O[seq, head] = bf16(output_scale * merged), the splits in a fixed order; with a gate, rows gate_stride elements apart,
// bf16 of that times sigmoid(gate[seq, head]). A sequence of length 0 (or less) leaves its rows of O as they are. O packed
// [seqs, num_q_heads, head_dim]. Grid (num_q_heads, seqs, head_dim / 64), block 256: sixteen threads share the 64 elements
// of a split, and splits are dealt out in turn to sixteen groups of threads, which are added in ascending order.
extern "C" __global__ void __launch_bounds__(256)
    spark_paged_decode_merge(const float* partial, const float* sums, __nv_bfloat16* O, const __nv_bfloat16* gate,
                             const int* seq_lens, unsigned int lens_stride, unsigned int num_q_heads,
                             unsigned int head_dim, float output_scale, unsigned int gate_stride,
                             unsigned int sliding_window) {
    spark_wait_for_previous();
    spark_let_next_start();
    constexpr unsigned QUADS = SPLIT_CHUNK / 4u;
    constexpr unsigned GROUPS = 256u / QUADS;
    constexpr unsigned EACH = SPLIT_MOST / GROUPS;
    __shared__ float shares[SPLIT_MOST];
    __shared__ float4 gathered[GROUPS][QUADS];
    __shared__ float whole;
    const size_t sequence = blockIdx.y;
    unsigned begin;
    unsigned end;
    seen_positions(seq_lens[sequence * lens_stride], sliding_window, begin, end);
    // The whole block leaves.
    if (end == 0u) {
        return;
    }
    const unsigned length = split_length(end - begin, num_q_heads);
    const unsigned splits = (end - begin + length - 1u) / length;
    const size_t place = sequence * num_q_heads + blockIdx.x;
    const unsigned group = threadIdx.x / QUADS;
    const unsigned quad = threadIdx.x % QUADS;
    const float* mine = partial + place * SPLIT_MOST * head_dim + blockIdx.z * SPLIT_CHUNK;
    float4 parts[EACH];
#pragma unroll
    for (unsigned i = 0u; i < EACH; ++i) {
        const unsigned split = i * GROUPS + group;
        parts[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (split < splits) {
            parts[i] = reinterpret_cast<const float4*>(mine + static_cast<size_t>(split) * head_dim)[quad];
        }
    }
    if (threadIdx.x < SPARK_WARP) {
        constexpr unsigned LANE = SPLIT_MOST / SPARK_WARP;
        const float2* scores = reinterpret_cast<const float2*>(sums) + place * SPLIT_MOST;
        float2 own[LANE];
        float highest = SPLIT_LOWEST;
#pragma unroll
        for (unsigned i = 0u; i < LANE; ++i) {
            const unsigned split = i * SPARK_WARP + threadIdx.x;
            own[i] = split < splits ? scores[split] : make_float2(SPLIT_LOWEST, 0.0f);
            highest = fmaxf(highest, own[i].x);
        }
#pragma unroll
        for (unsigned step = SPARK_WARP / 2u; step > 0u; step /= 2u) {
            highest = fmaxf(highest, __shfl_xor_sync(SPARK_FULL_MASK, highest, static_cast<int>(step)));
        }
        float total = 0.0f;
#pragma unroll
        for (unsigned i = 0u; i < LANE; ++i) {
            const float share = expf(own[i].x - highest);
            shares[i * SPARK_WARP + threadIdx.x] = share;
            total = total + share * own[i].y;
        }
        total = spark_warp_sum(total, SPARK_WARP);
        if (threadIdx.x == 0u) {
            whole = total;
        }
    }
    __syncthreads();
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (unsigned i = 0u; i < EACH; ++i) {
        const unsigned split = i * GROUPS + group;
        if (split < splits) {
            add_share(sum, shares[split], parts[i]);
        }
    }
    gathered[group][quad] = sum;
    __syncthreads();
    if (threadIdx.x < SPLIT_CHUNK) {
        float added = 0.0f;
#pragma unroll
        for (unsigned each = 0u; each < GROUPS; ++each) {
            added = added + reinterpret_cast<const float*>(gathered[each])[threadIdx.x];
        }
        const unsigned element = blockIdx.z * SPLIT_CHUNK + threadIdx.x;
        __nv_bfloat16* to = O + place * head_dim + element;
        spark_store(to, (whole == 0.0f ? 0.0f : added / whole) * output_scale);
        if (gate != nullptr) {
            const __nv_bfloat16* own = gate + sequence * gate_stride + blockIdx.x * head_dim + element;
            const float sigmoid = 1.0f / (1.0f + expf(-spark_load(own)));
            spark_store(to, spark_load(to) * sigmoid);
        }
    }
}
