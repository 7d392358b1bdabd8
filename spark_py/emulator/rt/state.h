// SPDX-License-Identifier: AGPL-3.0-only
// State of a launch: the grid's, and for each OS thread that works on it a block's threads, warps and stacks.
#pragma once

#include <pthread.h>
#include <setjmp.h>

#include <atomic>

#include "launch.h"

namespace emu {

constexpr unsigned WARP = 32;
constexpr unsigned MAX_THREADS = 1024;
constexpr unsigned MAX_WARPS = MAX_THREADS / WARP;
constexpr size_t STACK_BYTES = 256 * 1024;  // of address space; pages come with use
constexpr size_t PAGE = 4096;
constexpr unsigned char POISON = 0xff;  // NaN in every float format

struct Worker;
struct Checker;

enum Waiting : uint8_t { RUNNING, AT_BARRIER, AT_COLLECTIVE };

struct Lane : EmuLane {
    Worker* worker;
    void* sp;     // NULL until the thread has started
    void* stack;  // lower end, NULL until it has started
    EmuSite site;
    Waiting waiting;
    bool waited;  // for the kernels before this one
};

struct Warp {
    uint32_t live, ready, at_barrier, collecting;
    uint32_t op[WARP], mask[WARP];
    int arg[WARP], width[WARP];
    alignas(16) unsigned char value[WARP][16];
    alignas(16) unsigned char result[WARP][16];
};

struct Grid {
    const EmuLaunch* launch;
    unsigned char* args;
    const uint32_t* offsets;
    uint64_t blocks;
    std::atomic<uint64_t> next{0};
    std::atomic<bool> stop{false};
    std::atomic<bool> faulted{false};
    pthread_mutex_t baton = PTHREAD_MUTEX_INITIALIZER;  // who runs, where checked blocks are resident together
    bool passes_baton = false;
};

struct Worker {
    Grid* grid;
    Checker* checker;  // NULL in fast launches
    EmuBlock block;
    uint64_t block_number;
    Lane lanes[MAX_THREADS];
    Warp warps[MAX_WARPS];
    uint8_t warp_of_slot[MAX_WARPS], slot_of_warp[MAX_WARPS];
    unsigned threads, warp_count, live, arrived, current_slot;
    uint32_t ready_slots;  // bit s: the warp of slot s has a thread to run
    int count, barrier_result;
    uint32_t barrier_kind;
    EmuSite barrier_site;
    unsigned atomics_in_turn;
    void* main_sp;
    sigjmp_buf escape;
    bool running;
    // Shared memory of this OS thread.
    unsigned char* shared;
    size_t shared_size;
    unsigned char* dynamic;
    // The kernel's file in memory.
    uint64_t module_start, module_end;
    // Stacks.
    unsigned char* arena;
    void* free_stacks[MAX_THREADS];
    unsigned free_count, stacks_made;
    unsigned char* signal_stack;
    Worker* next_idle;
};

static inline Worker* worker_of(const EmuLane* lane) { return static_cast<const Lane*>(lane)->worker; }

extern __thread Worker* current_worker __attribute__((tls_model("initial-exec")));

// sched.cpp
void prepare_worker(Worker* worker);
bool make_arena(Worker* worker);
void run_block(Worker* worker, uint64_t number);
void suspend(Worker* worker, Lane* lane);
void yield(Worker* worker, Lane* lane);
void make_ready(Worker* worker, unsigned warp, uint32_t lanes);
void lane_finished(Worker* worker, Lane* lane);
[[noreturn]] void deadlock(Worker* worker);

// collect.cpp
void recheck_collectives(Worker* worker, unsigned warp);

// fault.cpp
EmuFault* claim_fault(Worker* worker, uint32_t kind);
void name_place(EmuPlace* place, const Worker* worker, uint64_t block, unsigned thread, uint32_t access, uint64_t pc);
void name_here(EmuFault* fault, Worker* worker, uint32_t access, void* pc);
void name_address(EmuFault* fault, Worker* worker, uint64_t address, uint32_t size);
void say(EmuFault* fault, const char* format, ...) __attribute__((format(printf, 2, 3)));
void append(EmuFault* fault, const char* format, ...) __attribute__((format(printf, 2, 3)));
void at_site(EmuFault* fault, EmuSite site);
[[noreturn]] void leave(Worker* worker);
[[noreturn]] void fail(Worker* worker, uint32_t kind, EmuSite site, const char* format, ...)
    __attribute__((format(printf, 4, 5)));
void install_handlers();
uint64_t relative_pc(void* pc);

// check.cpp
Checker* make_checker(const EmuLaunch* launch, Checker* first);
void free_checker(Checker* checker, bool last);
void checker_block_begins(Worker* worker);
void checker_block_ends(Worker* worker);
void checker_barrier(Worker* worker);
void checker_syncwarp(Worker* worker, unsigned warp, uint32_t lanes);
void checker_atomic(Worker* worker, uint64_t address, unsigned size, void* pc);
void checker_fence(Worker* worker);

}  // namespace emu
