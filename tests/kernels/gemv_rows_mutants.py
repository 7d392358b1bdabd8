# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of spark_gemv_rows.cuh and spark_gemv_pairs.cuh, for each kernel that is made of one of them."""

from __future__ import annotations

from .mutants import Mutant, Patch

CUH, PAIRS = "spark_gemv_rows.cuh", "spark_gemv_pairs.cuh"
_SPLIT_PY = "result.reshape(len(x), -1, 2, head_dim).swapaxes(1, 2).reshape(result.shape)"
_HALF_CU = "const unsigned half = output / head_dim % 2u;"
_WAIT_CU = "    spark_wait_for_previous();\n"


def _warps(header: str) -> str:
    return f"for (unsigned w = 1u; w < {'PAIR' if header == PAIRS else 'GEMV'}_WARPS; ++w) {{"


def shared_mutants(module: str, header: str = CUH) -> tuple[Mutant, ...]:
    """What every format's check must notice."""
    check = f"{module}::{module}"
    warps = _warps(header)
    return (
        Mutant(
            check,
            "gates before queries",
            cu=Patch(header, _HALF_CU, _HALF_CU.replace("% 2u", "% 2u ^ 1u")),
            py=Patch(f"{module}.py", _SPLIT_PY, _SPLIT_PY.replace("head_dim).swap", "head_dim)[:, :, ::-1].swap")),
        ),
        Mutant(
            check,
            "third matrix is the second again",
            cu=Patch(CUH, "which == 1u ? all.each[1] : all.each[2];", "all.each[1];"),
        ),
        Mutant(
            check,
            "one warp left out of the sum",
            cu=Patch(header, warps, warps.replace("w = 1u", "w = 2u")),
        ),
        Mutant(check, "the kernel before is not waited for", cu=Patch(header, _WAIT_CU, ""), race=True),
    )


def paired_mutants(module: str) -> tuple[Mutant, ...]:
    """What the check of a format of pairs must notice besides."""
    check = f"{module}::{module}"
    return (
        *shared_mutants(module, PAIRS),
        Mutant(
            check,
            "a pair that is one tile counts as two",
            cu=Patch(PAIRS, "tile += outputs > GEMV_TILE ? 2u : 1u;", "tile += 2u;"),
        ),
        Mutant(
            check,
            "x of the stripe at hand again",
            cu=Patch(PAIRS, "stripe + 1u < stripes ? stripe + 1u : 0u;", "stripe;"),
        ),
        Mutant(
            check,
            "a pair's sums where those of the pair before are read",
            cu=Patch(PAIRS, "        buffer ^= 1u;\n", ""),
            race=True,
        ),
    )


def past_the_row(module: str) -> Mutant:
    """Where a row need not be whole stripes."""
    patch = Patch(CUH, "chunk < chunks && row < left;", "row < left;")
    return Mutant(f"{module}::{module}", "chunks of the next output past a row's end", cu=patch)


def overwritten_sums(module: str) -> Mutant:
    """Where a tile's sums lie where those of the tile before lay."""
    patch = Patch(CUH, "            __syncthreads();  // sums have been read\n", "")
    return Mutant(f"{module}::{module}", "sums overwritten while they are read", cu=patch, race=True)
