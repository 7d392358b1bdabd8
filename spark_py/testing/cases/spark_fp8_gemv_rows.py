# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module spark_fp8_gemv_rows: values within what a tensor core's sums may lose."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...catalog.spec import Call
from ..case import Case
from ..compare import f64
from ..inputs import F32, Array
from ._gemv_argmax import gemv_argmax_cases
from ._gemv_rows import Shape, gemv_rows_cases
from .paged_decode_fp8 import E4M3

SHAPES: tuple[Shape, ...] = (
    (1, (5, 0, 0), 16, 0, 1, 0),
    (8, (33, 7, 16), 528, 0, 2, 0),
    (3, (64, 17, 16), 1168, 16, 3, 5),
    (5, (16, 40, 0), 2048, 8, 2, 0),
)


def _dense(c: Call, i: int) -> Array:
    weights: Array = f64(getattr(c, f"W{i}").view(E4M3)) * f64(getattr(c, f"S{i}"))[:, None]
    return weights


def _drawn(rng: np.random.Generator, i: int, n: int, size: int) -> Mapping[str, Array]:
    """Every value there is, but NaN, which one output of a matrix has."""
    codes = (rng.integers(0, 0x7F, (n, size)) | rng.choice([0, 0x80], (n, size))).astype(np.uint8)
    codes[n // 2 : n // 2 + (n > 4), rng.integers(size)] = rng.choice([0x7F, 0xFF])
    return {"W": codes, "S": rng.uniform(0.001, 3, n).astype(F32)}


def whole_numbers(weights: Array) -> Mapping[str, Array | float]:
    """The arguments that are FP64 [N, K] exactly, every other row by half of its size."""
    scales = np.where(np.arange(len(weights)) % 2, 2.0, 1.0)
    return {"W": (weights / scales[:, None]).astype(E4M3).view(np.uint8), "S": scales.astype(F32)}


CASES: Mapping[str, tuple[Case, ...]] = {
    "spark_fp8_gemv_rows": gemv_rows_cases(SHAPES, _dense, _drawn),
    "spark_fp8_gemv_rows_argmax": gemv_argmax_cases((32, 144, 528), whole_numbers),
}
