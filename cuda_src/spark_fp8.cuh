// SPDX-License-Identifier: AGPL-3.0-only
// E4M3 bytes from FP32 and back, by the toolkit's conversions: instructions from sm_89, arithmetic below.
#pragma once

#include <cuda_fp8.h>

#include "spark_common.cuh"

// FP32 to E4M3: nearest, ties to even, everything beyond (infinity too) to +-448; NaN becomes 0x7f, whatever its sign.
__device__ __forceinline__ unsigned char spark_to_e4m3(float value) {
    return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
}

// Two of them; `low` comes first in memory.
__device__ __forceinline__ unsigned spark_pack_e4m3(float low, float high) {
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

// E4M3 to FP32: exact. Below sm_89 the toolkit's conversion branches and loops over each byte, so it is done here: the
// bits of exponent and fraction mean the same in FP32, 2^120 times smaller, subnormals included.
__device__ __forceinline__ float spark_from_e4m3(unsigned char byte) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(byte, __NV_E4M3)));
#else
    const unsigned code = byte;
    const float value = __uint_as_float(((code & 0x80u) << 24) | ((code & 0x7fu) << 20)) * 0x1p120f;
    return (code & 0x7fu) == 0x7fu ? __uint_as_float(0x7fffffffu) : value;
#endif
}

// Two of them; the low byte comes first.
__device__ __forceinline__ void spark_widen_e4m3(unsigned short bytes, float* to) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    const float2 values = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(bytes, __NV_E4M3)));
    to[0] = values.x;
    to[1] = values.y;
#else
    to[0] = spark_from_e4m3(static_cast<unsigned char>(bytes));
    to[1] = spark_from_e4m3(static_cast<unsigned char>(bytes >> 8));
#endif
}

// Pairs (0, 1) and (2, 3) of a word of E4M3 bytes, as BF16. Exact; NaN stays NaN.
__device__ __forceinline__ void spark_e4m3_pairs(unsigned bytes, unsigned (&pairs)[2]) {
#pragma unroll
    for (unsigned i = 0u; i < 2u; ++i) {
        float values[2];
        spark_widen_e4m3(static_cast<unsigned short>(bytes >> (16u * i)), values);
        pairs[i] = spark_pack(values[0], values[1]);
    }
}
