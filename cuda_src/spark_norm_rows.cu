// SPDX-License-Identifier: AGPL-3.0-only
// Module spark_norm_rows: the norms of a draft head together with what stands before or after them, with the bits of
// rms_norm (or rms_norm_vanilla), bf16_concat and bf16_residual_add one after the other.
//
// A row is a block's, and stays in registers between the sum and the scaling; weights are on their way meanwhile.
// hidden_size is even and at most 8192, all pointers are on 4-byte addresses. Block min(hidden_size, 1024).

#include "rms_norm.cuh"

// to = (x * r) * weight or (x * r) * (1 + weight); every thread of the block calls. A sum has one term a pair, as in
// rms_norm: pairs that do not exist add nothing.
__device__ __forceinline__ void norm_pairs(const RmsPairs& x, const RmsPairs& weight, __nv_bfloat16* to, unsigned count,
                                           bool one_plus, float eps) {
    float squares = 0.0f;
#pragma unroll
    for (unsigned turn = 0u; turn < RMS_KEPT; ++turn) {
        if (turn * blockDim.x + threadIdx.x < count) {
            const float x0 = spark_low(x.word[turn]);
            const float x1 = spark_high(x.word[turn]);
            squares += x0 * x0 + x1 * x1;
        }
    }
    const float r = spark_inverse_rms(spark_block_sum(squares), 2u * count, eps);
#pragma unroll
    for (unsigned turn = 0u; turn < RMS_KEPT; ++turn) {
        const unsigned pair = turn * blockDim.x + threadIdx.x;
        if (pair < count) {
            reinterpret_cast<unsigned*>(to)[pair] = one_plus
                                                        ? spark_scale_pair<true>(x.word[turn], r, weight.word[turn])
                                                        : spark_scale_pair<false>(x.word[turn], r, weight.word[turn]);
        }
    }
}

// out [rows, 2 * hidden_size] = [norm of first | norm of second], BF16 [rows, hidden_size] each, with a weight each; used
// as 1 + w where one_plus. Grid (2, rows).
extern "C" __global__ void __launch_bounds__(1024)
    spark_norm_concat(const __nv_bfloat16* first, const __nv_bfloat16* second, const __nv_bfloat16* first_weight,
                      const __nv_bfloat16* second_weight, __nv_bfloat16* out, unsigned int hidden_size,
                      unsigned int one_plus, float eps) {
    spark_let_next_start();
    const size_t row = blockIdx.y;
    const unsigned count = hidden_size / 2u;
    const __nv_bfloat16* x = (blockIdx.x == 0u ? first : second) + row * hidden_size;
    const RmsPairs weight = spark_load_pairs<true>(blockIdx.x == 0u ? first_weight : second_weight, count, hidden_size);
    spark_wait_for_previous();
    const RmsPairs pairs = spark_load_pairs<true>(x, count, hidden_size);
    norm_pairs(pairs, weight, out + (2u * row + blockIdx.x) * hidden_size, count, one_plus != 0u, eps);
}

// hidden = bf16(hidden + src), output = norm of hidden as it was rounded; BF16 [rows, hidden_size]. Grid (rows).
extern "C" __global__ void __launch_bounds__(1024)
    spark_add_then_norm(__nv_bfloat16* hidden, const __nv_bfloat16* src, const __nv_bfloat16* weight,
                        __nv_bfloat16* output, unsigned int hidden_size, unsigned int one_plus, float eps) {
    spark_let_next_start();
    const size_t start = static_cast<size_t>(blockIdx.x) * hidden_size;
    const unsigned count = hidden_size / 2u;
    const RmsPairs scale = spark_load_pairs<true>(weight, count, hidden_size);
    spark_wait_for_previous();
    RmsPairs pairs = spark_load_pairs<true>(hidden + start, count, hidden_size);
    const RmsPairs added = spark_load_pairs<true>(src + start, count, hidden_size);
#pragma unroll
    for (unsigned turn = 0u; turn < RMS_KEPT; ++turn) {
        const unsigned pair = turn * blockDim.x + threadIdx.x;
        if (pair < count) {
            pairs.word[turn] = spark_pack(spark_low(pairs.word[turn]) + spark_low(added.word[turn]),
                                          spark_high(pairs.word[turn]) + spark_high(added.word[turn]));
            reinterpret_cast<unsigned*>(hidden + start)[pair] = pairs.word[turn];
        }
    }
    norm_pairs(pairs, scale, output + start, count, one_plus != 0u, eps);
}
