// SPDX-License-Identifier: AGPL-3.0-only
// A launch: arguments, OS threads, blocks in order, and what a kernel may ask of the runtime besides threads.

#include "launch.h"

#include <link.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <new>
#include <thread>
#include <vector>

#include "state.h"
#include "watchdog.h"

#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif

namespace emu {

namespace {

constexpr size_t SIGNAL_STACK = 64 * 1024;
pthread_mutex_t idle_lock = PTHREAD_MUTEX_INITIALIZER;
Worker* idle = nullptr;

int timeout_signal() { return SIGRTMIN + 9; }

Worker* take_worker() {
    pthread_mutex_lock(&idle_lock);
    Worker* worker = idle;
    if (worker != nullptr) {
        idle = worker->next_idle;
    }
    pthread_mutex_unlock(&idle_lock);
    if (worker != nullptr) {
        return worker;
    }
    void* memory =
        mmap(nullptr, sizeof(Worker) + SIGNAL_STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        return nullptr;
    }
    worker = static_cast<Worker*>(memory);
    worker->signal_stack = static_cast<unsigned char*>(memory) + sizeof(Worker);
    if (!make_arena(worker)) {
        munmap(memory, sizeof(Worker) + SIGNAL_STACK);
        return nullptr;
    }
    return worker;
}

void give_back(Worker* worker) {
    pthread_mutex_lock(&idle_lock);
    worker->next_idle = idle;
    idle = worker;
    pthread_mutex_unlock(&idle_lock);
}

struct Segment {
    const unsigned char* anchor;
    unsigned char* start;
    size_t size;
    uint64_t module_start, module_end;
};

int find_segment(struct dl_phdr_info* info, size_t, void* data) {
    Segment* segment = static_cast<Segment*>(data);
    const unsigned char* start = static_cast<const unsigned char*>(info->dlpi_tls_data);
    if (start == nullptr) {
        return 0;
    }
    uint64_t end = 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const ElfW(Phdr)& header = info->dlpi_phdr[i];
        if (header.p_type == PT_TLS && segment->anchor >= start && segment->anchor < start + header.p_memsz) {
            segment->start = const_cast<unsigned char*>(start);
            segment->size = header.p_memsz;
        } else if (header.p_type == PT_LOAD && header.p_vaddr + header.p_memsz > end) {
            end = header.p_vaddr + header.p_memsz;
        }
    }
    segment->module_start = info->dlpi_addr;
    segment->module_end = info->dlpi_addr + end;
    return segment->start != nullptr;
}

// The calling OS thread's copy of a file's shared memory.
Segment shared_of(const EmuModule* module) {
    Segment segment = {module->anchor(), nullptr, 0, 0, 0};
    dl_iterate_phdr(find_segment, &segment);
    return segment;
}

// Block numbers in the launch's order: ascending, descending, or by a step that meets each once.
uint64_t block_at(const Grid* grid, uint64_t turn) {
    const EmuLaunch* launch = grid->launch;
    if (launch->order == EMU_REVERSE) {
        return grid->blocks - 1 - turn;
    }
    if (launch->order == EMU_PRIORITY && grid->blocks > 2) {
        uint64_t step = (launch->seed * 2654435761u + grid->blocks / 2) % grid->blocks | 1u;
        for (uint64_t a = step, b = grid->blocks; a != 1;) {
            const uint64_t rest = b % a;
            if (rest == 0) {
                step += 2;
                a = step;
                b = grid->blocks;
            } else {
                b = a;
                a = rest;
            }
        }
        return static_cast<uint64_t>(static_cast<unsigned __int128>(turn) * step % grid->blocks);
    }
    return turn;
}

void run_blocks(Worker* worker) {
    Grid* grid = worker->grid;
    // Few blocks at a time: the last ones should not be one OS thread's alone.
    const uint64_t most = grid->blocks / (8 * grid->launch->workers) + 1;
    const uint64_t chunk = grid->launch->cooperative != 0u ? 1 : most > 64 ? 64 : most;
    for (;;) {
        const uint64_t first = grid->next.fetch_add(chunk);
        for (uint64_t turn = first; turn < first + chunk; ++turn) {
            if (turn >= grid->blocks || grid->stop.load(std::memory_order_relaxed)) {
                return;
            }
            run_block(worker, block_at(grid, turn));
        }
    }
}

void work(Grid* grid, Worker* worker) {
    worker->grid = grid;
    const Segment shared = shared_of(grid->launch->module);
    worker->shared = shared.start;
    worker->shared_size = shared.size;
    worker->module_start = shared.module_start;
    worker->module_end = shared.module_end;
    worker->dynamic = grid->launch->module->dynamic();
    prepare_worker(worker);
    stack_t alternate, before;
    memset(&alternate, 0, sizeof alternate);
    alternate.ss_sp = worker->signal_stack;
    alternate.ss_size = SIGNAL_STACK;
    sigaltstack(&alternate, &before);
    current_worker = worker;
    {
        Watchdog watchdog(grid->launch->timeout);
        if (grid->passes_baton) {
            pthread_mutex_lock(&grid->baton);
        }
        if (sigsetjmp(worker->escape, 1) == 0) {
            worker->running = true;
            run_blocks(worker);
        }
        worker->running = false;
        if (grid->passes_baton) {
            pthread_mutex_unlock(&grid->baton);
        }
    }
    current_worker = nullptr;
    spark_emu_lane = nullptr;
    sigaltstack(&before, nullptr);
}

bool no_resources(const EmuLaunch* launch, const char* what) {
    EmuFault* fault = launch->fault;
    memset(fault, 0, sizeof *fault);
    fault->kind = EMU_RESOURCES;
    fault->range = -1;
    say(fault, "%s", what);
    return false;
}

// The kernel's arguments one after another, each on its type's alignment.
unsigned char* pack(const EmuLaunch* launch, uint32_t* offsets) {
    size_t size = 0, largest = 16;
    for (uint32_t i = 0; i < launch->kernel->count; ++i) {
        const EmuParam& param = launch->kernel->params[i];
        size = (size + param.align - 1) / param.align * param.align;
        offsets[i] = static_cast<uint32_t>(size);
        size += param.size;
        largest = param.align > largest ? param.align : largest;
    }
    unsigned char* args = static_cast<unsigned char*>(aligned_alloc(largest, (size / largest + 1) * largest));
    for (uint32_t i = 0; args != nullptr && i < launch->kernel->count; ++i) {
        memcpy(args + offsets[i], launch->args + launch->offsets[i], launch->kernel->params[i].size);
    }
    return args;
}

bool run(const EmuLaunch* launch) {
    Grid grid;
    grid.launch = launch;
    grid.blocks = static_cast<uint64_t>(launch->grid.x) * launch->grid.y * launch->grid.z;
    std::vector<uint32_t> offsets(launch->kernel->count + 1);
    grid.offsets = offsets.data();
    grid.args = pack(launch, offsets.data());
    if (grid.args == nullptr) {
        return no_resources(launch, "no memory for the launch");
    }
    const bool checked = launch->module->checked != 0u;
    // The checks are one OS thread's at a time.
    uint64_t wanted = launch->cooperative != 0u ? grid.blocks : checked ? 1u : launch->workers;
    wanted = wanted > grid.blocks ? grid.blocks : wanted;
    grid.passes_baton = checked && wanted > 1;
    std::vector<Worker*> workers;
    while (workers.size() < wanted) {
        Worker* worker = take_worker();
        if (worker == nullptr) {
            break;
        }
        workers.push_back(worker);
        Checker* first = workers[0] == worker ? nullptr : workers[0]->checker;
        worker->checker = checked ? make_checker(launch, first) : nullptr;
    }
    bool enough = workers.size() == wanted || (!workers.empty() && launch->cooperative == 0u);
    if (enough) {
        std::vector<std::thread> threads;
        for (size_t i = 1; i < workers.size(); ++i) {
            threads.emplace_back(work, &grid, workers[i]);
        }
        work(&grid, workers[0]);
        for (std::thread& thread : threads) {
            thread.join();
        }
    }
    for (Worker* worker : workers) {
        free_checker(worker->checker, worker == workers.back());
        give_back(worker);
    }
    free(grid.args);
    return enough ? !grid.faulted.load() : no_resources(launch, "no memory for the stacks of the launch's threads");
}

}  // namespace

