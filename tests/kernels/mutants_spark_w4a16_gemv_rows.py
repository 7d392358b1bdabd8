# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of spark_w4a16_gemv_rows: which scale and element a code has, edges, and where an output goes."""

from __future__ import annotations

from .gemv_rows_mutants import overwritten_sums, shared_mutants
from .mutants import Mutant, Patch

_MODULE = "spark_w4a16_gemv_rows"
_CHECK, _CU, _PY = f"{_MODULE}::{_MODULE}", f"{_MODULE}.cu", f"{_MODULE}.py"

MUTANTS: tuple[Mutant, ...] = (
    *shared_mutants(_MODULE),
    overwritten_sums(_MODULE),
    Mutant(
        _CHECK,
        "the first scale of a pair for both chunks",
        cu=Patch(_CU, "const unsigned shift = w / 2u * 8u;", "const unsigned shift = 0u * w;"),
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
        cu=Patch(_CU, "(code & 0x7fu) == 0x7fu ? 0x7fff7fffu : __float_as_uint(value);", "__float_as_uint(value);"),
    ),
    Mutant(
        _CHECK,
        "codes without a sign",
        cu=Patch(_CU, "(magnitude & 0x01c001c0u) | (sign & 0x80008000u)", "(magnitude & 0x01c001c0u) | (sign & 0u)"),
    ),
    Mutant(
        _CHECK,
        "elements 4 and 5 of a word swapped",
        cu=Patch(
            _CU,
            "{__byte_perm(a.x, a.z, 0x5410u), __byte_perm(a.x, a.z, 0x7632u)}",
            "{__byte_perm(a.x, a.z, 0x7610u), __byte_perm(a.x, a.z, 0x5432u)}",
        ),
    ),
)
