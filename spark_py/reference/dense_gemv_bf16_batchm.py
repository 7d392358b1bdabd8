# SPDX-License-Identifier: AGPL-3.0-only
"""Module `dense_gemv_bf16_batchm`: Y = X W^T for a few rows, each with the bits of `gemv.dense_gemv_bf16`."""

from __future__ import annotations

from ._bf16 import Bf16Array, to_bf16
from .gemv import dot_matrix


def dense_gemv_bf16_batchm(x: Bf16Array, weights: Bf16Array) -> Bf16Array:
    """bf16(x[m] . w[n]): BF16 [M, K] and BF16 [N, K] give BF16 [M, N]. K % 8 == 0.

    Order of the FP32 sum as `gemv.dot_matrix`, so that a row's bits do not depend on M.
    """
    return to_bf16(dot_matrix(x, weights))
