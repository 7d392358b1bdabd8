# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module spark_v4_grouped_gemv."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...catalog.spec import Call
from ..case import Argument, Case, Draw
from ..compare import bits, f64, rounds
from ..inputs import Normal
from .gemv import ORDER, cancelling

# (rows, groups, outputs of a group, inputs of a group)
SHAPES = [(1, 8, 16, 520), (3, 2, 5, 64), (8, 3, 7, 264), (11, 1, 9, 1032), (5, 5, 1, 16), (2, 4, 3, 2056)]


def _exact(c: Call) -> Any:
    return np.einsum("mgk,gnk->mgn", f64(c.A), f64(c.B))


def _lost(c: Call) -> Any:
    return (c.K / 16 + 16) * 2.0**-24 * np.einsum("mgk,gnk->mgn", np.abs(f64(c.A)), np.abs(f64(c.B)))


def _numbers(shape: tuple[int, ...]) -> dict[str, Argument]:
    return dict(zip(("M", "groups", "N", "K"), shape, strict=True))


def _arguments(shape: tuple[int, ...]) -> Draw:
    return lambda rng: {"A": Normal(spread=4), "B": Normal(), **_numbers(shape)}


def _ordered(shape: tuple[int, ...]) -> Draw:
    rows, groups, count, size = shape

    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        parts = [cancelling(rng, (rows,), count, size) for _ in range(groups)]
        x, weights = (np.stack(each) for each in zip(*parts, strict=True))
        return {"A": np.ascontiguousarray(x.swapaxes(0, 1)), "B": weights, **_numbers(shape)}

    return draw


CASES: Mapping[str, tuple[Case, ...]] = {
    "spark_v4_grouped_gemv": (
        *(
            Case("M={} groups={} N={} K={}".format(*shape), _arguments(shape), {"C": rounds(_exact, slack=_lost)})
            for shape in SHAPES
        ),
        *(
            Case(
                "sums that cancel, M={} groups={} N={} K={}".format(*shape),
                _ordered(shape),
                {"C": bits()},
                tag="decision",
                subject=ORDER,
            )
            for shape in ((16, 3, 13, 64), (5, 2, 15, 2056), (1, 2, 15, 4096))
        ),
    ),
}
