// SPDX-License-Identifier: AGPL-3.0-only
// What Python hands to the runtime and gets back. launch.py mirrors these structures field by field.
#pragma once

#include "abi.h"

enum EmuOrder : uint32_t { EMU_WARP_FIRST, EMU_REVERSE, EMU_PRIORITY };

enum EmuFaultKind : uint32_t {
    EMU_NO_FAULT,
    EMU_RACE,
    EMU_BLOCK_OVERLAP,
    EMU_BOUNDS,
    EMU_ALIGNMENT,
    EMU_UNINITIALISED,
    EMU_DIVERGENCE,
    EMU_DEADLOCK,
    EMU_MASK,
    EMU_TIMEOUT,
    EMU_CRASH,
    EMU_STACK,
    EMU_TRAP,
    EMU_RESOURCES,
    EMU_DEPENDENCE,
};

enum EmuAccess : uint32_t { EMU_NO_ACCESS, EMU_READ, EMU_WRITE, EMU_ATOMIC };

enum EmuSpace : uint32_t { EMU_NO_SPACE, EMU_GLOBAL, EMU_DYNAMIC, EMU_STATIC };

struct EmuPlace {
    EmuDim block, thread;
    uint32_t access, known;
    uint64_t pc;  // from the start of the kernel's file; 0 where it is not known
};

// The first fault of a launch. `range` is the allocation it is about (-1: none), `offset` counts bytes from its start,
// or from the start of the shared memory that `space` names. `file` and `line` are a place in the source, if known.
struct EmuFault {
    uint32_t kind, space, size, line;
    EmuPlace here, other;
    uint64_t address;
    int64_t range, offset;
    char file[512];
    char text[2048];
};

struct EmuRange {
    uint64_t base, size;
};

struct EmuLaunch {
    const EmuModule* module;
    const EmuKernel* kernel;
    const unsigned char* args;
    const uint32_t* offsets;
    const EmuRange* ranges;  // live allocations by address; for checks and for messages
    uint64_t range_count;
    EmuDim grid, block;
    uint32_t shared, workers, cooperative, order;
    uint64_t seed;
    double timeout;  // seconds of CPU time to an OS thread; 0: none
    EmuFault* fault;
    const uint64_t* early;  // addresses in the ranges that a dependent kernel may read before it waits
    uint32_t early_count, dependent;
};

extern "C" {
SPARK_EMU_VISIBLE uint32_t spark_emu_abi();
// Runs a launch to its end; 0, or the kind of the fault that ended it.
SPARK_EMU_VISIBLE uint32_t spark_emu_launch(const EmuLaunch* launch);
// Where a file's shared memory starts and how many bytes are static.
SPARK_EMU_VISIBLE uint64_t spark_emu_static_shared(const EmuModule* module);
}
