// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_moe_step_bf16: BF16 experts of a mixture in two launches: routing, gate, up and activation; then down, the
// weighted sum and the shared expert. For every row the bits of moe_topk_softmax, moe_expert_gate_up_shared_bf16,
// moe_expert_silu_down_shared_bf16 and moe_weighted_sum_blend one after the other, as far as no product of the first two
// is so small that it is no normal FP32 number.
//
// A warp has an output at a time, and a ring in shared memory with the next stripes of 1 KiB of its weights, which run on
// from output to output. A lane reads what it has copied itself, so that a warp waits for nothing but its own copies.
// Tables and the shared expert's weights are asked for before the wait for the kernels before; every block finds out the
// experts for itself.

#include "spark_moe_step.cuh"

constexpr unsigned STEP_THREADS = 256u;  // two blocks a multiprocessor: one starts while the kernel before has one left
constexpr unsigned STEP_WARPS = STEP_THREADS / SPARK_WARP;
constexpr unsigned STEP_STAGES = 8u;
constexpr unsigned STEP_TURNS = MOE_EXPERTS / STEP_THREADS;  // entries of a table that a thread copies

extern __shared__ uint4 step_staged[];  // the rings, then what the kernel says

typedef uint4 StepStage[2][SPARK_WARP];

__device__ __forceinline__ void step_widen(const uint4& words, float (&to)[SPARK_DOT_CHUNK]) {
    const unsigned word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (unsigned i = 0u; i < 4u; ++i) {
        to[2u * i] = spark_low(word[i]);
        to[2u * i + 1u] = spark_high(word[i]);
    }
}

// Sum of each half of 64 lanes as the tree 16, 8, 4, 2, 1, then first half + second; a thread is lane l and lane l + 32.
// Every thread of the warp gets it.
__device__ __forceinline__ float step_sum(float first, float second) {
    const bool low = threadIdx.x % SPARK_WARP < SPARK_WARP / 2u;
    // From here on the lower lanes have the first half, the upper ones the second.
    float sum = low ? first : second;
    sum = sum + __shfl_xor_sync(SPARK_FULL_MASK, low ? second : first, 16);
#pragma unroll
    for (int step = 8; step > 0; step /= 2) {
        sum = sum + __shfl_xor_sync(SPARK_FULL_MASK, sum, step);
    }
    return sum + __shfl_xor_sync(SPARK_FULL_MASK, sum, 16);
}

// Fills a ring: its first `early` stages, then `middle`, which ends a group of copies, then the others. Behind it the ring
// has one group a stage.
template <class Middle, class Copy>
__device__ __forceinline__ void step_fill(unsigned early, const Middle& middle, const Copy& copy_next) {
#pragma unroll 1
    for (unsigned s = 0u;; ++s) {
        if (s == early) {  // the same for the whole warp, and once for each
            middle();
#pragma unroll 1
            for (unsigned i = 0u; i < early; ++i) {
                spark_copies_end();
            }
        }
        if (s == STEP_STAGES) {
            break;
        }
        copy_next();
        if (s >= early) {
            spark_copies_end();
        }
    }
}

