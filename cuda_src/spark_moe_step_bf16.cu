// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_moe_step_bf16: BF16 experts of a mixture in two launches: routing, gate, up and activation; then down, the
// weighted sum and the shared expert. For every row the bits of moe_topk_softmax, moe_expert_gate_up_shared_bf16,
// moe_expert_silu_down_shared_bf16 and moe_weighted_sum_blend one after the other.
//
// What a warp reads next is on its way while it adds up what it has: eight stripes of 1 KiB a warp, 128 KiB a
// multiprocessor. Blocks stay and take outputs in turn. The experts of a row are known late: the shared expert's weights
// and the tables are asked for before, and every block finds out the experts for itself, by one warp.

#include "spark_moe_step.cuh"

constexpr unsigned STEP_RING = 8u;
constexpr unsigned STEP_THREADS = 256u;  // two blocks a multiprocessor: one starts while the kernel before has one left
constexpr unsigned STEP_WARPS = STEP_THREADS / SPARK_WARP;

extern __shared__ uint4 step_staged[];

// sum + the products of a chunk of activations with a chunk of weights, ascending; each product rounds.
__device__ __forceinline__ float step_dot(float sum, const float (&a)[SPARK_DOT_CHUNK], const uint4& weights) {
    const unsigned word[4] = {weights.x, weights.y, weights.z, weights.w};
#pragma unroll
    for (unsigned i = 0u; i < 4u; ++i) {
        sum = sum + a[2u * i] * spark_low(word[i]);
        sum = sum + a[2u * i + 1u] * spark_high(word[i]);
    }
    return sum;
}

// The weights of an output of a slot, gate and up; whether they are here, and what is on its way of them.
struct GateUp {
    const uint4* rows[2];
    bool here;
    uint4 flying[STEP_RING][2];

    __device__ __forceinline__ void enter(moe_address gate, moe_address up, unsigned output, unsigned chunks) {
        here = gate != 0u && up != 0u;
        const size_t at = static_cast<size_t>(output) * chunks + threadIdx.x % SPARK_WARP;
        rows[0] = reinterpret_cast<const uint4*>(gate) + at;
        rows[1] = reinterpret_cast<const uint4*>(up) + at;
    }

    // Chunk `first` + 32 j + lane, for place j of the ring.
    __device__ __forceinline__ void load(unsigned j, unsigned first, unsigned chunks) {
        const unsigned chunk = first + j * SPARK_WARP;
        if (here && chunk + threadIdx.x % SPARK_WARP < chunks) {
            flying[j][0] = rows[0][chunk];
            flying[j][1] = rows[1][chunk];
        }
    }

    __device__ __forceinline__ void fill(unsigned chunks) {
#pragma unroll
        for (unsigned j = 0u; j < STEP_RING; ++j) {
            load(j, 0u, chunks);
        }
    }
};

