# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of spark_gemv_argmax.cuh, for each kernel that is made of it: ties, rounding, NaN, who is last, and what is
left behind."""

from __future__ import annotations

from .mutants import Mutant, Patch

_CUH = "spark_gemv_argmax.cuh"
_ROUNDED_CU = "__float_as_uint(__bfloat162float(__float2bfloat16_rn(sum)));"
_TAKE_CU = "take(const Matrix&, unsigned row, unsigned output, float sum) {\n"
_TAKE_LATE_CU = "take(const Matrix& matrix, unsigned row, unsigned output, float sum) {\n"
_BETTER_CU = "best[turn] = key > best[turn] ? key : best[turn];"
_CALLS = {
    "spark_gemv_rows": "winners(spark_gemv_rows(x, weights), table)",
    "spark_fp8_gemv_rows": "winners(spark_fp8_gemv_rows(x, codes, scales), table)",
    "spark_w4a16_gemv_rows": "winners(spark_w4a16_gemv_rows(x, packed, scales, scale2), table)",
}


def _mutants(module: str) -> tuple[Mutant, ...]:
    check, call, file = f"{module}::{module}_argmax", _CALLS[module], f"{module}.py"
    return (
        Mutant(
            check,
            "a later one of equal outputs of a thread",
            cu=Patch(_CUH, _BETTER_CU, _BETTER_CU.replace("key > best[turn]", "key >> 32 >= best[turn] >> 32")),
            py=Patch(file, call, call.replace("), table)", ")[:, ::-1], table)")),
        ),
        Mutant(check, "compared before they are rounded", cu=Patch(_CUH, _ROUNDED_CU, "__float_as_uint(sum);")),
        Mutant(check, "NaN wins", cu=Patch(_CUH, "return 0ull;", "return ~0ull;")),
        Mutant(
            check,
            "the last tile where it is not whole left out",
            cu=Patch(
                _CUH, _TAKE_CU, _TAKE_LATE_CU + "        if (output / 16u * 16u + 16u > matrix.n) {\n"
                "            return;\n        }\n",
            ),
        ),
        Mutant(check, "half of a row's lanes", cu=Patch(_CUH, "step = OUTPUTS / 2u;", "step = OUTPUTS / 4u;")),
        Mutant(check, "the last block but one is the last", cu=Patch(_CUH, "+ 1u == gridDim", "+ 2u == gridDim")),
        Mutant(check, "blocks that are done stay counted", cu=Patch(_CUH, "*state.done = 0u;", "")),
        Mutant(check, "winners stay", cu=Patch(_CUH, "            state.best[threadIdx.x] = 0ull;\n", "")),
        Mutant(
            check,
            "embeddings of the token before",
            cu=Patch(_CUH, "static_cast<size_t>(id) * to.width", "static_cast<size_t>(id - (id > 0u)) * to.width"),
            py=Patch(file, f"{call}", call.replace(", table)", ", None if table is None else table[::-1])")),
        ),
        Mutant(check, "the first row alone", cu=Patch(_CUH, "== 0u && row < M) {", "== 0u && row < 1u) {")),
    )  # fmt: skip


MUTANTS: tuple[Mutant, ...] = (
    *(mutant for module in _CALLS for mutant in _mutants(module)),
    Mutant(
        "spark_w4a16_gemv_rows::spark_w4a16_gemv_rows_argmax",
        "all rows of a thread are one",
        cu=Patch(_CUH, "row / step == turn) {", "turn == 0u) {"),
    ),
)
