# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module spark_v4_rope: neighbours of the tail, forwards and back, against FP64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...catalog.spec import Call
from ..case import Argument, Case, Draw
from ..compare import f64, rounds
from ..inputs import Array, Normal

# (rows, heads, head_dim, rope_dim)
SHAPES = [(1, 64, 512, 64), (3, 9, 32, 8), (2, 8, 64, 64), (4, 1, 512, 64), (5, 3, 34, 10), (1, 2, 1024, 512)]
POSITIONS = [0, 127, 1500, 30000, 1048575]
# cosf and sinf within 2 ulp of a number up to 1, two products and a sum: 5 roundings of at most (|a| + |b|) each.
BOUND = 2.0**-22


def turned(tail: Array, positions: Array, theta: float, inverse: bool = False) -> tuple[Array, Array]:
    """The tails FP64 [rows, ..., rope_dim] turned, with the angle that is rounded to FP32, and the error allowed."""
    half = tail.shape[-1] // 2
    theta = float(np.float32(theta))
    angle = positions.astype(np.float64)[:, None] / theta ** (np.arange(half) / half)
    angle = angle.reshape(len(positions), *(1,) * (tail.ndim - 2), half)
    pairs = tail[..., 0::2] + 1j * tail[..., 1::2]
    rounded = f64(angle.astype(np.float32))
    pairs = pairs * np.exp((-1j if inverse else 1j) * rounded)
    exact, slack = np.empty(tail.shape), np.empty(tail.shape)
    exact[..., 0::2], exact[..., 1::2] = pairs.real, pairs.imag
    # Where the FP64 angle lies on a rounding boundary of FP32, another pow may round it to the other side.
    either = (angle * (1 - 2.0**-50)).astype(np.float32) != (angle * (1 + 2.0**-50)).astype(np.float32)
    lost = BOUND + np.where(either, angle * 2.0**-23, 0.0)
    slack[..., 0::2] = slack[..., 1::2] = lost * (np.abs(tail[..., 0::2]) + np.abs(tail[..., 1::2]))
    return exact, slack


def _whole(c: Call, part: int) -> Array:
    """Values (part 0) or errors (part 1) of all elements; those before the tail stay."""
    start = c.head_dim - c.rope_dim
    whole: Array = np.zeros(c.x.shape) if part else f64(c.x).copy()
    whole[..., start:] = turned(f64(c.x[..., start:]), c.positions, c.theta, bool(c.inverse))[part]
    return whole


def _arguments(shape: tuple[int, ...], inverse: int) -> Draw:
    rows, heads, size, rope_dim = shape

    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        places = rng.choice(POSITIONS[1:], rows) - rng.integers(0, 3, rows)
        made: dict[str, Argument] = {"x": Normal(spread=8), "positions": places.astype(np.uint32), "heads": heads}
        made |= {"head_dim": size, "rope_dim": rope_dim, "theta": float(rng.choice([10000.0, 160000.0]))}
        return made | {"inverse": inverse}

    return draw


_CLOSE: Mapping[str, Any] = {"x": rounds(lambda c: _whole(c, 0), slack=lambda c: _whole(c, 1))}

CASES: Mapping[str, tuple[Case, ...]] = {
    "spark_v4_rope": tuple(
        Case(f"{list(shape)}{', back' if inverse else ''}", _arguments(shape, inverse), _CLOSE, (shape[0], 1, 1))
        for number, shape in enumerate(SHAPES)
        for inverse in ((0, 1) if number < 2 else (number % 2,))
    ),
}
