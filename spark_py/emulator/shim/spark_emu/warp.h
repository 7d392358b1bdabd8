// SPDX-License-Identifier: AGPL-3.0-only
// Shuffles, votes, matches and reductions of a warp, each with a mask of lanes that take part.
//
// __activemask() gives the calling lane alone. CUDA promises no more than some set of converged lanes with the caller
// in it, and here no two lanes ever run together.
#pragma once

namespace spark_emu {

template <class T>
static inline T collect(uint32_t op, uint32_t mask, T value, int arg, int width, EmuSite site) {
    static_assert(sizeof(T) <= 16 && std::is_trivially_copyable<T>::value, "a shuffle moves 16 bytes at most");
    alignas(16) unsigned char in[16] = {};
    alignas(16) unsigned char out[16];
    memcpy(in, &value, sizeof(T));
    spark_emu_collect(op, mask, arg, width, in, out, site);
    T result;
    memcpy(&result, out, sizeof(T));
    return result;
}

}  // namespace spark_emu

template <class T>
static inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, SPARK_EMU_SITE) {
    return spark_emu::collect(EMU_SHFL_IDX, mask, value, lane, width, SPARK_EMU_HERE);
}
template <class T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, SPARK_EMU_SITE) {
    return spark_emu::collect(EMU_SHFL_UP, mask, value, static_cast<int>(delta), width, SPARK_EMU_HERE);
}
template <class T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                                 SPARK_EMU_SITE) {
    return spark_emu::collect(EMU_SHFL_DOWN, mask, value, static_cast<int>(delta), width, SPARK_EMU_HERE);
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, SPARK_EMU_SITE) {
    return spark_emu::collect(EMU_SHFL_XOR, mask, value, lane_mask, width, SPARK_EMU_HERE);
}

static inline unsigned __ballot_sync(unsigned mask, int predicate, SPARK_EMU_SITE) {
    return spark_emu::collect<unsigned>(EMU_BALLOT, mask, predicate != 0, 0, 32, SPARK_EMU_HERE);
}
static inline int __any_sync(unsigned mask, int predicate, SPARK_EMU_SITE) {
    return __ballot_sync(mask, predicate, file, line) != 0u;
}
static inline int __all_sync(unsigned mask, int predicate, SPARK_EMU_SITE) {
    return __ballot_sync(mask, !predicate, file, line) == 0u;
}
static inline int __uni_sync(unsigned mask, int predicate, SPARK_EMU_SITE) {
    const unsigned votes = __ballot_sync(mask, predicate, file, line);
    return votes == 0u || votes == mask;
}
template <class T>
static inline unsigned __match_any_sync(unsigned mask, T value, SPARK_EMU_SITE) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "__match_any_sync takes 4 or 8 bytes");
    unsigned long long bits = 0;
    memcpy(&bits, &value, sizeof(T));
    return static_cast<unsigned>(spark_emu::collect(EMU_MATCH_ANY, mask, bits, 0, 32, SPARK_EMU_HERE));
}
template <class T>
static inline unsigned __match_all_sync(unsigned mask, T value, int* all, SPARK_EMU_SITE) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "__match_all_sync takes 4 or 8 bytes");
    unsigned long long bits = 0;
    memcpy(&bits, &value, sizeof(T));
    const unsigned same = static_cast<unsigned>(spark_emu::collect(EMU_MATCH_ALL, mask, bits, 0, 32, SPARK_EMU_HERE));
    *all = same != 0u;
    return same;
}

#define SPARK_EMU_REDUCE(name, type, op)                                                         \
    static inline type name(unsigned mask, type value, SPARK_EMU_SITE) {          \
        return spark_emu::collect(op, mask, value, 0, 32, SPARK_EMU_HERE);                                 \
    }
SPARK_EMU_REDUCE(__reduce_add_sync, unsigned, EMU_ADD)
SPARK_EMU_REDUCE(__reduce_add_sync, int, EMU_ADD)
SPARK_EMU_REDUCE(__reduce_min_sync, unsigned, EMU_MIN_U)
SPARK_EMU_REDUCE(__reduce_min_sync, int, EMU_MIN_S)
SPARK_EMU_REDUCE(__reduce_max_sync, unsigned, EMU_MAX_U)
SPARK_EMU_REDUCE(__reduce_max_sync, int, EMU_MAX_S)
SPARK_EMU_REDUCE(__reduce_and_sync, unsigned, EMU_AND)
SPARK_EMU_REDUCE(__reduce_or_sync, unsigned, EMU_OR)
SPARK_EMU_REDUCE(__reduce_xor_sync, unsigned, EMU_XOR)
#undef SPARK_EMU_REDUCE

static inline void __syncwarp(unsigned mask = 0xffffffffu, SPARK_EMU_SITE) {
    spark_emu::collect(EMU_SYNCWARP, mask, 0u, 0, 32, SPARK_EMU_HERE);
}
static inline unsigned __activemask() { return 1u << (spark_emu_lane->linear % 32u); }
static inline unsigned __lanemask_lt() { return (1u << (spark_emu_lane->linear % 32u)) - 1u; }
