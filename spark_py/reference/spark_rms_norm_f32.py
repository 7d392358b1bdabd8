# SPDX-License-Identifier: AGPL-3.0-only
"""Module `spark_rms_norm_f32`: RMS norm with the plain weight of FP32 rows. Formula: y = (x * r) * w."""

from __future__ import annotations

import numpy as np

from ._bf16 import Bf16Array, F32Array, to_bf16, to_f32
from .norm import inverse_rms


def spark_rms_norm_f32(x: F32Array, weight: Bf16Array, eps: float) -> Bf16Array:
    """y = bf16((x * r) * w), r = 1 / sqrt(mean(x^2) + eps).

    x: FP32 [T, H]; weight: BF16 [H]; result: BF16 [T, H]. Rows of BF16 numbers have the bits of `rms_norm_vanilla`.
    """
    with np.errstate(all="ignore"):
        return to_bf16(x * inverse_rms(x, eps) * to_f32(weight))
