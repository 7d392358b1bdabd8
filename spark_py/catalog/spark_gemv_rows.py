# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue row of module `spark_gemv_rows`: blocks take tiles of 16 outputs in turn."""

from __future__ import annotations

from ..reference import spark_gemv_rows as reference
from ._gemv_rows import WIDE_LOAD, each_matrix, gemv_rows_kernel, operand, outputs
from .gemv import whole_chunks
from .spec import Call, KernelSpec


def _spark_gemv_rows(c: Call) -> None:
    for rows, arguments in each_matrix(c, "W"):
        rows[...] = reference.spark_gemv_rows(*arguments)


KERNELS: tuple[KernelSpec, ...] = (
    gemv_rows_kernel(
        "spark_gemv_rows",
        operand("W", "bf16", lambda c, i: (outputs(c, i), c.K), align=WIDE_LOAD),
        whole_chunks,
        reference.spark_gemv_rows,
        _spark_gemv_rows,
        shared_bytes=40960,
    ),
)
