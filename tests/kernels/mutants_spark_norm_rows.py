# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of spark_norm_rows: which weight a side has, what the mean square is of, pairs past a row."""

from __future__ import annotations

from .mutants import Mutant, Patch

_CU, _PY = "spark_norm_rows.cu", "spark_norm_rows.py"
_CONCAT, _ADD = "spark_norm_rows::spark_norm_concat", "spark_norm_rows::spark_add_then_norm"
_WEIGHT_CU = "(blockIdx.x == 0u ? first_weight : second_weight, count, hidden_size);"
_NORM_PY = "return rms_norm(x, weight, eps) if one_plus else rms_norm_vanilla(x, weight, eps)"
_ADDED_PY = "return added, _norm(added, weight, eps, one_plus)"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        _CONCAT,
        "both sides with the first weight",
        cu=Patch(_CU, _WEIGHT_CU, "(first_weight, count, hidden_size);"),
        py=Patch(
            _PY, "zip((first, second), weights, strict=True)", "zip((first, second), weights[:1] * 2, strict=True)"
        ),
    ),
    Mutant(
        _CONCAT,
        "second before first",
        cu=Patch(
            _CU, "out + (2u * row + blockIdx.x) * hidden_size", "out + (2u * row + 1u - blockIdx.x) * hidden_size"
        ),
        py=Patch(_PY, "for x, weight in pair]", "for x, weight in [*pair][::-1]]"),
    ),
    Mutant(
        _CONCAT,
        "plain weights always",
        cu=Patch(_CU, "hidden_size, count, one_plus != 0u, eps);", "hidden_size, count, false, eps);"),
        py=Patch(_PY, _NORM_PY, "return rms_norm_vanilla(x, weight, eps)"),
    ),
    Mutant(
        _CONCAT,
        "all rows the first",
        cu=Patch(
            _CU, "(blockIdx.x == 0u ? first : second) + row * hidden_size;", "(blockIdx.x == 0u ? first : second);"
        ),
    ),
    Mutant(
        _ADD,
        "sum not stored",
        cu=Patch(_CU, "            reinterpret_cast<unsigned*>(hidden + start)[pair] = pairs.word[turn];\n", ""),
        py=Patch(_PY, _ADDED_PY, _ADDED_PY.replace("return added", "return hidden")),
    ),
    Mutant(
        _ADD,
        "norm of what was there before",
        py=Patch(_PY, _ADDED_PY, _ADDED_PY.replace("_norm(added", "_norm(hidden")),
    ),
    Mutant(
        _ADD,
        "mean of the pairs that a block has",
        cu=Patch(
            _CU, "spark_block_sum(squares), 2u * count, eps);", "spark_block_sum(squares), 2u * blockDim.x, eps);"
        ),
    ),
    Mutant(
        _ADD,
        "last turn left out of the sum",
        cu=Patch(
            _CU,
            "if (turn * blockDim.x + threadIdx.x < count) {",
            "if (turn < 3u && turn * blockDim.x + threadIdx.x < count) {",
        ),
    ),
)
