// SPDX-License-Identifier: AGPL-3.0-only
// Integer intrinsics and reinterpretations.
#pragma once

namespace spark_emu {

template <class To, class From>
static inline To bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "");
    To result;
    memcpy(&result, &value, sizeof(To));
    return result;
}

}  // namespace spark_emu

static inline unsigned __float_as_uint(float x) { return spark_emu::bits<unsigned>(x); }
static inline int __float_as_int(float x) { return spark_emu::bits<int>(x); }
static inline float __uint_as_float(unsigned x) { return spark_emu::bits<float>(x); }
static inline float __int_as_float(int x) { return spark_emu::bits<float>(x); }
static inline long long __double_as_longlong(double x) { return spark_emu::bits<long long>(x); }
static inline double __longlong_as_double(long long x) { return spark_emu::bits<double>(x); }
static inline int __double2hiint(double x) { return static_cast<int>(spark_emu::bits<unsigned long long>(x) >> 32); }
static inline int __double2loint(double x) { return static_cast<int>(spark_emu::bits<unsigned long long>(x)); }
static inline double __hiloint2double(int high, int low) {
    return spark_emu::bits<double>(static_cast<unsigned long long>(static_cast<unsigned>(high)) << 32 |
                                   static_cast<unsigned>(low));
}

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
static inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline unsigned __brev(unsigned x) {
    unsigned result = 0u;
    for (int i = 0; i < 32; ++i) {
        result |= ((x >> i) & 1u) << (31 - i);
    }
    return result;
}
static inline unsigned long long __brevll(unsigned long long x) {
    return static_cast<unsigned long long>(__brev(static_cast<unsigned>(x))) << 32 |
           __brev(static_cast<unsigned>(x >> 32));
}
// Byte i of the result is byte selector[4 i + 2 : 4 i] of y:x; bit 3 of a selector spreads that byte's sign.
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const unsigned long long pool = static_cast<unsigned long long>(y) << 32 | x;
    unsigned result = 0u;
    for (int i = 0; i < 4; ++i) {
        const unsigned choice = selector >> (4 * i);
        unsigned byte = static_cast<unsigned>(pool >> (8u * (choice & 7u))) & 0xffu;
        if (choice & 8u) {
            byte = byte & 0x80u ? 0xffu : 0u;
        }
        result |= byte << (8 * i);
    }
    return result;
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) << (shift & 31u) >> 32);
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> (shift & 31u));
}
static inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
static inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<long long>(a) * b >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
static inline long long __mul64hi(long long a, long long b) {
    return static_cast<long long>(static_cast<__int128>(a) * b >> 64);
}
static inline int __mul24(int a, int b) {
    return static_cast<int>(static_cast<unsigned>(a << 8 >> 8) * static_cast<unsigned>(b << 8 >> 8));
}
static inline unsigned __umul24(unsigned a, unsigned b) { return (a & 0xffffffu) * (b & 0xffffffu); }
static inline int __dp4a(int a, int b, int c) {
    unsigned sum = static_cast<unsigned>(c);
    for (int i = 0; i < 4; ++i) {
        sum += static_cast<unsigned>(static_cast<signed char>(a >> (8 * i)) * static_cast<signed char>(b >> (8 * i)));
    }
    return static_cast<int>(sum);
}
static inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
    for (int i = 0; i < 4; ++i) {
        c += (a >> (8 * i) & 0xffu) * (b >> (8 * i) & 0xffu);
    }
    return c;
}
