# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `spark_fp8_gemv_rows`: blocks take tiles of 16 outputs in turn."""

from __future__ import annotations

from ..reference import spark_fp8_gemv_rows as reference
from ._gemv_argmax import gemv_argmax_kernel, put, table_of
from ._gemv_rows import WIDE_LOAD, each_matrix, gemv_rows_kernel, operand, outputs, whole
from .spec import Call, KernelSpec, pointer


def _spark_fp8_gemv_rows(c: Call) -> None:
    for rows, arguments in each_matrix(c, "W", "S"):
        rows[...] = reference.spark_fp8_gemv_rows(*arguments)


def _spark_fp8_gemv_rows_argmax(c: Call) -> None:
    put(c, reference.spark_fp8_gemv_rows_argmax(c.X, c.W, c.S, table_of(c)))


KERNELS: tuple[KernelSpec, ...] = (
    gemv_rows_kernel(
        "spark_fp8_gemv_rows",
        [
            *operand("W", "u8", lambda c, i: (outputs(c, i), c.K), align=WIDE_LOAD),
            *operand("S", "f32", lambda c, i: (outputs(c, i),), early=False),
        ],
        whole(16),
        reference.spark_fp8_gemv_rows,
        _spark_fp8_gemv_rows,
        shared_bytes=36864,
    ),
    gemv_argmax_kernel(
        "spark_fp8_gemv_rows",
        [
            pointer("W", "u8", "r", lambda c: (c.N, c.K), align=WIDE_LOAD, early=True),
            pointer("S", "f32", "r", lambda c: (c.N,)),
        ],
        whole(16),
        reference.spark_fp8_gemv_rows_argmax,
        _spark_fp8_gemv_rows_argmax,
        shared_bytes=36864,
    ),
)
