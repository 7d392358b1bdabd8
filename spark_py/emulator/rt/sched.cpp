// SPDX-License-Identifier: AGPL-3.0-only
// Threads of a block as fibres on one OS thread: each runs until it waits, then the next one that can run goes on.
//
// A thread takes a stack when it starts and gives it back when it ends, so a kernel without barriers runs all its
// threads on one hot stack. Warps stand in slots; the order in which slots are served is the launch's.

#include <sched.h>
#include <string.h>
#include <sys/mman.h>

#include "state.h"
#include "switch.h"

namespace emu {

namespace {

constexpr size_t STAGGER = 64, STAGGERS = 31;  // stack tops on different cache sets

uint64_t mixed(uint64_t x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

void* take_stack(Worker* worker) {
    if (worker->free_count > 0) {
        return worker->free_stacks[--worker->free_count];
    }
    return worker->arena + STACK_BYTES * worker->stacks_made++;
}

void start_on(Lane* lane, void* stack, unsigned number) {
    lane->stack = stack;
    unsigned char* top = static_cast<unsigned char*>(stack) + STACK_BYTES - STAGGER * (number % STAGGERS);
    unsigned char* sp = top - FRAME_BYTES;
    memset(sp, 0, FRAME_BYTES);
    void (*entry)() = spark_emu_start;
    memcpy(sp + RETURN_AT, &entry, sizeof entry);
    lane->sp = sp;
}

// The next thread to run, taken off the ready masks; NULL where none can.
Lane* pick(Worker* worker) {
    if (worker->ready_slots == 0u) {
        return nullptr;
    }
    unsigned slot = worker->current_slot;
    const EmuLaunch* launch = worker->grid->launch;
    if (launch->order == EMU_PRIORITY) {
        slot = __builtin_ctz(worker->ready_slots);
    } else if ((worker->ready_slots >> slot & 1u) == 0u) {
        const uint32_t later = slot == 31u ? 0u : worker->ready_slots >> (slot + 1u) << (slot + 1u);
        slot = __builtin_ctz(later != 0u ? later : worker->ready_slots);
    }
    worker->current_slot = slot;
    const unsigned w = worker->warp_of_slot[slot];
    Warp& warp = worker->warps[w];
    unsigned lane = __builtin_ctz(warp.ready);
    if (launch->order == EMU_REVERSE) {
        lane = 31u - __builtin_clz(warp.ready);
    } else if (launch->order == EMU_PRIORITY) {
        const unsigned turn = static_cast<unsigned>(mixed(launch->seed ^ w)) & 31u;
        const uint32_t turned = turn == 0u ? warp.ready : warp.ready >> turn | warp.ready << (32u - turn);
        lane = (__builtin_ctz(turned) + turn) & 31u;
    }
    warp.ready &= ~(1u << lane);
    if (warp.ready == 0u) {
        worker->ready_slots &= ~(1u << slot);
    }
    return &worker->lanes[w * WARP + lane];
}

void* enter(Worker* worker, Lane* lane) {
    if (lane->sp == nullptr) {
        start_on(lane, take_stack(worker), lane->linear);
    }
    spark_emu_lane = lane;
    worker->atomics_in_turn = 0;
    lane->waiting = RUNNING;
    return lane->sp;
}

void release_barrier(Worker* worker) {
    const uint32_t kind = worker->barrier_kind;
    worker->barrier_result = kind == EMU_COUNT ? worker->count
                             : kind == EMU_ALL ? worker->count == static_cast<int>(worker->arrived)
                                               : worker->count != 0;
    worker->count = 0;
    worker->arrived = 0;
    if (worker->checker != nullptr) {
        checker_barrier(worker);
    }
    for (unsigned w = 0; w < worker->warp_count; ++w) {
        const uint32_t waiting = worker->warps[w].at_barrier;
        worker->warps[w].at_barrier = 0u;
        if (waiting != 0u) {
            make_ready(worker, w, waiting);
        }
    }
}

}  // namespace

void make_ready(Worker* worker, unsigned warp, uint32_t lanes) {
    worker->warps[warp].ready |= lanes;
    worker->ready_slots |= 1u << worker->slot_of_warp[warp];
}

bool make_arena(Worker* worker) {
    const size_t bytes = STACK_BYTES * MAX_THREADS;
    void* arena = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK,
                       -1, 0);
    if (arena == MAP_FAILED) {
        return false;
    }
    worker->arena = static_cast<unsigned char*>(arena);
    for (unsigned i = 0; i < MAX_THREADS; ++i) {
        // Without its guard page a stack still works; only an overflow would go unnoticed.
        mprotect(worker->arena + STACK_BYTES * i, PAGE, PROT_NONE);
    }
    return true;
}

// Settles what is the same for every block of the launch.
void prepare_worker(Worker* worker) {
    const EmuLaunch* launch = worker->grid->launch;
    worker->block.size = launch->block;
    worker->block.grid = launch->grid;
    worker->threads = launch->block.x * launch->block.y * launch->block.z;
    worker->warp_count = (worker->threads + WARP - 1) / WARP;
    const unsigned warps = worker->warp_count;
    for (unsigned slot = 0; slot < warps; ++slot) {
        worker->warp_of_slot[slot] = static_cast<uint8_t>(launch->order == EMU_REVERSE ? warps - 1 - slot : slot);
    }
    if (launch->order == EMU_PRIORITY) {
        for (unsigned slot = warps; slot-- > 1;) {
            const unsigned other = static_cast<unsigned>(mixed(launch->seed * 31 + slot) % (slot + 1));
            const uint8_t held = worker->warp_of_slot[slot];
            worker->warp_of_slot[slot] = worker->warp_of_slot[other];
            worker->warp_of_slot[other] = held;
        }
    }
    for (unsigned slot = 0; slot < warps; ++slot) {
        worker->slot_of_warp[worker->warp_of_slot[slot]] = static_cast<uint8_t>(slot);
    }
    unsigned i = 0;
    for (unsigned z = 0; z < launch->block.z; ++z) {
        for (unsigned y = 0; y < launch->block.y; ++y) {
            for (unsigned x = 0; x < launch->block.x; ++x, ++i) {
                Lane& lane = worker->lanes[i];
                lane.index = EmuDim{x, y, z};
                lane.linear = i;
                lane.block = &worker->block;
                lane.worker = worker;
            }
        }
    }
}

void run_block(Worker* worker, uint64_t number) {
    const EmuLaunch* launch = worker->grid->launch;
    worker->block_number = number;
    worker->block.index.x = static_cast<unsigned>(number % launch->grid.x);
    worker->block.index.y = static_cast<unsigned>(number / launch->grid.x % launch->grid.y);
    worker->block.index.z = static_cast<unsigned>(number / launch->grid.x / launch->grid.y);
    worker->live = worker->threads;
    worker->arrived = 0;
    worker->count = 0;
    worker->current_slot = 0;
    worker->ready_slots = 0;
    worker->free_count = 0;
    worker->stacks_made = 0;
    for (unsigned i = 0; i < worker->threads; ++i) {
        worker->lanes[i].sp = nullptr;
        worker->lanes[i].stack = nullptr;
        worker->lanes[i].waiting = RUNNING;
        worker->lanes[i].waited = launch->dependent == 0u;
    }
    for (unsigned w = 0; w < worker->warp_count; ++w) {
        Warp& warp = worker->warps[w];
        const unsigned lanes = worker->threads - w * WARP;
        warp.live = lanes >= WARP ? 0xffffffffu : (1u << lanes) - 1u;
        warp.ready = 0u;
        warp.at_barrier = warp.collecting = 0u;
        make_ready(worker, w, warp.live);
    }
    // What a block left in shared memory is not there for the next one.
    if (worker->dynamic == nullptr) {
        memset(worker->shared, POISON, worker->shared_size);
    } else {
        unsigned char* after = worker->dynamic + SPARK_EMU_DYNAMIC_MAX;
        memset(worker->shared, POISON, static_cast<size_t>(worker->dynamic - worker->shared) + launch->shared);
        memset(after, POISON, static_cast<size_t>(worker->shared + worker->shared_size - after));
    }
    if (worker->checker != nullptr) {
        checker_block_begins(worker);
    }
    spark_emu_switch(&worker->main_sp, enter(worker, pick(worker)));
    spark_emu_lane = nullptr;
    if (worker->checker != nullptr) {
        checker_block_ends(worker);
    }
}

void suspend(Worker* worker, Lane* lane) {
    Lane* next = pick(worker);
    if (next == nullptr) {
        deadlock(worker);
    }
    if (next == lane) {
        lane->waiting = RUNNING;
        return;
    }
    spark_emu_switch(&lane->sp, enter(worker, next));
}

// Lets other blocks that are resident have a turn.
static void yield_to_blocks(Worker* worker) {
    Grid* grid = worker->grid;
    if (grid->launch->cooperative == 0u) {
        return;
    }
    if (grid->passes_baton) {
        pthread_mutex_unlock(&grid->baton);
    }
    sched_yield();
    if (grid->passes_baton) {
        pthread_mutex_lock(&grid->baton);
    }
    if (grid->stop.load()) {
        leave(worker);
    }
}

// Lets every other thread that can run have a turn first.
void yield(Worker* worker, Lane* lane) {
    worker->atomics_in_turn = 0;
    yield_to_blocks(worker);
    if (worker->ready_slots == 0u) {
        return;
    }
    const unsigned me = lane->linear;
    Lane* next = nullptr;
    for (unsigned step = 0; step <= worker->warp_count && next == nullptr; ++step) {
        const unsigned w = (me / WARP + step) % worker->warp_count;
        uint32_t ready = worker->warps[w].ready;
        if (step == 0u) {
            ready &= me % WARP == 31u ? 0u : 0xffffffffu << (me % WARP + 1u);
        }
        if (ready != 0u) {
            const unsigned at = __builtin_ctz(ready);
            Warp& warp = worker->warps[w];
            warp.ready &= ~(1u << at);
            if (warp.ready == 0u) {
                worker->ready_slots &= ~(1u << worker->slot_of_warp[w]);
            }
            worker->current_slot = worker->slot_of_warp[w];
            next = &worker->lanes[w * WARP + at];
        }
    }
    make_ready(worker, me / WARP, 1u << (me % WARP));
    spark_emu_switch(&lane->sp, enter(worker, next));
}

void lane_finished(Worker* worker, Lane* lane) {
    if (!lane->waited) {
        fail(worker, EMU_DEPENDENCE, EmuSite{nullptr, 0},
             "the thread ends without spark_wait_for_previous: the kernel after this one would run while those before it "
             "still do");
    }
    const unsigned w = lane->linear / WARP;
    worker->warps[w].live &= ~(1u << (lane->linear % WARP));
    --worker->live;
    if (worker->arrived > 0u) {
        if (worker->checker != nullptr) {
            fail(worker, EMU_DIVERGENCE, worker->barrier_site,
                 "%u of %u threads wait at a barrier and thread %u has left the kernel", worker->arrived,
                 worker->threads, lane->linear);
        }
        if (worker->arrived == worker->live) {
            release_barrier(worker);
        }
    }
    if (worker->warps[w].collecting != 0u) {
        recheck_collectives(worker, w);
    }
}

}  // namespace emu

