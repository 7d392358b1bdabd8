// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_mxfp4_experts: what spark_moe_expert_mxfp4 computes for rows and the experts that a router chose for them,
// on tensor cores. This project's own kernels, with parameters of its _rows forms.
//
// A weight is code * 2^(scale - 127), a BF16 number below 2^128 in size; what lies beyond is infinite, and a scale of 0xff
// NaN. Weights go through tensor-core steps with FP32 sums by the way of spark_diagonal.cuh. A warp has two outputs at a
// time. Lane l takes the chunks of 32 values l, l + 32, ... in ascending order, and of a chunk the words of eight codes:
// two steps each, on the codes (0, 4) and (1, 5), then (2, 6) and (3, 7), which lie where one shift brings both to the
// halves of a word. The eight sums of an output are added as the tree 16, 8, 4, 2, 1 of a warp and rounded once.
//
// The activation silu(min(gate, limit)) * clamp(up, -limit, limit) stays FP32, each step rounded: it is the sum of three
// BF16 numbers, and the down projection has a step for each. So an output's bits depend on its slot's row, weights and
// activations alone.
//
// Tables have an entry an expert: the address of its packed codes [N, K / 2] and of its scales [N, K / 32]. An address of
// 0 (the expert lives elsewhere) gives zeros. K % 32 == 0; activations and codes on 16-byte addresses.

#include "moe_expert.cuh"
#include "spark_diagonal.cuh"

extern __shared__ uint4 spark_planes[];

constexpr unsigned EXPERTS_BLOCK = 256u;
constexpr unsigned EXPERTS_WARPS = EXPERTS_BLOCK / SPARK_WARP;
constexpr unsigned EXPERTS_OUTPUTS = 64u;  // of a block
constexpr unsigned EXPERTS_CHUNK = 32u;    // values under a scale: 16 bytes of codes
constexpr unsigned EXPERTS_WORDS = 4u;     // of a chunk
constexpr unsigned ONE_FACTOR = 128u;      // the largest scale that goes with 2^126 into one BF16 factor

// x as operands of steps: for each word of codes 16 bytes, the pairs (0, 4), (1, 5), (2, 6) and (3, 7) of its elements.
// Eight lanes that read at a time meet different banks. A plane is filled up with zeros to whole rounds of a warp.
__device__ __forceinline__ unsigned plane_place(unsigned chunk, unsigned word) {
    return EXPERTS_WORDS * chunk + (word ^ chunk / 2u % EXPERTS_WORDS);
}

__device__ __forceinline__ unsigned plane_chunks(unsigned k) {
    return (k / EXPERTS_CHUNK + SPARK_WARP - 1u) / SPARK_WARP * SPARK_WARP;
}

__device__ __forceinline__ uint4 paired(uint4 x) {
    return make_uint4(__byte_perm(x.x, x.z, 0x5410u), __byte_perm(x.x, x.z, 0x7632u), __byte_perm(x.y, x.w, 0x5410u),
                      __byte_perm(x.y, x.w, 0x7632u));
}

// Pairs (0, 4), (1, 5), (2, 6), (3, 7) of a word of codes, as BF16 2^126 times too small. Code 0 times 2^6 has exponent and
// fraction in their place, times 2^12 its sign; the two do not overlap.
__device__ __forceinline__ void codes_apart(unsigned codes, unsigned (&pairs)[4]) {
    const unsigned later = codes >> 8;
    pairs[0] = ((codes & 0x000f000fu) * 0x1040u) & 0x81c081c0u;
    pairs[1] = ((codes & 0x00f000f0u) * 0x0104u) & 0x81c081c0u;
    pairs[2] = ((later & 0x000f000fu) * 0x1040u) & 0x81c081c0u;
    pairs[3] = ((later & 0x00f000f0u) * 0x0104u) & 0x81c081c0u;
}

// 2^(scale - 1) twice, for scales up to ONE_FACTOR.
__device__ __forceinline__ unsigned one_factor(unsigned scale) { return scale * 0x00800080u + 0x3f003f00u; }

// 2^(scale - 127) twice, of scales from 1; NaN for 0xff.
__device__ __forceinline__ unsigned second_factor(unsigned scale) {
    return scale == 0xffu ? 0x7fff7fffu : scale == 0u ? 0x00400040u : scale * 0x00800080u;
}

