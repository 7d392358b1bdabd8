# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of spark_fp8_gemv_rows: which element and scale a byte has, edges, and where an output goes."""

from __future__ import annotations

from .mutants import Mutant, Patch

_CHECK = "spark_fp8_gemv_rows::spark_fp8_gemv_rows"
_CU, _PY = "spark_fp8_gemv_rows.cu", "spark_fp8_gemv_rows.py"
_SPLIT_PY = "result.reshape(len(x), -1, 2, head_dim).swapaxes(1, 2).reshape(result.shape)"
_HALF_CU = "const unsigned half = output / head_dim % 2u;"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        _CHECK,
        "gates before queries",
        cu=Patch(_CU, _HALF_CU, _HALF_CU.replace("% 2u", "% 2u ^ 1u")),
        py=Patch(_PY, _SPLIT_PY, _SPLIT_PY.replace("head_dim).swap", "head_dim)[:, :, ::-1].swap")),
    ),
    Mutant(
        _CHECK,
        "scale of the tile's first output",
        cu=Patch(_CU, "const float scale = matrix.scales[output];", "const float scale = matrix.scales[first];"),
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
        cu=Patch(_CU, "if (nan != 0u) {", "if (nan == 1u) {"),
    ),
    Mutant(
        _CHECK,
        "bytes without a sign",
        cu=Patch(_CU, "| (bytes & 0x80008000u), FP8_RAISE);", "| (bytes & 0u), FP8_RAISE);"),
    ),
    Mutant(
        _CHECK,
        "elements 1 and 2 of a word swapped",
        cu=Patch(
            _CU,
            "{__byte_perm(even, odd, 0x5410u), __byte_perm(even, odd, 0x7632u)}",
            "{even, odd}",
        ),
    ),
    Mutant(
        _CHECK,
        "chunks of the next output past a row's end",
        cu=Patch(_CU, "const bool live = chunk < chunks && row < left;", "const bool live = row < left;"),
    ),
    Mutant(
        _CHECK,
        "third matrix is the second again",
        cu=Patch(_CU, "which == 1u ? all.each[1] : all.each[2];", "all.each[1];"),
    ),
    Mutant(
        _CHECK,
        "one warp left out of the sum",
        cu=Patch(_CU, "for (unsigned w = 1u; w < FP8_WARPS; ++w) {", "for (unsigned w = 2u; w < FP8_WARPS; ++w) {"),
    ),
    Mutant(
        _CHECK,
        "sums overwritten while they are read",
        cu=Patch(_CU, "        __syncthreads();  // sums have been read\n", ""),
        race=True,
    ),
)
