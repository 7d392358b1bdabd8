# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of spark_w8a16_rows: which element and factor a byte has, edges and groups."""

from __future__ import annotations

from .gemv_rows_mutants import past_the_row
from .mutants import Mutant, Patch

_MODULE = "spark_w8a16_rows"
_CHECK, _CU, _PY = f"{_MODULE}::{_MODULE}", f"{_MODULE}.cu", f"{_MODULE}.py"
_FACTOR = "factor = factors[first / GEMV_UNITS];"
_BYTES = "bytes >> (16u * i)"
_GROUP = "* groups + output / (matrix.n / groups)) * (k / 8u);"

MUTANTS: tuple[Mutant, ...] = (
    past_the_row(_MODULE),
    Mutant(_CHECK, "factor of the first block", cu=Patch(_CU, _FACTOR, "factor = factors[0];")),
    Mutant(
        _CHECK,
        "factors of the matrix's first outputs",
        cu=Patch(_CU, "static_cast<size_t>(output / W8_SIDE)", "static_cast<size_t>(output / W8_SIDE * 0u)"),
        py=Patch(_PY, "factors[first // BLOCK, block]", "factors[0, block]"),
    ),
    Mutant(
        _CHECK,
        "a stripe goes on from the one before",
        cu=Patch(_CU, "if (p == 0u) {", "if (p == 0u && factor == factors[threadIdx.x / SPARK_WARP]) {"),
    ),
    Mutant(_CHECK, "bytes without a sign", cu=Patch("spark_fp8.cuh", _BYTES, "bytes >> (16u * i) & 0x7f7fu")),
    Mutant(_CHECK, "the pairs of a word exchanged", cu=Patch("spark_fp8.cuh", _BYTES, "bytes >> (16u - 16u * i)")),
    Mutant(_CHECK, "every group reads the first", cu=Patch(_CU, _GROUP, "* groups) * (k / 8u);")),
    Mutant(
        _CHECK,
        "rows of the first matrix for both",
        cu=Patch(_CU, "S1, reinterpret_cast<const uint4*>(X1)", "S1, reinterpret_cast<const uint4*>(X0)"),
    ),
    Mutant(_CHECK, "a row too many", cu=Patch(_CU, "return row < matrix.rows;", "return row < matrix.rows + 1u;")),
    Mutant(
        _CHECK,
        "groups in turn",
        py=Patch(_PY, "(first + np.arange(len(values))) // per_group", "(first + np.arange(len(values))) % groups"),
    ),
    Mutant(
        _CHECK,
        "result rounded before the last block is added",
        py=Patch(_PY, "sums[:, mine] += factors", "sums[:, mine] = to_bf16(sums[:, mine]) + factors"),
    ),
)
