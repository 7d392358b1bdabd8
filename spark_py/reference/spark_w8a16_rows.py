# SPDX-License-Identifier: AGPL-3.0-only
"""Module `spark_w8a16_rows`: rows through block-scaled E4M3 matrices, or each group of a row through its own."""

from __future__ import annotations

import numpy as np

from ._bf16 import Bf16Array, F32Array, to_bf16
from ._e4m3 import U8Array, from_e4m3
from .gemv import dot_matrix
from .w8a16_gemv import BLOCK

_TILE = 128


def spark_w8a16_rows(x: Bf16Array, codes: U8Array, factors: F32Array, groups: int = 1) -> Bf16Array:
    """bf16(sum over blocks of factor * (sum over its k of x[m, g * K + k] value[n, k])): BF16 [M, groups * K], E4M3
    bytes [N, K] and FP32 [ceil(N / 128), ceil(K / 128)] give BF16 [M, N]; output n is of group n // (N / groups).

    The FP32 sum within a block is that of `gemv.dot_matrix`, and blocks are added in ascending order; a tensor core's
    is another, as near. Bytes 0x7F and 0xFF are NaN. K % 16 == 0.
    """
    count, size = codes.shape
    result: Bf16Array = np.empty((len(x), count), x.dtype)
    per_group = count // groups
    with np.errstate(all="ignore"):
        for first in range(0, count, _TILE):
            values = from_e4m3(codes[first : first + _TILE])
            which = (first + np.arange(len(values))) // per_group
            sums: F32Array = np.zeros((len(x), len(values)), np.float32)
            for group in np.unique(which):
                mine = which == group
                for block, start in enumerate(range(0, size, BLOCK)):
                    part = x[:, group * size + start : group * size + min(start + BLOCK, size)]
                    dots = dot_matrix(np.ascontiguousarray(part), values[mine, start : start + BLOCK])
                    sums[:, mine] += factors[first // BLOCK, block] * dots
            result[:, first : first + _TILE] = to_bf16(sums)
    return result
