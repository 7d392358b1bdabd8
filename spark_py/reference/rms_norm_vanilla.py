# SPDX-License-Identifier: AGPL-3.0-only
"""Module `rms_norm_vanilla`: RMS norm with the plain weight. Formula: y = (x * r) * w."""

from __future__ import annotations

import numpy as np

from ._bf16 import Bf16Array, to_bf16, to_f32
from .norm import inverse_rms


def rms_norm_vanilla(x: Bf16Array, weight: Bf16Array, eps: float) -> Bf16Array:
    """y = bf16((x * r) * w), r = 1 / sqrt(mean(x^2) + eps).

    x: BF16 [T, H]; weight: BF16 [H]; result: BF16 [T, H]. Order of the sum and treatment of NaN and infinities as
    `norm.rms_norm`.
    """
    with np.errstate(all="ignore"):
        values = to_f32(x)
        return to_bf16(values * inverse_rms(values, eps) * to_f32(weight))
