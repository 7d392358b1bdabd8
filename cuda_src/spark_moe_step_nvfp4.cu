// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_moe_step_nvfp4: NVFP4 experts of a mixture in two launches: routing, gate, up and activation; then down, the
// weighted sum and the shared expert.
//
// A row of K weights is K / 2 bytes of E2M1 codes (low nibble first) and K / 16 block scales in E4M3; a weight is
// code * scale * scale2. Codes go as they are, 2^126 times too small, through tensor-core steps with FP32 sums; x comes
// 2^48 times larger, and scales multiply the sums.
//
// A warp has 16 rows of weights and a slice of 128 k, eight blocks of 16. Lane 4 g + t reads blocks 2 t and 2 t + 1 of rows
// g and g + 8, and its codes are its part of each step. Column c of a step's other operand has elements of block c alone,
// in the lanes that read it, and zeros in the others: so column c of the sums is block c's, whatever its lanes multiply
// beside. The lane that read blocks 2 t and 2 t + 1 holds their sums too, and multiplies them by their scales.
//
// All that a warp reads is on its way at once. Slices are added in ascending order of warps. An output's bits depend on
// its row of x, its experts and their order alone.

#include "spark_e2m1.cuh"
#include "spark_fp8.cuh"
#include "spark_moe_step.cuh"

constexpr unsigned FP4_GATE_UP_THREADS = 256u;  // two blocks a multiprocessor
constexpr unsigned FP4_GATE_UP_WARPS = FP4_GATE_UP_THREADS / SPARK_WARP;
constexpr unsigned FP4_DOWN_THREADS = 512u;
constexpr unsigned FP4_DOWN_WARPS = FP4_DOWN_THREADS / SPARK_WARP;
constexpr unsigned FP4_SLICE = 128u;  // k
constexpr unsigned FP4_BLOCKS = 8u;   // of 16 k in a slice
constexpr unsigned FP4_ROWS = 16u;    // of weights
constexpr unsigned FP4_TILES = 16u;   // of a block in the gate and up projection, at most
constexpr unsigned FP4_GATE_UP_RING = 3u;
constexpr unsigned FP4_DOWN_RING = 3u;
constexpr float FP4_RAISED = 0x1p48f;   // of x
constexpr float FP4_LOWERED = 0x1p78f;  // of sums

extern __shared__ uint4 fp4_staged[];

// A matrix of NVFP4 weights.
struct Fp4Weights {
    moe_address codes;
    moe_address scales;
};

// What a lane reads of a slice: two blocks of rows g and g + 8, and their scales.
struct Fp4Piece {
    uint4 codes[2];
    unsigned short scales[2];

    // Zeros where there are no weights, or no such k.
    __device__ __forceinline__ void load(unsigned i, const Fp4Weights& weights, size_t row, unsigned slice, unsigned k) {
        const unsigned t = threadIdx.x % 4u;
        codes[i] = make_uint4(0u, 0u, 0u, 0u);
        scales[i] = 0u;
        if (weights.codes != 0u && slice * FP4_SLICE + 32u * t < k) {
            codes[i] = reinterpret_cast<const uint4*>(weights.codes)[row * (k / 32u) + slice * 4u + t];
            scales[i] = reinterpret_cast<const unsigned short*>(weights.scales)[row * (k / 32u) + slice * 4u + t];
        }
    }
};

// The lane's part of the other operand: of its even block and of its odd one, each eight words of elements i and i + 4 of
// the block's first half, then of its second one. One of them at most is not 0.
struct Fp4Columns {
    unsigned even[8];
    unsigned odd[8];

    // Whether the lane has a column of its own, that of block lane / 4.
    static __device__ __forceinline__ bool mine() { return threadIdx.x % SPARK_WARP / 8u == threadIdx.x % 4u; }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (unsigned i = 0u; i < 8u; ++i) {
            even[i] = 0u;
            odd[i] = 0u;
        }
    }

    // The words of the lane's own column.
    __device__ __forceinline__ void set(const uint4& low, const uint4& high) {
        const unsigned words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        const bool first = threadIdx.x / 4u % 2u == 0u;
#pragma unroll
        for (unsigned i = 0u; i < 8u; ++i) {
            even[i] = first ? words[i] : 0u;
            odd[i] = first ? 0u : words[i];
        }
    }
};

