# SPDX-License-Identifier: AGPL-3.0-only
"""Module `moe_silu_mul`: the gated activation of SwiGLU, without a clamp."""

from __future__ import annotations

import numpy as np

from ._bf16 import Bf16Array, sigmoid, to_bf16, to_f32


def moe_silu_mul(gate: Bf16Array, up: Bf16Array) -> Bf16Array:
    """bf16((g * (1 / (1 + exp(-g)))) * u), element-wise, in FP32. BF16 [n] each.

    No clamp on either operand. A large negative g gives +-0; g = -Inf gives NaN (-Inf * 0).
    """
    with np.errstate(all="ignore"):
        g = to_f32(gate)
        return to_bf16(g * sigmoid(g) * to_f32(up))
