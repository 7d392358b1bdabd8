# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module spark_gemv_rows: values within what a tensor core's sums may lose; the order is the hardware's."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...catalog.spec import Call
from ..case import Case
from ..compare import f64
from ..inputs import BF16, Array, normal
from ._gemv_argmax import INFINITE, PLANTED, gemv_argmax_cases
from ._gemv_rows import Shape, gemv_rows_cases

SHAPES: tuple[Shape, ...] = (
    (1, (5, 0, 0), 8, 0, 1, 0),
    (8, (33, 7, 16), 520, 0, 2, 0),
    (3, (64, 17, 16), 1032, 16, 3, 5),
    (5, (16, 40, 0), 2056, 8, 2, 0),
    (2, (100, 0, 0), 1544, 0, 3, 1),
    (7, (48, 15, 9), 64, 24, 9, 0),
)


def _dense(c: Call, i: int) -> Array:
    return f64(getattr(c, f"W{i}"))


def _drawn(rng: np.random.Generator, i: int, n: int, size: int) -> Mapping[str, Array]:
    weights = normal(rng, n, size)
    weights[n // 2 : n // 2 + (n > 4), 3] = np.nan  # of one output alone
    return {"W": weights}


def whole_numbers(weights: Array) -> Mapping[str, Array | float]:
    """The arguments that are FP64 [N, K] exactly."""
    return {"W": weights.astype(BF16)}


CASES: Mapping[str, tuple[Case, ...]] = {
    "spark_gemv_rows": gemv_rows_cases(SHAPES, _dense, _drawn),
    "spark_gemv_rows_argmax": gemv_argmax_cases((8, 72, 520), whole_numbers, (*PLANTED, *INFINITE)),
}
