# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module w8a16_gemv: partial blocks of rows and columns, NaN codes, and the order of our sum as a decision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...catalog.spec import Call, ceil_div
from ...reference._e4m3 import E4M3
from ..case import Argument, Case, Draw
from ..compare import bits, f64, within
from ..inputs import BF16, F32, Array
from .gemv import ORDER
from .gemv_fp8w import (
    ORDERED,
    SHAPES,
    close,
    close_rows,
    nan_weights,
    one_row,
    one_row_cancelling,
    products_of_rows,
    row_scales,
    some_rows,
    subnormal,
)

BLOCKS = [(130, 272), (257, 144), (129, 128), (128, 1152), (383, 400)]


def block_scales(rng: np.random.Generator, n: int, k: int) -> Array:
    """FP32 [ceil(n / 128), ceil(k / 128)] over a few powers of ten."""
    shape = ceil_div(n, 128), ceil_div(k, 128)
    return row_scales(rng, shape[0] * shape[1]).reshape(shape)


def even_scales(rng: np.random.Generator, n: int, k: int) -> Array:
    """As `block_scales`, the same all over a row of blocks."""
    return row_scales(rng, ceil_div(n, 128))[:, None].repeat(ceil_div(k, 128), 1)


def weight_values(c: Call) -> Any:
    """What the weights of a launch stand for, FP64."""
    scales = f64(c.block_scale).repeat(128, 0)[: c.N].repeat(128, 1)[:, : c.K]
    return f64(c.B.view(E4M3)) * scales


def _block_scale(rng: np.random.Generator, n: int, k: int) -> Mapping[str, Argument]:
    return {"block_scale": block_scales(rng, n, k)}


def _even_scale(rng: np.random.Generator, n: int, k: int) -> Mapping[str, Argument]:
    return {"block_scale": even_scales(rng, n, k)}


def _with_nan(n: int, k: int) -> Draw:
    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        scales = np.ones((ceil_div(n, 128), ceil_div(k, 128)), F32)
        return {"A": np.ones(k, BF16), "B": nan_weights(rng, n, k), "block_scale": scales, "N": n, "K": k}

    return draw


CASES: Mapping[str, tuple[Case, ...]] = {
    "w8a16_gemv": (
        *(Case(f"N={n} K={k}", one_row(_block_scale, n, k), close(weight_values)) for n, k in (*SHAPES, *BLOCKS)),
        Case("subnormal codes", one_row(_block_scale, 130, 272, subnormal), close(weight_values)),
        *(
            Case(
                f"sums that cancel, N={n} K={k}",
                one_row_cancelling(_even_scale, n, k),
                {"C": bits()},
                tag="decision",
                subject=ORDER,
            )
            for n, k in (*ORDERED, (130, 272))
        ),
        Case("codes 0x7F and 0xFF are NaN", _with_nan(9, 272), {"C": within(1)}, tag="decision", subject="NaN weights"),
    ),
    "spark_w8a16_gemv_batchm": (
        *products_of_rows(_block_scale, _even_scale, weight_values),
        *(
            Case(f"M={m} N={n} K={k}, partial blocks", some_rows(_block_scale, m, n, k), close_rows(weight_values))
            for m, n, k in ((2, 257, 144), (4, 130, 400))
        ),
    ),
}
