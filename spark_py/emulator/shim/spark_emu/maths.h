// SPDX-License-Identifier: AGPL-3.0-only
// Floating-point functions that CUDA has and <cmath> lacks. The approximate ones (__expf and its kin) are the exact
// functions here: results differ from a GPU's by its error, never by more.
#pragma once

// glibc declares these names as functions of its own.
#define __expf(x) expf(x)
#define __exp10f(x) exp10f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)
#define __powf(x, y) powf(x, y)
#define __sincosf(x, s, c) sincosf(x, s, c)
#define __fdividef(x, y) ((x) / (y))

// C23 has these names too, and newer C libraries declare them.
#define rsqrtf spark_emu_rsqrtf
#define rsqrt spark_emu_rsqrt
#define sinpif spark_emu_sinpif
#define cospif spark_emu_cospif
static inline float rsqrtf(float x) { return static_cast<float>(1.0 / sqrt(static_cast<double>(x))); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
static inline float sinpif(float x) { return static_cast<float>(sin(M_PI * static_cast<double>(x))); }
static inline float cospif(float x) { return static_cast<float>(cos(M_PI * static_cast<double>(x))); }
static inline float rcbrtf(float x) { return static_cast<float>(1.0 / cbrt(static_cast<double>(x))); }
static inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }  // NaN gives 0
static inline float normcdff(float x) { return static_cast<float>(0.5 * erfc(-x * 0.70710678118654752440)); }
static inline double normcdf(double x) { return 0.5 * erfc(-x * 0.70710678118654752440); }

static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __frsqrt_rn(float a) { return rsqrtf(a); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __ddiv_rn(double a, double b) { return a / b; }
static inline double __dsqrt_rn(double a) { return sqrt(a); }
static inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }

namespace spark_emu {

// To an integer as the GPU does it: rounded by `mode`, held to the type's range, NaN gives 0 (64 bits: its lowest bit
// pattern with the top bit alone).
template <class To, class From>
static inline To to_integer(From x, From (*mode)(From)) {
    if (x != x) {
        return sizeof(To) == 8 ? static_cast<To>(1ull << 63) : static_cast<To>(0);
    }
    const From whole = mode(x);
    constexpr To low = std::is_signed<To>::value ? static_cast<To>(1ull << (8 * sizeof(To) - 1)) : static_cast<To>(0);
    constexpr To high = static_cast<To>(~low);
    if (whole <= static_cast<From>(low)) {
        return low;
    }
    return whole >= static_cast<From>(high) ? high : static_cast<To>(whole);
}

}  // namespace spark_emu

#define SPARK_EMU_TO_INTEGER(from, word, To, From, suffix)                                                           \
    static inline To __##from##2##word##_rn(From x) { return spark_emu::to_integer<To, From>(x, rint##suffix); }     \
    static inline To __##from##2##word##_rz(From x) { return spark_emu::to_integer<To, From>(x, trunc##suffix); }    \
    static inline To __##from##2##word##_ru(From x) { return spark_emu::to_integer<To, From>(x, ceil##suffix); }     \
    static inline To __##from##2##word##_rd(From x) { return spark_emu::to_integer<To, From>(x, floor##suffix); }
SPARK_EMU_TO_INTEGER(float, int, int, float, f)
SPARK_EMU_TO_INTEGER(float, uint, unsigned, float, f)
SPARK_EMU_TO_INTEGER(float, ll, long long, float, f)
SPARK_EMU_TO_INTEGER(float, ull, unsigned long long, float, f)
SPARK_EMU_TO_INTEGER(double, int, int, double, )
SPARK_EMU_TO_INTEGER(double, uint, unsigned, double, )
SPARK_EMU_TO_INTEGER(double, ll, long long, double, )
SPARK_EMU_TO_INTEGER(double, ull, unsigned long long, double, )
#undef SPARK_EMU_TO_INTEGER
static inline float __int2float_rn(int x) { return static_cast<float>(x); }
static inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
static inline float __ll2float_rn(long long x) { return static_cast<float>(x); }
static inline float __ull2float_rn(unsigned long long x) { return static_cast<float>(x); }
static inline double __int2double_rn(int x) { return x; }
static inline double __uint2double_rn(unsigned x) { return x; }
static inline float __double2float_rn(double x) { return static_cast<float>(x); }

// min and max as CUDA overloads them: the other number where one is NaN; mixed signs compare as unsigned.
#define SPARK_EMU_MIN_MAX(type)                                           \
    static inline type min(type a, type b) { return b < a ? b : a; }      \
    static inline type max(type a, type b) { return a < b ? b : a; }
SPARK_EMU_MIN_MAX(int)
SPARK_EMU_MIN_MAX(unsigned)
SPARK_EMU_MIN_MAX(long)
SPARK_EMU_MIN_MAX(unsigned long)
SPARK_EMU_MIN_MAX(long long)
SPARK_EMU_MIN_MAX(unsigned long long)
#undef SPARK_EMU_MIN_MAX
static inline unsigned min(int a, unsigned b) { return min(static_cast<unsigned>(a), b); }
static inline unsigned min(unsigned a, int b) { return min(a, static_cast<unsigned>(b)); }
static inline unsigned max(int a, unsigned b) { return max(static_cast<unsigned>(a), b); }
static inline unsigned max(unsigned a, int b) { return max(a, static_cast<unsigned>(b)); }
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline double min(double a, double b) { return fmin(a, b); }
static inline double max(double a, double b) { return fmax(a, b); }
static inline double min(float a, double b) { return fmin(a, b); }
static inline double min(double a, float b) { return fmin(a, b); }
static inline double max(float a, double b) { return fmax(a, b); }
static inline double max(double a, float b) { return fmax(a, b); }
