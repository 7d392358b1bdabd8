# SPDX-License-Identifier: AGPL-3.0-only
"""Module `gemm`: C = A W^T, every output summed in ascending k."""

from __future__ import annotations

import numpy as np

from ._bf16 import Bf16Array, to_bf16, to_f32

_TILE_ELEMENTS = 1 << 16


def dense_gemm_bf16(a: Bf16Array, b: Bf16Array) -> Bf16Array:
    """bf16(a[m] . b[n]): BF16 [M, K] and BF16 [N, K] give BF16 [M, N].

    One FP32 sum an output, ascending k, one addition for each product (exact in FP32). An output's bits depend on its
    two rows alone, not on M or N.
    """
    rows, depth = a.shape
    columns = b.shape[0]
    result = np.empty((rows, columns), a.dtype)
    width = max(1, _TILE_ELEMENTS // rows)
    by_k = np.ascontiguousarray(to_f32(a).T)[:, :, None]
    with np.errstate(all="ignore"):
        for start in range(0, columns, width):
            factors = np.ascontiguousarray(to_f32(b[start : start + width]).T)[:, None, :]
            sums = np.zeros((rows, factors.shape[2]), np.float32)
            products = np.empty_like(sums)
            for k in range(depth):
                np.multiply(by_k[k], factors[k], out=products)
                sums += products
            result[:, start : start + width] = to_bf16(sums)
    return result


def dense_gemm_bf16_pipelined(a: Bf16Array, b: Bf16Array) -> Bf16Array:
    """As `dense_gemm_bf16`. Tensor cores sum in an order of their own, so the kernel has other last bits."""
    return dense_gemm_bf16(a, b)
