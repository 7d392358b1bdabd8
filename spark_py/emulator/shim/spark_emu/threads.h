// SPDX-License-Identifier: AGPL-3.0-only
// Indices, barriers and what else is asked about or by a thread.
#pragma once

#define threadIdx (*reinterpret_cast<const uint3*>(&spark_emu_lane->index))
#define blockIdx (*reinterpret_cast<const uint3*>(&spark_emu_lane->block->index))
#define blockDim (*reinterpret_cast<const dim3*>(&spark_emu_lane->block->size))
#define gridDim (*reinterpret_cast<const dim3*>(&spark_emu_lane->block->grid))
#define warpSize 32

// Where a call stands in the source: what messages name.
#define SPARK_EMU_HERE (EmuSite{__builtin_FILE(), __builtin_LINE()})

static inline void __syncthreads(EmuSite site = SPARK_EMU_HERE) { spark_emu_barrier(EMU_SYNC, 0, site); }
static inline int __syncthreads_count(int predicate, EmuSite site = SPARK_EMU_HERE) {
    return spark_emu_barrier(EMU_COUNT, predicate, site);
}
static inline int __syncthreads_and(int predicate, EmuSite site = SPARK_EMU_HERE) {
    return spark_emu_barrier(EMU_ALL, predicate, site);
}
static inline int __syncthreads_or(int predicate, EmuSite site = SPARK_EMU_HERE) {
    return spark_emu_barrier(EMU_ANY, predicate, site);
}

static inline void __threadfence() { spark_emu_fence(); }
static inline void __threadfence_block() { spark_emu_fence(); }
static inline void __threadfence_system() { spark_emu_fence(); }
static inline void __nanosleep(unsigned) { spark_emu_yield(); }

static inline long long clock64() { return spark_emu_clock(); }
static inline clock_t spark_emu_clock32() { return static_cast<clock_t>(spark_emu_clock()); }
#define clock spark_emu_clock32
static inline unsigned long long __globaltimer() { return static_cast<unsigned long long>(spark_emu_clock()); }

static inline void __trap(EmuSite site = SPARK_EMU_HERE) { spark_emu_trap("__trap()", site); }
#undef assert
#define assert(condition) ((condition) ? (void)0 : spark_emu_trap("assert(" #condition ")", EmuSite{__FILE__, __LINE__}))
#define printf spark_emu_printf
#define __builtin_assume(condition) ((void)0)
