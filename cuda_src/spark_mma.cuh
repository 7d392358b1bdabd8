// SPDX-License-Identifier: AGPL-3.0-only
// The tensor-core step of spark_mma_step.cuh, and copies into shared memory that run on while the thread computes. On a
// GPU these are CuTe's wrappers of the instructions (the headers of nvidia-cutlass); where a CPU runs the kernel, the same
// in C++.
#pragma once

#include "spark_mma_step.cuh"

#ifndef SPARK_EMULATED
#include <cute/arch/copy_sm80.hpp>
#endif

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