// activation [T, top_k + 1, N] = silu(g) * u in FP32, g and u = bf16(A [T, K] . a row of gate and up), for the experts
// that gate_logits [T, num_experts] choose, and for the shared one. Those experts and their logits, the largest first, go
// to expert_indices and expert_logits [T, top_k].
// Grid (any, T), block 256, 2 K bytes of dynamic shared memory. K % 8 == 0; A and weights on 16-byte addresses.
extern "C" __global__ void __launch_bounds__(STEP_THREADS, 2) spark_moe_route_gate_up_bf16(
    const __nv_bfloat16* A, const __nv_bfloat16* gate_logits, const unsigned long long* gate_weight_ptrs,
    const unsigned long long* up_weight_ptrs, unsigned int* expert_indices, float* expert_logits,
    const __nv_bfloat16* sh_gate_weight, const __nv_bfloat16* sh_up_weight, float* activation, unsigned int N,
    unsigned int K, unsigned int num_experts, unsigned int top_k) {
    __shared__ moe_address gates[MOE_STEP_EXPERTS];
    __shared__ moe_address ups[MOE_STEP_EXPERTS];
    __shared__ unsigned ids[MOE_STEP_SLOTS];
    const unsigned lane = threadIdx.x % SPARK_WARP;
    const unsigned warp = threadIdx.x / SPARK_WARP;
    const size_t row = blockIdx.y;
    spark_let_next_start();
    const unsigned chunks = K / SPARK_DOT_CHUNK;
    const unsigned tasks = (top_k + 1u) * N;
    const unsigned stride = gridDim.x * STEP_WARPS;
    // Outputs of the shared expert come first.
    unsigned task = blockIdx.x + gridDim.x * warp;

    const moe_address shared_gate = reinterpret_cast<moe_address>(sh_gate_weight);
    const moe_address shared_up = reinterpret_cast<moe_address>(sh_up_weight);
    GateUp weights;
    weights.here = false;
    const bool routes = warp == STEP_WARPS - 1u;
    const bool early = task < N && !routes;
    if (!routes) {
        constexpr unsigned OTHERS = STEP_THREADS - SPARK_WARP;
        constexpr unsigned TURNS = (MOE_STEP_EXPERTS + OTHERS - 1u) / OTHERS;
        if (early) {
            weights.enter(shared_gate, shared_up, task, chunks);
            weights.fill(chunks);
        }
        MoeShare<moe_address, OTHERS, TURNS> gate_entries;
        MoeShare<moe_address, OTHERS, TURNS> up_entries;
        gate_entries.read(gate_weight_ptrs, num_experts, 0u);
        up_entries.read(up_weight_ptrs, num_experts, 0u);
        spark_wait_for_previous();
        const uint4* x = reinterpret_cast<const uint4*>(A + row * K);
        for (unsigned first = 0u; first < chunks; first += 2u * OTHERS) {
            MoeShare<uint4, OTHERS, 2u> some;
            some.read(x, chunks, first);
            some.write(chunks, first, [](unsigned at, const uint4& chunk) { step_staged[at] = chunk; });
        }
        gate_entries.write(num_experts, 0u, [&](unsigned at, moe_address entry) { gates[at] = entry; });
        up_entries.write(num_experts, 0u, [&](unsigned at, moe_address entry) { ups[at] = entry; });
    } else {
        spark_wait_for_previous();
        moe_route(gate_logits + row * num_experts, ids, expert_indices + row * top_k, expert_logits + row * top_k,
                  num_experts, top_k);
    }
    __syncthreads();

    const auto enter = [&](unsigned at) {
        if (at < N) {
            weights.enter(shared_gate, shared_up, at, chunks);
        } else {
            const unsigned slot = at / N - 1u;
            weights.enter(gates[ids[slot]], ups[ids[slot]], at % N, chunks);
        }
    };
    if (!early && task < tasks) {
        enter(task);
        weights.fill(chunks);
    }
    constexpr unsigned STRIDE = STEP_RING * SPARK_WARP;
    while (task < tasks) {
        const unsigned now = task;
        const bool here = weights.here;
        float gate[2] = {};  // lane l and lane l + 32
        float up[2] = {};
        for (unsigned first = 0u; first < chunks; first += STRIDE) {
            unsigned next = first + STRIDE;
            if (next >= chunks) {
                next = 0u;
                task += stride;
                weights.here = false;
                if (task < tasks) {
                    enter(task);
                }
            }
#pragma unroll
            for (unsigned j = 0u; j < STEP_RING; ++j) {
                const unsigned chunk = first + j * SPARK_WARP + lane;
                if (here && chunk < chunks) {
                    const uint4 x = step_staged[chunk];
                    const unsigned word[4] = {x.x, x.y, x.z, x.w};
                    float a[SPARK_DOT_CHUNK];
#pragma unroll
                    for (unsigned i = 0u; i < 4u; ++i) {
                        a[2u * i] = spark_low(word[i]);
                        a[2u * i + 1u] = spark_high(word[i]);
                    }
                    gate[j % 2u] = step_dot(gate[j % 2u], a, weights.flying[j][0]);
                    up[j % 2u] = step_dot(up[j % 2u], a, weights.flying[j][1]);
                }
                weights.load(j, next, chunks);
            }
        }
        // Where the slot's weights are elsewhere the sums are zeros.
        const float g = moe_rounded(moe_halves_sum(gate[0], gate[1]));
        const float u = moe_rounded(moe_halves_sum(up[0], up[1]));
        if (lane == 0u) {
            const unsigned slot = now < N ? top_k : now / N - 1u;
            activation[(row * (top_k + 1u) + slot) * N + now % N] = moe_gated(g, u);
        }
    }
}