// Where this lane's words of a plane are, of its first chunk; those of the next one are a round further on.
constexpr unsigned EXPERTS_ROUND = EXPERTS_WORDS * SPARK_WARP;

__device__ __forceinline__ void lane_places(unsigned (&places)[EXPERTS_WORDS]) {
#pragma unroll
    for (unsigned word = 0u; word < EXPERTS_WORDS; ++word) {
        places[word] = plane_place(threadIdx.x % SPARK_WARP, word);
    }
}

// A chunk of OUTPUTS outputs times PLANES numbers that make up each element, `from` words into each plane. WIDE: some
// scale is above ONE_FACTOR.
template <unsigned PLANES, unsigned OUTPUTS, bool WIDE>
__device__ __forceinline__ void experts_chunk(float (&sums)[OUTPUTS / 2u][4], const uint4 (&codes)[OUTPUTS],
                                              const unsigned (&scales)[OUTPUTS],
                                              const unsigned (&places)[EXPERTS_WORDS], unsigned from,
                                              unsigned plane) {
#pragma unroll
    for (unsigned word = 0u; word < EXPERTS_WORDS; ++word) {
        uint4 x[PLANES];
#pragma unroll
        for (unsigned p = 0u; p < PLANES; ++p) {
            x[p] = spark_planes[p * plane + from + places[word]];
        }
#pragma unroll
        for (unsigned two = 0u; two < OUTPUTS / 2u; ++two) {
            unsigned pairs[2][4];
#pragma unroll
            for (unsigned o = 0u; o < 2u; ++o) {
                const uint4 each = codes[2u * two + o];
                const unsigned scale = scales[2u * two + o];
                codes_apart(word == 0u ? each.x : word == 1u ? each.y : word == 2u ? each.z : each.w, pairs[o]);
#pragma unroll
                for (unsigned i = 0u; i < 4u; ++i) {
                    pairs[o][i] = spark_multiply_pairs(pairs[o][i], WIDE ? 0x7e807e80u : one_factor(scale));
                    if (WIDE) {
                        pairs[o][i] = spark_multiply_pairs(pairs[o][i], second_factor(scale));
                    }
                }
            }
#pragma unroll
            for (unsigned p = 0u; p < PLANES; ++p) {
                spark_mma(sums[two], {pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]}, {x[p].x, x[p].y});
                spark_mma(sums[two], {pairs[0][2], pairs[1][2], pairs[0][3], pairs[1][3]}, {x[p].z, x[p].w});
            }
        }
    }
}

constexpr unsigned EXPERTS_TOGETHER = 2u;  // outputs of a warp at a time
constexpr unsigned EXPERTS_TURNS = EXPERTS_OUTPUTS / (EXPERTS_WARPS * EXPERTS_TOGETHER);

template <unsigned PLANES>
__device__ __forceinline__ void experts_add(float (&sums)[1][4], const uint4 (&codes)[EXPERTS_TOGETHER],
                                            const unsigned (&scales)[EXPERTS_TOGETHER],
                                            const unsigned (&places)[EXPERTS_WORDS], unsigned from, unsigned plane) {
    const unsigned most = scales[0] > scales[1] ? scales[0] : scales[1];
    if (__any_sync(SPARK_FULL_MASK, most > ONE_FACTOR)) {
        experts_chunk<PLANES, EXPERTS_TOGETHER, true>(sums, codes, scales, places, from, plane);
    } else {
        experts_chunk<PLANES, EXPERTS_TOGETHER, false>(sums, codes, scales, places, from, plane);
    }
}

// The sums of two outputs, of which `left` exist, go to `out` and become zero.
__device__ __forceinline__ void experts_store(float (&sums)[1][4], __nv_bfloat16* out, unsigned left) {
#pragma unroll
    for (unsigned o = 0u; o < EXPERTS_TOGETHER; ++o) {
        const float sum = spark_diagonal_sum(sums[0], o);
        if (threadIdx.x % SPARK_WARP == 0u && o < left) {
            spark_store(out + o, sum);
        }
    }
#pragma unroll
    for (unsigned i = 0u; i < 4u; ++i) {
        sums[0][i] = 0.0f;
    }
}

