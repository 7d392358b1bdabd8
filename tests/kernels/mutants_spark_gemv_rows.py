# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of spark_gemv_rows: what a lane holds, whose turn a stripe is, edges, and where an output goes."""

from __future__ import annotations

from .gemv_rows_mutants import CUH, past_the_row, shared_mutants
from .mutants import Mutant, Patch

_MODULE = "spark_gemv_rows"
_CHECK, _PY = f"{_MODULE}::{_MODULE}", f"{_MODULE}.py"

MUTANTS: tuple[Mutant, ...] = (
    *shared_mutants(_MODULE),
    past_the_row(_MODULE),
    Mutant(
        _CHECK,
        "queries and gates left as they are",
        cu=Patch(CUH, "if (head_dim > 0u && tile", "if (head_dim > all.each[0].n && tile"),
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
        cu=Patch(CUH, "high[p] = taken(slot, p, 8u);", "high[p] = taken(slot, p, 0u);"),
    ),
    Mutant(
        _CHECK,
        "stripes past the last whole round left out",
        cu=Patch(
            CUH,
            "row_stripes > warp ? (row_stripes - warp + GEMV_WARPS - 1u) / GEMV_WARPS : 0u;",
            "chunks >= 64u ? chunks / 64u : row_stripes > warp ? 1u : 0u;",
        ),
    ),
    Mutant(
        _CHECK,
        "a row too many",
        cu=Patch(CUH, "if (row < M && output < matrix.n &&", "if (row <= M && output < matrix.n &&"),
    ),
    Mutant(
        _CHECK,
        "later tiles of a block are the first",
        cu=Patch(
            CUH,
            "                if (ahead_tile < tiles) {\n                    enter();",
            "                if (ahead_tile >= tiles) {\n                    enter();",
        ),
    ),
    Mutant(
        _CHECK,
        "a stripe is overwritten before it is read",
        cu=Patch(
            CUH,
            "spark_copies_wait<GEMV_STAGES - 1u>();\n            __syncwarp();",
            "copy_next();\n            __syncwarp();",
        ),
        race=True,
    ),
    Mutant(
        _CHECK + "@far",
        "32-bit row offset",
        cu=Patch(
            CUH,
            "from = matrix.weights + static_cast<size_t>(output + lane / GEMV_UNITS) * chunks;",
            "from = matrix.weights + static_cast<unsigned>((output + lane / GEMV_UNITS) * chunks * 8u) / 8u;",
        ),
    ),
)
