// SPDX-License-Identifier: AGPL-3.0-only
// What a compiled kernel file and the emulator's runtime library share. Plain C data: both sides may be built by
// different compilers. Raise SPARK_EMU_ABI with every change.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define SPARK_EMU_ABI 2
#define SPARK_EMU_DYNAMIC_MAX 232448  // bytes of dynamic shared memory that a block may have: 227 KiB

#define SPARK_EMU_VISIBLE __attribute__((visibility("default")))

struct EmuDim {
    unsigned x, y, z;
};

struct EmuBlock {
    EmuDim index;
    EmuDim size;  // threads
    EmuDim grid;
};

// The thread that runs now. `block` is shared by the threads of a block.
struct EmuLane {
    EmuDim index;
    unsigned linear;
    const EmuBlock* block;
};

enum EmuParamKind : uint32_t { EMU_BYTES, EMU_POINTER, EMU_UNSIGNED, EMU_SIGNED, EMU_FLOAT };

struct EmuParam {
    uint32_t kind, size, align;
};

// One kernel of a file: `call` runs it once, for the current thread, with its arguments at args + offsets[i].
struct EmuKernel {
    const char* name;
    uint32_t count;
    const EmuParam* params;
    void (*call)(const unsigned char* args, const uint32_t* offsets);
};

// One compiled file. `anchor` and `dynamic` give addresses in the calling OS thread's copy of the file's shared
// memory: somewhere inside it, and where the dynamic part starts (NULL where the file has none).
struct EmuModule {
    uint32_t abi;
    uint32_t checked;
    unsigned char* (*anchor)();
    unsigned char* (*dynamic)();
    const EmuKernel* kernels;
    uint32_t count;
};

enum EmuCollective : uint32_t {
    EMU_SHFL_IDX,
    EMU_SHFL_UP,
    EMU_SHFL_DOWN,
    EMU_SHFL_XOR,
    EMU_BALLOT,
    EMU_MATCH_ANY,
    EMU_MATCH_ALL,
    EMU_ADD,
    EMU_MIN_U,
    EMU_MAX_U,
    EMU_MIN_S,
    EMU_MAX_S,
    EMU_AND,
    EMU_OR,
    EMU_XOR,
    EMU_SYNCWARP,
};

enum EmuBarrier : uint32_t { EMU_SYNC, EMU_COUNT, EMU_ALL, EMU_ANY };

struct EmuSite {
    const char* file;
    int line;
};

extern "C" {

extern SPARK_EMU_VISIBLE __thread EmuLane* spark_emu_lane __attribute__((tls_model("initial-exec")));

// Waits for the block; the result is what __syncthreads_count and its kin return.
SPARK_EMU_VISIBLE int spark_emu_barrier(uint32_t kind, int predicate, EmuSite site);

// Waits for the lanes of `mask`, gives 16 bytes of value and takes 16 bytes of result. `arg` is the source lane, delta
// or lane mask of a shuffle, `width` its width.
SPARK_EMU_VISIBLE void spark_emu_collect(uint32_t op, uint32_t mask, int arg, int width, const void* value,
                                         void* result, EmuSite site);

// Called before each atomic operation: threads that wait for one another by atomics get their turn.
SPARK_EMU_VISIBLE void spark_emu_atomic(const volatile void* address, unsigned size);
SPARK_EMU_VISIBLE void spark_emu_yield();
// The thread may use from now on what the kernels before this one wrote.
SPARK_EMU_VISIBLE void spark_emu_wait_for_previous();
SPARK_EMU_VISIBLE void spark_emu_fence();
SPARK_EMU_VISIBLE long long spark_emu_clock();
SPARK_EMU_VISIBLE int spark_emu_printf(const char* format, ...) __attribute__((format(printf, 1, 2)));
SPARK_EMU_VISIBLE void spark_emu_trap(const char* what, EmuSite site) __attribute__((noreturn));
SPARK_EMU_VISIBLE bool spark_emu_is_shared(const void* address);
}
