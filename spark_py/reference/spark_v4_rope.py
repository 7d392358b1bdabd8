# SPDX-License-Identifier: AGPL-3.0-only
"""Module `spark_v4_rope`: rotary position embedding of neighbours on the tail of each head, as DeepSeek-V4 has it.

Formula: (y[2i], y[2i + 1]) = the pair (t[2i], t[2i + 1]) turned by +-position / theta^(2 i / rope_dim), t the tail.
"""

from __future__ import annotations

import numpy as np

from ._bf16 import Bf16Array, F32Array, U32Array, to_bf16, to_f32
from .rope import angles


def rotate(tail: F32Array, positions: U32Array, theta: float, inverse: bool = False) -> F32Array:
    """The tails FP32 [rows, ..., rope_dim] turned by the angles of positions u32 [rows]; each operation in FP32.

    Cosine and sine are those of the FP32 angle, rounded once from FP64. `inverse` turns the other way.
    """
    turned = angles(positions, tail.shape[-1], theta).astype(np.float64)
    turned = turned.reshape(len(positions), *(1,) * (tail.ndim - 2), -1)
    cosine, sine = np.cos(turned).astype(np.float32), np.sin(turned).astype(np.float32)
    if inverse:
        sine = -sine
    first, second = tail[..., 0::2], tail[..., 1::2]
    result = np.empty_like(tail)
    with np.errstate(all="ignore"):
        result[..., 0::2] = first * cosine - second * sine
        result[..., 1::2] = first * sine + second * cosine
    return result


def spark_v4_rope(x: Bf16Array, positions: U32Array, rope_dim: int, theta: float, inverse: bool = False) -> Bf16Array:
    """The heads with their last rope_dim elements turned: x BF16 [rows, heads, head_dim] and positions u32 [rows].

    Rounded to BF16 once; the other elements keep their bits.
    """
    start = x.shape[-1] - rope_dim
    result = x.copy()
    result[..., start:] = to_bf16(rotate(to_f32(x[..., start:]), positions, theta, inverse))
    return result