// output [T, N] = bf16(sum over slots e of p[e] * bf16(activation[e] . down_e) + s * bf16(activation[top_k] . shared down)),
// in slot order; p: the softmax weights of the chosen experts, as topk_weight has them; s = sigmoid(input [T, N] .
// gate_weight [N]), or 1 without a gate_weight. activation FP32 [T, top_k + 1, K], weights [N, K]. Grid (ceil(N / 8), T), block 256, (top_k + 1) * 4 K bytes of dynamic shared memory.
// K % 8 == 0, with a gate N % 8 == 0; weights, activation, input and gate_weight on 16-byte addresses.
extern "C" __global__ void __launch_bounds__(STEP_THREADS, 2) spark_moe_down_blend_bf16(
    const float* activation, const unsigned long long* weight_ptrs, const __nv_bfloat16* gate_logits,
    const unsigned int* expert_indices, const float* expert_logits, const __nv_bfloat16* sh_down_weight, const __nv_bfloat16* input,
    const __nv_bfloat16* gate_weight, __nv_bfloat16* output, unsigned int N, unsigned int K, unsigned int num_experts,
    unsigned int top_k, unsigned int normalize) {
    __shared__ moe_address table[MOE_STEP_EXPERTS];
    __shared__ unsigned ids[MOE_STEP_SLOTS];
    __shared__ float shares[MOE_STEP_SLOTS];
    __shared__ float gate_sums[MOE_GATE_WARPS];
    constexpr unsigned OTHERS = STEP_THREADS - SPARK_WARP;
    constexpr unsigned ACTIVATIONS = 7u;  // of a thread, four at a time, that are on their way at once
    static_assert(STEP_WARPS >= MOE_GATE_WARPS, "a warp of the block for each of the sums");
    const unsigned lane = threadIdx.x % SPARK_WARP;
    const unsigned warp = threadIdx.x / SPARK_WARP;
    const size_t row = blockIdx.y;
    const bool weighs = warp == STEP_WARPS - 1u;  // the others bring the activations
    const size_t n = static_cast<size_t>(blockIdx.x) * STEP_WARPS + warp;
    const unsigned chunks = K / SPARK_DOT_CHUNK;

    // What is read next: a stripe of 64 chunks of the output's row in a slot. The shared expert's come first.
    const uint4* from = nullptr;
    unsigned turn = 0u;
    unsigned ahead = 0u;
    uint4 flying[STEP_RING][2];
    const auto load = [&](unsigned j) {
        if (ahead == 0u) {
            moe_address weights = 0u;
            if (n < N && turn <= top_k) {
                weights = turn == 0u ? reinterpret_cast<moe_address>(sh_down_weight) : table[ids[turn - 1u]];
            }
            from = weights != 0u ? reinterpret_cast<const uint4*>(weights) + n * chunks : nullptr;
        }
        const unsigned chunk = ahead + lane;
        if (from != nullptr && chunk < chunks) {
            flying[j][0] = from[chunk];
        }
        if (from != nullptr && chunk + SPARK_WARP < chunks) {
            flying[j][1] = from[chunk + SPARK_WARP];
        }
        ahead += SPARK_DOT_THREADS;
        if (ahead >= chunks) {
            ahead = 0u;
            turn += 1u;
        }
    };

    spark_let_next_start();
    const unsigned stripes = (chunks + SPARK_DOT_THREADS - 1u) / SPARK_DOT_THREADS;
#pragma unroll
    for (unsigned j = 0u; j < STEP_RING; ++j) {
        if (j < stripes) {
            load(j);
        }
    }
    MoeShare<moe_address, STEP_THREADS, (MOE_STEP_EXPERTS + STEP_THREADS - 1u) / STEP_THREADS> entries;
    entries.read(weight_ptrs, num_experts, 0u);
    spark_wait_for_previous();
    if (threadIdx.x < top_k) {
        ids[threadIdx.x] = expert_indices[row * top_k + threadIdx.x];
    }
    // The first activations, and what the experts' weights need, are on their way while the block waits for the indices.
    const float4* act = reinterpret_cast<const float4*>(activation + row * (top_k + 1u) * K);
    const unsigned quarters = (top_k + 1u) * 2u * chunks;
    MoeShare<float4, OTHERS, ACTIVATIONS> some;
    TopkLane terms;
    float chosen = 0.0f;
    if (weighs) {
        terms.load(gate_logits + row * num_experts, num_experts);
        chosen = lane < top_k ? expert_logits[row * top_k + lane] : 0.0f;
    } else {
        some.read(act, quarters, 0u);
    }
    entries.write(num_experts, 0u, [&](unsigned at, moe_address entry) { table[at] = entry; });
    __syncthreads();
#pragma unroll
    for (unsigned j = 0u; j < STEP_RING; ++j) {
        if (j >= stripes) {
            load(j);
        }
    }

    // The halves of a slot's chunks lie apart, so that neighbouring lanes read neighbouring words.
    float4* staged = reinterpret_cast<float4*>(step_staged);
    if (weighs) {
        const float weight = topk_weight(terms, chosen, num_experts, top_k, normalize != 0u);
        if (lane < top_k) {
            shares[lane] = weight;
        }
    }
    for (unsigned first = 0u; !weighs;) {
        some.write(quarters, first, [&](unsigned at, const float4& four) {
            const unsigned slot = at / (2u * chunks);
            const unsigned within = at % (2u * chunks);
            staged[(2u * slot + within % 2u) * chunks + within / 2u] = four;
        });
        first += ACTIVATIONS * OTHERS;
        if (first >= quarters) {
            break;
        }
        some.read(act, quarters, first);
    }
    const bool gated = gate_weight != nullptr;
    if (gated) {
        moe_gate_sums(gate_sums, input + row * N, gate_weight, N);
    }
    __syncthreads();

    float total = 0.0f;
    float shared = 0.0f;
    float sums[2] = {};  // lane l and lane l + 32
    unsigned at = 0u;
    for (unsigned now = 0u; now <= top_k;) {
#pragma unroll
        for (unsigned j = 0u; j < STEP_RING; ++j) {
            if (now > top_k) {
                break;
            }
            const unsigned slot = now == 0u ? top_k : now - 1u;
            const bool here = n < N && (now == 0u ? sh_down_weight != nullptr : table[ids[slot]] != 0u);
#pragma unroll
            for (unsigned half = 0u; half < 2u; ++half) {
                const unsigned chunk = at + half * SPARK_WARP + lane;
                if (here && chunk < chunks) {
                    const float4 low = staged[2u * slot * chunks + chunk];
                    const float4 high = staged[(2u * slot + 1u) * chunks + chunk];
                    const float a[SPARK_DOT_CHUNK] = {low.x,  low.y,  low.z,  low.w,
                                                      high.x, high.y, high.z, high.w};
                    sums[half] = step_dot(sums[half], a, flying[j][half]);
                }
            }
            load(j);
            at += SPARK_DOT_THREADS;
            if (at >= chunks) {
                const float result = moe_rounded(moe_halves_sum(sums[0], sums[1]));
                if (now == 0u) {
                    shared = result;
                } else {
                    total = total + shares[slot] * result;
                }
                sums[0] = 0.0f;
                sums[1] = 0.0f;
                at = 0u;
                now += 1u;
            }
        }
    }
    const float gate = gated ? moe_gate_share(gate_sums) : 1.0f;
    if (lane == 0u && n < N) {
        spark_store(output + row * N + n, total + gate * shared);
    }
}
