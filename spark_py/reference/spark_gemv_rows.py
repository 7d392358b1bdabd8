# SPDX-License-Identifier: AGPL-3.0-only
"""Module `spark_gemv_rows`: up to eight rows through up to three matrices, each row as if it were alone."""

from __future__ import annotations

from ._bf16 import Bf16Array, to_bf16
from .gemv import dot_matrix


def spark_gemv_rows(x: Bf16Array, weights: Bf16Array, head_dim: int = 0) -> Bf16Array:
    """bf16(x[m] . w[n]): BF16 [M, K] and BF16 [N, K] give BF16 [M, N]. K % 8 == 0.

    head_dim > 0: outputs are [query | gate] of a head after the other, 2 head_dim each, and come back as the queries of
    all heads, then the gates of all. The FP32 sum is that of `gemv.dot_matrix`; a tensor core's is another, as near.
    """
    result = to_bf16(dot_matrix(x, weights))
    if head_dim:
        result = result.reshape(len(x), -1, 2, head_dim).swapaxes(1, 2).reshape(result.shape)
    return result
