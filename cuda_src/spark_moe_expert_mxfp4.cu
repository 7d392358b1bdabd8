// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_moe_expert_mxfp4: the MXFP4 experts of a SwiGLU mixture that a router chose, as DeepSeek-V4 has them.
// This project's own kernels. Format and order of arithmetic in mxfp4.cuh, so a projection has the bits that
// spark_mxfp4_gemv gives it.
//
// Tables have an entry an expert: the address of its packed codes [N, K / 2] and of its scales [N, K / 32]. An address
// of 0 (the expert lives elsewhere) gives zeros. Slot s is expert expert_indices[s]; there is no shared expert. A warp
// has two outputs at a time, each of its threads two of their 64 lanes, 32 apart. Blocks have 128 threads and 8
// outputs, those of the down projection 32, one pair of a warp after the other, since each block computes the whole
// activation.
//
// The activation silu(min(gate, limit)) * clamp(up, -limit, limit) stays FP32: (g * (1 / (1 + exp(-g)))) * u, each step
// rounded. It is not rounded to BF16 before the down projection.
//
// The _rows forms have the same parameters and for every row the bits of the kernel for one: A [rows, K],
// expert_indices [rows, top_k], results [rows, top_k, N].

#include "moe_expert.cuh"
#include "mxfp4.cuh"

extern __shared__ float4 spark_staged[];

constexpr unsigned EXPERT_OUTPUTS = 2u;  // of a warp at a time
constexpr unsigned EXPERT_DOWN_PAIRS = 4u;
constexpr unsigned CHUNK_QUADS = MXFP4_CHUNK / 4u;

struct Mxfp4Tables {
    const spark_address* packed;
    const spark_address* scales;
};

// An activation that the block computed once: eight groups of four a chunk. Their places within the chunk are permuted
// by its number, so that eight threads that read or write at a time meet eight different banks.
struct Mxfp4StagedRow {
    const float4* staged;

    static __device__ __forceinline__ unsigned place(unsigned chunk, unsigned quad) {
        return CHUNK_QUADS * chunk + (quad ^ chunk % CHUNK_QUADS);
    }

    __device__ __forceinline__ void load(float (&a)[8], unsigned r, unsigned word) const {
        const unsigned chunk = word / MXFP4_WORDS;
        const unsigned quad = 2u * (word % MXFP4_WORDS);
        const float4 low = staged[place(chunk, quad)];
        const float4 high = staged[place(chunk, quad + 1u)];
        a[0] = low.x;
        a[1] = low.y;
        a[2] = low.z;
        a[3] = low.w;
        a[4] = high.x;
        a[5] = high.y;
        a[6] = high.z;
        a[7] = high.w;
    }
};

// Fills `staged`, 4 K bytes, by all threads of the block; ends with a barrier.
__device__ __forceinline__ Mxfp4StagedRow mxfp4_stage(float4* staged, const __nv_bfloat16* gate,
                                                      const __nv_bfloat16* up, float limit, unsigned k) {
    const uint4* g = reinterpret_cast<const uint4*>(gate);
    const uint4* u = reinterpret_cast<const uint4*>(up);
    for (unsigned word = threadIdx.x; word < k / 8u; word += SPARK_EXPERT_THREADS) {
        float values[8];
        spark_gated(g[word], u[word], values, SparkLimit{limit});
        const unsigned chunk = word / MXFP4_WORDS;
        const unsigned quad = 2u * (word % MXFP4_WORDS);
        staged[Mxfp4StagedRow::place(chunk, quad)] = make_float4(values[0], values[1], values[2], values[3]);
        staged[Mxfp4StagedRow::place(chunk, quad + 1u)] = make_float4(values[4], values[5], values[6], values[7]);
    }
    __syncthreads();
    return {staged};
}

