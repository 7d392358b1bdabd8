# SPDX-License-Identifier: AGPL-3.0-only
"""Module `rope`: rotary position embedding of rotate-half pairs.

Formula: (y[i], y[i + half]) = the pair (x[i], x[i + half]) turned by position / theta^(2 i / rotary_dim).
"""

from __future__ import annotations

import numpy as np

from ._bf16 import Bf16Array, F32Array, U32Array, to_bf16, to_f32


def angles(positions: U32Array, rotary_dim: int, theta: float) -> F32Array:
    """position / theta^(2 i / rotary_dim) for i < rotary_dim / 2: u32 [...] gives FP32 [..., rotary_dim / 2].

    In FP64 up to the cast: at position 131072 a frequency rounded to FP32 would be worth 0.03 rad.
    """
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    frequencies = 1.0 / np.power(np.float64(theta), exponents)
    return (positions.astype(np.float64)[..., None] * frequencies).astype(np.float32)


def rope_forward(x: Bf16Array, positions: U32Array, rotary_dim: int, theta: float) -> Bf16Array:
    """The rotated heads: x BF16 [batch, s, heads, head_dim] and positions u32 [batch, s] give BF16 of x's shape.

    y[i] = bf16(x[i] c - x[i + half] s), y[i + half] = bf16(x[i + half] c + x[i] s), half = rotary_dim / 2, each
    operation in FP32; c and s are cosine and sine of the FP32 angle, rounded once from FP64. Elements from rotary_dim
    on keep their bits.
    """
    half = rotary_dim // 2
    turned = angles(positions, rotary_dim, theta).astype(np.float64)[:, :, None, :]
    cosine, sine = np.cos(turned).astype(np.float32), np.sin(turned).astype(np.float32)
    result = x.copy()
    with np.errstate(all="ignore"):
        first, second = to_f32(x[..., :half]), to_f32(x[..., half:rotary_dim])
        result[..., :half] = to_bf16(first * cosine - second * sine)
        result[..., half:rotary_dim] = to_bf16(second * cosine + first * sine)
    return result