// out[n] = bf16(planes . weights[n]) for the outputs of this block, where all 64 are there and k is STEPS rounds of a warp:
// places are known when the kernel is compiled. AHEAD turns of a warp are on their way while others are multiplied; the
// first ones before `stage` has made the planes.
template <unsigned PLANES, unsigned STEPS, unsigned AHEAD, class Stage>
__device__ __forceinline__ void experts_whole(const uint4* codes, const unsigned char* scales, __nv_bfloat16* out,
                                              const Stage& stage) {
    constexpr unsigned OUTPUTS = EXPERTS_TOGETHER;
    constexpr unsigned CHUNKS = STEPS * SPARK_WARP;
    constexpr unsigned PLANE = EXPERTS_WORDS * CHUNKS;
    static_assert(EXPERTS_TURNS % AHEAD == 0u, "a warp's turns come AHEAD at a time");
    const size_t first = blockIdx.x * EXPERTS_OUTPUTS + threadIdx.x / SPARK_WARP * (EXPERTS_TURNS * OUTPUTS);
    codes += first * CHUNKS + threadIdx.x % SPARK_WARP;
    scales += first * CHUNKS + threadIdx.x % SPARK_WARP;
    out += first;
    uint4 ring[AHEAD][STEPS][OUTPUTS];
    unsigned scale_ring[AHEAD][STEPS][OUTPUTS];
    const auto load = [&](unsigned turn, unsigned step) {
#pragma unroll
        for (unsigned o = 0u; o < OUTPUTS; ++o) {
            // An address that came out of memory: the compiler cannot see by itself that it is a global one.
            const unsigned at = (turn * OUTPUTS + o) * CHUNKS + step * SPARK_WARP;
            ring[turn][step][o] = __ldg(codes + at);
            scale_ring[turn][step][o] = __ldg(scales + at);
        }
    };
#pragma unroll
    for (unsigned a = 0u; a < AHEAD; ++a) {
#pragma unroll
        for (unsigned step = 0u; step < STEPS; ++step) {
            load(a, step);
        }
    }
    stage();
    unsigned places[EXPERTS_WORDS];
    lane_places(places);
    float sums[1][4] = {};
#pragma unroll 1
    for (unsigned turn = 0u; turn < EXPERTS_TURNS; turn += AHEAD) {
        codes += AHEAD * OUTPUTS * CHUNKS;
        scales += AHEAD * OUTPUTS * CHUNKS;
#pragma unroll
        for (unsigned a = 0u; a < AHEAD; ++a) {
#pragma unroll
            for (unsigned step = 0u; step < STEPS; ++step) {
                experts_add<PLANES>(sums, ring[a][step], scale_ring[a][step], places, step * EXPERTS_ROUND, PLANE);
                if (turn + AHEAD < EXPERTS_TURNS) {
                    load(a, step);
                }
            }
            experts_store(sums, out + (turn + a) * OUTPUTS, OUTPUTS);
        }
    }
}

