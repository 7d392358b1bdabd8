# SPDX-License-Identifier: AGPL-3.0-only
"""Module `w4a16_gemv`, joint projections of several rows, in the order of `w4a16_gemv.scaled_by_weight`."""

from __future__ import annotations

import numpy as np

from ._bf16 import Bf16Array, to_bf16
from .quantize_nvfp4 import U8Array
from .w4a16_gemv import scaled_by_weight


def _rows(x: Bf16Array, packed: U8Array, scales: U8Array, scale2: float) -> Bf16Array:
    return to_bf16(np.stack([scaled_by_weight(row, packed, scales, scale2) for row in x]))


def w4a16_gemv_qg_batch(
    x: Bf16Array, packed: U8Array, scales: U8Array, scale2: float, num_heads: int, head_dim: int
) -> Bf16Array:
    """Each row as `w4a16_gemv.w4a16_gemv_qg` has it: BF16 [M, K] gives BF16 [M, 2 * num_heads * head_dim]."""
    heads = _rows(x, packed, scales, scale2).reshape(len(x), num_heads, 2, head_dim)
    return heads.transpose(0, 2, 1, 3).reshape(len(x), -1)


def w4a16_gemv_dual_batch(
    x: Bf16Array,
    packed_0: U8Array,
    scales_0: U8Array,
    scale2_0: float,
    packed_1: U8Array,
    scales_1: U8Array,
    scale2_1: float,
) -> tuple[Bf16Array, Bf16Array]:
    """bf16(x[m] . w[n]) for two weights [N, K]: BF16 [M, K] gives two BF16 [M, N]."""
    first = _rows(x, packed_0, scales_0, scale2_0)
    return first, _rows(x, packed_1, scales_1, scale2_1)
