# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of spark_gemv_rows: what a lane holds, whose turn a stripe is, edges, and where an output goes."""

from __future__ import annotations

from .mutants import Mutant, Patch

_CHECK = "spark_gemv_rows::spark_gemv_rows"
_CU, _PY = "spark_gemv_rows.cu", "spark_gemv_rows.py"
_SPLIT_PY = "result.reshape(len(x), -1, 2, head_dim).swapaxes(1, 2).reshape(result.shape)"
_HALF_CU = "const unsigned half = output / head_dim % 2u;"
_LIVE_CU = "const bool live = chunk < chunks && row < left;"
_FIND_CU = "output = tile * GEMV_TILE;"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        _CHECK,
        "gates before queries",
        cu=Patch(_CU, _HALF_CU, _HALF_CU.replace("% 2u", "% 2u ^ 1u")),
        py=Patch(_PY, _SPLIT_PY, _SPLIT_PY.replace("head_dim).swap", "head_dim)[:, :, ::-1].swap")),
    ),
    Mutant(
        _CHECK,
        "queries and gates left as they are",
        cu=Patch(_CU, "if (head_dim > 0u && tile", "if (head_dim > N0 && tile"),
        py=Patch(_PY, "if head_dim:", "if head_dim < 0:"),
    ),
    Mutant(
        _CHECK,
        "last chunk of k left out",
        py=Patch(_PY, "dot_matrix(x, weights)", "dot_matrix(*(a[:, : max(8, a.shape[1] - 8)] for a in (x, weights)))"),
    ),
    Mutant(
        _CHECK,
        "outputs of the upper half of a tile from the lower",
        cu=Patch(
            _CU, "high[p] = ring[slot][place(g + 8u, 4u * p + t)];", "high[p] = ring[slot][place(g, 4u * p + t)];"
        ),
    ),
    Mutant(
        _CHECK,
        "stripes past the last whole round left out",
        cu=Patch(
            _CU,
            "const unsigned stripes = chunks > start ? (chunks - start + ROUND - 1u) / ROUND : 0u;",
            "const unsigned stripes = chunks / ROUND > 0u ? chunks / ROUND : chunks > start ? 1u : 0u;",
        ),
    ),
    Mutant(
        _CHECK,
        "chunks of the next output past a row's end",
        cu=Patch(_CU, _LIVE_CU, "const bool live = row < left;"),
    ),
    Mutant(
        _CHECK,
        "third matrix is the second again",
        cu=Patch(_CU, "which == 1u ? all.each[1] : all.each[2];", "all.each[1];"),
    ),
    Mutant(
        _CHECK,
        "one warp left out of the sum",
        cu=Patch(_CU, "for (unsigned w = 1u; w < GEMV_WARPS; ++w) {", "for (unsigned w = 2u; w < GEMV_WARPS; ++w) {"),
    ),
    Mutant(
        _CHECK,
        "a row too many",
        cu=Patch(_CU, "if (row < M && output < matrix.n) {", "if (row <= M && output < matrix.n) {"),
    ),
    Mutant(
        _CHECK,
        "later tiles of a block are the first",
        cu=Patch(
            _CU,
            "                if (ahead_tile < tiles) {\n                    enter();",
            "                if (ahead_tile >= tiles) {\n                    enter();",
        ),
    ),
    Mutant(
        _CHECK,
        "a stripe is overwritten before it is read",
        cu=Patch(
            _CU,
            "spark_copies_wait<GEMV_STAGES - 1u>();\n            __syncwarp();",
            "copy_next();\n            __syncwarp();",
        ),
        race=True,
    ),
    Mutant(
        _CHECK + "@far",
        "32-bit row offset",
        cu=Patch(
            _CU,
            "from = matrix.weights + static_cast<size_t>(output + lane / GEMV_UNITS) * chunks;",
            "from = matrix.weights + static_cast<unsigned>((output + lane / GEMV_UNITS) * chunks * 8u) / 8u;",
        ),
    ),
)