// The same for every n and k, DEPTH chunks of an output on their way, from planes that have been made.
template <unsigned PLANES, unsigned DEPTH>
__device__ __forceinline__ void experts_any(const uint4* codes, const unsigned char* scales, __nv_bfloat16* out,
                                            unsigned n, unsigned k) {
    constexpr unsigned OUTPUTS = EXPERTS_TOGETHER;
    constexpr unsigned TURNS = EXPERTS_TURNS;
    const unsigned lane = threadIdx.x % SPARK_WARP;
    const unsigned chunks = k / EXPERTS_CHUNK;
    const unsigned steps = (chunks + SPARK_WARP - 1u) / SPARK_WARP;
    const unsigned plane = EXPERTS_WORDS * plane_chunks(k);
    const unsigned first = blockIdx.x * EXPERTS_OUTPUTS + threadIdx.x / SPARK_WARP * (TURNS * OUTPUTS);
    const unsigned left = first < n ? n - first : 0u;
    const unsigned own = left < TURNS * OUTPUTS ? left : TURNS * OUTPUTS;
    const unsigned total = (own + OUTPUTS - 1u) / OUTPUTS * steps;
    codes += static_cast<size_t>(first) * chunks;
    scales += static_cast<size_t>(first) * chunks;
    out += first;

    uint4 ring[DEPTH][OUTPUTS];
    unsigned scale_ring[DEPTH][OUTPUTS];
    unsigned ahead_turn = 0u;
    unsigned ahead_step = 0u;
    const auto load = [&](uint4(&to)[OUTPUTS], unsigned(&to_scales)[OUTPUTS]) {
        const unsigned chunk = ahead_step * SPARK_WARP + lane;
        const bool live = ahead_turn * OUTPUTS < own && chunk < chunks;
#pragma unroll
        for (unsigned o = 0u; o < OUTPUTS; ++o) {
            to[o] = make_uint4(0u, 0u, 0u, 0u);
            to_scales[o] = 0u;
            if (live) {
                // An output past the last repeats the first of its turn; nobody asks for it.
                const unsigned which = ahead_turn * OUTPUTS + (ahead_turn * OUTPUTS + o < own ? o : 0u);
                const unsigned at = which * chunks + chunk;
                // An address that came out of memory: the compiler cannot see by itself that it is a global one.
                to[o] = __ldg(codes + at);
                to_scales[o] = __ldg(scales + at);
            }
        }
        ahead_step += 1u;
        if (ahead_step == steps) {
            ahead_step = 0u;
            ahead_turn += 1u;
        }
    };
#pragma unroll
    for (unsigned d = 0u; d < DEPTH; ++d) {
        load(ring[d], scale_ring[d]);
    }
    unsigned places[EXPERTS_WORDS];
    lane_places(places);
    float sums[1][4] = {};
    unsigned turn = 0u;
    unsigned step = 0u;
    for (unsigned base = 0u; base < total; base += DEPTH) {
#pragma unroll
        for (unsigned d = 0u; d < DEPTH; ++d) {
            if (base + d >= total) {
                break;
            }
            experts_add<PLANES>(sums, ring[d], scale_ring[d], places, step * EXPERTS_ROUND, plane);
            load(ring[d], scale_ring[d]);
            step += 1u;
            if (step == steps) {
experts_store(sums, out + turn * OUTPUTS, own - turn * OUTPUTS);
                step = 0u;
                turn += 1u;
            }
        }
    }
}

// Zeros for the outputs of this block.
__device__ __forceinline__ void experts_nothing(__nv_bfloat16* out, unsigned n) {
    const unsigned output = blockIdx.x * EXPERTS_OUTPUTS + threadIdx.x;
    if (threadIdx.x < EXPERTS_OUTPUTS && output < n) {
        spark_store(out + output, 0.0f);
    }
}

// Gate and up projections of A [rows, K] for expert_indices [rows, top_k]: gate_out and up_out [rows, top_k, N]. Grid
// (ceil(N / 64), rows, 2 * top_k), z = 2 * slot for gate and 2 * slot + 1 for up; block 256; ceil(K / 1024) * 2048 bytes of
// dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256, 3) spark_mxfp4_experts_gate_up(
    const __nv_bfloat16* __restrict__ A, const unsigned long long* __restrict__ gate_packed_ptrs,
    const unsigned long long* __restrict__ gate_scale_ptrs, __nv_bfloat16* __restrict__ gate_out,
    const unsigned long long* __restrict__ up_packed_ptrs, const unsigned long long* __restrict__ up_scale_ptrs,
    __nv_bfloat16* __restrict__ up_out, const unsigned int* __restrict__ expert_indices, unsigned int N,
    unsigned int K, unsigned int top_k) {
    spark_let_next_start();
    spark_wait_for_previous();
    const bool up = blockIdx.z % 2u != 0u;
    const size_t at = static_cast<size_t>(blockIdx.y) * top_k + blockIdx.z / 2u;
    const unsigned expert = expert_indices[at];
    __nv_bfloat16* out = (up ? up_out : gate_out) + at * N;
    const spark_address codes = (up ? up_packed_ptrs : gate_packed_ptrs)[expert];
    if (codes == 0u) {  // the same for the whole block
        experts_nothing(out, N);
        return;
    }
    const uint4* x = reinterpret_cast<const uint4*>(A) + static_cast<size_t>(blockIdx.y) * (K / 8u);
    const auto stage = [&]() {
        for (unsigned word = threadIdx.x; word < EXPERTS_WORDS * plane_chunks(K); word += EXPERTS_BLOCK) {
            uint4 values = {0u, 0u, 0u, 0u};
            if (word < K / 8u) {
                values = paired(x[word]);
            }
            spark_planes[plane_place(word / EXPERTS_WORDS, word % EXPERTS_WORDS)] = values;
        }
        __syncthreads();
    };
    const uint4* weights = reinterpret_cast<const uint4*>(codes);
    const unsigned char* scales = reinterpret_cast<const unsigned char*>((up ? up_scale_ptrs : gate_scale_ptrs)[expert]);
    if (K == 4096u && N % EXPERTS_OUTPUTS == 0u) {
        experts_whole<1u, 4u, 1u>(weights, scales, out, stage);
    } else {
        stage();
        experts_any<1u, 2u>(weights, scales, out, N, K);
    }
}