// activation [T, top_k + 1, N] = silu(g) * u in FP32, g and u = bf16(A [T, K] . a row of gate and up), for the experts
// that gate_logits [T, num_experts] choose, which go to expert_indices [T, top_k], and for the shared one.
// Grid (any, T), block 256, 64 KiB and 2 K bytes of dynamic shared memory. K % 8 == 0; A and weights on 16-byte addresses.
extern "C" __global__ void __launch_bounds__(STEP_THREADS, 2) spark_moe_route_gate_up_bf16(
    const __nv_bfloat16* A, const __nv_bfloat16* gate_logits, const unsigned long long* gate_weight_ptrs,
    const unsigned long long* up_weight_ptrs, unsigned int* expert_indices, const __nv_bfloat16* sh_gate_weight,
    const __nv_bfloat16* sh_up_weight, float* activation, unsigned int N, unsigned int K, unsigned int num_experts,
    unsigned int top_k) {
    __shared__ moe_address gates[MOE_EXPERTS];
    __shared__ moe_address ups[MOE_EXPERTS];
    __shared__ MoeRoute<STEP_WARPS> route;
    const unsigned lane = threadIdx.x % SPARK_WARP;
    const unsigned warp = threadIdx.x / SPARK_WARP;
    const size_t row = blockIdx.y;
    spark_let_next_start();
    StepStage* ring = reinterpret_cast<StepStage*>(step_staged) + warp * STEP_STAGES;
    uint4* x = step_staged + STEP_WARPS * STEP_STAGES * 2u * SPARK_WARP;
    const uint4* a = reinterpret_cast<const uint4*>(A + row * K);
    const unsigned chunks = K / SPARK_DOT_CHUNK;
    const unsigned tasks = (top_k + 1u) * N;
    const unsigned stride = gridDim.x * STEP_WARPS;

    // What is copied next: 32 chunks from `ahead_chunk` on of output ahead % N of a slot; those of the shared expert come
    // first. Where one of an output's two rows is elsewhere, neither is read.
    unsigned id = 0u;  // of slot `lane`
    unsigned ahead = blockIdx.x + gridDim.x * warp;
    unsigned ahead_chunk = lane;
    unsigned slot_ahead = 0u;
    const uint4* rows[2] = {nullptr, nullptr};
    const auto enter = [&]() {
        moe_address gate = reinterpret_cast<moe_address>(sh_gate_weight);
        moe_address up = reinterpret_cast<moe_address>(sh_up_weight);
        if (ahead >= N) {
            const unsigned expert = __shfl_sync(SPARK_FULL_MASK, id, static_cast<int>(ahead / N - 1u));
            gate = gates[expert];
            up = ups[expert];
        }
        const size_t at = static_cast<size_t>(ahead % N) * chunks;
        const bool here = gate != 0u && up != 0u;
        rows[0] = here ? reinterpret_cast<const uint4*>(gate) + at : nullptr;
        rows[1] = here ? reinterpret_cast<const uint4*>(up) + at : nullptr;
    };
    const auto copy_next = [&]() {
        if (ahead < tasks) {
            if (ahead_chunk == lane) {
                enter();
            }
            if (rows[0] != nullptr && ahead_chunk < chunks) {
                spark_copy_16(&ring[slot_ahead][0][lane], rows[0] + ahead_chunk, true);
                spark_copy_16(&ring[slot_ahead][1][lane], rows[1] + ahead_chunk, true);
            }
            ahead_chunk += SPARK_WARP;
            if (ahead_chunk - lane >= chunks) {
                ahead_chunk = lane;
                ahead += stride;
            }
        }
        slot_ahead = slot_ahead + 1u == STEP_STAGES ? 0u : slot_ahead + 1u;
    };

    const unsigned steps = (chunks + SPARK_WARP - 1u) / SPARK_WARP;
    const unsigned early = ahead < N ? (steps < STEP_STAGES ? steps : STEP_STAGES) : 0u;
    const auto find_experts = [&]() {
#pragma unroll
        for (unsigned i = 0u; i < STEP_TURNS; ++i) {
            const unsigned e = threadIdx.x + i * STEP_THREADS;
            if (e < num_experts) {
                gates[e] = gate_weight_ptrs[e];
                ups[e] = up_weight_ptrs[e];
            }
        }
        spark_wait_for_previous();
#pragma unroll 1
        for (unsigned c = threadIdx.x; c < chunks; c += STEP_THREADS) {
            spark_copy_16(&x[c], a + c, true);
        }
        spark_copies_end();
        route.find(gate_logits + row * num_experts, num_experts, top_k);
        spark_copies_wait<0>();
        __syncthreads();
        id = route.choose(top_k);
        if (blockIdx.x == 0u && warp == 0u && lane < top_k) {
            expert_indices[row * top_k + lane] = id;
        }
    };
    step_fill(early, find_experts, copy_next);

    unsigned slot = 0u;
#pragma unroll 1
    for (unsigned task = blockIdx.x + gridDim.x * warp; task < tasks; task += stride) {
        const unsigned turn = task / N;
        bool here = sh_gate_weight != nullptr && sh_up_weight != nullptr;
        if (turn > 0u) {
            const unsigned expert = __shfl_sync(SPARK_FULL_MASK, id, static_cast<int>(turn - 1u));
            here = gates[expert] != 0u && ups[expert] != 0u;
        }
        float gate[2] = {};  // lane l and lane l + 32
        float up[2] = {};
#pragma unroll 1
        for (unsigned step = 0u; step < steps; ++step) {
            spark_copies_wait<STEP_STAGES - 1u>();
            const unsigned chunk = step * SPARK_WARP + lane;
            if (here && chunk < chunks) {
                float xs[SPARK_DOT_CHUNK];
                float g[SPARK_DOT_CHUNK];
                float u[SPARK_DOT_CHUNK];
                step_widen(x[chunk], xs);
                step_widen(ring[slot][0][lane], g);
                step_widen(ring[slot][1][lane], u);
                // Products of two BF16 are exact, so that a sum rounds once either way.
#pragma unroll
                for (unsigned i = 0u; i < SPARK_DOT_CHUNK; ++i) {
                    gate[0] = fmaf(xs[i], g[i], gate[0]);
                    up[0] = fmaf(xs[i], u[i], up[0]);
                }
            }
            // The other lane's turn.
            const float gate_other = gate[1];
            const float up_other = up[1];
            gate[1] = gate[0];
            up[1] = up[0];
            gate[0] = gate_other;
            up[0] = up_other;
            copy_next();
            spark_copies_end();
            slot = slot + 1u == STEP_STAGES ? 0u : slot + 1u;
        }
        const bool swapped = steps % 2u != 0u;
        const float g = moe_rounded(swapped ? step_sum(gate[1], gate[0]) : step_sum(gate[0], gate[1]));
        const float u = moe_rounded(swapped ? step_sum(up[1], up[0]) : step_sum(up[0], up[1]));
        if (lane == 0u) {
            const unsigned to = turn == 0u ? top_k : turn - 1u;
            activation[(row * (top_k + 1u) + to) * N + task % N] = moe_gated(g, u);
        }
    }
}

