// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_gemv_rows: spark_gemv_rows.cuh on BF16 matrices. A stripe is 64 k in two pieces of 32, a piece two
// tensor-core steps: of a lane's chunk the elements 0 to 3 go into the first, 4 to 7 into the second.

#include "spark_gemv_argmax.cuh"

struct Bf16 : GemvFormat {
    using Matrix = GemvMatrix;
    static constexpr unsigned CHUNK = 8u;
    static constexpr bool KEEPS = false;
    static constexpr unsigned BUFFERS = 2u;

    uint4 rows[GEMV_PIECES];

    __device__ __forceinline__ void read_x(const uint4* x, unsigned first, unsigned chunks, bool live) {
#pragma unroll
        for (unsigned p = 0u; p < GEMV_PIECES; ++p) {
            const unsigned chunk = first + 4u * p;
            rows[p] = make_uint4(0u, 0u, 0u, 0u);
            if (live && chunk < chunks) {
                rows[p] = x[chunk];
            }
        }
    }

    __device__ __forceinline__ void multiply(float (&sum)[4], unsigned p, const uint4& low, const uint4& high) const {
        spark_mma(sum, {low.x, high.x, low.y, high.y}, {rows[p].x, rows[p].y});
        spark_mma(sum, {low.z, high.z, low.w, high.w}, {rows[p].z, rows[p].w});
    }

    static __device__ __forceinline__ float scaled(const Matrix&, unsigned, float sum) { return sum; }
};

// Yi[m * stride_i + n] = bf16(sum over k of X[m, k] * Wi[n, k]), Wi BF16 [Ni, K]: tiled_gemv_rows. K % 8 == 0. Any
// dynamic shared memory, which is not used: with some of it fewer blocks run on a multiprocessor at a time.
extern "C" __global__ void __launch_bounds__(256, 4)
    spark_gemv_rows(const __nv_bfloat16* __restrict__ X, const __nv_bfloat16* __restrict__ W0,
                    const __nv_bfloat16* __restrict__ W1, const __nv_bfloat16* __restrict__ W2,
                    __nv_bfloat16* __restrict__ Y0, __nv_bfloat16* __restrict__ Y1, __nv_bfloat16* __restrict__ Y2,
                    unsigned int M, unsigned int N0, unsigned int N1, unsigned int N2, unsigned int K,
                    unsigned int stride0, unsigned int stride1, unsigned int stride2, unsigned int head_dim) {
    const GemvMatrices<Bf16::Matrix> all = {{{reinterpret_cast<const uint4*>(W0), Y0, N0, stride0},
                                             {reinterpret_cast<const uint4*>(W1), Y1, N1, stride1},
                                             {reinterpret_cast<const uint4*>(W2), Y2, N2, stride2}}};
    tiled_gemv_rows(Bf16{}, X, all, M, K, head_dim);
}

// ids[m] = argmax over n of bf16(sum over k of X[m, k] * W[n, k]), embed[m] = row ids[m] of embed_table [N or more, K]:
// spark_gemv_argmax.cuh. K % 8 == 0; embed_table and embed, which may both be NULL, on 16-byte addresses.
extern "C" __global__ void __launch_bounds__(256, 4)
    spark_gemv_rows_argmax(const __nv_bfloat16* __restrict__ X, const __nv_bfloat16* __restrict__ W, unsigned int* ids,
                           const __nv_bfloat16* __restrict__ embed_table, __nv_bfloat16* embed,
                           unsigned long long* best, unsigned int* done, unsigned int M, unsigned int N,
                           unsigned int K) {
    const GemvMatrices<Bf16::Matrix> all = {{{reinterpret_cast<const uint4*>(W), nullptr, N, N}, {}, {}}};
    GemvArgmax<GEMV_TILE, 1u> argmax;
    tiled_gemv_rows(Bf16{}, X, all, M, K, 0u, argmax);
    argmax.finish(M, {best, done}, {ids, embed_table, embed, K});
}
