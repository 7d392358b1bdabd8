# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of spark_w8a16_rows: which element and factor a byte has, edges, groups, and what the diagonal is."""

from __future__ import annotations

from .mutants import Mutant, Patch

_ROW, _ROWS = "spark_w8a16_rows::spark_w8a16_row", "spark_w8a16_rows::spark_w8a16_rows"
_CU, _CUH, _PY = "spark_w8a16_rows.cu", "spark_diagonal.cuh", "spark_w8a16_rows.py"
_FACTOR = "factor[d] = factors[unit / SIDE];"
_SIGN = "| (bytes & 0x80008000u), W8_RAISE);"
_GROUP = "const unsigned group = output / (matrix.n / groups);"
_OWN = "const float own = g % 2u == 0u ? sums[2u * second] : sums[2u * second + 1u];"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(_ROW, "factor of the first block", cu=Patch(_CU, _FACTOR, "factor[d] = factors[0];")),
    Mutant(
        _ROWS, "factor of the block before", cu=Patch(_CU, _FACTOR, "factor[d] = factors[(unit - 1u) / SIDE % 9u];")
    ),
    Mutant(
        _ROWS,
        "factors of the matrix's first outputs",
        cu=Patch(_CU, "static_cast<size_t>(output / W8_SIDE)", "static_cast<size_t>(output / W8_SIDE * 0u)"),
        py=Patch(_PY, "factors[first // BLOCK, block]", "factors[0, block]"),
    ),
    Mutant(_ROW, "bytes without a sign", cu=Patch(_CU, _SIGN, "| (bytes & 0u), W8_RAISE);")),
    Mutant(_ROWS, "NaN is 480", cu=Patch(_CU, "(carries & 0x80808080u) != 0u ?", "carries == 1u ?")),
    Mutant(_ROW, "every group reads the first", cu=Patch(_CU, _GROUP, "const unsigned group = 0u;")),
    Mutant(
        _ROWS,
        "groups in turn",
        cu=Patch(_CU, _GROUP, "const unsigned group = output % groups;"),
        py=Patch(_PY, "(first + np.arange(len(values))) // per_group", "(first + np.arange(len(values))) % groups"),
    ),
    Mutant(_ROW, "beside the diagonal", cu=Patch(_CUH, _OWN, _OWN.replace("g % 2u == 0u", "g % 2u != 0u"))),
    Mutant(
        _ROWS,
        "both outputs of a pair are the first",
        cu=Patch(_CU, "spark_diagonal_sum(sums[r][o / 2u], o % 2u);", "spark_diagonal_sum(sums[r][o / 2u], 0u);"),
    ),
    Mutant(
        _ROWS,
        "result rounded before the last block is added",
        py=Patch(_PY, "sums[:, mine] += factors", "sums[:, mine] = to_bf16(sums[:, mine]) + factors"),
    ),
)
