# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of spark_fp8_gemv_rows: which element and scale a byte has, edges, and where an output goes."""

from __future__ import annotations

from .gemv_rows_mutants import overwritten_sums, past_the_row, shared_mutants
from .mutants import Mutant, Patch

_MODULE = "spark_fp8_gemv_rows"
_CHECK, _CU, _PY = f"{_MODULE}::{_MODULE}", f"{_MODULE}.cu", f"{_MODULE}.py"
_FP8, _WIDE_CU = "spark_fp8.cuh", "pairs[i] = spark_pack(values[0], values[1]);"

MUTANTS: tuple[Mutant, ...] = (
    *shared_mutants(_MODULE),
    past_the_row(_MODULE),
    overwritten_sums(_MODULE),
    Mutant(
        _CHECK,
        "scale of the tile's first output",
        cu=Patch(
            _CU,
            "const float scale = matrix.scales[output];",
            "const float scale = matrix.scales[output / GEMV_TILE * GEMV_TILE];",
        ),
    ),
    Mutant(
        _CHECK,
        "scale left out",
        cu=Patch(_CU, "const float scale = matrix.scales[output];", "const float scale = 1.0f;"),
        py=Patch(_PY, "to_bf16(sums * scales)", "to_bf16(sums)"),
    ),
    Mutant(
        _CHECK,
        "result rounded before it is scaled",
        py=Patch(_PY, "to_bf16(sums * scales)", "to_bf16(to_bf16(sums).astype('f4') * scales)"),
    ),
    Mutant(
        _CHECK,
        "a NaN byte is 480",
        cu=Patch(_FP8, _WIDE_CU, "pairs[i] = spark_pack(fminf(values[0], 480.0f), fminf(values[1], 480.0f));"),
    ),
    Mutant(
        _CHECK,
        "bytes without a sign",
        cu=Patch(_FP8, _WIDE_CU, "pairs[i] = spark_pack(fabsf(values[0]), fabsf(values[1]));"),
    ),
    Mutant(
        _CHECK,
        "elements 0 and 1 of a pair swapped",
        cu=Patch(_FP8, _WIDE_CU, "pairs[i] = spark_pack(values[1], values[0]);"),
    ),
)