__device__ __forceinline__ unsigned fp4_times(unsigned a, unsigned b) {
    const __nv_bfloat162 product =
        __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&a), *reinterpret_cast<const __nv_bfloat162*>(&b));
    return *reinterpret_cast<const unsigned*>(&product);
}

// Eight BF16, raised, as words of elements i and i + 4.
__device__ __forceinline__ uint4 fp4_raised(const uint4& eight) {
    constexpr unsigned TWICE = 0x57805780u;  // FP4_RAISED
    return make_uint4(fp4_times(__byte_perm(eight.x, eight.z, 0x5410u), TWICE),
                      fp4_times(__byte_perm(eight.x, eight.z, 0x7632u), TWICE),
                      fp4_times(__byte_perm(eight.y, eight.w, 0x5410u), TWICE),
                      fp4_times(__byte_perm(eight.y, eight.w, 0x7632u), TWICE));
}

// sums += the piece's steps with each of the parts that x is the sum of.
template <unsigned PARTS>
__device__ __forceinline__ void fp4_multiply(float (&sums)[4], const Fp4Piece& piece,
                                             const Fp4Columns (&parts)[PARTS]) {
    const unsigned low[4] = {piece.codes[0].x, piece.codes[0].y, piece.codes[0].z, piece.codes[0].w};
    const unsigned high[4] = {piece.codes[1].x, piece.codes[1].y, piece.codes[1].z, piece.codes[1].w};
#pragma unroll
    for (unsigned w = 0u; w < 4u; ++w) {
        unsigned a[4];
        unsigned b[4];
        spark_e2m1_pairs(low[w], a);
        spark_e2m1_pairs(high[w], b);
#pragma unroll
        for (unsigned p = 0u; p < PARTS; ++p) {
            const unsigned* x = (w < 2u ? parts[p].even : parts[p].odd) + w % 2u * 4u;
            spark_mma(sums, {a[0], b[0], a[1], b[1]}, {x[0], x[1]});
            spark_mma(sums, {a[2], b[2], a[3], b[3]}, {x[2], x[3]});
        }
    }
}

// Sums times scales, over the slice: of row g, and of row g + 8. All four lanes of g get both.
__device__ __forceinline__ void fp4_reduce(const float (&sums)[4], const Fp4Piece& piece, float (&rows)[2]) {
#pragma unroll
    for (unsigned i = 0u; i < 2u; ++i) {
        float scales[2];
        spark_widen_e4m3(piece.scales[i], scales);
        float row = sums[2u * i] * scales[0] + sums[2u * i + 1u] * scales[1];
        row = row + __shfl_xor_sync(SPARK_FULL_MASK, row, 1);
        rows[i] = row + __shfl_xor_sync(SPARK_FULL_MASK, row, 2);
    }
}

