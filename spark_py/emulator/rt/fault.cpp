// SPDX-License-Identifier: AGPL-3.0-only
// Faults: the first one of a launch is written down, its block is left where it stands, and the process goes on.

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include "state.h"
#include "watchdog.h"

__thread EmuLane* spark_emu_lane __attribute__((tls_model("initial-exec")));

namespace emu {

__thread Worker* current_worker __attribute__((tls_model("initial-exec")));

namespace {

struct sigaction previous[NSIG];
pthread_mutex_t handler_lock = PTHREAD_MUTEX_INITIALIZER;
const int CAUGHT[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};

void* pc_of(void* context) {
    const ucontext_t* state = static_cast<const ucontext_t*>(context);
#if defined(__x86_64__)
    return reinterpret_cast<void*>(state->uc_mcontext.gregs[REG_RIP]);
#else
    return reinterpret_cast<void*>(state->uc_mcontext.pc);
#endif
}

void pass_on(int number, siginfo_t* info, void* context) {
    const struct sigaction& old = previous[number];
    if ((old.sa_flags & SA_SIGINFO) != 0 && old.sa_sigaction != nullptr) {
        old.sa_sigaction(number, info, context);
    } else if (old.sa_handler == SIG_DFL) {
        signal(number, SIG_DFL);  // the instruction runs again, and the process ends as it would have
    } else if (old.sa_handler != SIG_IGN) {
        old.sa_handler(number);
    }
}

bool is_guard_page(const Worker* worker, uint64_t address) {
    const uint64_t arena = reinterpret_cast<uint64_t>(worker->arena);
    return address >= arena && address < arena + STACK_BYTES * MAX_THREADS && (address - arena) % STACK_BYTES < PAGE;
}

const char* what(int number, const siginfo_t* info) {
    switch (number) {
        case SIGFPE:
            return "an integer is divided by zero";
        case SIGILL:
            return "an illegal instruction is reached";
        case SIGBUS:
            return info->si_code == BUS_ADRALN ? "a misaligned access" : "memory that is not there is used";
        default:
            return "memory that is not there is used";
    }
}

void on_fault(int number, siginfo_t* info, void* context) {
    Worker* worker = current_worker;
    if (worker == nullptr || !worker->running) {
        pass_on(number, info, context);
        return;
    }
    const uint64_t address = reinterpret_cast<uint64_t>(info->si_addr);
    const bool overflow = number == SIGSEGV && is_guard_page(worker, address);
    EmuFault* fault = claim_fault(worker, overflow ? EMU_STACK : EMU_CRASH);
    if (fault != nullptr) {
        name_here(fault, worker, EMU_NO_ACCESS, pc_of(context));
        if (overflow) {
            say(fault, "the thread's stack of %zu bytes overflows: endless recursion, or very large local arrays",
                STACK_BYTES);
        } else {
            say(fault, "%s", what(number, info));
            if (number == SIGSEGV || number == SIGBUS) {
                name_address(fault, worker, address, 0);
            }
        }
    }
    leave(worker);
}

}  // namespace

void on_timeout(int, siginfo_t*, void* context) {
    Worker* worker = current_worker;
    if (worker == nullptr || !worker->running) {
        return;
    }
    EmuFault* fault = claim_fault(worker, EMU_TIMEOUT);
    if (fault != nullptr) {
        name_here(fault, worker, EMU_NO_ACCESS, pc_of(context));
        say(fault,
            "the launch still runs after %g s of CPU time: a loop without end, or a wait for what no other thread does",
            worker->grid->launch->timeout);
    }
    leave(worker);
}

// Takes the signals over where somebody else has them; what is not a kernel's fault goes to who had them before.
void install_handlers() {
    pthread_mutex_lock(&handler_lock);
    for (int number : CAUGHT) {
        struct sigaction now;
        sigaction(number, nullptr, &now);
        if ((now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == on_fault) {
            continue;
        }
        struct sigaction ours;
        memset(&ours, 0, sizeof ours);
        ours.sa_sigaction = on_fault;
        ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigemptyset(&ours.sa_mask);
        previous[number] = now;
        sigaction(number, &ours, nullptr);
    }
    pthread_mutex_unlock(&handler_lock);
}

// The record to fill, or NULL where another thread of the launch was quicker.
EmuFault* claim_fault(Worker* worker, uint32_t kind) {
    if (worker->grid->faulted.exchange(true)) {
        return nullptr;
    }
    EmuFault* fault = worker->grid->launch->fault;
    memset(fault, 0, sizeof *fault);
    fault->kind = kind;
    fault->range = -1;
    return fault;
}

uint64_t relative_pc(void* pc) {
    Dl_info info;
    if (pc == nullptr || dladdr(pc, &info) == 0) {
        return 0;
    }
    return reinterpret_cast<uint64_t>(pc) - reinterpret_cast<uint64_t>(info.dli_fbase);
}

void name_place(EmuPlace* place, const Worker* worker, uint64_t block, unsigned thread, uint32_t access, uint64_t pc) {
    const EmuLaunch* launch = worker->grid->launch;
    place->block.x = static_cast<unsigned>(block % launch->grid.x);
    place->block.y = static_cast<unsigned>(block / launch->grid.x % launch->grid.y);
    place->block.z = static_cast<unsigned>(block / launch->grid.x / launch->grid.y);
    place->thread = worker->lanes[thread].index;
    place->access = access;
    place->known = 1;
    place->pc = pc;
}

void name_here(EmuFault* fault, Worker* worker, uint32_t access, void* pc) {
    Dl_info ours, module;
    // Only an address in the kernel's own file is a line of it.
    const bool inside = pc != nullptr && dladdr(pc, &ours) != 0 &&
                        dladdr(reinterpret_cast<const void*>(worker->grid->launch->kernel->call), &module) != 0 &&
                        ours.dli_fbase == module.dli_fbase;
    const unsigned thread = spark_emu_lane == nullptr ? 0u : spark_emu_lane->linear;
    name_place(&fault->here, worker, worker->block_number, thread, access, inside ? relative_pc(pc) : 0);
}

// Which buffer, or which part of shared memory, an address is in or next to.
void name_address(EmuFault* fault, Worker* worker, uint64_t address, uint32_t size) {
    const EmuLaunch* launch = worker->grid->launch;
    fault->address = address;
    fault->size = size;
    const uint64_t shared = reinterpret_cast<uint64_t>(worker->shared);
    const uint64_t dynamic = reinterpret_cast<uint64_t>(worker->dynamic);
    if (dynamic != 0 && address >= dynamic && address < dynamic + SPARK_EMU_DYNAMIC_MAX) {
        fault->space = EMU_DYNAMIC;
        fault->offset = static_cast<int64_t>(address - dynamic);
        return;
    }
    if (address >= shared && address < shared + worker->shared_size) {
        fault->space = EMU_STATIC;
        fault->offset = static_cast<int64_t>(address - shared);
        return;
    }
    int64_t best = -1;
    uint64_t distance = UINT64_MAX;
    for (uint64_t i = 0; i < launch->range_count; ++i) {
        const EmuRange& range = launch->ranges[i];
        const uint64_t end = range.base + range.size;
        const uint64_t gap = address < range.base ? range.base - address : address < end ? 0 : address - end + 1;
        if (gap < distance) {
            distance = gap;
            best = static_cast<int64_t>(i);
        }
    }
    if (best >= 0 && distance <= (1u << 20)) {
        fault->space = EMU_GLOBAL;
        fault->range = best;
        fault->offset = static_cast<int64_t>(address - launch->ranges[best].base);
    }
}

static void write(EmuFault* fault, size_t at, const char* format, va_list values) {
    vsnprintf(fault->text + at, sizeof fault->text - at, format, values);
}

void say(EmuFault* fault, const char* format, ...) {
    va_list values;
    va_start(values, format);
    write(fault, 0, format, values);
    va_end(values);
}

void append(EmuFault* fault, const char* format, ...) {
    va_list values;
    va_start(values, format);
    write(fault, strlen(fault->text), format, values);
    va_end(values);
}

void at_site(EmuFault* fault, EmuSite site) {
    if (site.file != nullptr) {
        snprintf(fault->file, sizeof fault->file, "%s", site.file);
        fault->line = static_cast<uint32_t>(site.line);
    }
}

// Ends this OS thread's part of the launch from wherever it is. Kernels own nothing that would have to be released.
void leave(Worker* worker) {
    worker->grid->stop.store(true);
    siglongjmp(worker->escape, 1);
}

void fail(Worker* worker, uint32_t kind, EmuSite site, const char* format, ...) {
    EmuFault* fault = claim_fault(worker, kind);
    if (fault != nullptr) {
        name_here(fault, worker, EMU_NO_ACCESS, nullptr);
        at_site(fault, site);
        va_list values;
        va_start(values, format);
        write(fault, 0, format, values);
        va_end(values);
    }
    leave(worker);
}

// Nobody can run and somebody still lives: who waits where.
void deadlock(Worker* worker) {
    EmuFault* fault = claim_fault(worker, EMU_DEADLOCK);
    if (fault == nullptr) {
        leave(worker);
    }
    say(fault, "no thread can go on; %u of %u threads live", worker->live, worker->threads);
    bool told[MAX_THREADS] = {};
    bool named = false;
    unsigned groups = 0;
    for (unsigned i = 0; i < worker->threads; ++i) {
        const Lane& lane = worker->lanes[i];
        const bool alive = (worker->warps[i / WARP].live >> (i % WARP) & 1u) != 0u;
        if (!alive || told[i]) {
            continue;
        }
        unsigned count = 0;
        for (unsigned j = i; j < worker->threads; ++j) {
            const Lane& other = worker->lanes[j];
            const bool lives = (worker->warps[j / WARP].live >> (j % WARP) & 1u) != 0u;
            if (lives && other.waiting == lane.waiting && other.site.line == lane.site.line) {
                told[j] = true;
                ++count;
            }
        }
        if (!named) {
            name_place(&fault->here, worker, worker->block_number, i, EMU_NO_ACCESS, 0);
            at_site(fault, lane.site);
            named = true;
        }
        if (++groups <= 8) {
            append(fault, "; %u wait at %s in line %d (first: thread %u)", count,
                   lane.waiting == AT_BARRIER ? "a barrier" : "a warp collective", lane.site.line, i);
        }
    }
    leave(worker);
}

}  // namespace emu

using namespace emu;

extern "C" void spark_emu_trap(const char* what, EmuSite site) {
    Worker* worker = worker_of(spark_emu_lane);
    fail(worker, EMU_TRAP, site, "%s", what);
}
