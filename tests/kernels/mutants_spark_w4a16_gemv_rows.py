# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of spark_w4a16_gemv_rows: which scale and element a code has, edges, and where an output goes."""

from __future__ import annotations

from .gemv_rows_mutants import paired_mutants
from .mutants import Mutant, Patch

_MODULE = "spark_w4a16_gemv_rows"
_CHECK, _CU, _PY = f"{_MODULE}::{_MODULE}", f"{_MODULE}.cu", f"{_MODULE}.py"

MUTANTS: tuple[Mutant, ...] = (
    *paired_mutants(_MODULE),
    Mutant(
        _CHECK,
        "the first scale of a pair for both chunks",
        cu=Patch(_CU, "scales[1][w / 2u]", "scales[1][0]"),
    ),
    Mutant(
        _CHECK,
        "scale of a tensor left out",
        cu=Patch(_CU, "const float factor = W4_LOWERED * matrix.scale2;", "const float factor = W4_LOWERED;"),
        py=Patch(_PY, "to_bf16(sums * np.float32(scale2))", "to_bf16(sums)"),
    ),
    Mutant(
        _CHECK,
        "result rounded before it is scaled",
        py=Patch(_PY, "to_bf16(sums * np.float32(scale2))", "to_bf16(to_bf16(sums).astype('f4') * np.float32(scale2))"),
    ),
    Mutant(
        _CHECK,
        "the high nibble first",
        py=Patch(_PY, "codes(packed[some])", "codes((packed[some] >> 4) | (packed[some] << 4))"),
    ),
    Mutant(
        _CHECK,
        "a NaN scale is 480",
        cu=Patch(
            _CU, "spark_pack(scales[0], scales[1])", "spark_pack(fminf(scales[0], 480.0f), fminf(scales[1], 480.0f))"
        ),
    ),
    Mutant(
        _CHECK,
        "codes without a sign",
        cu=Patch("spark_e2m1.cuh", "spark_choose(0x80808080u, codes, 0u);", "0u;"),
    ),
    Mutant(
        _CHECK,
        "elements 4 and 5 of a word swapped",
        cu=Patch(
            _CU,
            "make_uint4(__byte_perm(x.x, x.z, 0x5410u), __byte_perm(x.x, x.z, 0x7632u),",
            "make_uint4(__byte_perm(x.x, x.z, 0x7610u), __byte_perm(x.x, x.z, 0x5432u),",
        ),
    ),
    Mutant(
        _CHECK,
        "the second tile has the scales of the first",
        cu=Patch(_CU, "raise(scale[h][p][0], scales[0]);", "raise(scale[0][p][0], scales[0]);"),
    ),
)
