# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module spark_fp8_gemv_rows: values within what a tensor core's sums may lose."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...catalog.spec import Call
from ..case import Argument, Case, Draw
from ..compare import Bound, f64, rounds
from ..inputs import F32, Array, Normal
from .paged_decode_fp8 import E4M3
from .spark_gemv_rows import product

# (rows, outputs of the three matrices, K, head_dim, blocks, gap between rows of output)
Shape = tuple[int, tuple[int, int, int], int, int, int, int]
SHAPES: tuple[Shape, ...] = (
    (1, (5, 0, 0), 16, 0, 1, 0),
    (8, (33, 7, 16), 528, 0, 2, 0),
    (3, (64, 17, 16), 1168, 16, 3, 5),
    (5, (16, 40, 0), 2048, 8, 2, 0),
)


def _rows(c: Call, i: int, slack: bool) -> Array:
    """The flat output: between rows stays what was there, with nothing lost."""
    before = getattr(c, f"Y{i}")
    flat = np.zeros(before.shape) if slack else f64(before).copy()
    n, stride = getattr(c, f"N{i}"), getattr(c, f"stride{i}")
    view = np.lib.stride_tricks.as_strided(flat, (c.M, n), (stride * flat.itemsize, flat.itemsize))
    x, w = f64(c.X), f64(getattr(c, f"W{i}").view(E4M3)) * f64(getattr(c, f"S{i}"))[:, None]
    head_dim = c.head_dim if i == 0 else 0
    # A step adds 16 products to a sum and may lose a bit of it; eight warps are added up, the scale rounds once.
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
            # Every value there is, but NaN, which one output of a matrix has.
            codes = (rng.integers(0, 0x7F, (n, size)) | rng.choice([0, 0x80], (n, size))).astype(np.uint8)
            codes[n // 2 : n // 2 + (n > 4), rng.integers(size)] = rng.choice([0x7F, 0xFF])
            scales = rng.uniform(0.001, 3, n).astype(F32)
            made |= {f"N{i}": n, f"stride{i}": n + gap if n else 0}
            made |= {f"W{i}": codes if n else None, f"S{i}": scales if n else None}
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


CASES: Mapping[str, tuple[Case, ...]] = {"spark_fp8_gemv_rows": tuple(map(_case, SHAPES))}
