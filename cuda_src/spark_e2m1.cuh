// SPDX-License-Identifier: AGPL-3.0-only
// E2M1 codes, eight in a word, as operands of tensor-core steps: four words of two BF16, 2^126 times too small.
//
// A code is a sign and three bits s|eem; the three are exponent and fraction of a BF16 whose other exponent bits are 0, so
// that 0, 1/2, 1, ... 6 come out 2^126 times smaller, 1/2 as a subnormal, all of them exact. Of the eight codes 0 .. 7 of a
// word, lowest first, the pairs (0, 4), (1, 5), (2, 6) and (3, 7) lie 16 bits apart, so one shift brings both to where
// they belong. Every word is then one choice by bits between a shifted code and a shifted sign: signs of even and of odd
// codes are kept apart, so that all other bits of theirs are 0 or not chosen.
#pragma once

#include "spark_mma_step.cuh"

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

// pairs[j]: codes j (low half) and j + 4. Thirteen instructions, six of them shifts to the left, which need not be done
// by the unit of the others.
__device__ __forceinline__ void spark_e2m1_pairs(unsigned codes, unsigned (&pairs)[4]) {
    constexpr unsigned MAGNITUDE = 0x01c001c0u;
    const unsigned even = spark_choose(0x08080808u, codes, 0u);
    const unsigned odd = spark_choose(0x80808080u, codes, 0u);
    const unsigned upper = codes >> 6;
    pairs[0] = spark_choose(MAGNITUDE, codes << 6, even << 12);
    pairs[1] = spark_choose(MAGNITUDE, codes << 2, odd << 8);
    pairs[2] = spark_choose(MAGNITUDE, upper << 4, even << 4);
    pairs[3] = spark_choose(MAGNITUDE, upper, odd);
}