// output [T, N] = bf16(sum over slots e of p[e] * bf16(activation[e] . down_e) + s * bf16(activation[top_k] . shared down)),
// in slot order; p: the softmax weights that gate_logits [T, num_experts] give the experts of expert_indices [T, top_k];
// s = sigmoid(input [T, N] . gate_weight [N]), or 1 without a gate_weight. activation FP32 [T, top_k + 1, K], weights [N, K].
// Grid (ceil(N / 8), T), block 256, 64 KiB and (top_k + 1) * 4 K bytes of dynamic shared memory. K % 8 == 0, with a gate
// N % 8 == 0; weights, activation, input and gate_weight on 16-byte addresses.
extern "C" __global__ void __launch_bounds__(STEP_THREADS, 2) spark_moe_down_blend_bf16(
    const float* activation, const unsigned long long* weight_ptrs, const __nv_bfloat16* gate_logits,
    const unsigned int* expert_indices, const __nv_bfloat16* sh_down_weight, const __nv_bfloat16* input,
    const __nv_bfloat16* gate_weight, __nv_bfloat16* output, unsigned int N, unsigned int K, unsigned int num_experts,
    unsigned int top_k, unsigned int normalize) {
    __shared__ moe_address table[MOE_EXPERTS];
    __shared__ MoeShares shares;
    __shared__ float gate_sums[MOE_GATE_WARPS];
    static_assert(STEP_WARPS >= MOE_GATE_WARPS, "a warp of the block for each of the sums");
    const unsigned lane = threadIdx.x % SPARK_WARP;
    const unsigned warp = threadIdx.x / SPARK_WARP;
    const size_t row = blockIdx.y;
    spark_let_next_start();
    StepStage* ring = reinterpret_cast<StepStage*>(step_staged) + warp * STEP_STAGES;
    uint4* staged = step_staged + STEP_WARPS * STEP_STAGES * 2u * SPARK_WARP;
    const size_t n = static_cast<size_t>(blockIdx.x) * STEP_WARPS + warp;
    const unsigned chunks = K / SPARK_DOT_CHUNK;

    // What is copied next: 64 chunks from `ahead_chunk` on of the output's row in a slot. The shared expert has turn 0,
    // slot e turn e + 1.
    unsigned id = 0u;  // of slot `lane`
    unsigned ahead = 0u;
    unsigned ahead_chunk = lane;
    unsigned slot_ahead = 0u;
    const uint4* from = nullptr;
    const auto copy_next = [&]() {
        if (ahead <= top_k) {
            if (ahead_chunk == lane) {
                moe_address weights = reinterpret_cast<moe_address>(sh_down_weight);
                if (ahead > 0u) {
                    weights = table[__shfl_sync(SPARK_FULL_MASK, id, static_cast<int>(ahead - 1u))];
                }
                const bool here = weights != 0u && n < N;
                from = here ? reinterpret_cast<const uint4*>(weights) + n * chunks : nullptr;
            }
#pragma unroll
            for (unsigned half = 0u; half < 2u; ++half) {
                const unsigned chunk = ahead_chunk + half * SPARK_WARP;
                if (from != nullptr && chunk < chunks) {
                    spark_copy_16(&ring[slot_ahead][half][lane], from + chunk, true);
                }
            }
            ahead_chunk += 2u * SPARK_WARP;
            if (ahead_chunk - lane >= chunks) {
                ahead_chunk = lane;
                ahead += 1u;
            }
        }
        slot_ahead = slot_ahead + 1u == STEP_STAGES ? 0u : slot_ahead + 1u;
    };

    const unsigned stripes = (chunks + 2u * SPARK_WARP - 1u) / (2u * SPARK_WARP);
    const unsigned early = stripes < STEP_STAGES ? stripes : STEP_STAGES;
    const auto read_experts = [&]() {
#pragma unroll
        for (unsigned i = 0u; i < STEP_TURNS; ++i) {
            const unsigned e = threadIdx.x + i * STEP_THREADS;
            if (e < num_experts) {
                table[e] = weight_ptrs[e];
            }
        }
        spark_wait_for_previous();
        id = lane < top_k ? expert_indices[row * top_k + lane] : 0u;
        // Neighbouring lanes read the halves of neighbouring chunks: they lie so that those are in different banks.
        const uint4* act = reinterpret_cast<const uint4*>(activation + row * (top_k + 1u) * K);
#pragma unroll 1
        for (unsigned i = threadIdx.x; i < (top_k + 1u) * 2u * chunks; i += STEP_THREADS) {
            spark_copy_16(&staged[i ^ (i / 8u % 2u)], act + i, true);
        }
        spark_copies_end();
        shares.read(gate_logits + row * num_experts, num_experts);
        __syncthreads();
    };
    step_fill(early, read_experts, copy_next);

    const bool gated = gate_weight != nullptr;
    if (gated) {
        moe_gate_sums(gate_sums, input + row * N, gate_weight, N);
    }
    const float share = shares.weight(id, num_experts, top_k, normalize != 0u);
    spark_copies_wait<STEP_STAGES>();
    __syncthreads();

    float total = 0.0f;
    float shared = 0.0f;
    unsigned slot = 0u;
#pragma unroll 1
    for (unsigned turn = 0u; turn <= top_k; ++turn) {
        const unsigned e = turn == 0u ? top_k : turn - 1u;
        bool here = sh_down_weight != nullptr;
        if (turn > 0u) {
            here = table[__shfl_sync(SPARK_FULL_MASK, id, static_cast<int>(e))] != 0u;
        }
        float sums[2] = {};  // lane l and lane l + 32
#pragma unroll 1
        for (unsigned at = lane; at - lane < chunks; at += 2u * SPARK_WARP) {
            spark_copies_wait<STEP_STAGES - 1u>();
#pragma unroll
            for (unsigned half = 0u; half < 2u; ++half) {
                const unsigned chunk = at + half * SPARK_WARP;
                if (here && n < N && chunk < chunks) {
                    const unsigned first = 2u * (e * chunks + chunk);
                    const unsigned swap = first / 8u % 2u;
                    const float4 low = *reinterpret_cast<const float4*>(&staged[first ^ swap]);
                    const float4 high = *reinterpret_cast<const float4*>(&staged[(first + 1u) ^ swap]);
                    const float xs[SPARK_DOT_CHUNK] = {low.x,  low.y,  low.z,  low.w,
                                                       high.x, high.y, high.z, high.w};
                    float w[SPARK_DOT_CHUNK];
                    step_widen(ring[slot][half][lane], w);
#pragma unroll
                    for (unsigned i = 0u; i < SPARK_DOT_CHUNK; ++i) {
                        sums[half] = sums[half] + xs[i] * w[i];
                    }
                }
            }
            copy_next();
            spark_copies_end();
            slot = slot + 1u == STEP_STAGES ? 0u : slot + 1u;
        }
        const float result = moe_rounded(step_sum(sums[0], sums[1]));
        if (turn == 0u) {
            shared = result;
        } else {
            total = total + __shfl_sync(SPARK_FULL_MASK, share, static_cast<int>(e)) * result;
        }
    }
    const float gate = gated ? moe_gate_share(gate_sums) : 1.0f;
    if (lane == 0u && n < N) {
        spark_store(output + row * N + n, total + gate * shared);
    }
}
