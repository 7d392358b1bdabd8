// SPDX-License-Identifier: AGPL-3.0-only
// A choice by bits between two words.
#pragma once

#include "spark_common.cuh"

// One instruction, which the compiler does not take apart into a shift and a mask for each use: bits of `set` where the
// mask has 1, of `clear` elsewhere.
__device__ __forceinline__ unsigned spark_choose(unsigned mask, unsigned set, unsigned clear) {
#ifndef SPARK_EMULATED
    unsigned chosen;
    asm("lop3.b32 %0, %1, %2, %3, 0xe2;" : "=r"(chosen) : "r"(set), "r"(mask), "r"(clear));
    return chosen;
#else
    return (set & mask) | (clear & ~mask);
#endif
}
