# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of spark_gemv_rows.cuh, for each kernel that is made of it."""

from __future__ import annotations

from .mutants import Mutant, Patch

CUH = "spark_gemv_rows.cuh"
_SPLIT_PY = "result.reshape(len(x), -1, 2, head_dim).swapaxes(1, 2).reshape(result.shape)"
_HALF_CU = "const unsigned half = output / head_dim % 2u;"
_LIVE_CU = "(Format::WHOLE || chunk < chunks) && row < left;"
_WAIT_CU = "    spark_wait_for_previous();\n"
_WARPS_CU = "for (unsigned w = 1u; w < GEMV_WARPS; ++w) {"


def shared_mutants(module: str) -> tuple[Mutant, ...]:
    """What every format's check must notice."""
    check = f"{module}::{module}"
    return (
        Mutant(
            check,
            "gates before queries",
            cu=Patch(CUH, _HALF_CU, _HALF_CU.replace("% 2u", "% 2u ^ 1u")),
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
            cu=Patch(CUH, _WARPS_CU, _WARPS_CU.replace("w = 1u", "w = 2u")),
        ),
        Mutant(check, "the kernel before is not waited for", cu=Patch(CUH, _WAIT_CU, ""), race=True),
    )


def past_the_row(module: str) -> Mutant:
    """Where a row need not be whole stripes."""
    patch = Patch(CUH, _LIVE_CU, "row < left;")
    return Mutant(f"{module}::{module}", "chunks of the next output past a row's end", cu=patch)


def overwritten_sums(module: str) -> Mutant:
    """Where a tile's sums lie where those of the tile before lay."""
    patch = Patch(CUH, "            __syncthreads();  // sums have been read\n", "")
    return Mutant(f"{module}::{module}", "sums overwritten while they are read", cu=patch, race=True)
