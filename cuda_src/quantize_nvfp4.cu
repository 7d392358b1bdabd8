// SPDX-License-Identifier: AGPL-3.0-only
// Module quantize_nvfp4: BF16 weights to NVFP4, that is E2M1 values in groups of 16 along K with an E4M3 scale each,
// under one FP32 factor. w = value * scale * scale2.
//
// Both encoders are the engine's, bit for bit, and neither rounds as the hardware does.

#include "absmax.cuh"

constexpr unsigned GROUP = 16u;
constexpr float E2M1_MAX = 6.0f;
constexpr float E4M3_MAX = 448.0f;
constexpr unsigned E4M3_MAX_CODE = 0x7eu;
constexpr float E4M3_LEAST_NORMAL = 0.015625f;        // 2^-6
constexpr float E4M3_LEAST_SUBNORMAL = 0.001953125f;  // 2^-9

// A magnitude as E4M3. Normals round half up; subnormals do too, but stay below 2^-6; what is below 2^-9 is 0; what is
// above 448, and NaN, is 448.
__device__ __forceinline__ unsigned encode_e4m3(float a) {
    if (!(a <= E4M3_MAX)) {
        return E4M3_MAX_CODE;
    }
    if (a >= E4M3_LEAST_NORMAL) {
        // 3 of 23 bits of mantissa, and a bias of 7 for 127; a carry goes into the exponent.
        return ((__float_as_uint(a) + (1u << 19)) >> 20) - ((127u - 7u) << 3);
    }
    if (a >= E4M3_LEAST_SUBNORMAL) {
        const unsigned steps = static_cast<unsigned>(a * 512.0f + 0.5f);
        return steps < 7u ? steps : 7u;
    }
    return 0u;
}

// The value of a code from 0 to 0x7e.
__device__ __forceinline__ float decode_e4m3(unsigned code) {
    return code < 8u ? static_cast<float>(code) * E4M3_LEAST_SUBNORMAL
                     : __uint_as_float((code + ((127u - 7u) << 3)) << 20);
}

// The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, a tie to the smaller magnitude. Bit 3 is the sign of numbers below zero:
// one that rounds to zero keeps it, -0.0 has none. NaN is +6.
__device__ __forceinline__ unsigned encode_e2m1(float y) {
    const float a = fabsf(y);
    const unsigned sign = y < 0.0f ? 8u : 0u;
    unsigned code = 7u;
    code = a <= 5.0f ? 6u : code;
    code = a <= 3.5f ? 5u : code;
    code = a <= 2.5f ? 4u : code;
    code = a <= 1.75f ? 3u : code;
    code = a <= 1.25f ? 2u : code;
    code = a <= 0.75f ? 1u : code;
    code = a <= 0.25f ? 0u : code;
    return sign | code;
}

__device__ __forceinline__ void load_group(const __nv_bfloat16* from, float (&x)[GROUP]) {
    if (spark_aligned(from, 16u)) {
#pragma unroll
        for (unsigned half = 0u; half < 2u; ++half) {
            const uint4 words = reinterpret_cast<const uint4*>(from)[half];
            const unsigned word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
            for (unsigned w = 0u; w < 4u; ++w) {
                x[8u * half + 2u * w] = spark_low(word[w]);
                x[8u * half + 2u * w + 1u] = spark_high(word[w]);
            }
        }
    } else {
#pragma unroll
        for (unsigned i = 0u; i < GROUP; ++i) {
            x[i] = spark_load(from + i);
        }
    }
}

// Eight bytes, the lowest of word 0 first.
__device__ __forceinline__ void store_group(unsigned char* to, const unsigned (&word)[2]) {
    if (spark_aligned(to, 8u)) {
        *reinterpret_cast<uint2*>(to) = make_uint2(word[0], word[1]);
    } else {
#pragma unroll
        for (unsigned i = 0u; i < GROUP / 2u; ++i) {
            to[i] = static_cast<unsigned char>(word[i / 4u] >> (8u * (i % 4u)));
        }
    }
}

// *global_max = the larger of it and max |input| over total_elements values; the caller zeroes it first. Grid
// clamp(total_elements / 256, 1, 1024), block 256. NaN is passed over.
extern "C" __global__ void nvfp4_global_absmax(const __nv_bfloat16* input, float* global_max,
                                               unsigned int total_elements) {
    const size_t first = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const size_t threads = static_cast<size_t>(gridDim.x) * blockDim.x;
    const float most = spark_block_max(spark_absmax(input, total_elements, first, threads));
    if (threadIdx.x == 0u) {
        // Numbers that are not negative are ordered as their bits are.
        atomicMax(reinterpret_cast<unsigned*>(global_max), __float_as_uint(most));
    }
}

// Row n of input [N, K] as codes, packed_out [N, K / 2] (the even k in the low nibble), and scales, scale_out
// [N, K / 16]. Grid N, block 256: a thread takes groups. K % 16 == 0.
extern "C" __global__ void quantize_bf16_to_nvfp4(const __nv_bfloat16* input, unsigned char* packed_out,
                                                  unsigned char* scale_out, float scale2, unsigned int N,
                                                  unsigned int K) {
    const size_t row = blockIdx.x;
    if (row >= N) {
        return;
    }
    const unsigned groups = K / GROUP;
    const float per_scale2 = 1.0f / scale2;
    for (unsigned g = threadIdx.x; g < groups; g += blockDim.x) {
        const size_t at = row * groups + g;
        float x[GROUP];
        load_group(input + at * GROUP, x);
        float most = 0.0f;
#pragma unroll
        for (unsigned i = 0u; i < GROUP; ++i) {
            most = spark_larger(most, x[i]);
        }
        const unsigned scale = most > 0.0f ? encode_e4m3(most * per_scale2 / E2M1_MAX) : 0u;
        const float step = decode_e4m3(scale) * scale2;
        const float per_step = step > 0.0f ? 1.0f / step : 0.0f;
        unsigned word[2] = {0u, 0u};
#pragma unroll
        for (unsigned i = 0u; i < GROUP; ++i) {
            word[i / 8u] |= encode_e2m1(x[i] * per_step) << (4u * (i % 8u));
        }
        store_group(packed_out + at * (GROUP / 2u), word);
        scale_out[at] = static_cast<unsigned char>(scale);
    }
}
