// SPDX-License-Identifier: AGPL-3.0-only
// Module w4a16_gemv, kernels for several rows: Y = X W^T with NVFP4 weights [N, K]. Each weight is read once for all
// rows of a group of lanes, and each row has the bits that w4a16_gemv gives it alone.
//
// Grid ceil(N / 4), block 256; K % 16 == 0, A on a 16-byte address, B_packed on an 8-byte one. A [M, K] and C [M, N] are
// contiguous. The number in a name is the most rows M the kernel computes (the host refuses more).

#include "w4a16.cuh"

// M is 2.
extern "C" __global__ void __launch_bounds__(256)
    w4a16_gemv_batch2(const __nv_bfloat16* __restrict__ A, const unsigned char* __restrict__ B_packed,
                      const unsigned char* __restrict__ B_scale, float scale2, __nv_bfloat16* __restrict__ C,
                      unsigned int N, unsigned int K) {
    spark_w4_block<2u, 2u, 4u>(A, B_packed, B_scale, scale2, C, 2u, N, K);
}

// M is 3.
extern "C" __global__ void __launch_bounds__(256)
    w4a16_gemv_batch3(const __nv_bfloat16* __restrict__ A, const unsigned char* __restrict__ B_packed,
                      const unsigned char* __restrict__ B_scale, float scale2, __nv_bfloat16* __restrict__ C,
                      unsigned int N, unsigned int K) {
    spark_w4_block<3u, 2u, 4u>(A, B_packed, B_scale, scale2, C, 3u, N, K);
}

extern "C" __global__ void __launch_bounds__(256)
    w4a16_gemv_batch4(const __nv_bfloat16* __restrict__ A, const unsigned char* __restrict__ B_packed,
                      const unsigned char* __restrict__ B_scale, float scale2, __nv_bfloat16* __restrict__ C,
                      unsigned int M, unsigned int N, unsigned int K) {
    spark_w4_block<4u, 4u, 4u>(A, B_packed, B_scale, scale2, C, M, N, K);
}

extern "C" __global__ void __launch_bounds__(256)
    w4a16_gemv_batch5(const __nv_bfloat16* __restrict__ A, const unsigned char* __restrict__ B_packed,
                      const unsigned char* __restrict__ B_scale, float scale2, __nv_bfloat16* __restrict__ C,
                      unsigned int M, unsigned int N, unsigned int K) {
    spark_w4_block<5u, 4u, 4u>(A, B_packed, B_scale, scale2, C, M, N, K);
}

extern "C" __global__ void __launch_bounds__(256)
    w4a16_gemv_batch6(const __nv_bfloat16* __restrict__ A, const unsigned char* __restrict__ B_packed,
                      const unsigned char* __restrict__ B_scale, float scale2, __nv_bfloat16* __restrict__ C,
                      unsigned int M, unsigned int N, unsigned int K) {
    spark_w4_block<6u, 4u, 4u>(A, B_packed, B_scale, scale2, C, M, N, K);
}

extern "C" __global__ void __launch_bounds__(256)
    w4a16_gemv_batch7(const __nv_bfloat16* __restrict__ A, const unsigned char* __restrict__ B_packed,
                      const unsigned char* __restrict__ B_scale, float scale2, __nv_bfloat16* __restrict__ C,
                      unsigned int M, unsigned int N, unsigned int K) {
    spark_w4_block<7u, 4u, 4u>(A, B_packed, B_scale, scale2, C, M, N, K);
}

extern "C" __global__ void __launch_bounds__(256)
    w4a16_gemv_batch8(const __nv_bfloat16* __restrict__ A, const unsigned char* __restrict__ B_packed,
                      const unsigned char* __restrict__ B_scale, float scale2, __nv_bfloat16* __restrict__ C,
                      unsigned int M, unsigned int N, unsigned int K) {
    spark_w4_block<8u, 4u, 4u>(A, B_packed, B_scale, scale2, C, M, N, K);
}

extern "C" __global__ void __launch_bounds__(256)
    w4a16_gemv_batch16(const __nv_bfloat16* __restrict__ A, const unsigned char* __restrict__ B_packed,
                       const unsigned char* __restrict__ B_scale, float scale2, __nv_bfloat16* __restrict__ C,
                       unsigned int M, unsigned int N, unsigned int K) {
    spark_w4_block<16u, 4u, 4u>(A, B_packed, B_scale, scale2, C, M, N, K);
}

extern "C" __global__ void __launch_bounds__(256)
    w4a16_gemv_batch32(const __nv_bfloat16* __restrict__ A, const unsigned char* __restrict__ B_packed,
                       const unsigned char* __restrict__ B_scale, float scale2, __nv_bfloat16* __restrict__ C,
                       unsigned int M, unsigned int N, unsigned int K) {
    spark_w4_block<32u, 4u, 4u>(A, B_packed, B_scale, scale2, C, M, N, K);
}

// Eight outputs a block: of a grid of ceil(N / 4) the second half has nothing to do.
extern "C" __global__ void __launch_bounds__(256)
    w4a16_gemv_batch8_rt2(const __nv_bfloat16* __restrict__ A, const unsigned char* __restrict__ B_packed,
                          const unsigned char* __restrict__ B_scale, float scale2, __nv_bfloat16* __restrict__ C,
                          unsigned int M, unsigned int N, unsigned int K) {
    spark_w4_block<8u, 4u, 8u>(A, B_packed, B_scale, scale2, C, M, N, K);
}
