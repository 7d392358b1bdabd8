# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of spark_v4_grouped_gemv: whose inputs a group sees, the order of its sum, rows, edges."""

from __future__ import annotations

from .mutants import Mutant, Patch

_CHECK = "spark_v4_grouped_gemv::spark_v4_grouped_gemv"
_CU, _PY = "spark_v4_grouped_gemv.cu", "spark_v4_grouped_gemv.py"
_DOT_PY = "to_bf16(dot_matrix(x[:, group], block))"
_ROW_CU = "inputs[row * a_stride + chunk]"
_STORE_CU = "c + static_cast<size_t>(lane) * outputs + output, halves[0] + halves[1]"
_WEIGHTS_CU = "const uint4* weights = b + output * chunks;"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        _CHECK,
        "every group from the first group's inputs",
        cu=Patch(_CU, "a + group * chunks;", "a + 0u * group * chunks;"),
        py=Patch(_PY, _DOT_PY, _DOT_PY.replace("x[:, group]", "x[:, 0]")),
    ),
    Mutant(
        _CHECK,
        "groups dealt out in turn",
        cu=Patch(
            _CU, "const size_t group = output / per_group;", "const size_t group = output % (outputs / per_group);"
        ),
        py=Patch(
            _PY,
            "    for group, block in enumerate(weights):\n",
            "    groups = len(weights)\n"
            "    weights = weights.reshape(-1, groups, weights.shape[2]).swapaxes(0, 1)\n"
            "    for group, block in enumerate(weights):\n",
        ),
    ),
    Mutant(
        _CHECK,
        "products added without an order",
        py=Patch(_PY, _DOT_PY, "(x[:, group].astype(float) @ block.astype(float).T).astype(x.dtype)"),
    ),
    Mutant(
        _CHECK,
        "rows of input as far apart as a group is long",
        cu=Patch(_CU, _ROW_CU, "inputs[row * static_cast<size_t>(chunks) + chunk]"),
    ),
    Mutant(
        _CHECK,
        "second half of the lanes left out",
        cu=Patch(_CU, _STORE_CU, _STORE_CU.replace(" + halves[1]", "")),
    ),
    Mutant(
        _CHECK,
        "outputs past the last group written",
        cu=Patch(_CU, "if (lane < ROWS && output < outputs) {", "if (lane < ROWS) {"),
    ),
    Mutant(
        _CHECK,
        "rows from 8 on are the first rows again",
        cu=Patch(_CU, "+ static_cast<size_t>(first) * groups * chunks;", "+ 0u * first;"),
        py=Patch(_PY, _DOT_PY, _DOT_PY.replace("x[:, group]", "x[[row % 8 for row in range(len(x))], group]")),
    ),
    Mutant(
        _CHECK,
        "halves swapped for those of the next output",
        cu=Patch(_CU, "warp_sums[lane] + 2u * own;", "warp_sums[lane] + 2u * (own ^ 1u);"),
    ),
    Mutant(
        _CHECK,
        "chunks past a row's end taken along",
        cu=Patch(
            _CU,
            "            if (chunk < mine) {\n#pragma unroll",
            "            weight[d] = chunk < mine ? weight[d] : weight[0];\n"
            "            if (chunk / SPARK_DOT_THREADS * SPARK_DOT_THREADS < mine) {\n#pragma unroll",
        ),
    ),
    Mutant(
        _CHECK + "@far",
        "32-bit row offset",
        cu=Patch(_CU, _WEIGHTS_CU, "const uint4* weights = b + static_cast<unsigned>(output * chunks * 8u) / 8u;"),
    ),
)
