// SPDX-License-Identifier: AGPL-3.0-only
// The checked build's memory accesses: bounds, alignment, use before writing, and races.
//
// Kernels are compiled with -fsanitize=thread,alignment,bounds and linked without its libraries: the calls that the
// compiler puts before each access end here. Two accesses of a block are ordered by a block barrier between them, and
// within a warp by a __syncwarp; shuffles and votes order nothing. Accesses of two blocks are ordered where the first
// block did an atomic operation behind a __threadfence and the second one met it.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <new>
#include <unordered_map>
#include <vector>

#include "check.h"
#include "shadow.h"

namespace emu {

Shadow::~Shadow() {
    if (cells_ != nullptr) {
        munmap(cells_, (size_ / 4 + 2) * sizeof(Cell));
    }
}

bool Shadow::make() {
    void* memory = mmap(nullptr, (size_ / 4 + 2) * sizeof(Cell), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    cells_ = memory == MAP_FAILED ? nullptr : static_cast<Cell*>(memory);
    return cells_ != nullptr;
}

void Shadow::clear(uint64_t bytes) {
    if (cells_ != nullptr) {
        memset(cells_, 0, (bytes / 4 + 2) * sizeof(Cell));
    }
}

// What blocks have let others know of: for each atomic variable, the blocks that passed it behind a fence.
struct Releases {
    std::vector<uint32_t> blocks;
    uint64_t last_block = UINT64_MAX;
    size_t merged = 0;
};

struct GridChecker {
    explicit GridChecker(const EmuLaunch* launch)
        : ranges(launch->ranges), count(launch->range_count), shadows(new Shadow[launch->range_count + 1]) {
        for (uint64_t i = 0; i < count; ++i) {
            shadows[i].cover(ranges[i].base, ranges[i].size);
        }
    }
    ~GridChecker() { delete[] shadows; }

    const EmuRange* ranges;
    uint64_t count;
    Shadow* shadows;
    std::unordered_map<uint64_t, Releases> releases;
};

// The block that an OS thread runs.
struct Checker {
    GridChecker* grid;
    uint64_t last_range = 0;
    uint64_t clock[MAX_THREADS], base[MAX_THREADS];
    uint64_t seen[MAX_WARPS][WARP][WARP];  // [warp][lane][other]: the other's clock up to which the lane is behind it
    Shadow shared;
    std::vector<unsigned char> written;  // one flag a byte of shared memory
    std::vector<unsigned char> known;    // blocks whose work this one is behind
    bool fenced = false, joined = false;
    // The block's first read of shared memory that nobody had written. It waits for the block's end: a thread that
    // writes there later makes it a race, which says more.
    bool read_early = false;
    unsigned early_lane, early_size;
    uint64_t early_address;
    void* early_pc;
};

namespace {

bool ordered(const Checker* checker, Touch before, uint64_t block, unsigned lane) {
    if (before.block() != (block & Touch::BLOCK_MASK)) {
        return before.block() < checker->known.size() && checker->known[before.block()] != 0;
    }
    const unsigned other = before.lane();
    if (before.clock() < checker->base[other]) {
        return true;
    }
    return other / WARP == lane / WARP && before.clock() < checker->seen[lane / WARP][lane % WARP][other % WARP];
}

const char* verb(bool write, bool atomic) { return atomic ? "updates (atomic)" : write ? "writes" : "reads"; }
uint32_t access_of(bool write, bool atomic) { return atomic ? EMU_ATOMIC : write ? EMU_WRITE : EMU_READ; }

[[noreturn]] void race(Worker* worker, Touch before, uint32_t before_pc, uint64_t address, unsigned size, bool write,
                       bool atomic, void* pc) {
    const bool blocks = before.block() != (worker->block_number & Touch::BLOCK_MASK);
    EmuFault* fault = claim_fault(worker, blocks ? EMU_BLOCK_OVERLAP : EMU_RACE);
    if (fault != nullptr) {
        name_here(fault, worker, access_of(write, atomic), pc);
        name_place(&fault->other, worker, before.block(), before.lane(),
                   access_of(before.write(), before.atomic()), before_pc);
        name_address(fault, worker, address, size);
        say(fault, "%s what another thread %s, with nothing between that orders the two", verb(write, atomic),
            verb(before.write(), before.atomic()));
    }
    leave(worker);
}

void touch_cell(Worker* worker, Cell* cell, uint64_t address, unsigned bytes, unsigned size, bool write, bool atomic,
                void* pc, uint32_t pc_offset) {
    Checker* checker = worker->checker;
    const unsigned lane = spark_emu_lane->linear;
    const Touch now = Touch::of(worker->block_number, lane, checker->clock[lane], bytes, write, atomic);
    int slot = -1, rank = 0;
    for (unsigned i = 0; i < TOUCHES; ++i) {
        const Touch before = cell->touch[i];
        int worth = 0;
        if (!before.valid()) {
            worth = 4;
        } else if (before.same_thread(now)) {
            const bool covered = (before.bytes() & ~bytes) == 0u && (write || !before.write());
            worth = covered && (!atomic || before.atomic()) ? 5 : 1;
        } else if ((before.bytes() & bytes) != 0u && (write || before.write()) && !(atomic && before.atomic())) {
            if (!ordered(checker, before, worker->block_number, lane)) {
                race(worker, before, cell->pc[i], address, size, write, atomic, pc);
            }
            worth = before.block() == now.block() ? (write ? 3 : 2) : 0;
        } else {
            worth = before.write() ? 0 : 2;
        }
        if (slot < 0 || worth > rank) {
            slot = static_cast<int>(i);
            rank = worth;
        }
    }
    if (rank == 0) {
        slot = static_cast<int>(pc_offset % TOUCHES);
    }
    cell->touch[slot] = now;
    cell->pc[slot] = pc_offset;
}

void touch(Worker* worker, Shadow* shadow, uint64_t address, unsigned size, bool write, bool atomic, void* pc) {
    Checker* checker = worker->checker;
    if (checker->clock[spark_emu_lane->linear] > Touch::CLOCK_MASK) {
        return;  // a million barriers on: clocks no longer fit, and nothing more is claimed
    }
    const uint32_t pc_offset = static_cast<uint32_t>(reinterpret_cast<uint64_t>(pc) - module_base(worker));
    for (uint64_t at = address & ~3ull; at < address + size; at += 4) {
        Cell* cell = shadow->at(at);
        if (cell == nullptr) {
            return;
        }
        unsigned bytes = 15u;
        if (at < address) {
            bytes &= 15u << (address - at);
        }
        if (at + 4 > address + size) {
            bytes &= 15u >> (at + 4 - address - size);
        }
        touch_cell(worker, cell, address, bytes & 15u, size, write, atomic, pc, pc_offset);
    }
}

[[noreturn]] void out_of_bounds(Worker* worker, uint64_t address, unsigned size, bool write, bool atomic, void* pc) {
    EmuFault* fault = claim_fault(worker, EMU_BOUNDS);
    if (fault != nullptr) {
        name_here(fault, worker, access_of(write, atomic), pc);
        name_address(fault, worker, address, size);
        say(fault, "%s %u bytes outside every buffer", verb(write, atomic), size);
        if (fault->space == EMU_DYNAMIC) {
            say(fault, "%s %u bytes at %lld of %u bytes of dynamic shared memory", verb(write, atomic), size,
                static_cast<long long>(fault->offset), worker->grid->launch->shared);
        }
    }
    leave(worker);
}

void shared_access(Worker* worker, uint64_t address, unsigned size, bool write, bool atomic, void* pc) {
    Checker* checker = worker->checker;
    const uint64_t start = reinterpret_cast<uint64_t>(worker->shared);
    const uint64_t dynamic = reinterpret_cast<uint64_t>(worker->dynamic);
    if (dynamic != 0 && address + size > dynamic && address < dynamic + SPARK_EMU_DYNAMIC_MAX &&
        address + size > dynamic + worker->grid->launch->shared) {
        out_of_bounds(worker, address, size, write, atomic, pc);
    }
    unsigned char* written = checker->written.data() + (address - start);
    const bool early = (!write || atomic) && memchr(written, 0, size) != nullptr;
    if (write) {
        memset(written, 1, size);
    }
    if (early && !checker->read_early) {
        checker->read_early = true;
        checker->early_lane = spark_emu_lane->linear;
        checker->early_size = size;
        checker->early_address = address;
        checker->early_pc = pc;
    }
    touch(worker, &checker->shared, address, size, write, atomic, pc);
}

const EmuRange* find_range(Checker* checker, uint64_t address, uint64_t* index) {
    const GridChecker* grid = checker->grid;
    const EmuRange* last = grid->ranges + checker->last_range;
    if (grid->count > 0 && address - last->base < last->size) {
        *index = checker->last_range;
        return last;
    }
    uint64_t low = 0, high = grid->count;
    while (low < high) {
        const uint64_t middle = (low + high) / 2;
        if (grid->ranges[middle].base <= address) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    if (low == 0 || address - grid->ranges[low - 1].base >= grid->ranges[low - 1].size) {
        return nullptr;
    }
    *index = checker->last_range = low - 1;
    return grid->ranges + low - 1;
}

// Whether a dependent kernel may read a range before it waits.
bool is_early(const EmuLaunch* launch, const EmuRange* range) {
    for (uint32_t i = 0; i < launch->early_count; ++i) {
        if (launch->early[i] - range->base < range->size) {
            return true;
        }
    }
    return false;
}

[[noreturn]] void too_early(Worker* worker, uint64_t address, unsigned size, bool write, bool atomic, void* pc) {
    EmuFault* fault = claim_fault(worker, EMU_DEPENDENCE);
    if (fault != nullptr) {
        name_here(fault, worker, access_of(write, atomic), pc);
        name_address(fault, worker, address, size);
        say(fault, "%s global memory before spark_wait_for_previous%s", verb(write, atomic),
            write ? "" : ", which only an `early` parameter allows");
    }
    leave(worker);
}

}  // namespace

void check_access(const void* pointer, unsigned size, bool write, bool atomic, void* pc) {
    if (spark_emu_lane == nullptr || size == 0) {
        return;  // a file's own initialisers
    }
    Worker* worker = worker_of(spark_emu_lane);
    const uint64_t address = reinterpret_cast<uint64_t>(pointer);
    if (address - reinterpret_cast<uint64_t>(worker->arena) < STACK_BYTES * MAX_THREADS) {
        return;  // the thread's own variables
    }
    if (pointer == &spark_emu_lane || address - reinterpret_cast<uint64_t>(worker) < sizeof(Worker)) {
        return;  // threadIdx and its kin
    }
    if (address - reinterpret_cast<uint64_t>(worker->shared) < worker->shared_size) {
        shared_access(worker, address, size, write, atomic, pc);
        return;
    }
    uint64_t index = 0;
    const EmuRange* range = find_range(worker->checker, address, &index);
    if (range == nullptr) {
        if (in_module(worker, address)) {
            return;  // tables and __device__ variables of the file
        }
        out_of_bounds(worker, address, size, write, atomic, pc);
    }
    if (address + size > range->base + range->size) {
        out_of_bounds(worker, address, size, write, atomic, pc);
    }
    if (!static_cast<const Lane*>(spark_emu_lane)->waited && (write || !is_early(worker->grid->launch, range))) {
        too_early(worker, address, size, write, atomic, pc);
    }
    touch(worker, worker->checker->grid->shadows + index, address, size, write, atomic, pc);
}

void misaligned(const void* pointer, unsigned alignment, const char* access, EmuSite site, void* pc) {
    if (spark_emu_lane == nullptr) {
        return;
    }
    Worker* worker = worker_of(spark_emu_lane);
    EmuFault* fault = claim_fault(worker, EMU_ALIGNMENT);
    if (fault != nullptr) {
        name_here(fault, worker, EMU_NO_ACCESS, pc);
        at_site(fault, site);
        name_address(fault, worker, reinterpret_cast<uint64_t>(pointer), alignment);
        say(fault, "%s needs a multiple of %u bytes", access, alignment);
    }
    leave(worker);
}

Checker* make_checker(const EmuLaunch* launch, Checker* first) {
    Checker* checker = new (std::nothrow) Checker;
    if (checker != nullptr) {
        checker->grid = first != nullptr ? first->grid : new (std::nothrow) GridChecker(launch);
    }
    return checker;
}

void free_checker(Checker* checker, bool last) {
    if (checker != nullptr && last) {
        delete checker->grid;
    }
    delete checker;
}

void checker_block_begins(Worker* worker) {
    Checker* checker = worker->checker;
    for (unsigned i = 0; i < worker->threads; ++i) {
        checker->clock[i] = 1;
        checker->base[i] = 0;
    }
    memset(checker->seen, 0, sizeof checker->seen[0] * worker->warp_count);
    if (checker->written.empty()) {
        checker->shared.cover(reinterpret_cast<uint64_t>(worker->shared), worker->shared_size);
        checker->written.resize(worker->shared_size);
    }
    // The dynamic part that the launch did not ask for is never reached.
    const uint64_t used = worker->dynamic == nullptr ? worker->shared_size
                          : worker->dynamic + SPARK_EMU_DYNAMIC_MAX == worker->shared + worker->shared_size
                              ? static_cast<uint64_t>(worker->dynamic - worker->shared) + worker->grid->launch->shared
                              : worker->shared_size;
    checker->shared.clear(used);
    memset(checker->written.data(), 0, used);
    if (checker->joined || checker->known.empty()) {
        checker->known.assign(static_cast<size_t>(worker->grid->blocks < (1u << 24) ? worker->grid->blocks : 0) + 1, 0);
    }
    checker->fenced = checker->joined = checker->read_early = false;
}

void checker_block_ends(Worker* worker) {
    const Checker* checker = worker->checker;
    if (!checker->read_early) {
        return;
    }
    EmuFault* fault = claim_fault(worker, EMU_UNINITIALISED);
    if (fault != nullptr) {
        const uint64_t pc = reinterpret_cast<uint64_t>(checker->early_pc) - module_base(worker);
        name_place(&fault->here, worker, worker->block_number, checker->early_lane, EMU_READ, pc);
        name_address(fault, worker, checker->early_address, checker->early_size);
        say(fault, "reads %u bytes of shared memory that no thread of the block has written", checker->early_size);
    }
    leave(worker);
}

void checker_barrier(Worker* worker) {
    Checker* checker = worker->checker;
    for (unsigned i = 0; i < worker->threads; ++i) {
        checker->base[i] = ++checker->clock[i];
    }
}

void checker_syncwarp(Worker* worker, unsigned warp, uint32_t lanes) {
    Checker* checker = worker->checker;
    uint64_t(*seen)[WARP] = checker->seen[warp];
    uint64_t joined[WARP] = {};
    for (uint32_t left = lanes; left != 0u; left &= left - 1u) {
        const unsigned lane = __builtin_ctz(left);
        for (unsigned other = 0; other < WARP; ++other) {
            joined[other] = seen[lane][other] > joined[other] ? seen[lane][other] : joined[other];
        }
        const uint64_t next = ++checker->clock[warp * WARP + lane];
        joined[lane] = next;
    }
    for (uint32_t left = lanes; left != 0u; left &= left - 1u) {
        memcpy(seen[__builtin_ctz(left)], joined, sizeof joined);
    }
}

void checker_fence(Worker* worker) { worker->checker->fenced = true; }

void checker_atomic(Worker* worker, uint64_t address, unsigned size, void* pc) {
    if (address % size != 0) {
        misaligned(reinterpret_cast<const void*>(address), size, "an atomic operation", EmuSite{nullptr, 0}, pc);
    }
    check_access(reinterpret_cast<const void*>(address), size, true, true, pc);
    Checker* checker = worker->checker;
    if (address - reinterpret_cast<uint64_t>(worker->shared) < worker->shared_size || checker->known.size() == 1) {
        return;
    }
    Releases& releases = checker->grid->releases[address];
    if (releases.last_block != worker->block_number) {
        releases.last_block = worker->block_number;
        releases.merged = 0;
    }
    for (; releases.merged < releases.blocks.size(); ++releases.merged) {
        checker->known[releases.blocks[releases.merged]] = 1;
        checker->joined = true;
    }
    if (checker->fenced && (releases.blocks.empty() || releases.blocks.back() != worker->block_number)) {
        releases.blocks.push_back(static_cast<uint32_t>(worker->block_number));
        releases.merged = releases.blocks.size();
    }
}

}  // namespace emu
