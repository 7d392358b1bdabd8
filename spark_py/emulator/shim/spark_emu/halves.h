// SPDX-License-Identifier: AGPL-3.0-only
// Arithmetic on BF16 and FP16 that the toolkit's headers give to the device alone.
#pragma once

namespace spark_emu {

// The FP64 sum a * b + c rounded to odd, so that rounding it once more to a narrow type is a single rounding. Products
// of two BF16 or FP16 are exact in FP64.
static inline double odd_fma(double a, double b, double c) {
    const double product = a * b;
    const double sum = product + c;
    const double virtual_c = sum - product;
    const double error = (product - (sum - virtual_c)) + (c - virtual_c);
    unsigned long long word = bits<unsigned long long>(sum);
    if (error != 0.0 && error == error && (word & 1ull) == 0ull && sum - sum == 0.0) {
        // The exact sum lies between `sum` and a neighbour: take the odd one of the two.
        word += (error > 0.0) == (sum > 0.0) ? 1ull : -1ull;
    }
    return bits<double>(word);
}

}  // namespace spark_emu

static inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
    return __double2bfloat16(
        spark_emu::odd_fma(__bfloat162float(a), __bfloat162float(b), __bfloat162float(c)));
}
static inline __half __hfma(__half a, __half b, __half c) {
    return __double2half(spark_emu::odd_fma(__half2float(a), __half2float(b), __half2float(c)));
}
static inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
    return __nv_bfloat162(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y));
}
static inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    return __half2(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y));
}
