# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module gemm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...catalog.spec import Call
from ..case import Argument, Case, Draw
from ..compare import Bound, bits, f64, rounds
from ..inputs import Normal
from .gemv import ORDER, cancelling

SHAPES = [(1, 1, 1), (5, 3, 7), (16, 16, 16), (17, 33, 100), (31, 15, 257), (40, 47, 64), (2, 70, 1025)]


def _exact(c: Call) -> Any:
    return f64(c.A) @ f64(c.B).T


def _lost(c: Call) -> Any:
    # A scalar kernel adds K products one after the other.
    return (c.K + 16) * 2.0**-24 * (np.abs(f64(c.A)) @ np.abs(f64(c.B)).T)


def _tensor_core(c: Call) -> Any:
    # One step of a tensor core adds 16 products to a sum, and cuts off below 2^-23 of the largest of them.
    return (c.K / 16 + 2) * 2.0**-22 * (np.abs(f64(c.A)) @ np.abs(f64(c.B)).T)


def _shapes(bound: Bound) -> tuple[Case, ...]:
    return tuple(
        Case(
            f"M={m} N={n} K={k}",
            lambda rng, m=m, n=n, k=k: {"A": Normal(), "B": Normal(), "M": m, "N": n, "K": k},  # type: ignore[misc]
            {"C": bound},
        )
        for m, n, k in SHAPES
    )


def _ordered(m: int, n: int, k: int) -> Draw:
    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        a, b = cancelling(rng, (m,), n, k)
        return {"A": a, "B": b, "M": m, "N": n, "K": k}

    return draw


CASES: Mapping[str, tuple[Case, ...]] = {
    "dense_gemm_bf16": (
        *_shapes(rounds(_exact, slack=_lost)),
        Case("sums that cancel", _ordered(19, 33, 100), {"C": bits()}, tag="decision", subject=ORDER),
    ),
    "dense_gemm_bf16_pipelined": _shapes(rounds(_exact, slack=_tensor_core)),
}