// Of eight activations, `plane` 0, 1 or 2 of the three BF16 numbers that make up each; `values` becomes what is left. An
// infinite one is all in plane 0.
__device__ __forceinline__ uint4 next_plane(float (&values)[8]) {
    unsigned words[4];
#pragma unroll
    for (unsigned i = 0u; i < 8u; i += 2u) {
        words[i / 2u] = spark_pack(values[i], values[i + 1u]);
        const float low = spark_low(words[i / 2u]);
        const float high = spark_high(words[i / 2u]);
        values[i] = fabsf(low) <= 0x1.fep127f ? values[i] - low : 0.0f;
        values[i + 1u] = fabsf(high) <= 0x1.fep127f ? values[i + 1u] - high : 0.0f;
    }
    return paired(make_uint4(words[0], words[1], words[2], words[3]));
}

// Activation and down projection. gate_out and up_out [rows, top_k, K]; C [rows, top_k, N]. Grid (ceil(N / 64), rows,
// top_k), block 256, three times the shared memory of the above.
extern "C" __global__ void __launch_bounds__(256, 3) spark_mxfp4_experts_silu_down(
    const __nv_bfloat16* __restrict__ gate_out, const __nv_bfloat16* __restrict__ up_out,
    const unsigned long long* __restrict__ packed_ptrs, const unsigned long long* __restrict__ scale_ptrs,
    __nv_bfloat16* __restrict__ C, const unsigned int* __restrict__ expert_indices, unsigned int N, unsigned int K,
    unsigned int top_k, float limit) {
    spark_let_next_start();
    spark_wait_for_previous();
    const size_t at = static_cast<size_t>(blockIdx.y) * top_k + blockIdx.z;
    const unsigned expert = expert_indices[at];
    __nv_bfloat16* out = C + at * N;
    const spark_address codes = packed_ptrs[expert];
    if (codes == 0u) {  // the same for the whole block
        experts_nothing(out, N);
        return;
    }
    const uint4* gate = reinterpret_cast<const uint4*>(gate_out) + at * (K / 8u);
    const uint4* up = reinterpret_cast<const uint4*>(up_out) + at * (K / 8u);
    const auto stage = [&]() {
        const unsigned plane = EXPERTS_WORDS * plane_chunks(K);
        for (unsigned word = threadIdx.x; word < plane; word += EXPERTS_BLOCK) {
            float values[8] = {};
            if (word < K / 8u) {
                spark_gated(gate[word], up[word], values, SparkLimit{limit});
            }
            const unsigned place = plane_place(word / EXPERTS_WORDS, word % EXPERTS_WORDS);
#pragma unroll
            for (unsigned p = 0u; p < 3u; ++p) {
                spark_planes[p * plane + place] = next_plane(values);
            }
        }
        __syncthreads();
    };
    const uint4* weights = reinterpret_cast<const uint4*>(codes);
    const unsigned char* scales = reinterpret_cast<const unsigned char*>(scale_ptrs[expert]);
    if (K == 2048u && N % EXPERTS_OUTPUTS == 0u) {
        experts_whole<3u, 2u, 1u>(weights, scales, out, stage);
    } else {
        stage();
        experts_any<3u, 2u>(weights, scales, out, N, K);
    }
}
