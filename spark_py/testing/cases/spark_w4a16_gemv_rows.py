# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module spark_w4a16_gemv_rows: values within what a tensor core's sums may lose."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...catalog.spec import Call
from ..case import Argument, Case, Draw
from ..compare import Bound, f64, rounds
from ..inputs import Array, Normal
from .spark_gemv_rows import product
from .w4a16_gemv import nvfp4, weights

# (rows, outputs of the three matrices, K, head_dim, blocks, gap between rows of output)
Shape = tuple[int, tuple[int, int, int], int, int, int, int]
SHAPES: tuple[Shape, ...] = (
    (1, (5, 0, 0), 256, 0, 1, 0),
    (8, (33, 7, 16), 512, 0, 2, 0),
    (3, (64, 17, 16), 2304, 16, 3, 5),
    (5, (16, 40, 0), 2048, 8, 2, 0),
)


def _rows(c: Call, i: int, slack: bool) -> Array:
    """The flat output: between rows stays what was there, with nothing lost."""
    before = getattr(c, f"Y{i}")
    flat = np.zeros(before.shape) if slack else f64(before).copy()
    n, stride = getattr(c, f"N{i}"), getattr(c, f"stride{i}")
    view = np.lib.stride_tricks.as_strided(flat, (c.M, n), (stride * flat.itemsize, flat.itemsize))
    x, w = f64(c.X), weights(getattr(c, f"W{i}"), getattr(c, f"S{i}"), getattr(c, f"scale2_{i}"))
    head_dim = c.head_dim if i == 0 else 0
    # A step adds 16 products to a sum and may lose a bit of it; eight warps are added up, the factor rounds twice.
    if slack:
        view[...] = (c.K / 64 + 32) * 2.0**-23 * product(np.abs(x), np.abs(w), head_dim)
    else:
        view[...] = product(x, w, head_dim)
    return flat


def _bound(i: int) -> Bound:
    return rounds(lambda c: _rows(c, i, False), slack=lambda c: _rows(c, i, True))


def _arguments(shape: Shape) -> Draw:
    rows, outputs, size, head_dim, _, gap = shape

    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        made: dict[str, Argument] = {"X": Normal(spread=4), "M": rows, "K": size, "head_dim": head_dim}
        for i, n in enumerate(outputs):
            # Every scale there is, but NaN, which one output of a matrix has.
            packed, scales = nvfp4(rng, n, size, 0x00, 0x7F)
            scales[n // 2 : n // 2 + (n > 4), size // 32] = 0x7F
            made |= {f"N{i}": n, f"stride{i}": n + gap if n else 0, f"scale2_{i}": 0.0123 * (i + 1)}
            made |= {f"W{i}": packed if n else None, f"S{i}": scales if n else None}
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


CASES: Mapping[str, tuple[Case, ...]] = {"spark_w4a16_gemv_rows": tuple(map(_case, SHAPES))}
