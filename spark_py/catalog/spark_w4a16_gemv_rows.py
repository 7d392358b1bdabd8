# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue row of module `spark_w4a16_gemv_rows`: blocks take tiles of 16 outputs in turn."""

from __future__ import annotations

from ..reference import spark_w4a16_gemv_rows as reference
from ._gemv_rows import MATRICES, WIDE_LOAD, each_matrix, gemv_rows_kernel, operand, outputs, whole
from .spec import Call, KernelSpec, f32


def _spark_w4a16_gemv_rows(c: Call) -> None:
    for rows, arguments in each_matrix(c, "W", "S", "scale2_"):
        rows[...] = reference.spark_w4a16_gemv_rows(*arguments)


KERNELS: tuple[KernelSpec, ...] = (
    gemv_rows_kernel(
        "spark_w4a16_gemv_rows",
        [
            *operand("W", "u8", lambda c, i: (outputs(c, i), c.K // 2), align=WIDE_LOAD),
            *operand("S", "u8", lambda c, i: (outputs(c, i), c.K // 16), align=WIDE_LOAD),
        ],
        whole(256),
        reference.spark_w4a16_gemv_rows,
        _spark_w4a16_gemv_rows,
        shared_bytes=26624,
        threads=128,
        factors=tuple(f32(f"scale2_{i}") for i in MATRICES),
    ),
)
