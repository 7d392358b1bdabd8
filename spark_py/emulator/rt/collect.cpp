// SPDX-License-Identifier: AGPL-3.0-only
// Collectives of a warp. Each lane posts what it wants and its value; the last one to come computes every lane's
// result, so partial and concurrent masks are exact and a mismatch is an error instead of a hang.

#include <string.h>

#include "state.h"

namespace emu {

namespace {

const char* const NAMES[] = {
    "__shfl_sync",       "__shfl_up_sync",    "__shfl_down_sync",  "__shfl_xor_sync",   "a vote",
    "__match_any_sync",  "__match_all_sync",  "__reduce_add_sync", "__reduce_min_sync", "__reduce_max_sync",
    "__reduce_min_sync", "__reduce_max_sync", "__reduce_and_sync", "__reduce_or_sync",  "__reduce_xor_sync",
    "__syncwarp",
};

template <class T>
T value_of(const Warp& warp, unsigned lane) {
    T value;
    memcpy(&value, warp.value[lane], sizeof value);
    return value;
}

template <class T>
void give(Warp& warp, uint32_t lanes, T value) {
    for (uint32_t left = lanes; left != 0u; left &= left - 1u) {
        memcpy(warp.result[__builtin_ctz(left)], &value, sizeof value);
    }
}

unsigned source_lane(const Warp& warp, unsigned lane) {
    const int width = warp.width[lane];
    const int me = static_cast<int>(lane), base = me & ~(width - 1), arg = warp.arg[lane];
    int source = me;
    switch (warp.op[lane]) {
        case EMU_SHFL_IDX:
            return static_cast<unsigned>(base + (arg & (width - 1)));
        case EMU_SHFL_UP:
            source = static_cast<unsigned>(arg) > static_cast<unsigned>(me - base) ? me : me - arg;
            break;
        case EMU_SHFL_DOWN:
            source = static_cast<unsigned>(arg) >= static_cast<unsigned>(base + width - me) ? me : me + arg;
            break;
        case EMU_SHFL_XOR:
            source = static_cast<unsigned>(me ^ arg) >= static_cast<unsigned>(base + width) ? me : me ^ arg;
            break;
    }
    return static_cast<unsigned>(source);
}

void shuffle(Worker* worker, unsigned w, uint32_t lanes) {
    Warp& warp = worker->warps[w];
    for (uint32_t left = lanes; left != 0u; left &= left - 1u) {
        const unsigned lane = __builtin_ctz(left), source = source_lane(warp, lane);
        if ((lanes >> source & 1u) != 0u) {
            memcpy(warp.result[lane], warp.value[source], 16);
            continue;
        }
        if (worker->checker != nullptr) {
            fail(worker, EMU_MASK, worker->lanes[w * WARP + lane].site,
                 "%s: lane %u of warp %u reads lane %u, which does not take part (mask %#x, taking part %#x)",
                 NAMES[warp.op[lane]], lane, w, source, warp.mask[lane], lanes);
        }
        memset(warp.result[lane], POISON, 16);
    }
}

uint32_t fold(uint32_t op, uint32_t a, uint32_t b) {
    const int32_t x = static_cast<int32_t>(a), y = static_cast<int32_t>(b);
    switch (op) {
        case EMU_ADD:
            return a + b;
        case EMU_MIN_U:
            return a < b ? a : b;
        case EMU_MAX_U:
            return a > b ? a : b;
        case EMU_MIN_S:
            return x < y ? a : b;
        case EMU_MAX_S:
            return x > y ? a : b;
        case EMU_AND:
            return a & b;
        case EMU_OR:
            return a | b;
        default:
            return a ^ b;
    }
}

void compute(Worker* worker, unsigned w, uint32_t lanes) {
    Warp& warp = worker->warps[w];
    const unsigned first = __builtin_ctz(lanes);
    const uint32_t op = warp.op[first];
    if (op <= EMU_SHFL_XOR) {
        shuffle(worker, w, lanes);
        return;
    }
    if (op == EMU_SYNCWARP) {
        if (worker->checker != nullptr) {
            checker_syncwarp(worker, w, lanes);
        }
        return;
    }
    if (op == EMU_BALLOT) {
        uint32_t votes = 0u;
        for (uint32_t left = lanes; left != 0u; left &= left - 1u) {
            const unsigned lane = __builtin_ctz(left);
            votes |= (value_of<uint32_t>(warp, lane) != 0u ? 1u : 0u) << lane;
        }
        give(warp, lanes, votes);
        return;
    }
    if (op == EMU_MATCH_ANY || op == EMU_MATCH_ALL) {
        for (uint32_t left = lanes; left != 0u; left &= left - 1u) {
            const unsigned lane = __builtin_ctz(left);
            uint32_t same = 0u;
            for (uint32_t others = lanes; others != 0u; others &= others - 1u) {
                const unsigned other = __builtin_ctz(others);
                same |= (value_of<uint64_t>(warp, lane) == value_of<uint64_t>(warp, other) ? 1u : 0u) << other;
            }
            give<uint64_t>(warp, 1u << lane, op == EMU_MATCH_ANY || same == lanes ? same : 0u);
        }
        return;
    }
    uint32_t total = value_of<uint32_t>(warp, first);
    for (uint32_t left = lanes & (lanes - 1u); left != 0u; left &= left - 1u) {
        total = fold(op, total, value_of<uint32_t>(warp, __builtin_ctz(left)));
    }
    give(warp, lanes, total);
}

// Whether all lanes of `mask` that still live have posted; computes their results if so.
bool complete(Worker* worker, unsigned w, uint32_t mask) {
    Warp& warp = worker->warps[w];
    const uint32_t lanes = mask & warp.live;
    if ((warp.collecting & lanes) != lanes) {
        return false;
    }
    warp.collecting &= ~lanes;
    compute(worker, w, lanes);
    return true;
}

}  // namespace

// A lane has ended: those that waited for it alone go on.
void recheck_collectives(Worker* worker, unsigned w) {
    Warp& warp = worker->warps[w];
    const uint32_t born = worker->threads - w * WARP >= WARP ? 0xffffffffu : (1u << (worker->threads - w * WARP)) - 1u;
    for (uint32_t left = warp.collecting; left != 0u;) {
        const unsigned lane = __builtin_ctz(left);
        const uint32_t mask = warp.mask[lane];
        left &= ~mask;
        if (worker->checker != nullptr && (mask & born & ~warp.live) != 0u) {
            fail(worker, EMU_MASK, worker->lanes[w * WARP + lane].site,
                 "%s of lane %u, warp %u: mask %#x names lane %d, which has left the kernel", NAMES[warp.op[lane]],
                 lane, w, mask, __builtin_ctz(mask & born & ~warp.live));
        }
        if (complete(worker, w, mask)) {
            make_ready(worker, w, mask & warp.live);
        }
    }
}

}  // namespace emu

