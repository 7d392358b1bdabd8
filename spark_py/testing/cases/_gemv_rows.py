# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of the modules of `spark_gemv_rows.cuh`: values within what a tensor core's sums may lose; the order is the
hardware's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import numpy as np

from ...catalog._gemv_rows import rows_of
from ...catalog.spec import Call
from ..case import Argument, Case, Draw
from ..compare import Bound, f64, rounds
from ..inputs import Array, Normal

# (rows, outputs of the three matrices, K, head_dim, blocks, gap between rows of output)
Shape: TypeAlias = tuple[int, tuple[int, int, int], int, int, int, int]
Dense: TypeAlias = "Callable[[Call, int], Array]"
"""Matrix i of a call, FP64 [N, K]."""
Drawn: TypeAlias = "Callable[[np.random.Generator, int, int, int], Mapping[str, Array | float]]"
"""The arguments of matrix i, [n, k], from (generator, i, n, k). Arrays of a matrix without outputs are left out."""


def _product(x: Array, weights: Array, head_dim: int) -> Array:
    """[M, N] in FP64, queries before gates where head_dim says so."""
    exact: Array = x @ weights.T
    if head_dim:
        exact = exact.reshape(len(x), -1, 2, head_dim).swapaxes(1, 2).reshape(exact.shape)
    return exact


def _rows(c: Call, i: int, dense: Dense, slack: bool) -> Array:
    """The flat output: between rows stays what was there, with nothing lost."""
    before = getattr(c, f"Y{i}")
    flat = np.zeros(before.shape) if slack else f64(before).copy()
    x, w, head_dim = f64(c.X), dense(c, i), c.head_dim if i == 0 else 0
    # A step adds 16 products to a sum and may lose a bit of it; eight warps are added up, a factor rounds.
    if slack:
        rows_of(c, flat, i)[...] = (c.K / 64 + 32) * 2.0**-23 * _product(np.abs(x), np.abs(w), head_dim)
    else:
        rows_of(c, flat, i)[...] = _product(x, w, head_dim)
    return flat


def _bound(i: int, dense: Dense) -> Bound:
    return rounds(lambda c: _rows(c, i, dense, False), slack=lambda c: _rows(c, i, dense, True))


def _arguments(shape: Shape, drawn: Drawn) -> Draw:
    rows, outputs, size, head_dim, _, gap = shape

    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        made: dict[str, Argument] = {"X": Normal(spread=4), "M": rows, "K": size, "head_dim": head_dim}
        for i, n in enumerate(outputs):
            made |= {f"N{i}": n, f"stride{i}": n + gap if n else 0}
            for name, value in drawn(rng, i, n, size).items():
                made[f"{name}{i}"] = value if n or not isinstance(value, np.ndarray) else None
            if not n:
                made[f"Y{i}"] = None
        return made

    return draw


def _case(shape: Shape, dense: Dense, drawn: Drawn) -> Case:
    rows, outputs, size, head_dim, blocks, gap = shape
    name = f"{rows} rows, N={'+'.join(map(str, outputs))} K={size} in {blocks} blocks"
    name += (f", heads of {head_dim}" if head_dim else "") + (f", {gap} apart" if gap else "")
    bounds = {f"Y{i}": _bound(i, dense) for i, n in enumerate(outputs) if n}
    return Case(name, _arguments(shape, drawn), bounds, (blocks, 1, 1))


def gemv_rows_cases(shapes: Iterable[Shape], dense: Dense, drawn: Drawn) -> tuple[Case, ...]:
    """A case of each shape, with weights from `drawn` that mean `dense`."""
    return tuple(_case(shape, dense, drawn) for shape in shapes)
