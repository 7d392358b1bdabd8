# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of the kernels of `spark_gemv_argmax.cuh`: whole numbers, whose sums are exact in any order, so that the winner
is known whatever the hardware's order is, and equal outputs are frequent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from ..case import Argument, Case, Draw
from ..inputs import BF16, U32, Array, any_bits

TOP, SMALL_AT = 256.0, 16
"""The largest output that is planted, and where 1 is added to it that rounding takes away again."""
Weights: TypeAlias = "Callable[[Array], Mapping[str, Array | float]]"
"""The arguments that stand for FP64 [N, K], exactly: numbers of a size, TOP, 0 and 1, or NaN or -Inf in column 0."""


@dataclass(frozen=True, slots=True)
class Planted:
    """Outputs [n] of `rows` rows, `blocks` blocks: `values` at these places, all others small. `winner`: of row 0."""

    n: int
    winner: int
    values: Mapping[int, float] = field(default_factory=dict)
    rows: int = 1
    blocks: int = 1
    embeds: bool = True

    def __str__(self) -> str:
        told = ", ".join(f"{value} at {at}" for at, value in self.values.items())
        return f"{self.rows} rows of {self.n} in {self.blocks} blocks: {told or 'as they come'}"


NEARLY = TOP + 1
"""Rounds to TOP."""
PLANTED: Sequence[Planted] = (
    Planted(56, 19, {19: TOP, 35: TOP, 51: TOP}),
    Planted(40, 5, {20: NEARLY, 5: TOP, 37: NEARLY}, blocks=2),
    Planted(37, 36, {36: TOP}, rows=3, blocks=3),
    Planted(70, 60, {2: np.nan, 60: TOP, 61: np.nan}, rows=8, blocks=2),
    Planted(5, 0, dict.fromkeys(range(5), np.nan), blocks=3, embeds=False),
    Planted(1, 0),
    Planted(33, 0, {0: TOP, 32: TOP}, rows=2, blocks=3, embeds=False),
)
INFINITE: Sequence[Planted] = (
    Planted(35, 4, {i: np.nan if i < 4 or i == 9 else -np.inf for i in range(35)}, blocks=2),
    Planted(20, 17, {i: -np.inf for i in range(20) if i != 17}),
)
"""For formats that have infinity."""


def inputs(rng: np.random.Generator, rows: int, k: int) -> Array:
    """BF16 [rows, k] of -1, 0 and 1, those at 0 and SMALL_AT being 1."""
    x = rng.integers(-1, 2, (rows, k)).astype(BF16)
    x[:, 0] = x[:, SMALL_AT if k > SMALL_AT else 1] = 1
    return x


def dense(rng: np.random.Generator, case: Planted, k: int) -> Array:
    """FP64 [n, k]: what is planted, and elsewhere -1, 0 and 1."""
    weights = rng.integers(-1, 2, (case.n, k)).astype(np.float64)
    for at, value in case.values.items():
        weights[at] = 0.0
        weights[at, 0] = TOP if value == NEARLY else value
        weights[at, SMALL_AT if k > SMALL_AT else 1] = float(value == NEARLY)
    return weights


def _draw(case: Planted, k: int, encoded: Weights) -> Draw:
    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        table = any_bits(rng, case.n, k) if case.embeds else None
        made: dict[str, Argument] = {"X": inputs(rng, case.rows, k), **encoded(dense(rng, case, k))}
        made |= {"embed_table": table, "best": np.zeros(case.rows, np.uint64), "done": np.zeros(1, U32)}
        return made | ({} if case.embeds else {"embed": None}) | {"M": case.rows, "N": case.n, "K": k}

    return draw


def _case(planted: Planted, k: int, encoded: Weights) -> Case:
    """Where two outputs could win, which one does is a decision."""
    draw, grid = _draw(planted, k, encoded), (planted.blocks, 1, 1)
    name = f"{planted}, K={k}"
    if len(planted.values) <= 1 and planted.winner:
        return Case(name, draw, grid=grid)
    return Case(name, draw, grid=grid, tag="decision", subject="argmax ties")


def gemv_argmax_cases(sizes: Sequence[int], encoded: Weights, planted: Sequence[Planted] = PLANTED) -> tuple[Case, ...]:
    """A case of each, with rows of `sizes` elements by turns."""
    return tuple(_case(each, sizes[i % len(sizes)], encoded) for i, each in enumerate(planted))
