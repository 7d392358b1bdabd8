# SPDX-License-Identifier: AGPL-3.0-only
"""Module `spark_v4_grouped_gemv`: a block-diagonal projection, each group with the bits of `gemv.dense_gemv_bf16`."""

from __future__ import annotations

import numpy as np

from ._bf16 import Bf16Array, to_bf16
from .gemv import dot_matrix


def spark_v4_grouped_gemv(x: Bf16Array, weights: Bf16Array) -> Bf16Array:
    """bf16(x[m, g] . w[g, n]): BF16 [M, groups, K] and BF16 [groups, N, K] give BF16 [M, groups, N]. K % 8 == 0.

    Order of the FP32 sum as `gemv.dot_matrix`, so that a group's bits depend on its own elements alone.
    """
    result = np.empty((len(x), *weights.shape[:2]), x.dtype)
    for group, block in enumerate(weights):
        result[:, group] = to_bf16(dot_matrix(x[:, group], block))
    return result
