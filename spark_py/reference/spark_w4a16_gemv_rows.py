# SPDX-License-Identifier: AGPL-3.0-only
"""Module `spark_w4a16_gemv_rows`: up to eight rows through up to three NVFP4 matrices, each row as if it were alone."""

from __future__ import annotations

import numpy as np

from ._bf16 import Bf16Array, F32Array, U32Array, to_bf16
from ._gemv_argmax import winners
from .gemv import dot_matrix
from .quantize_nvfp4 import U8Array
from .w4a16_gemv import CHUNK, E4M3, codes

_TILE_ELEMENTS = 1 << 20


def spark_w4a16_gemv_rows(
    x: Bf16Array, packed: U8Array, scales: U8Array, scale2: float, head_dim: int = 0
) -> Bf16Array:
    """bf16(scale2 * sum of x[m, k] code[n, k] scale[n, k / 16]): BF16 [M, K] and an NVFP4 weight [N, K] give BF16
    [M, N].

    code * scale is exact in BF16; the FP32 sum is that of `gemv.dot_matrix`, a tensor core's is another, as near.
    head_dim > 0: outputs are [query | gate] of a head after the other, 2 head_dim each, and come back as the queries of
    all heads, then the gates of all. K % 256 == 0.
    """
    count, size = len(packed), x.shape[1]
    sums: F32Array = np.empty((len(x), count), np.float32)
    step = max(1, _TILE_ELEMENTS // size)
    with np.errstate(all="ignore"):
        for first in range(0, count, step):
            some = slice(first, first + step)
            weights = codes(packed[some]) * np.repeat(E4M3[scales[some]], CHUNK, axis=1)
            sums[:, some] = dot_matrix(x, to_bf16(weights))
        result = to_bf16(sums * np.float32(scale2))
    if head_dim:
        result = result.reshape(len(x), -1, 2, head_dim).swapaxes(1, 2).reshape(result.shape)
    return result


def spark_w4a16_gemv_rows_argmax(
    x: Bf16Array, packed: U8Array, scales: U8Array, scale2: float, table: Bf16Array | None
) -> tuple[U32Array, Bf16Array | None]:
    """(ids u32 [M], embeddings): of each row of `spark_w4a16_gemv_rows` the index of the largest, as
    `argmax.argmax_rows` finds it, and the rows BF16 [M, K] of `table` that the ids name."""
    return winners(spark_w4a16_gemv_rows(x, packed, scales, scale2), table)
