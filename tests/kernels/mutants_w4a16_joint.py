# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of the joint NVFP4 projections of two and three rows: rows, weights, places, the order of sums."""

from __future__ import annotations

from .mutants import Mutant, Patch

_QG2, _QG3 = (f"w4a16_gemv::w4a16_gemv_qg_batch{rows}" for rows in (2, 3))
_DUAL2, _DUAL3 = (f"w4a16_gemv::w4a16_gemv_dual_batch{rows}" for rows in (2, 3))
_CU, _CUH, _PY = "w4a16_gemv_joint_batch.cu", "w4a16.cuh", "w4a16_gemv_joint_batch.py"

_ROW_CU = "const uint4 x = rows[static_cast<size_t>(r) * words + word];"
_PAIR_CU = "sum = sum + spark_low(a) * (low * factor);\n    return sum + spark_high(a) * (high * factor);"  # fmt: skip
_CALL2_CU = (
    "one_of_two<2u>(A, second ? B1_packed : B0_packed, second ? B1_scale : B0_scale, second ? B1_scale2 : B0_scale2,"
)
_CALL3_CU = _CALL2_CU.replace("2u", "3u")
_HEADS_PY = "return heads.transpose(0, 2, 1, 3).reshape(len(x), -1)"
_ROWS_PY = "np.stack([scaled_by_weight(row, packed, scales, scale2) for row in x])"
_IMPORT_PY = "from .w4a16_gemv import scaled_by_weight\n"
_OTHER_PY = (
    "from .w4a16_gemv import scaled_by_chunk\n\n\n"
    "def scaled_by_weight(row, *weight):\n    return scaled_by_chunk(row[None], *weight)[0]\n"
)
_SECOND_PY = "return first, _rows(x, packed_1, scales_1, scale2_1)"


def _everywhere(name: str, find: str, replace: str, py: tuple[str, str]) -> tuple[Mutant, ...]:
    """A change of the arithmetic that all four share."""
    cu, reference = Patch(_CUH, find, replace), Patch(_PY, *py)
    return tuple(Mutant(check, name, cu=cu, py=reference) for check in (_QG2, _QG3, _DUAL2, _DUAL3))


MUTANTS: tuple[Mutant, ...] = (
    *_everywhere(
        "the first row for all",
        _ROW_CU,
        "const uint4 x = rows[word];",
        (_ROWS_PY, "np.stack([scaled_by_weight(x[0], packed, scales, scale2) for _ in x])"),
    ),
    *_everywhere(
        "fused, or in the order of the other kernels",
        _PAIR_CU,
        "sum = fmaf(spark_low(a), low * factor, sum);\n    return fmaf(spark_high(a), high * factor, sum);",
        (_IMPORT_PY, _OTHER_PY),
    ),
    Mutant(
        _QG2,
        "queries and gates head by head",
        cu=Patch(_CU, "const size_t at = spark_w4_apart(output, num_heads, head_dim);", "const size_t at = output;"),
        py=Patch(_PY, _HEADS_PY, "return heads.reshape(len(x), -1)"),
    ),
    Mutant(
        _QG3,
        "the last row left out",
        cu=Patch(_CU, "queries_and_gates<3u>(A", "queries_and_gates<2u>(A"),
    ),
    Mutant(
        _DUAL2,
        "the factor of the first for both",
        cu=Patch(_CU, _CALL2_CU, _CALL2_CU.replace("second ? B1_scale2 : B0_scale2", "B0_scale2")),
        py=Patch(_PY, _SECOND_PY, _SECOND_PY.replace("scale2_1", "scale2_0")),
    ),
    Mutant(
        _DUAL3,
        "the scales of the first for both",
        cu=Patch(_CU, _CALL3_CU, _CALL3_CU.replace("second ? B1_scale : B0_scale", "B0_scale")),
        py=Patch(_PY, _SECOND_PY, _SECOND_PY.replace("scales_1", "scales_0")),
    ),
)
