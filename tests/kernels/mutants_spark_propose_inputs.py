# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of spark_propose_inputs: whose row it is, who copies what, the last pieces."""

from __future__ import annotations

from .mutants import Mutant, Patch

_CU, _PY = "spark_propose_inputs.cu", "spark_propose_inputs.py"
_NAME = "spark_propose_inputs::spark_propose_inputs"
_PIECES = "for (size_t i = first; i < bytes / 16u; i += step) {"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        _NAME,
        "every row the first's",
        cu=Patch(_CU, "static_cast<size_t>(sources[row])", "static_cast<size_t>(sources[0])"),
        py=Patch(_PY, "np.stack(rows)", "np.stack([rows[0]] * len(rows))"),
    ),
    Mutant(
        _NAME,
        "the first token for all",
        cu=Patch(_CU, ": tokens[row];", ": tokens[0];"),
        py=Patch(_PY, "table[tokens]", "table[tokens[:1].repeat(tokens.size)]"),
    ),
    Mutant(_NAME, "the last piece stays", cu=Patch(_CU, _PIECES, _PIECES.replace("bytes / 16u", "bytes / 16u - 1u"))),
    Mutant(
        _NAME,
        "each block its first pieces alone",
        cu=Patch(_CU, _PIECES, _PIECES.replace("i += step", "i += bytes")),
    ),
    Mutant(
        _NAME,
        "rows of the slab's blocks copy the same pieces",
        cu=Patch(_CU, "row * gridDim.x + blockIdx.x, gridDim.x * gridDim.y", "blockIdx.x, gridDim.x * gridDim.y"),
    ),
    Mutant(
        _NAME,
        "sixteen bytes at a time wherever the row starts",
        cu=Patch(_CU, "if (bytes % 16u == 0u && spark_aligned(to, 16u) && spark_aligned(from, 16u)) {",
                 "if (spark_aligned(to, 16u) && spark_aligned(from, 16u)) {"),
    ),
    Mutant(
        _NAME,
        "a byte missing of rows by elements",
        cu=Patch(_CU, "i < bytes / 2u", "i < bytes / 2u - 1u"),
    ),
)  # fmt: skip
