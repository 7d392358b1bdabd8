# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module gemv: the values within what FP32 sums in any order allow, and the order of our sum as a decision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...catalog.spec import Call
from ..case import Argument, Case
from ..compare import bits, f64, rounds
from ..inputs import Array, Normal, normal

SHAPES = [(1, 8), (5, 64), (7, 264), (33, 520), (4, 2056), (9, 3000), (6, 4096)]
ORDER = "order of sums"


def summed(c: Call) -> Any:
    """The product in FP64."""
    return f64(c.B) @ f64(c.A)


def lost(c: Call) -> Any:
    """What FP32 may lose: no order of adding products 64 at a time or in a tree loses more."""
    return (c.K / 16 + 16) * 2.0**-24 * (np.abs(f64(c.B)) @ np.abs(f64(c.A)))


def cancelling(rng: np.random.Generator, rows: tuple[int, ...], count: int, size: int) -> tuple[Array, Array]:
    """Activations over many magnitudes and sums that cancel to a small rest: the rounding of every step stays."""
    x = (rng.standard_normal((*rows, size)) * 2.0 ** rng.integers(-6, 6, (*rows, size))).astype(normal(rng, 1).dtype)
    weights = normal(rng, count, size)
    half = size // 2
    x[..., half : 2 * half] = x[..., :half]
    weights[:, half : 2 * half] = -weights[:, :half]
    weights[:, -1] += weights.dtype.type(0.01)
    return x, weights


def _ordered(rng: np.random.Generator, count: int, size: int) -> Mapping[str, Argument]:
    x, weights = cancelling(rng, (), count, size)
    return {"A": x, "B": weights, "N": count, "K": size}


CASES: Mapping[str, tuple[Case, ...]] = {
    "dense_gemv_bf16": (
        *(
            Case(
                f"N={n} K={k}",
                lambda rng, n=n, k=k: {"A": Normal(spread=4), "B": Normal(), "N": n, "K": k},  # type: ignore[misc]
                {"C": rounds(summed, slack=lost)},
            )
            for n, k in SHAPES
        ),
        *(
            Case(
                f"sums that cancel, N={n} K={k}",
                lambda rng, n=n, k=k: _ordered(rng, n, k),  # type: ignore[misc]
                {"C": bits()},
                tag="decision",
                subject=ORDER,
            )
            for n, k in ((37, 64), (65, 2056), (30, 4096))
        ),
    ),
}
