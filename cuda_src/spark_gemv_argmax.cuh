// SPDX-License-Identifier: AGPL-3.0-only
// The index of the largest output of each row of spark_gemv_rows.cuh, and the row of an embedding table that it names,
// without the outputs ever being written: the end of a draft and the beginning of the next in the LM head's own launch.
//
// The index is that of argmax.cu on the rounded outputs: equal maxima give the lowest index, NaN never wins, +0 and -0
// are equal, a row of NaN and -Inf gives the lowest index that is not NaN, one of NaN alone 0. A value and its index are
// one number, larger for the better of two, so that no order of threads and blocks changes what wins.
//
// Blocks meet in memory: the last one to come has every row's winner. It leaves that memory as it found it, zero.
#pragma once

#include "spark_gemv_rows.cuh"

// Best of a launch's rows so far, and blocks that are done; both zero between launches.
struct ArgmaxState {
    unsigned long long* best;
    unsigned* done;
};

// Where the winners of rows go, and BF16 [row, width], the rows of `table` that they name. No embeddings without
// `embed`.
struct ArgmaxResult {
    unsigned* ids;
    const __nv_bfloat16* table;
    __nv_bfloat16* embed;
    unsigned width;
};

// A number for output `index` of value `sum`, rounded: 0 for NaN, larger for a larger value, then for a lower index.
__device__ __forceinline__ unsigned long long argmax_key(float sum, unsigned index) {
    unsigned bits = __float_as_uint(__bfloat162float(__float2bfloat16_rn(sum)));
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return 0ull;
    }
    bits = bits == 0x80000000u ? 0u : bits;
    const unsigned rank = (bits & 0x80000000u) != 0u ? ~bits : bits | 0x80000000u;
    return static_cast<unsigned long long>(rank) << 32 | (0xffffffffu - index);
}

// The best output that a thread has seen of each of its rows: of a tile of OUTPUTS outputs, thread t takes output
// t % OUTPUTS of row t / OUTPUTS and, where TURNS is 2, of row (t + blockDim.x) / OUTPUTS, if there is one.
template <unsigned OUTPUTS, unsigned TURNS>
struct GemvArgmax {
    unsigned long long best[TURNS] = {};

    template <class Matrix>
    __device__ __forceinline__ void take(const Matrix&, unsigned row, unsigned output, float sum) {
        const unsigned long long key = argmax_key(sum, output);
        const unsigned step = blockDim.x / OUTPUTS;
#pragma unroll
        for (unsigned turn = 0u; turn < TURNS; ++turn) {
            if (TURNS == 1u || row / step == turn) {
                best[turn] = key > best[turn] ? key : best[turn];
            }
        }
    }

    // After the last tile, by all threads of all blocks.
    __device__ __forceinline__ void finish(unsigned M, const ArgmaxState& state, const ArgmaxResult& to) {
#pragma unroll
        for (unsigned turn = 0u; turn < TURNS; ++turn) {
            const unsigned row = (threadIdx.x + turn * blockDim.x) / OUTPUTS;
            unsigned long long winner = best[turn];
#pragma unroll
            for (unsigned step = OUTPUTS / 2u; step > 0u; step /= 2u) {
                const unsigned long long other = __shfl_xor_sync(SPARK_FULL_MASK, winner, step);
                winner = other > winner ? other : winner;
            }
            if (threadIdx.x % OUTPUTS == 0u && row < M) {
                atomicMax(state.best + row, winner);
                __threadfence();  // before the block counts as done
            }
        }
        __syncthreads();
        // No shared memory here: with a byte more than the ring's, a block less of them fits.
        if (__syncthreads_or(threadIdx.x == 0u && atomicAdd(state.done, 1u) + 1u == gridDim.x) == 0) {
            return;
        }
        __threadfence();  // what follows sees what every block did before it counted
        // Each row has as many threads as the others.
        const unsigned share = blockDim.x / (M <= 1u ? 1u : M <= 2u ? 2u : M <= 4u ? 4u : GEMV_ROWS);
        const unsigned row = threadIdx.x / share;
        if (row < M) {
            const unsigned long long winner = *static_cast<volatile unsigned long long*>(state.best + row);
            const unsigned id = winner == 0ull ? 0u : 0xffffffffu - static_cast<unsigned>(winner);
            if (threadIdx.x % share == 0u) {
                to.ids[row] = id;
            }
            if (to.embed != nullptr) {
                const __nv_bfloat16* from = to.table + static_cast<size_t>(id) * to.width;
                __nv_bfloat16* into = to.embed + static_cast<size_t>(row) * to.width;
                // Rows of K elements, which the weights' format has in multiples of 16 bytes.
                for (unsigned i = threadIdx.x % share; i < to.width / 8u; i += share) {
                    reinterpret_cast<uint4*>(into)[i] = reinterpret_cast<const uint4*>(from)[i];
                }
            }
        }
        __syncthreads();  // all have read the winners
        if (threadIdx.x < M) {
            state.best[threadIdx.x] = 0ull;
        }
        if (threadIdx.x == 0u) {
            *state.done = 0u;
        }
    }
};
