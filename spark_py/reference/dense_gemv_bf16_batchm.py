# SPDX-License-Identifier: AGPL-3.0-only
"""Module `dense_gemv_bf16_batchm`: Y = X W^T for a few rows, each with the bits of `gemv.dense_gemv_bf16`."""

from __future__ import annotations

import numpy as np

from ._bf16 import Bf16Array
from .gemv import dense_gemv_bf16


def dense_gemv_bf16_batchm(x: Bf16Array, weights: Bf16Array) -> Bf16Array:
    """bf16(x[m] . w[n]): BF16 [M, K] and BF16 [N, K] give BF16 [M, N]. K % 8 == 0.

    Order of the FP32 sum as `gemv.dot_rows`, so that a row's bits do not depend on M.
    """
    return np.stack([dense_gemv_bf16(row, weights) for row in x])