using namespace emu;

extern "C" void spark_emu_collect(uint32_t op, uint32_t mask, int arg, int width, const void* value, void* result,
                                  EmuSite site) {
    Lane* lane = static_cast<Lane*>(spark_emu_lane);
    Worker* worker = lane->worker;
    const unsigned w = lane->linear / WARP, me = lane->linear % WARP;
    Warp& warp = worker->warps[w];
    if ((mask >> me & 1u) == 0u) {
        fail(worker, EMU_MASK, site, "%s: lane %u of warp %u calls it and is not in its mask %#x", NAMES[op], me, w,
             mask);
    }
    if (width < 1 || width > 32 || (width & (width - 1)) != 0) {
        fail(worker, EMU_MASK, site, "%s: width is %d, a power of two up to 32 is needed", NAMES[op], width);
    }
    if (worker->checker != nullptr) {
        const unsigned alive = worker->threads - w * WARP;
        const uint32_t born = alive >= WARP ? 0xffffffffu : (1u << alive) - 1u;
        if ((mask & born & ~warp.live) != 0u) {
            fail(worker, EMU_MASK, site, "%s of lane %u, warp %u: mask %#x names lane %d, which has left the kernel",
                 NAMES[op], me, w, mask, __builtin_ctz(mask & born & ~warp.live));
        }
    }
    for (uint32_t left = warp.collecting; left != 0u; left &= left - 1u) {
        const unsigned other = __builtin_ctz(left);
        const bool concerned = (mask >> other & 1u) != 0u || (warp.mask[other] >> me & 1u) != 0u;
        if (concerned && (warp.mask[other] != mask || warp.op[other] != op || warp.width[other] != width)) {
            fail(worker, EMU_MASK, site,
                 "lanes of warp %u meet at different collectives: lane %u at %s, mask %#x, width %d, and lane %u at "
                 "%s, mask %#x, width %d, line %d",
                 w, me, NAMES[op], mask, width, other, NAMES[warp.op[other]], warp.mask[other], warp.width[other],
                 worker->lanes[w * WARP + other].site.line);
        }
    }
    warp.op[me] = op;
    warp.mask[me] = mask;
    warp.arg[me] = arg;
    warp.width[me] = width;
    memcpy(warp.value[me], value, 16);
    warp.collecting |= 1u << me;
    lane->site = site;
    if (complete(worker, w, mask)) {
        const uint32_t others = mask & warp.live & ~(1u << me);
        if (others != 0u) {
            make_ready(worker, w, others);
        }
    } else {
        lane->waiting = AT_COLLECTIVE;
        suspend(worker, lane);
    }
    memcpy(result, warp.result[me], 16);
}
