// SPDX-License-Identifier: AGPL-3.0-only
// Atomic operations, exact over the OS threads that share a grid.
#pragma once

namespace spark_emu {

template <size_t SIZE>
struct Word;
template <>
struct Word<2> {
    using type = unsigned short;
};
template <>
struct Word<4> {
    using type = unsigned;
};
template <>
struct Word<8> {
    using type = unsigned long long;
};

// *p = next(*p) as one step; gives the old value. `next` may be called several times.
template <class T, class Next>
__attribute__((noinline, no_sanitize("thread", "alignment"))) static T update(T* p, Next next) {
    using W = typename Word<sizeof(T)>::type;
    spark_emu_atomic(p, sizeof(T));
    W* word = reinterpret_cast<W*>(p);
    W old = __atomic_load_n(word, __ATOMIC_SEQ_CST);
    for (;;) {
        T before;
        memcpy(&before, &old, sizeof(T));
        const T after = next(before);
        W wanted;
        memcpy(&wanted, &after, sizeof(T));
        if (__atomic_compare_exchange_n(word, &old, wanted, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
            return before;
        }
    }
}

}  // namespace spark_emu

#define SPARK_EMU_ATOMIC(name, type, expression)                                       \
    static inline type name(type* p, type value) {                                     \
        return spark_emu::update(p, [value](type old) { return (type)(expression); }); \
    }                                                                                  \
    static inline type name##_block(type* p, type value) { return name(p, value); }    \
    static inline type name##_system(type* p, type value) { return name(p, value); }

#define SPARK_EMU_ATOMIC_INTEGERS(name, expression)       \
    SPARK_EMU_ATOMIC(name, int, expression)               \
    SPARK_EMU_ATOMIC(name, unsigned, expression)          \
    SPARK_EMU_ATOMIC(name, long long, expression)         \
    SPARK_EMU_ATOMIC(name, unsigned long long, expression)

SPARK_EMU_ATOMIC(atomicAdd, int, static_cast<unsigned>(old) + static_cast<unsigned>(value))
SPARK_EMU_ATOMIC(atomicAdd, unsigned, old + value)
SPARK_EMU_ATOMIC(atomicAdd, unsigned long long, old + value)
SPARK_EMU_ATOMIC(atomicAdd, float, old + value)
SPARK_EMU_ATOMIC(atomicAdd, double, old + value)
SPARK_EMU_ATOMIC(atomicAdd, __half, __hadd(old, value))
SPARK_EMU_ATOMIC(atomicAdd, __nv_bfloat16, __hadd(old, value))
SPARK_EMU_ATOMIC(atomicAdd, __half2, __hadd2(old, value))
SPARK_EMU_ATOMIC(atomicAdd, __nv_bfloat162, __hadd2(old, value))
SPARK_EMU_ATOMIC(atomicSub, int, static_cast<unsigned>(old) - static_cast<unsigned>(value))
SPARK_EMU_ATOMIC(atomicSub, unsigned, old - value)
SPARK_EMU_ATOMIC_INTEGERS(atomicMin, value < old ? value : old)
SPARK_EMU_ATOMIC_INTEGERS(atomicMax, value > old ? value : old)
SPARK_EMU_ATOMIC_INTEGERS(atomicAnd, old & value)
SPARK_EMU_ATOMIC_INTEGERS(atomicOr, old | value)
SPARK_EMU_ATOMIC_INTEGERS(atomicXor, old ^ value)
SPARK_EMU_ATOMIC_INTEGERS(atomicExch, value)
SPARK_EMU_ATOMIC(atomicExch, float, value)
SPARK_EMU_ATOMIC(atomicInc, unsigned, old >= value ? 0u : old + 1u)
SPARK_EMU_ATOMIC(atomicDec, unsigned, old == 0u || old > value ? value : old - 1u)
#undef SPARK_EMU_ATOMIC_INTEGERS
#undef SPARK_EMU_ATOMIC

template <class T>
static inline T atomicCAS(T* p, T compare, T value) {
    return spark_emu::update(p, [=](T old) { return memcmp(&old, &compare, sizeof(T)) == 0 ? value : old; });
}