// activation [T, top_k + 1, N] = silu(g) * u in FP32, g and u = A [T, K] . a row of gate and up, for the experts that
// gate_logits [T, num_experts] choose, which go to expert_indices [T, top_k], and for the shared one. Grid (any with at most 16 tiles of 8 outputs a block, T), block 256, 2 K
// bytes of dynamic shared memory. K % 32 == 0; A and codes on 16-byte addresses, scales on even ones.
extern "C" __global__ void __launch_bounds__(FP4_GATE_UP_THREADS, 2) spark_moe_route_gate_up_nvfp4(
    const __nv_bfloat16* A, const __nv_bfloat16* gate_logits, const unsigned long long* gate_packed_ptrs,
    const unsigned long long* gate_scale_ptrs, const float* gate_scale2_vals, const unsigned long long* up_packed_ptrs,
    const unsigned long long* up_scale_ptrs, const float* up_scale2_vals, unsigned int* expert_indices,
    const unsigned char* sh_gate_packed, const unsigned char* sh_gate_scale, float sh_gate_s2,
    const unsigned char* sh_up_packed, const unsigned char* sh_up_scale, float sh_up_s2, float* activation,
    unsigned int N, unsigned int K, unsigned int num_experts, unsigned int top_k) {
    constexpr unsigned OUTPUTS = FP4_ROWS / 2u;  // of a tile: rows g are gate's, rows g + 8 up's
    __shared__ Fp4Weights gates[MOE_EXPERTS];
    __shared__ Fp4Weights ups[MOE_EXPERTS];
    __shared__ MoeRoute<FP4_GATE_UP_WARPS> route;
    __shared__ float factors[FP4_TILES][2];
    __shared__ float sums[FP4_TILES][FP4_GATE_UP_WARPS][FP4_ROWS];
    const unsigned lane = threadIdx.x % SPARK_WARP;
    const unsigned warp = threadIdx.x / SPARK_WARP;
    const unsigned g = lane / 4u;
    const size_t row = blockIdx.y;
    spark_let_next_start();

    const unsigned slices = (K + FP4_SLICE - 1u) / FP4_SLICE;
    const unsigned slot_tiles = (N + OUTPUTS - 1u) / OUTPUTS;
    const unsigned all_tiles = (top_k + 1u) * slot_tiles;
    // The block's tiles; those of the shared expert come first.
    const unsigned tiles = blockIdx.x < all_tiles ? (all_tiles - blockIdx.x - 1u) / gridDim.x + 1u : 0u;
    const Fp4Weights shared_gate = {reinterpret_cast<moe_address>(sh_gate_packed),
                                    reinterpret_cast<moe_address>(sh_gate_scale)};
    const Fp4Weights shared_up = {reinterpret_cast<moe_address>(sh_up_packed),
                                  reinterpret_cast<moe_address>(sh_up_scale)};

    // What is read next: tile `ahead` of slice `ahead_slice`.
    unsigned id = 0u;  // of slot `lane`
    unsigned ahead = 0u;
    unsigned ahead_slice = warp;
    Fp4Piece ring[FP4_GATE_UP_RING];
    const auto load = [&](unsigned j) {
        if (ahead_slice < slices && tiles > 0u) {
            const unsigned tile = blockIdx.x + ahead * gridDim.x;
            const unsigned turn = tile / slot_tiles;
            const unsigned output = tile % slot_tiles * OUTPUTS + g;
            const size_t at = output < N ? output : N - 1u;
            const unsigned expert = __shfl_sync(SPARK_FULL_MASK, id, static_cast<int>(turn == 0u ? 0u : turn - 1u));
            const Fp4Weights gate = turn == 0u ? shared_gate : gates[expert];
            const Fp4Weights up = turn == 0u ? shared_up : ups[expert];
            ring[j].load(0u, gate, at, ahead_slice, K);
            ring[j].load(1u, up, at, ahead_slice, K);
            ahead += 1u;
            if (ahead == tiles) {
                ahead = 0u;
                ahead_slice += FP4_GATE_UP_WARPS;
            }
        }
    };

    const bool early = blockIdx.x < slot_tiles;
    if (early) {
        load(0u);
    }
#pragma unroll
    for (unsigned i = 0u; i < MOE_EXPERTS / FP4_GATE_UP_THREADS; ++i) {
        const unsigned e = threadIdx.x + i * FP4_GATE_UP_THREADS;
        if (e < num_experts) {
            gates[e] = {gate_packed_ptrs[e], gate_scale_ptrs[e]};
            ups[e] = {up_packed_ptrs[e], up_scale_ptrs[e]};
        }
    }
    spark_wait_for_previous();
    const uint4* x = reinterpret_cast<const uint4*>(A + row * K);
#pragma unroll 1
    for (unsigned at = threadIdx.x; at < K / 8u; at += FP4_GATE_UP_THREADS) {
        fp4_staged[at] = fp4_raised(x[at]);
    }
    route.find(gate_logits + row * num_experts, num_experts, top_k);
    __syncthreads();
    id = route.choose(top_k);
    if (blockIdx.x == 0u && warp == 0u && lane < top_k) {
        expert_indices[row * top_k + lane] = id;
    }

#pragma unroll
    for (unsigned j = 0u; j < FP4_GATE_UP_RING; ++j) {
        if (j > 0u || !early) {
            load(j);
        }
    }
    Fp4Columns columns[1];
    const auto read_x = [&](unsigned slice) {
        const unsigned block = slice * FP4_BLOCKS + g;
        if (Fp4Columns::mine() && block < K / 16u) {
            columns[0].set(fp4_staged[2u * block], fp4_staged[2u * block + 1u]);
        } else {
            columns[0].clear();
        }
    };
    read_x(warp);
    if (warp == 0u) {
        const unsigned turn = (blockIdx.x + lane / 2u * gridDim.x) / slot_tiles;
        const unsigned expert = __shfl_sync(SPARK_FULL_MASK, id, static_cast<int>(turn == 0u ? 0u : turn - 1u));
        const bool up = lane % 2u != 0u;
        float factor = up ? sh_up_s2 : sh_gate_s2;
        if (turn != 0u && lane < 2u * tiles) {
            // That of an expert that is elsewhere may be anything.
            factor = (up ? ups : gates)[expert].codes != 0u ? (up ? up_scale2_vals : gate_scale2_vals)[expert] : 0.0f;
        }
        factors[lane / 2u][lane % 2u] = factor * FP4_LOWERED;
    }
    unsigned tile = 0u;
    unsigned slice = warp;
    while (slice < slices && tiles > 0u) {
#pragma unroll
        for (unsigned j = 0u; j < FP4_GATE_UP_RING; ++j) {
            if (slice >= slices) {
                break;
            }
            float products[4] = {};
            float rows[2];
            fp4_multiply(products, ring[j], columns);
            fp4_reduce(products, ring[j], rows);
            load(j);
            if (lane % 4u < 2u) {
                float* sum = &sums[tile][warp][g + lane % 4u * OUTPUTS];
                const float value = lane % 4u == 0u ? rows[0] : rows[1];
                *sum = slice == warp ? value : *sum + value;
            }
            tile += 1u;
            if (tile == tiles) {
                tile = 0u;
                slice += FP4_GATE_UP_WARPS;
                if (slice < slices) {
                    read_x(slice);
                }
            }
        }
    }
    __syncthreads();

    const unsigned adders = slices < FP4_GATE_UP_WARPS ? slices : FP4_GATE_UP_WARPS;
    if (threadIdx.x < tiles * OUTPUTS) {
        const unsigned at = threadIdx.x / OUTPUTS;
        const unsigned o = threadIdx.x % OUTPUTS;
        float gate = 0.0f;
        float up = 0.0f;
        for (unsigned w = 0u; w < adders; ++w) {
            gate = gate + sums[at][w][o];
            up = up + sums[at][w][o + OUTPUTS];
        }
        const unsigned whole = blockIdx.x + at * gridDim.x;
        const unsigned turn = whole / slot_tiles;
        const unsigned output = whole % slot_tiles * OUTPUTS + o;
        const size_t slot = turn == 0u ? top_k : turn - 1u;
        if (output < N) {
            activation[(row * (top_k + 1u) + slot) * N + output] =
                moe_gated(gate * factors[at][0], up * factors[at][1]);
        }
    }
}

