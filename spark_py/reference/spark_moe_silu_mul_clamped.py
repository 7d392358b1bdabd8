# SPDX-License-Identifier: AGPL-3.0-only
"""Module `spark_moe_silu_mul_clamped`: the gated activation of SwiGLU with DeepSeek-V4's limit."""

from __future__ import annotations

import numpy as np

from ._bf16 import Bf16Array, sigmoid, to_bf16, to_f32


def spark_moe_silu_mul_clamped(gate: Bf16Array, up: Bf16Array, limit: float) -> Bf16Array:
    """bf16((g * (1 / (1 + exp(-g)))) * u), g = min(gate, limit), u = min(max(up, -limit), limit), in FP32.

    BF16 [n] each. The gate is bounded from above alone. NaN stays NaN, and g = -Inf gives NaN (-Inf * 0).
    """
    most = np.float32(limit)
    with np.errstate(all="ignore"):
        g = np.minimum(to_f32(gate), most)
        u = np.clip(to_f32(up), -most, most)
        return to_bf16(g * sigmoid(g) * u)
