# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module spark_w8a16_rows: values within what a tensor core's sums may lose; the order is the hardware's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

from ...catalog.spark_w8a16_rows import rows_of
from ...catalog.spec import Call, ceil_div
from ..case import Argument, Case, Draw
from ..compare import Bound, f64, rounds
from ..inputs import F32, Array, Normal
from .paged_decode_fp8 import E4M3

# (rows of both, outputs of both matrices, K, gap between rows of output, groups, blocks)
Shape: TypeAlias = tuple[tuple[int, int], tuple[int, int], int, int, int, int]
SHAPES: tuple[Shape, ...] = (
    ((1, 0), (5, 0), 16, 0, 1, 1),
    ((1, 4), (131, 6), 1168, 0, 1, 2),
    ((1, 0), (96, 0), 1296, 0, 6, 3),
    ((4, 3), (7, 134), 1168, 5, 1, 3),
    ((3, 0), (144, 0), 144, 0, 9, 2),
    ((8, 8), (6, 130), 400, 1, 1, 10),
)


def _dense(c: Call, i: int) -> Array:
    """Matrix i in FP64, [N, K]."""
    codes: Array = getattr(c, f"W{i}")
    n, k = codes.shape
    factors = f64(getattr(c, f"S{i}")).repeat(128, 0)[:n].repeat(128, 1)[:, :k]
    values: Array = f64(codes.view(E4M3)) * factors
    return values


def _product(x: Array, weights: Array, groups: int) -> Array:
    n, k = weights.shape
    x, weights = x.reshape(len(x), groups, k), weights.reshape(groups, n // groups, k)
    product: Array = np.einsum("mgk,gnk->mgn", x, weights).reshape(len(x), n)
    return product


def _rows(c: Call, i: int, slack: bool) -> Array:
    """The flat output: between rows stays what was there, with nothing lost."""
    before = getattr(c, f"Y{i}")
    flat = np.zeros(before.shape) if slack else f64(before).copy()
    x, w = f64(getattr(c, f"X{i}")), _dense(c, i)
    groups = c.groups if i == 0 else 1
    # A step adds 16 products to a sum and may lose a bit of it; eight warps are added up, factors round.
    if slack:
        rows_of(c, flat, i)[...] = (c.K / 64 + 32) * 2.0**-23 * _product(np.abs(x), np.abs(w), groups)
    else:
        rows_of(c, flat, i)[...] = _product(x, w, groups)
    return flat


def _bound(i: int) -> Bound:
    return rounds(lambda c: _rows(c, i, False), slack=lambda c: _rows(c, i, True))


def drawn(rng: np.random.Generator, n: int, k: int) -> tuple[Array, Array]:
    """Codes of every value there is, but NaN, which one output has where there are more than four; and factors."""
    codes = (rng.integers(0, 0x7F, (n, k)) | rng.choice([0, 0x80], (n, k))).astype(np.uint8)
    codes[n // 2 : n // 2 + (n > 4), rng.integers(k)] = rng.choice([0x7F, 0xFF])
    return codes, rng.uniform(0.001, 3, (ceil_div(n, 128), ceil_div(k, 128))).astype(F32)


def _arguments(shape: Shape) -> Draw:
    rows, outputs, size, gap, groups, _ = shape

    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        made: dict[str, Argument] = {"K": size, "groups": groups}
        for i, n in enumerate(outputs):
            made |= {f"M{i}": rows[i], f"N{i}": n, f"stride{i}": n + gap if n else 0}
            if n:
                made[f"X{i}"] = Normal(spread=4)
                made[f"W{i}"], made[f"S{i}"] = drawn(rng, n, size)
            else:
                made |= {f"X{i}": None, f"W{i}": None, f"S{i}": None, f"Y{i}": None}
        return made

    return draw


def _case(shape: Shape) -> Case:
    rows, outputs, size, gap, groups, blocks = shape
    name = f"{rows[0]} and {rows[1]} rows, N={'+'.join(map(str, outputs))} K={size} in {blocks} blocks"
    name += (f" in {groups} groups" if groups > 1 else "") + (f", {gap} apart" if gap else "")
    return Case(name, _arguments(shape), {f"Y{i}": _bound(i) for i, n in enumerate(outputs) if n}, (blocks, 1, 1))


CASES: Mapping[str, tuple[Case, ...]] = {"spark_w8a16_rows": tuple(map(_case, SHAPES))}
