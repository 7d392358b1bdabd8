// SPDX-License-Identifier: AGPL-3.0-only
// Module residual_add: element-wise BF16 kernels. Grid ceil(n / 256), block 256, one element a thread; no alignment
// beyond the element's, and operands may be the output.

#include "spark_common.cuh"

__device__ __forceinline__ size_t element() { return static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; }

// residual = bf16(residual + src)
extern "C" __global__ void bf16_residual_add(__nv_bfloat16* residual, const __nv_bfloat16* src, unsigned int n) {
    spark_let_next_start();
    spark_wait_for_previous();
    const size_t i = element();
    if (i < n) {
        spark_store(residual + i, spark_load(residual + i) + spark_load(src + i));
    }
}

// output = bf16(input * sigmoid(gate)); output may be input.
extern "C" __global__ void sigmoid_gate_mul(const __nv_bfloat16* input, const __nv_bfloat16* gate,
                                            __nv_bfloat16* output, unsigned int n) {
    spark_let_next_start();
    spark_wait_for_previous();
    const size_t i = element();
    if (i < n) {
        const float sigmoid = 1.0f / (1.0f + expf(-spark_load(gate + i)));
        spark_store(output + i, spark_load(input + i) * sigmoid);
    }
}

// out[0, N) = a, out[N, 2N) = b, bit for bit.
extern "C" __global__ void bf16_concat(const __nv_bfloat16* a, const __nv_bfloat16* b, __nv_bfloat16* out,
                                       unsigned int N) {
    spark_let_next_start();
    spark_wait_for_previous();
    const size_t i = element();
    if (i < N) {
        out[i] = a[i];
        out[N + i] = b[i];
    }
}
