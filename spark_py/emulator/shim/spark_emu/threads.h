// SPDX-License-Identifier: AGPL-3.0-only
// Indices, barriers and what else is asked about or by a thread.
#pragma once

#define threadIdx (*reinterpret_cast<const uint3*>(&spark_emu_lane->index))
#define blockIdx (*reinterpret_cast<const uint3*>(&spark_emu_lane->block->index))
#define blockDim (*reinterpret_cast<const dim3*>(&spark_emu_lane->block->size))
#define gridDim (*reinterpret_cast<const dim3*>(&spark_emu_lane->block->grid))
#define warpSize 32

// Last parameters of a function: where its call stands in the source, which is what messages name. Two plain ones, since
// GCC folds a structure of them where it is declared.
#define SPARK_EMU_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define SPARK_EMU_HERE (EmuSite{file, line})

static inline void __syncthreads(SPARK_EMU_SITE) { spark_emu_barrier(EMU_SYNC, 0, SPARK_EMU_HERE); }
static inline int __syncthreads_count(int predicate, SPARK_EMU_SITE) {
    return spark_emu_barrier(EMU_COUNT, predicate, SPARK_EMU_HERE);
}
static inline int __syncthreads_and(int predicate, SPARK_EMU_SITE) {
    return spark_emu_barrier(EMU_ALL, predicate, SPARK_EMU_HERE);
}
static inline int __syncthreads_or(int predicate, SPARK_EMU_SITE) {
    return spark_emu_barrier(EMU_ANY, predicate, SPARK_EMU_HERE);
}

static inline void __threadfence() { spark_emu_fence(); }
static inline void __threadfence_block() { spark_emu_fence(); }
static inline void __threadfence_system() { spark_emu_fence(); }
static inline void __nanosleep(unsigned) { spark_emu_yield(); }

static inline long long clock64() { return spark_emu_clock(); }
static inline clock_t spark_emu_clock32() { return static_cast<clock_t>(spark_emu_clock()); }
#define clock spark_emu_clock32
static inline unsigned long long __globaltimer() { return static_cast<unsigned long long>(spark_emu_clock()); }

static inline void __trap(SPARK_EMU_SITE) { spark_emu_trap("__trap()", SPARK_EMU_HERE); }
#undef assert
#define assert(condition) \
    ((condition) ? (void)0 : spark_emu_trap("assert(" #condition ")", EmuSite{__FILE__, __LINE__}))
#define printf spark_emu_printf
#define __builtin_assume(condition) ((void)0)