// out[n] = bf16(row . weights[n]) for pair `pair` of the `pairs` that each warp of the block has; zeros for an expert
// that is elsewhere.
template <class Row>
__device__ __forceinline__ void mxfp4_outputs(const Row& row, const Mxfp4Tables& tables, unsigned expert,
                                              __nv_bfloat16* out, unsigned n, unsigned k, unsigned pair = 0u,
                                              unsigned pairs = 1u) {
    const unsigned lane = threadIdx.x % SPARK_WARP;
    const unsigned warp = threadIdx.x / SPARK_WARP;
    const size_t place = (static_cast<size_t>(blockIdx.x) * SPARK_EXPERT_WARPS + warp) * pairs + pair;
    const size_t first = place * EXPERT_OUTPUTS;
    if (first >= n) {
        return;
    }
    const unsigned left = n - static_cast<unsigned>(first);
    const unsigned outputs = left < EXPERT_OUTPUTS ? left : EXPERT_OUTPUTS;
    const spark_address codes = tables.packed[expert];
    if (codes == 0u) {
        if (lane < outputs) {
            spark_store(out + first + lane, 0.0f);
        }
        return;
    }
    const unsigned chunks = k / MXFP4_CHUNK;
    const Mxfp4Weights weights = {reinterpret_cast<const uint4*>(codes) + first * chunks,
                                  reinterpret_cast<const unsigned char*>(tables.scales[expert]) + first * chunks,
                                  outputs, chunks};
    float sums[2][1][EXPERT_OUTPUTS][2] = {};
    mxfp4_lanes<2u, 1u, EXPERT_OUTPUTS, 2u>(sums, row, weights, lane);
#pragma unroll
    for (unsigned o = 0u; o < EXPERT_OUTPUTS; ++o) {
        const float half = spark_warp_sum(sums[0][0][o][0] + sums[0][0][o][1], SPARK_WARP);
        const float sum = half + spark_warp_sum(sums[1][0][o][0] + sums[1][0][o][1], SPARK_WARP);
        if (lane == 0u && o < outputs) {
            spark_store(out + first + o, sum);
        }
    }
}

// Row t of A through the expert of its slot.
__device__ __forceinline__ void mxfp4_project(const __nv_bfloat16* a, const Mxfp4Tables& tables, __nv_bfloat16* out,
                                              const unsigned* expert_indices, unsigned t, unsigned slot, unsigned n,
                                              unsigned k, unsigned top_k) {
    const size_t at = static_cast<size_t>(t) * top_k + slot;
    const Mxfp4Rows row = {reinterpret_cast<const uint4*>(a + static_cast<size_t>(t) * k), 0u};
    mxfp4_outputs(row, tables, expert_indices[at], out + at * n, n, k);
}

// The activation of a slot of row t through its expert. `staged` holds 4 K bytes.
__device__ __forceinline__ void mxfp4_down(float4* staged, const __nv_bfloat16* gate, const __nv_bfloat16* up,
                                           const Mxfp4Tables& tables, __nv_bfloat16* out,
                                           const unsigned* expert_indices, unsigned t, unsigned slot, unsigned n,
                                           unsigned k, unsigned top_k, float limit) {
    const size_t at = static_cast<size_t>(t) * top_k + slot;
    const unsigned expert = expert_indices[at];
    Mxfp4StagedRow row = {staged};
    if (tables.packed[expert] != 0u) {  // the same for the whole block
        row = mxfp4_stage(staged, gate + at * k, up + at * k, limit, k);
    }
#pragma unroll 1
    for (unsigned pair = 0u; pair < EXPERT_DOWN_PAIRS; ++pair) {
        mxfp4_outputs(row, tables, expert, out + at * n, n, k, pair, EXPERT_DOWN_PAIRS);
    }
}

