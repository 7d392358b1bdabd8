# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue row of module `spark_fp8_gemv_rows`: blocks take tiles of 16 outputs in turn."""

from __future__ import annotations

from ..reference import spark_fp8_gemv_rows as reference
from ._gemv_rows import WIDE_LOAD, each_matrix, gemv_rows_kernel, operand, outputs, whole
from .spec import Call, KernelSpec


def _spark_fp8_gemv_rows(c: Call) -> None:
    for rows, arguments in each_matrix(c, "W", "S"):
        rows[...] = reference.spark_fp8_gemv_rows(*arguments)


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
)
