# SPDX-License-Identifier: AGPL-3.0-only
"""Module `spark_fp8_gemv_rows`: up to eight rows through up to three E4M3 matrices, each row as if it were alone."""

from __future__ import annotations

import numpy as np

from ._bf16 import Bf16Array, F32Array, U32Array, to_bf16
from ._e4m3 import U8Array, from_e4m3
from ._gemv_argmax import winners
from .gemv import dot_matrix

_TILE_ELEMENTS = 1 << 20


def spark_fp8_gemv_rows(x: Bf16Array, codes: U8Array, scales: F32Array, head_dim: int = 0) -> Bf16Array:
    """bf16(scale[n] * sum of x[m, k] value[n, k]): BF16 [M, K], E4M3 bytes [N, K] and FP32 [N] give BF16 [M, N].

    The FP32 sum is that of `gemv.dot_matrix`, a tensor core's is another, as near. head_dim > 0: outputs are [query |
    gate] of a head after the other, 2 head_dim each, and come back as the queries of all heads, then the gates of all.
    K % 16 == 0.
    """
    count = len(codes)
    sums: F32Array = np.empty((len(x), count), np.float32)
    step = max(1, _TILE_ELEMENTS // x.shape[1])
    with np.errstate(all="ignore"):
        for first in range(0, count, step):
            sums[:, first : first + step] = dot_matrix(x, from_e4m3(codes[first : first + step]))
        result = to_bf16(sums * scales)
    if head_dim:
        result = result.reshape(len(x), -1, 2, head_dim).swapaxes(1, 2).reshape(result.shape)
    return result


def spark_fp8_gemv_rows_argmax(
    x: Bf16Array, codes: U8Array, scales: F32Array, table: Bf16Array | None
) -> tuple[U32Array, Bf16Array | None]:
    """(ids u32 [M], embeddings): of each row of `spark_fp8_gemv_rows` the index of the largest, as
    `argmax.argmax_rows` finds it, and the rows BF16 [M, K] of `table` that the ids name."""
    return winners(spark_fp8_gemv_rows(x, codes, scales), table)