// Two activations, raised, as the sum of two BF16 each.
__device__ __forceinline__ void fp4_split(float low, float high, unsigned& upper, unsigned& rest) {
    const float raised[2] = {low * FP4_RAISED, high * FP4_RAISED};
    upper = spark_pack(raised[0], raised[1]);
    rest = spark_pack(raised[0] - spark_low(upper), raised[1] - spark_high(upper));
}

// output [T, N] = bf16(sum over slots e of p[e] * (activation[e] . down_e) + s * (activation[top_k] . shared down)); p: the
// softmax weights of the chosen experts, as topk_weight has them; s = sigmoid(input [T, N] . gate_weight [N]), or 1 without a gate_weight. activation FP32 [T, top_k + 1, K], which
// goes as the sum of two BF16 through the steps. Grid (ceil(N / 16), T), block 512, 512 bytes of dynamic shared memory for
// each of the slots' slices. K % 32 == 0, with a gate N % 8 == 0; codes, input and gate_weight on 16-byte addresses,
// scales on even ones.
extern "C" __global__ void __launch_bounds__(FP4_DOWN_THREADS, 1) spark_moe_down_blend_nvfp4(
    const float* activation, const unsigned long long* packed_ptrs, const unsigned long long* scale_ptrs, const float* scale2_vals,
    const __nv_bfloat16* gate_logits, const unsigned int* expert_indices, const unsigned char* sh_down_packed,
    const unsigned char* sh_down_scale, float sh_down_s2, const __nv_bfloat16* input, const __nv_bfloat16* gate_weight,
    __nv_bfloat16* output, unsigned int N, unsigned int K, unsigned int num_experts, unsigned int top_k,
    unsigned int normalize) {
    __shared__ Fp4Weights table[MOE_EXPERTS];
    __shared__ MoeShares softmax;
    __shared__ float gate_sums[MOE_GATE_WARPS];
    __shared__ float routed_sums[FP4_DOWN_WARPS][FP4_ROWS];
    __shared__ float shared_sums[FP4_DOWN_WARPS][FP4_ROWS];
    const unsigned lane = threadIdx.x % SPARK_WARP;
    const unsigned warp = threadIdx.x / SPARK_WARP;
    const unsigned g = lane / 4u;
    const size_t row = blockIdx.y;
    const unsigned first = blockIdx.x * FP4_ROWS;
    spark_let_next_start();

    // Unit u is slice u % slices of turn u / slices; the shared expert has turn 0, slot e turn e + 1.
    const unsigned slices = (K + FP4_SLICE - 1u) / FP4_SLICE;
    const unsigned units = (top_k + 1u) * slices;
    unsigned id = 0u;  // of slot `lane`
    unsigned ahead = warp;
    Fp4Piece ring[FP4_DOWN_RING];
    const auto load = [&](unsigned j) {
        if (ahead < units) {
            const unsigned turn = ahead / slices;
            const unsigned expert = __shfl_sync(SPARK_FULL_MASK, id, static_cast<int>(turn == 0u ? 0u : turn - 1u));
            const Fp4Weights weights = turn == 0u ? Fp4Weights{reinterpret_cast<moe_address>(sh_down_packed),
                                                               reinterpret_cast<moe_address>(sh_down_scale)}
                                                  : table[expert];
#pragma unroll
            for (unsigned i = 0u; i < 2u; ++i) {
                const unsigned n = first + g + 8u * i;
                ring[j].load(i, weights, n < N ? n : N - 1u, ahead % slices, K);
            }
            ahead += FP4_DOWN_WARPS;
        }
    };
    const bool early = warp < slices;
    if (early) {
        load(0u);
    }
    if (threadIdx.x < num_experts) {
        table[threadIdx.x] = {packed_ptrs[threadIdx.x], scale_ptrs[threadIdx.x]};
    }
    spark_wait_for_previous();
    id = lane < top_k ? expert_indices[row * top_k + lane] : 0u;
    softmax.read(gate_logits + row * num_experts, num_experts);
    __syncthreads();
#pragma unroll
    for (unsigned j = 0u; j < FP4_DOWN_RING; ++j) {
        if (j > 0u || !early) {
            load(j);
        }
    }

    // Of a block of 16 activations, what one BF16 has of each, in the order of Fp4Columns, and behind it the rest.
    const float4* act = reinterpret_cast<const float4*>(activation + row * (top_k + 1u) * K);
    const unsigned slot_eights = slices * FP4_BLOCKS * 2u;
    const unsigned eights = (top_k + 1u) * slot_eights;
#pragma unroll 2
    for (unsigned at = threadIdx.x; at < eights; at += FP4_DOWN_THREADS) {
        const unsigned k = at % slot_eights * 8u;
        float4 low = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        float4 high = low;
        if (k < K) {
            const float4* from = act + (at / slot_eights * K + k) / 4u;
            low = from[0];
            high = from[1];
        }
        uint4 upper;
        uint4 rest;
        fp4_split(low.x, high.x, upper.x, rest.x);
        fp4_split(low.y, high.y, upper.y, rest.y);
        fp4_split(low.z, high.z, upper.z, rest.z);
        fp4_split(low.w, high.w, upper.w, rest.w);
        fp4_staged[at / 2u * 4u + at % 2u] = upper;
        fp4_staged[at / 2u * 4u + 2u + at % 2u] = rest;
    }
    float share = softmax.weight(id, num_experts, top_k, normalize != 0u);
    // The factor of an expert that is elsewhere may be anything.
    share = share * (lane < top_k && table[id].codes != 0u ? scale2_vals[id] * FP4_LOWERED : 0.0f);
    const bool gated = gate_weight != nullptr;
    if (gated) {
        moe_gate_sums(gate_sums, input + row * N, gate_weight, N);
    }
    __syncthreads();

    float routed[2] = {};
    float shared[2] = {};
    for (unsigned unit = warp; unit < units;) {
#pragma unroll
        for (unsigned j = 0u; j < FP4_DOWN_RING; ++j) {
            if (unit >= units) {
                break;
            }
            const unsigned turn = unit / slices;
            const unsigned slot = turn == 0u ? top_k : turn - 1u;
            const float slot_share = __shfl_sync(SPARK_FULL_MASK, share, static_cast<int>(turn == 0u ? 0u : slot));
            Fp4Columns columns[2];
#pragma unroll
            for (unsigned part = 0u; part < 2u; ++part) {
                const uint4* from = fp4_staged + ((slot * slices + unit % slices) * FP4_BLOCKS + g) * 4u + 2u * part;
                if (Fp4Columns::mine()) {
                    columns[part].set(from[0], from[1]);
                } else {
                    columns[part].clear();
                }
            }
            float products[4] = {};
            float rows[2];
            fp4_multiply(products, ring[j], columns);
            fp4_reduce(products, ring[j], rows);
            load(j);
#pragma unroll
            for (unsigned i = 0u; i < 2u; ++i) {
                if (turn == 0u) {
                    shared[i] = shared[i] + rows[i];
                } else {
                    routed[i] = routed[i] + slot_share * rows[i];
                }
            }
            unit += FP4_DOWN_WARPS;
        }
    }
    if (lane % 4u < 2u) {
        const unsigned to = g + lane % 4u * 8u;
        routed_sums[warp][to] = lane % 4u == 0u ? routed[0] : routed[1];
        shared_sums[warp][to] = lane % 4u == 0u ? shared[0] : shared[1];
    }
    const float gate = gated ? moe_gate_share(gate_sums) : 1.0f;
    __syncthreads();

    if (warp == 0u) {
        float total = 0.0f;
        float last = 0.0f;
        if (lane < FP4_ROWS) {
            for (unsigned w = 0u; w < FP4_DOWN_WARPS; ++w) {
                total = total + routed_sums[w][lane];
                last = last + shared_sums[w][lane];
            }
        }
        const float share = __shfl_sync(SPARK_FULL_MASK, gate, 0) * (sh_down_s2 * FP4_LOWERED);
        const size_t n = first + lane;
        if (lane < FP4_ROWS && n < N) {
            spark_store(output + row * N + n, total + share * last);
        }
    }
}
