# SPDX-License-Identifier: AGPL-3.0-only
"""Module `residual_add`: BF16 addition, sigmoid gate and concatenation."""

from __future__ import annotations

import numpy as np

from ._bf16 import Bf16Array, sigmoid, to_bf16, to_f32


def bf16_residual_add(residual: Bf16Array, src: Bf16Array) -> Bf16Array:
    """bf16(residual + src), element-wise, added in FP32. BF16 [n] each."""
    with np.errstate(all="ignore"):
        return to_bf16(to_f32(residual) + to_f32(src))


def sigmoid_gate_mul(x: Bf16Array, gate: Bf16Array) -> Bf16Array:
    """bf16(x * (1 / (1 + exp(-gate)))), element-wise, in FP32. BF16 [n] each. A gate of -Inf gives 0 for finite x."""
    with np.errstate(all="ignore"):
        return to_bf16(to_f32(x) * sigmoid(to_f32(gate)))


def bf16_concat(a: Bf16Array, b: Bf16Array) -> Bf16Array:
    """[a | b]: BF16 [N] and [N] give [2N], bit for bit (NaN payloads too)."""
    return np.concatenate([a, b])
