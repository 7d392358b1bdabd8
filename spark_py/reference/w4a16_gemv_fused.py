# SPDX-License-Identifier: AGPL-3.0-only
"""Module `w4a16_gemv_fused`: two NVFP4 projections of one row, each with the bits of `w4a16_gemv.w4a16_gemv`."""

from __future__ import annotations

from ._bf16 import Bf16Array
from .quantize_nvfp4 import U8Array
from .w4a16_gemv import w4a16_gemv


def w4a16_gemv_dual(
    x: Bf16Array,
    packed_1: U8Array,
    scales_1: U8Array,
    scale2_1: float,
    packed_2: U8Array,
    scales_2: U8Array,
    scale2_2: float,
) -> tuple[Bf16Array, Bf16Array]:
    """bf16(x . w) for two weights [N, K]: BF16 [K] gives two BF16 [N]; also what `w4a16_gemv_dual_sw` computes."""
    first = w4a16_gemv(x, packed_1, scales_1, scale2_1)
    second = w4a16_gemv(x, packed_2, scales_2, scale2_2)
    return first, second
