// SPDX-License-Identifier: AGPL-3.0-only
// A tensor-core step on BF16: on a GPU the instruction, where a CPU runs the kernel the same in C++. Headers of the
// toolkit alone.
#pragma once

#include "spark_common.cuh"

// sums [16, 8] += a [16, 16] b [16, 8], BF16 with FP32 sums, by the 32 lanes of a warp. Of lane 4 g + t, words hold
// pairs along k, the lower k in the low half:
//   a: (row g, k 2t), (row g + 8, k 2t), (row g, k 2t + 8), (row g + 8, k 2t + 8)
//   b: (k 2t, column g), (k 2t + 8, column g)
//   sums: (row g, column 2t), (row g, column 2t + 1), (row g + 8, column 2t), (row g + 8, column 2t + 1)
// An element of the result depends on its own row, column and sum alone.
__device__ __forceinline__ void spark_mma(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#ifndef SPARK_EMULATED
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
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

// Asks for bytes into the L2 cache: 16-byte address and size. Nothing is read as far as the kernel can tell.
__device__ __forceinline__ void spark_prefetch(const uint4* from, unsigned bytes) {
#if !defined(SPARK_EMULATED) && __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
#endif
}

// Starts a copy of 16 bytes into shared memory; zeros instead, and nothing is read, where `live` is false. Both addresses
// are multiples of 16, `from` also where it is not read.
__device__ __forceinline__ void spark_copy_16(uint4* to, const uint4* from, bool live) {
#ifndef SPARK_EMULATED
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                     static_cast<unsigned>(__cvta_generic_to_shared(to))),
                 "l"(from), "r"(live ? 16u : 0u)
                 : "memory");
#else
    *to = live ? *from : make_uint4(0u, 0u, 0u, 0u);
#endif
}

// Ends a group of this thread's copies, which may be empty.
__device__ __forceinline__ void spark_copies_end() {
#ifndef SPARK_EMULATED
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most the last LATER groups of this thread's copies are under way. What the others brought this thread may
// read; other threads of the warp need __syncwarp, other warps a barrier.
template <unsigned LATER>
__device__ __forceinline__ void spark_copies_wait() {
#ifndef SPARK_EMULATED
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
#endif
}