using namespace emu;

extern "C" void spark_emu_fibre() {
    Lane* lane = static_cast<Lane*>(spark_emu_lane);
    Worker* worker = lane->worker;
    Grid* grid = worker->grid;
    for (;;) {
        grid->launch->kernel->call(grid->args, grid->offsets);
        lane_finished(worker, lane);
        void* unused;
        if (worker->live == 0u) {
            spark_emu_switch(&unused, worker->main_sp);
        }
        Lane* next = pick(worker);
        if (next == nullptr) {
            deadlock(worker);
        }
        if (next->sp == nullptr) {
            // A thread that starts takes over this very stack; `sp` only says that it has begun.
            next->stack = lane->stack;
            next->sp = lane->stack;
            spark_emu_lane = lane = next;
            worker->atomics_in_turn = 0;
            continue;
        }
        worker->free_stacks[worker->free_count++] = lane->stack;
        spark_emu_switch(&unused, enter(worker, next));
    }
}

extern "C" int spark_emu_barrier(uint32_t kind, int predicate, EmuSite site) {
    Lane* lane = static_cast<Lane*>(spark_emu_lane);
    Worker* worker = lane->worker;
    if (worker->checker != nullptr) {
        if (worker->live != worker->threads) {
            fail(worker, EMU_DIVERGENCE, site, "a barrier is reached after %u of %u threads have left the kernel",
                 worker->threads - worker->live, worker->threads);
        }
        const EmuSite other = worker->barrier_site;
        if (worker->arrived > 0u && (other.line != site.line || strcmp(other.file, site.file) != 0)) {
            fail(worker, EMU_DIVERGENCE, site, "%u of %u threads wait at another barrier, line %d", worker->arrived,
                 worker->threads, other.line);
        }
    }
    if (worker->arrived > 0u && worker->barrier_kind != kind) {
        fail(worker, EMU_DIVERGENCE, site,
             "threads of a block meet at barriers of different kinds, the other at line %d", worker->barrier_site.line);
    }
    worker->barrier_site = site;
    worker->barrier_kind = kind;
    worker->count += predicate != 0;
    const unsigned w = lane->linear / WARP;
    if (++worker->arrived == worker->live) {
        release_barrier(worker);
        if (worker->grid->launch->order == EMU_PRIORITY && worker->ready_slots != 0u) {
            make_ready(worker, w, 1u << (lane->linear % WARP));
            suspend(worker, lane);
        }
        return worker->barrier_result;
    }
    worker->warps[w].at_barrier |= 1u << (lane->linear % WARP);
    lane->waiting = AT_BARRIER;
    lane->site = site;
    suspend(worker, lane);
    return worker->barrier_result;
}

extern "C" void spark_emu_wait_for_previous() { static_cast<Lane*>(spark_emu_lane)->waited = true; }

extern "C" void spark_emu_yield() {
    Lane* lane = static_cast<Lane*>(spark_emu_lane);
    yield(lane->worker, lane);
}
