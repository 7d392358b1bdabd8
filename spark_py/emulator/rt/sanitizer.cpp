// SPDX-License-Identifier: AGPL-3.0-only
// The functions that -fsanitize=thread,alignment,bounds calls, under the names that compilers know them by.

#include <string.h>

#include "check.h"

using namespace emu;

namespace {

// As the compilers lay them out for their own library.
struct Location {
    const char* file;
    uint32_t line, column;
};
struct Type {
    uint16_t kind, info;
    char name[1];
};
struct MismatchData {
    Location location;
    const Type* type;
    unsigned char log_alignment, check;
};
struct IndexData {
    Location location;
    const Type* array;
    const Type* index;
};

const char* const CHECKS[] = {
    "a load",        "a store",          "binding a reference", "a member access", "a member call",
    "a constructor", "a pointer cast",   "a pointer cast",      "a cast to a base",
};

EmuSite site_of(const Location& location) { return EmuSite{location.file, static_cast<int>(location.line)}; }

void aligned_access(const void* pointer, unsigned size, bool write, void* pc) {
    if (reinterpret_cast<uint64_t>(pointer) % size != 0) {
        misaligned(pointer, size, write ? "a store" : "a load", EmuSite{nullptr, 0}, pc);
    }
    check_access(pointer, size, write, false, pc);
}

}  // namespace

#define PC __builtin_return_address(0)
#define CALLBACKS(size)                                                                                                \
    SPARK_EMU_VISIBLE void __tsan_read##size(void* p) { aligned_access(p, size, false, PC); }                          \
    SPARK_EMU_VISIBLE void __tsan_write##size(void* p) { aligned_access(p, size, true, PC); }                          \
    SPARK_EMU_VISIBLE void __tsan_unaligned_read##size(void* p) { check_access(p, size, false, false, PC); }           \
    SPARK_EMU_VISIBLE void __tsan_unaligned_write##size(void* p) { check_access(p, size, true, false, PC); }           \
    SPARK_EMU_VISIBLE void __tsan_volatile_read##size(void* p) { volatile_access(p, size, false, PC); }                \
    SPARK_EMU_VISIBLE void __tsan_volatile_write##size(void* p) { volatile_access(p, size, true, PC); }                \
    SPARK_EMU_VISIBLE void __tsan_unaligned_volatile_read##size(void* p) { volatile_access(p, size, false, PC); }      \
    SPARK_EMU_VISIBLE void __tsan_unaligned_volatile_write##size(void* p) { volatile_access(p, size, true, PC); }

// Volatile accesses are how threads wait for one another: no race among themselves, and others get their turn.
static void volatile_access(const void* pointer, unsigned size, bool write, void* pc) {
    check_access(pointer, size, write, true, pc);
    if (spark_emu_lane != nullptr && !write) {
        Lane* lane = static_cast<Lane*>(spark_emu_lane);
        if (++lane->worker->atomics_in_turn >= 32u) {
            yield(lane->worker, lane);
        }
    }
}

extern "C" {

SPARK_EMU_VISIBLE void __tsan_init() {}
SPARK_EMU_VISIBLE void __tsan_func_entry(void*) {}
SPARK_EMU_VISIBLE void __tsan_func_exit(void*) {}
CALLBACKS(1)
CALLBACKS(2)
CALLBACKS(4)
CALLBACKS(8)
CALLBACKS(16)
SPARK_EMU_VISIBLE void __tsan_read_range(void* p, unsigned long size) {
    check_access(p, static_cast<unsigned>(size), false, false, PC);
}
SPARK_EMU_VISIBLE void __tsan_write_range(void* p, unsigned long size) {
    check_access(p, static_cast<unsigned>(size), true, false, PC);
}

SPARK_EMU_VISIBLE void __ubsan_handle_type_mismatch_v1(MismatchData* data, void* pointer) {
    const unsigned kind = data->check < sizeof CHECKS / sizeof *CHECKS ? data->check : 0u;
    misaligned(pointer, 1u << data->log_alignment, CHECKS[kind], site_of(data->location), PC);
}

SPARK_EMU_VISIBLE void __ubsan_handle_out_of_bounds(IndexData* data, uint64_t index) {
    if (spark_emu_lane == nullptr) {
        return;
    }
    fail(worker_of(spark_emu_lane), EMU_BOUNDS, site_of(data->location), "index %lld is out of bounds for %s",
         static_cast<long long>(static_cast<int64_t>(index)), data->array->name);
}
}
