# SPDX-License-Identifier: AGPL-3.0-only
"""Module `spark_gemv_rows`: up to eight rows through up to three matrices, each row as if it were alone."""

from __future__ import annotations

from ._bf16 import Bf16Array, U32Array, to_bf16
from ._gemv_argmax import winners
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


def spark_gemv_rows_argmax(
    x: Bf16Array, weights: Bf16Array, table: Bf16Array | None
) -> tuple[U32Array, Bf16Array | None]:
    """(ids u32 [M], embeddings): of each row of `spark_gemv_rows` the index of the largest, as
    `argmax.argmax_rows` finds it, and the rows BF16 [M, K] of `table` that the ids name."""
    return winners(spark_gemv_rows(x, weights), table)
