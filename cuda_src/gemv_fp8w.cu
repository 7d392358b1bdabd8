// SPDX-License-Identifier: AGPL-3.0-only
// Module gemv_fp8w: BF16 weights to E4M3 with one FP32 factor a row, and y = x W^T with such weights. Parameters and
// geometry are the engine's.

#include "absmax.cuh"
#include "fp8_gemv.cuh"

constexpr float E4M3_MAX = 448.0f;

// row_scales[n] = max |input[n]| / 448, 1 for a row of zeros; output[n] = E4M3(input[n] * (1 / scale)), nearest even,
// saturating. NaN is passed over by the maximum and stays NaN, 0x7f. Grid N, block 256; any K and any address.
extern "C" __global__ void quantize_bf16_to_fp8(const __nv_bfloat16* input, unsigned char* output, float* row_scales,
                                                unsigned int N, unsigned int K) {
    spark_let_next_start();
    spark_wait_for_previous();
    const size_t row = blockIdx.x;
    const __nv_bfloat16* from = input + row * K;
    unsigned char* to = output + row * K;
    const size_t count = row < N ? K : 0u;
    const float most = spark_block_max(spark_absmax(from, count, threadIdx.x, blockDim.x));
    const float scale = most > 0.0f ? most / E4M3_MAX : 1.0f;
    const float per_scale = 1.0f / scale;
    const size_t chunks = spark_aligned(from, 16u) && spark_aligned(to, 8u) ? count / ABSMAX_CHUNK : 0u;
    for (size_t c = threadIdx.x; c < chunks; c += blockDim.x) {
        const uint4 words = reinterpret_cast<const uint4*>(from)[c];
        const unsigned word[4] = {words.x, words.y, words.z, words.w};
        unsigned pair[4];
#pragma unroll
        for (unsigned w = 0u; w < 4u; ++w) {
            pair[w] = spark_pack_e4m3(spark_low(word[w]) * per_scale, spark_high(word[w]) * per_scale);
        }
        reinterpret_cast<uint2*>(to)[c] = make_uint2(pair[0] | (pair[1] << 16), pair[2] | (pair[3] << 16));
    }
    for (size_t i = chunks * ABSMAX_CHUNK + threadIdx.x; i < count; i += blockDim.x) {
        to[i] = spark_to_e4m3(spark_load(from + i) * per_scale);
    }
    if (threadIdx.x == 0u && row < N) {
        row_scales[row] = scale;
    }
}

// C[n] = bf16(A . B[n]), scaled by row, in the order of fp8_gemv.cuh. Bytes 0x7f and 0xff are NaN. Grid ceil(N / 4),
// block 256. K % 16 == 0; A and B on 16-byte addresses.
extern "C" __global__ void __launch_bounds__(256)
    dense_gemv_fp8w(const __nv_bfloat16* __restrict__ A, const unsigned char* __restrict__ B,
                    const float* __restrict__ row_scale, __nv_bfloat16* __restrict__ C, unsigned int N,
                    unsigned int K) {
    spark_let_next_start();
    spark_wait_for_previous();
    __shared__ float warp_sums[1][FP8_WARPS];
    fp8_gemv_block<Fp8Scales::ROW, 1u, 1u>(A, B, row_scale, C, N, K, 0u, warp_sums);
}
