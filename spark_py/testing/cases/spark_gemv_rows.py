# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module spark_gemv_rows: values within what a tensor core's sums may lose; the order is the hardware's."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...catalog.spec import Call
from ..case import Argument, Case, Draw
from ..compare import Bound, f64, rounds
from ..inputs import Array, Normal, normal

# (rows, outputs of the three matrices, K, head_dim, blocks, gap between rows of output)
Shape = tuple[int, tuple[int, int, int], int, int, int, int]
SHAPES: tuple[Shape, ...] = (
    (1, (5, 0, 0), 8, 0, 1, 0),
    (8, (33, 7, 16), 520, 0, 2, 0),
    (3, (64, 17, 16), 1032, 16, 3, 5),
    (5, (16, 40, 0), 2056, 8, 2, 0),
    (2, (100, 0, 0), 1544, 0, 3, 1),
    (7, (48, 15, 9), 64, 24, 9, 0),
)


def product(x: Array, weights: Array, head_dim: int) -> Array:
    """[M, N] in FP64, queries before gates where head_dim says so."""
    exact: Array = x @ weights.T
    if head_dim:
        exact = exact.reshape(len(x), -1, 2, head_dim).swapaxes(1, 2).reshape(exact.shape)
    return exact


def _rows(c: Call, i: int, slack: bool) -> Array:
    """The flat output: between rows stays what was there, with nothing lost."""
    before = getattr(c, f"Y{i}")
    flat = np.zeros(before.shape) if slack else f64(before).copy()
    n, stride = getattr(c, f"N{i}"), getattr(c, f"stride{i}")
    view = np.lib.stride_tricks.as_strided(flat, (c.M, n), (stride * flat.itemsize, flat.itemsize))
    x, w, head_dim = f64(c.X), f64(getattr(c, f"W{i}")), c.head_dim if i == 0 else 0
    # A step adds 16 products to a sum and may lose a bit of it; eight warps are added up.
    view[...] = (
        (c.K / 64 + 32) * 2.0**-23 * product(np.abs(x), np.abs(w), head_dim) if slack else product(x, w, head_dim)
    )
    return flat


def _bound(i: int) -> Bound:
    return rounds(lambda c: _rows(c, i, False), slack=lambda c: _rows(c, i, True))


def _arguments(shape: Shape) -> Draw:
    rows, outputs, size, head_dim, _, gap = shape

    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        made: dict[str, Argument] = {"X": Normal(spread=4), "M": rows, "K": size, "head_dim": head_dim}
        for i, n in enumerate(outputs):
            made |= {f"N{i}": n, f"stride{i}": n + gap if n else 0}
            weights = normal(rng, n, size)
            weights[n // 2 : n // 2 + (n > 4), 3] = np.nan  # of one output alone
            made[f"W{i}"] = weights if n else None
            if not n:
                made[f"Y{i}"] = None
        return made

    return draw


def _case(shape: Shape) -> Case:
    rows, outputs, size, head_dim, blocks, gap = shape
    name = f"{rows} rows, N={'+'.join(map(str, outputs))} K={size} in {blocks} blocks"
    name += (f", heads of {head_dim}" if head_dim else "") + (f", {gap} apart" if gap else "")
    bounds = {f"Y{i}": _bound(i) for i, n in enumerate(outputs) if n}
    return Case(name, _arguments(shape), bounds, (blocks, 1, 1))


CASES: Mapping[str, tuple[Case, ...]] = {"spark_gemv_rows": tuple(map(_case, SHAPES))}
