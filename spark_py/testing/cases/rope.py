# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module rope."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...catalog.spec import Call
from ..case import Argument, Case, Draw
from ..compare import f64, rounds
from ..inputs import Array, Normal

# (batch, seq_len, q heads, kv heads, head_dim, rotary_dim)
SHAPES = [
    (1, 9, 2, 1, 128, 64),
    (1, 7, 4, 2, 96, 96),
    (1, 5, 2, 2, 64, 64),
    (1, 4, 2, 1, 256, 256),
    (1, 40, 1, 1, 80, 10),
]
POSITIONS = [0, 1500, 30000, 131072]
# cosf and sinf within 2 ulp of a number up to 1, two products and a sum: 5 roundings of at most (|x0| + |x1|) each.
BOUND = 2.0**-22


def _turn(c: Call, x: Array) -> tuple[Array, Array]:
    """The rotated elements in FP64, from the angle that is rounded to FP32, and the error that is allowed."""
    half = c.rotary_dim // 2
    exponents = np.array([2 * i / c.rotary_dim for i in range(half)])
    angle = c.positions.astype(np.float64)[:, :, None, None] / c.theta**exponents
    rounded = f64(angle.astype(np.float32))
    exact, slack = f64(x).copy(), np.zeros(x.shape)
    first, second = f64(x[..., :half]), f64(x[..., half : 2 * half])
    exact[..., :half] = first * np.cos(rounded) - second * np.sin(rounded)
    exact[..., half : 2 * half] = second * np.cos(rounded) + first * np.sin(rounded)
    # Where the FP64 angle lies on a rounding boundary of FP32, another pow may round it to the other side.
    either = (angle * (1 - 2.0**-50)).astype(np.float32) != (angle * (1 + 2.0**-50)).astype(np.float32)
    lost = (BOUND + np.where(either, angle * 2.0**-23, 0.0)) * (np.abs(first) + np.abs(second))
    slack[..., :half] = slack[..., half : 2 * half] = lost
    return exact, slack


def _arguments(shape: tuple[int, ...]) -> Draw:
    batch, length, q_heads, kv_heads, size, rotary = shape

    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        places = rng.choice(POSITIONS, (batch, length)) + rng.integers(0, 3, (batch, length))
        numbers: dict[str, Argument] = {"seq_len": length, "num_q_heads": q_heads, "num_kv_heads": kv_heads}
        numbers |= {"head_dim": size, "rotary_dim": rotary, "theta": float(rng.choice([10000.0, 1e6, 1e7]))}
        return {"Q": Normal(spread=8), "K": Normal(spread=8), "positions": places.astype(np.uint32), **numbers}

    return draw


_CLOSE: Mapping[str, Any] = {
    "Q": rounds(lambda c: _turn(c, c.Q)[0], slack=lambda c: _turn(c, c.Q)[1]),
    "K": rounds(lambda c: _turn(c, c.K)[0], slack=lambda c: _turn(c, c.K)[1]),
}


def _case(shape: tuple[int, ...], **more: Any) -> Case:
    return Case(str(list(shape)), _arguments(shape), _CLOSE, (1, 1, shape[0]), **more)


CASES: Mapping[str, tuple[Case, ...]] = {
    "rope_forward": (
        *map(_case, SHAPES),
        _case((2, 3, 2, 2, 256, 64), tag="abi"),
        _case((1, 3, 2, 1, 33, 6)),
        _case((1, 3, 1, 1, 512, 512), tag="decision", subject="RoPE of more than 256 elements"),
    ),
}