Watchdog::Watchdog(double seconds) {
    if (seconds <= 0.0) {
        return;
    }
    struct sigevent event;
    memset(&event, 0, sizeof event);
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = timeout_signal();
    event.sigev_notify_thread_id = static_cast<pid_t>(syscall(SYS_gettid));
    if (timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer_) != 0) {
        return;
    }
    armed_ = true;
    struct itimerspec when;
    memset(&when, 0, sizeof when);
    when.it_value.tv_sec = static_cast<time_t>(seconds);
    when.it_value.tv_nsec = static_cast<long>((seconds - static_cast<double>(when.it_value.tv_sec)) * 1e9);
    timer_settime(timer_, 0, &when, nullptr);
}

Watchdog::~Watchdog() {
    if (armed_) {
        timer_delete(timer_);
    }
}

}  // namespace emu

using namespace emu;

extern "C" {

uint32_t spark_emu_abi() { return SPARK_EMU_ABI; }

uint64_t spark_emu_static_shared(const EmuModule* module) {
    const Segment segment = shared_of(module);
    const uint64_t all = segment.size - 1;  // the anchor
    return module->dynamic() == nullptr ? all : all - SPARK_EMU_DYNAMIC_MAX;
}

uint32_t spark_emu_launch(const EmuLaunch* launch) {
    install_handlers();
    struct sigaction timeout;
    memset(&timeout, 0, sizeof timeout);
    timeout.sa_sigaction = on_timeout;
    timeout.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    sigaction(timeout_signal(), &timeout, nullptr);
    return run(launch) ? static_cast<uint32_t>(EMU_NO_FAULT) : launch->fault->kind;
}

void spark_emu_fence() {
    Worker* worker = worker_of(spark_emu_lane);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (worker->checker != nullptr) {
        checker_fence(worker);
    }
}

void spark_emu_atomic(const volatile void* address, unsigned size) {
    Lane* lane = static_cast<Lane*>(spark_emu_lane);
    Worker* worker = lane->worker;
    // A thread that comes back again and again may be waiting for another. Its turn ends before the check, so that
    // check and operation are one step where checked blocks are resident together.
    if (++worker->atomics_in_turn >= 32u) {
        yield(worker, lane);
    }
    if (worker->checker != nullptr) {
        checker_atomic(worker, reinterpret_cast<uint64_t>(address), size, __builtin_return_address(0));
    }
}

long long spark_emu_clock() {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

bool spark_emu_is_shared(const void* address) {
    const Worker* worker = worker_of(spark_emu_lane);
    const unsigned char* byte = static_cast<const unsigned char*>(address);
    return byte >= worker->shared && byte < worker->shared + worker->shared_size;
}

// Written straight to the standard output's descriptor: a block that is left in a fault holds no lock.
int spark_emu_printf(const char* format, ...) {
    char line[1024];
    va_list values;
    va_start(values, format);
    const int size = vsnprintf(line, sizeof line, format, values);
    va_end(values);
    const size_t wanted = size < 0 ? 0 : static_cast<size_t>(size);
    const size_t kept = wanted < sizeof line ? wanted : sizeof line - 1;
    for (size_t at = 0; at < kept;) {
        const ssize_t written = write(STDOUT_FILENO, line + at, kept - at);
        if (written <= 0) {
            break;
        }
        at += static_cast<size_t>(written);
    }
    return size;
}
}
