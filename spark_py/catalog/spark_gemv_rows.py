# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `spark_gemv_rows`: blocks take tiles of 16 outputs in turn."""

from __future__ import annotations

from ..reference import spark_gemv_rows as reference
from ._gemv_argmax import gemv_argmax_kernel, put, table_of
from ._gemv_rows import WIDE_LOAD, each_matrix, gemv_rows_kernel, operand, outputs
from .gemv import whole_chunks
from .spec import Call, KernelSpec, pointer


def _spark_gemv_rows(c: Call) -> None:
    for rows, arguments in each_matrix(c, "W"):
        rows[...] = reference.spark_gemv_rows(*arguments)


def _spark_gemv_rows_argmax(c: Call) -> None:
    put(c, reference.spark_gemv_rows_argmax(c.X, c.W, table_of(c)))


KERNELS: tuple[KernelSpec, ...] = (
    gemv_rows_kernel(
        "spark_gemv_rows",
        operand("W", "bf16", lambda c, i: (outputs(c, i), c.K), align=WIDE_LOAD),
        whole_chunks,
        reference.spark_gemv_rows,
        _spark_gemv_rows,
        shared_bytes=40960,
        padded=True,
    ),
    gemv_argmax_kernel(
        "spark_gemv_rows",
        [pointer("W", "bf16", "r", lambda c: (c.N, c.K), align=WIDE_LOAD, early=True)],
        whole_chunks,
        reference.spark_gemv_rows_argmax,
        _spark_gemv_rows_argmax,
        shared_bytes=40960,
    ),
)
