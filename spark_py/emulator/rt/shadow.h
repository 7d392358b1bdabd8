// SPDX-License-Identifier: AGPL-3.0-only
// Shadow of memory: for each four bytes, who touched them last.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace emu {

// One access, packed: thread and block, the thread's clock, which of the four bytes, and how.
struct Touch {
    static constexpr unsigned BLOCK_BITS = 27, LANE_BITS = 10, CLOCK_BITS = 20;
    static constexpr uint64_t BLOCK_MASK = (1ull << BLOCK_BITS) - 1, CLOCK_MASK = (1ull << CLOCK_BITS) - 1;

    uint64_t word;

    static Touch of(uint64_t block, unsigned lane, uint64_t clock, unsigned bytes, bool write, bool atomic) {
        return Touch{1ull << 63 | static_cast<uint64_t>(write) << 62 | static_cast<uint64_t>(atomic) << 61 |
                     static_cast<uint64_t>(bytes) << 57 | (clock & CLOCK_MASK) << (BLOCK_BITS + LANE_BITS) |
                     static_cast<uint64_t>(lane) << BLOCK_BITS | (block & BLOCK_MASK)};
    }
    bool valid() const { return word != 0; }
    bool write() const { return (word >> 62 & 1u) != 0; }
    bool atomic() const { return (word >> 61 & 1u) != 0; }
    unsigned bytes() const { return word >> 57 & 15u; }
    uint64_t clock() const { return word >> (BLOCK_BITS + LANE_BITS) & CLOCK_MASK; }
    unsigned lane() const { return word >> BLOCK_BITS & 1023u; }
    uint64_t block() const { return word & BLOCK_MASK; }
    bool same_thread(Touch other) const {
        constexpr uint64_t who = (1ull << (BLOCK_BITS + LANE_BITS)) - 1;
        return ((word ^ other.word) & who) == 0;
    }
};

constexpr unsigned TOUCHES = 4;

struct Cell {
    Touch touch[TOUCHES];
    uint32_t pc[TOUCHES];
};

// The cells of one range of memory, made by the first access.
class Shadow {
   public:
    Shadow() = default;
    ~Shadow();
    Shadow(const Shadow&) = delete;
    Shadow& operator=(const Shadow&) = delete;

    // The cell of a byte; NULL where there is no memory for cells.
    Cell* at(uint64_t address) {
        if (cells_ == nullptr && !make()) {
            return nullptr;
        }
        return cells_ + (address / 4 - base_ / 4);
    }
    void cover(uint64_t base, uint64_t size) {
        base_ = base;
        size_ = size;
    }
    void clear(uint64_t bytes);

   private:
    bool make();
    Cell* cells_ = nullptr;
    uint64_t base_ = 0, size_ = 0;
};

}  // namespace emu
