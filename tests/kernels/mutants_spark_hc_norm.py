# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of spark_hc_norm: which row is added to which, what is rounded, and the row that is normalised."""

from __future__ import annotations

from .mutants import Mutant, Patch

_SUM, _PRE, _HEAD = (f"spark_hc_norm::spark_hc_{name}" for name in ("expand_sum", "pre_norm", "head_norm"))
_CU, _PY = "spark_hc_norm.cu", "spark_hc_norm.py"
_OWN = "(apart != 0u ? stream : token) * quads + quad];"
_R = "const float r = spark_inverse_rms(spark_block_sum(squares), size, eps);"
_SQUARES = "squares += x0 * x0 + x1 * x1;"
_RAW = "const unsigned word = reinterpret_cast<const unsigned*>(raw)[pair];"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(_SUM, "the first stream's branch for all", cu=Patch(_CU, _OWN, "token * quads + quad];")),
    Mutant(
        _SUM,
        "common of the first token",
        cu=Patch(_CU, "(common)[token * quads + quad];", "(common)[quad];"),
        py=Patch(_PY, "to_f32(common)[:, None]", "to_f32(common)[:1, None]"),
    ),
    Mutant(
        _SUM,
        "sum not rounded",
        py=Patch(
            _PY, "to_f32(to_bf16(to_f32(own) + to_f32(common)[:, None]))", "to_f32(own) + to_f32(common)[:, None]"
        ),
    ),
    Mutant(_PRE, "norm_eps for eps", cu=Patch(_CU, _R, _R.replace("eps)", "0.03f)"))),
    Mutant(_PRE, "squares of the first of each pair", cu=Patch(_CU, _SQUARES, "squares += x0 * x0 + x0 * x1;")),
    Mutant(_PRE, "comb of the first token", cu=Patch(_CU, "comb + token * (HC * HC));", "comb);")),
    Mutant(
        _HEAD,
        "row of the head normalised where it lies",
        cu=Patch(
            _CU,
            "y + token * size, output + token * size, size, eps);",
            "output + token * size, y + token * size, size, eps);",
        ),
        py=Patch(_PY, "return y, rms_norm_vanilla(y, weight, eps)", "return rms_norm_vanilla(y, weight, eps), y"),
    ),
    Mutant(_HEAD, "weight of the pair before", cu=Patch(_CU, "(weight)[pair];", "(weight)[pair ^ 1u];")),
    Mutant(_HEAD, "a pair's second element twice", cu=Patch(_CU, _RAW, _RAW.replace("[pair];", "[pair] >> 16 << 16;"))),
)
