# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of argmax: ties, NaN, the start value, edges, and what a log-probability means."""

from __future__ import annotations

from .mutants import Mutant, Patch

_FIRST_CU = "for (unsigned j = 8u; j-- > 0u;) {"
_MERGE_CU = "b.value > a.value || (b.value == a.value && b.index < a.index);"
_START_CU = "Best best = {__uint_as_float(MINUS_INF_BITS), ARGMAX_NONE, 0.0f};"
_TOP_CU = "top = fmaxf(top, v[j]);"
_TAIL_CU = "if (threadIdx.x < n - tail) {"
_RESCALE_CU = "best.sum = a.sum * weight_of(a.value, best.value) + b.sum * weight_of(b.value, best.value);"
_WINNERS_PY = "winners = np.argmax(np.where(missing, np.float32(-np.inf), values), axis=1)"
_HOPELESS_PY = "winners[row] = np.argmin(missing[row])"
_RESULT_PY = "return np.asarray(result, np.float32)"
_TOTAL_PY = "total = np.where(values == top, 1.0, np.exp(values - top)).sum(axis=1)"
_LAST_PY = "winners = values.shape[1] - 1 - np.argmax(np.where(missing, -np.inf, values)[:, ::-1], axis=1)"
_START_PY = "winners = np.argmax(np.where(missing | (values < -1e30), np.float32(-1e30), values), axis=1)"
_NAN_PY = "winners = np.argmax(values, axis=1)"


def _index_mutants(function: str) -> tuple[Mutant, ...]:
    check = f"argmax::{function}"
    return (
        Mutant(
            check,
            "last index of a tie in a chunk",
            cu=Patch("argmax.cu", _FIRST_CU, "for (unsigned j = 0u; j < 8u; ++j) {"),
            py=Patch("argmax.py", _WINNERS_PY, _LAST_PY),
        ),
        Mutant(
            check,
            "first thread of a tie wins, not the lowest index",
            cu=Patch("argmax.cu", _MERGE_CU, "b.value > a.value;"),
        ),
        Mutant(
            check,
            "NaN pins the maximum",
            cu=Patch("argmax.cu", _TOP_CU, "top = v[j] > top ? v[j] : top;"),
            py=Patch("argmax.py", _WINNERS_PY, _NAN_PY),
        ),
        Mutant(
            check,
            "entries below -1e30 never win",
            cu=Patch("argmax.cu", _START_CU, "Best best = {-1e30f, ARGMAX_NONE, 0.0f};"),
            py=Patch("argmax.py", _WINNERS_PY, _START_PY),
        ),
        Mutant(
            check,
            "last column left out",
            cu=Patch("argmax.cu", _TAIL_CU, "if (threadIdx.x + 1u < n - tail) {"),
            py=Patch(
                "argmax.py",
                _WINNERS_PY,
                "winners = np.argmax(np.where(missing, -np.inf, values)[:, : max(1, values.shape[1] - 1)], axis=1)",
            ),
        ),
    )


MUTANTS: tuple[Mutant, ...] = (
    *_index_mutants("argmax_bf16"),
    *_index_mutants("argmax_bf16_batch"),
    *_index_mutants("argmax_bf16_batch_lp"),
    Mutant(
        "argmax::argmax_bf16",
        "-Inf never wins among the elements beside the chunks",
        cu=Patch(
            "argmax.cu",
            "if (v > before || (v == before && best.index == ARGMAX_NONE)) {",
            "if (v > before) {",
        ),
        py=Patch("argmax.py", _HOPELESS_PY, "winners[row] = 0"),
    ),
    Mutant(
        "argmax::argmax_bf16",
        "no index for a row of NaN",
        cu=Patch("argmax.cu", "return best.index == ARGMAX_NONE ? 0u : best.index;", "return best.index;"),
        py=Patch("argmax.py", _HOPELESS_PY, "winners[row] = values.shape[1] - 1"),
    ),
    Mutant(
        "argmax::argmax_bf16_batch",
        "rows packed: row_stride ignored",
        cu=Patch(
            "argmax.cu",
            "argmax_row<false>(logits + static_cast<size_t>(blockIdx.x) * row_stride, n);",
            "argmax_row<false>(logits + static_cast<size_t>(blockIdx.x) * n, n);",
        ),
    ),
    Mutant(
        "argmax::argmax_bf16_batch@far",
        "32-bit row offset",
        cu=Patch(
            "argmax.cu",
            "argmax_row<false>(logits + static_cast<size_t>(blockIdx.x) * row_stride, n);",
            "argmax_row<false>(logits + blockIdx.x * row_stride, n);",
        ),
    ),
    Mutant(
        "argmax::argmax_bf16_batch_lp",
        "NaN reported as certain",
        cu=Patch(
            "argmax.cu",
            "return 0.0f - logf(best.sum);",
            "return best.sum > 0.0f ? 0.0f - logf(best.sum) : 0.0f;",
        ),
        py=Patch("argmax.py", _RESULT_PY, "return np.asarray(np.nan_to_num(result), np.float32)"),
    ),
    Mutant(
        "argmax::argmax_bf16_batch_lp",
        "two +Inf reported as certain",
        cu=Patch("argmax.cu", "return best.sum == 1.0f ? 0.0f : __uint_as_float(NAN_BITS);", "return 0.0f;"),
        py=Patch(
            "argmax.py",
            "result[infinite] = np.where(certain[infinite], 0.0, np.nan)",
            "result[infinite & (top[:, 0] > 0)] = 0.0",
        ),
    ),
    Mutant(
        "argmax::argmax_bf16_batch_lp",
        "sums merged without a common maximum",
        cu=Patch("argmax.cu", _RESCALE_CU, "best.sum = a.sum + b.sum;"),
        py=Patch("argmax.py", _TOTAL_PY, "total = np.where(values == top, 1.0, np.exp(values - 1 - top)).sum(axis=1)"),
    ),
    Mutant(
        "argmax::argmax_bf16_batch_lp",
        "logarithm to base 2",
        cu=Patch("argmax.cu", "return 0.0f - logf(best.sum);", "return 0.0f - log2f(best.sum);"),
        py=Patch("argmax.py", "result = 0.0 - np.log(total)", "result = 0.0 - np.log2(total)"),
    ),
    Mutant(
        "argmax::argmax_bf16_batch_lp",
        "the winner counted twice",
        cu=Patch(
            "argmax.cu", "best.sum = best.sum * weight_of(before, best.value) + added;", "best.sum = best.sum + added;"
        ),
        py=Patch(
            "argmax.py", _TOTAL_PY, "total = 1.0 + np.where(values == top, 1.0, np.exp(values - top)).sum(axis=1)"
        ),
    ),
)
