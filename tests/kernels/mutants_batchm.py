# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of dense_gemv_bf16_batchm: a row is the GEMV of that row, barriers and strides included."""

from __future__ import annotations

from .mutants import Mutant, Patch

_CHECK = "dense_gemv_bf16_batchm::dense_gemv_bf16_batchm"
_CU = "dense_gemv_bf16_batchm.cu"
_STAGED = "staged[i] = a[static_cast<size_t>(i / AT_ONCE) * chunks + chunk];"
_STORE = "spark_store(c + static_cast<size_t>(lane) * out_stride + output, halves[0] + halves[1]);"
_PY = "return to_bf16(dot_matrix(x, weights))"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        _CHECK,
        "rows from 8 on are the first rows again",
        cu=Patch(_CU, _STAGED, _STAGED.replace("i / AT_ONCE", "i / AT_ONCE % 8u")),
        py=Patch(
            "dense_gemv_bf16_batchm.py",
            _PY,
            "return to_bf16(dot_matrix(x[[row % 8 for row in range(len(x))]], weights))",
        ),
    ),
    Mutant(
        _CHECK,
        "products added without an order",
        py=Patch(
            "dense_gemv_bf16_batchm.py",
            _PY,
            "return (x.astype(float) @ weights.astype(float).T).astype(x.dtype)",
        ),
    ),
    Mutant(
        _CHECK,
        "threads past N leave before the barrier",
        cu=Patch(_CU, "float sums[ROWS] = {};", "if (output >= n) return;\n    float sums[ROWS] = {};"),
    ),
    Mutant(_CHECK, "rows of output without their stride", cu=Patch(_CU, _STORE, _STORE.replace("out_stride", "n"))),
    Mutant(_CHECK, "halves swapped for those of the next output", cu=Patch(_CU, "2u * group;", "2u * (group ^ 1u);")),
    Mutant(
        _CHECK,
        "the last stripe as if it were whole",
        cu=Patch(_CU, "if (first + at < mine) {", "if (mine > 0u) {"),
    ),
)
