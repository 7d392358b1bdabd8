// SPDX-License-Identifier: AGPL-3.0-only
// A tensor-core step on BF16, and copies into shared memory that run on while the thread computes. On a GPU they are
// CuTe's wrappers of the instructions (the headers of nvidia-cutlass); where a CPU runs the kernel, the same in C++.
#pragma once

#include "spark_common.cuh"

#ifndef SPARK_EMULATED
#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/mma_sm80.hpp>
#endif

// sums [16, 8] += a [16, 16] b [16, 8], BF16 with FP32 sums, by the 32 lanes of a warp. Of lane 4 g + t, words hold
// pairs along k, the lower k in the low half:
//   a: (row g, k 2t), (row g + 8, k 2t), (row g, k 2t + 8), (row g + 8, k 2t + 8)
//   b: (k 2t, column g), (k 2t + 8, column g)
//   sums: (row g, column 2t), (row g, column 2t + 1), (row g + 8, column 2t), (row g + 8, column 2t + 1)
__device__ __forceinline__ void spark_mma(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#ifndef SPARK_EMULATED
    cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(sums[0], sums[1], sums[2], sums[3], a[0], a[1], a[2], a[3], b[0], b[1],
                                              sums[0], sums[1], sums[2], sums[3]);
#else
    const unsigned lane = threadIdx.x % SPARK_WARP;
    uint4 rows[4];        // of lanes with this lane's rows
    uint2 columns[2][4];  // of lanes with this lane's columns
    for (unsigned t = 0u; t < 4u; ++t) {
        rows[t] = __shfl_sync(SPARK_FULL_MASK, make_uint4(a[0], a[1], a[2], a[3]), lane / 4u * 4u + t);
        for (unsigned column = 0u; column < 2u; ++column) {
            const unsigned from = (lane % 4u * 2u + column) * 4u + t;
            columns[column][t] = __shfl_sync(SPARK_FULL_MASK, make_uint2(b[0], b[1]), from);
        }
    }
    for (unsigned i = 0u; i < 4u; ++i) {
        for (unsigned half = 0u; half < 2u; ++half) {
            for (unsigned t = 0u; t < 4u; ++t) {
                const unsigned low_row = half == 0u ? rows[t].x : rows[t].z;
                const unsigned high_row = half == 0u ? rows[t].y : rows[t].w;
                const unsigned x = i < 2u ? low_row : high_row;
                const unsigned y = half == 0u ? columns[i % 2u][t].x : columns[i % 2u][t].y;
                sums[i] = sums[i] + spark_low(x) * spark_low(y);
                sums[i] = sums[i] + spark_high(x) * spark_high(y);
            }
        }
    }
#endif
}

// Starts a copy of 16 bytes into shared memory; zeros instead, and nothing is read, where `live` is false. Both
// addresses are multiples of 16, `from` also where it is not read.
__device__ __forceinline__ void spark_copy_async(uint4* to, const void* from, bool live) {
#ifndef SPARK_EMULATED
    cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint4>::copy(*static_cast<const uint4*>(from), *to, live);
#else
    *to = live ? *static_cast<const uint4*>(from) : make_uint4(0u, 0u, 0u, 0u);
#endif
}

// Ends a group of this thread's copies, which may be empty.
__device__ __forceinline__ void spark_copy_group() {
#ifndef SPARK_EMULATED
    cute::cp_async_fence();
    asm volatile("" ::: "memory");  // what is read before was read before
#endif
}

// Waits until at most the last `LATER` groups of this thread's copies are under way. What the others brought, this
// thread may read; other threads need a barrier.
template <int LATER>
__device__ __forceinline__ void spark_copy_wait() {
#ifndef SPARK_EMULATED
    cute::cp_async_wait<LATER>();
    asm volatile("" ::: "memory");  // CuTe does not tell the compiler that shared memory has changed
#endif
}
