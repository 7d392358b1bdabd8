# SPDX-License-Identifier: AGPL-3.0-only
"""Module `spark_residual_add_rms_norm_vanilla`: residual addition and RMS norm with the plain weight."""

from __future__ import annotations

import numpy as np

from ._bf16 import Bf16Array, to_bf16, to_f32
from .norm import inverse_rms


def spark_residual_add_rms_norm_vanilla(
    hidden: Bf16Array, src: Bf16Array, weight: Bf16Array, eps: float
) -> tuple[Bf16Array, Bf16Array]:
    """(bf16(s), output) for s = hidden + src in FP32: `norm.residual_add_rms_norm` with weight w.

    output = bf16((bf16(s) * r) * w) with r = 1 / sqrt(mean(s^2) + eps) from the sums before rounding. hidden, src: BF16
    [T, H]; weight: BF16 [H]; results: BF16 [T, H]. The kernel stores the first result twice.
    """
    with np.errstate(all="ignore"):
        sums = to_f32(hidden) + to_f32(src)
        rounded = to_bf16(sums)
        return rounded, to_bf16(to_f32(rounded) * inverse_rms(sums, eps) * to_f32(weight))