// Gate (z = 0) and up (z = 1) projections. A [K]; gate_out and up_out [top_k, N]. Grid (ceil(N / 8), top_k, 2).
extern "C" __global__ void __launch_bounds__(128) spark_moe_expert_gate_up_mxfp4(
    const __nv_bfloat16* __restrict__ A, const unsigned long long* __restrict__ gate_packed_ptrs,
    const unsigned long long* __restrict__ gate_scale_ptrs, __nv_bfloat16* __restrict__ gate_out,
    const unsigned long long* __restrict__ up_packed_ptrs, const unsigned long long* __restrict__ up_scale_ptrs,
    __nv_bfloat16* __restrict__ up_out, const unsigned int* __restrict__ expert_indices, unsigned int N,
    unsigned int K, unsigned int top_k) {
    spark_let_next_start();
    spark_wait_for_previous();
    const bool up = blockIdx.z != 0u;
    mxfp4_project(A, {up ? up_packed_ptrs : gate_packed_ptrs, up ? up_scale_ptrs : gate_scale_ptrs},
                  up ? up_out : gate_out, expert_indices, 0u, blockIdx.y, N, K, top_k);
}

// Grid (ceil(N / 8), rows, 2 * top_k); z is 2 * slot for gate and 2 * slot + 1 for up.
extern "C" __global__ void __launch_bounds__(128) spark_moe_expert_gate_up_mxfp4_rows(
    const __nv_bfloat16* __restrict__ A, const unsigned long long* __restrict__ gate_packed_ptrs,
    const unsigned long long* __restrict__ gate_scale_ptrs, __nv_bfloat16* __restrict__ gate_out,
    const unsigned long long* __restrict__ up_packed_ptrs, const unsigned long long* __restrict__ up_scale_ptrs,
    __nv_bfloat16* __restrict__ up_out, const unsigned int* __restrict__ expert_indices, unsigned int N,
    unsigned int K, unsigned int top_k) {
    spark_let_next_start();
    spark_wait_for_previous();
    const bool up = blockIdx.z % 2u != 0u;
    mxfp4_project(A, {up ? up_packed_ptrs : gate_packed_ptrs, up ? up_scale_ptrs : gate_scale_ptrs},
                  up ? up_out : gate_out, expert_indices, blockIdx.y, blockIdx.z / 2u, N, K, top_k);
}

// Activation and down projection. gate_out and up_out [top_k, K]; C [top_k, N]. Grid (ceil(N / 32), top_k, 1), 4 K
// bytes of dynamic shared memory. Six blocks a processor hide the loads, which fewer with more registers do not.
extern "C" __global__ void __launch_bounds__(128, 6) spark_moe_expert_silu_down_clamped_mxfp4(
    const __nv_bfloat16* __restrict__ gate_out, const __nv_bfloat16* __restrict__ up_out,
    const unsigned long long* __restrict__ packed_ptrs, const unsigned long long* __restrict__ scale_ptrs,
    __nv_bfloat16* __restrict__ C, const unsigned int* __restrict__ expert_indices, unsigned int N, unsigned int K,
    unsigned int top_k, float limit) {
    spark_let_next_start();
    spark_wait_for_previous();
    mxfp4_down(spark_staged, gate_out, up_out, {packed_ptrs, scale_ptrs}, C, expert_indices, 0u, blockIdx.y, N, K,
               top_k, limit);
}

// Grid (ceil(N / 32), rows, top_k).
extern "C" __global__ void __launch_bounds__(128, 6) spark_moe_expert_silu_down_clamped_mxfp4_rows(
    const __nv_bfloat16* __restrict__ gate_out, const __nv_bfloat16* __restrict__ up_out,
    const unsigned long long* __restrict__ packed_ptrs, const unsigned long long* __restrict__ scale_ptrs,
    __nv_bfloat16* __restrict__ C, const unsigned int* __restrict__ expert_indices, unsigned int N, unsigned int K,
    unsigned int top_k, float limit) {
    spark_let_next_start();
    spark_wait_for_previous();
    mxfp4_down(spark_staged, gate_out, up_out, {packed_ptrs, scale_ptrs}, C, expert_indices, blockIdx.y, blockIdx.z, N,
               K, top_k, limit);
}
