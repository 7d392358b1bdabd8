# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `spark_w4a16_gemv_rows`: blocks take tiles of 16 outputs in turn."""

from __future__ import annotations

from ..reference import spark_w4a16_gemv_rows as reference
from ._gemv_argmax import gemv_argmax_kernel, put, table_of
from ._gemv_rows import MATRICES, WIDE_LOAD, each_matrix, gemv_rows_kernel, operand, outputs, whole
from .spec import Call, KernelSpec, f32, pointer


def _spark_w4a16_gemv_rows(c: Call) -> None:
    for rows, arguments in each_matrix(c, "W", "S", "scale2_"):
        rows[...] = reference.spark_w4a16_gemv_rows(*arguments)


def _spark_w4a16_gemv_rows_argmax(c: Call) -> None:
    put(c, reference.spark_w4a16_gemv_rows_argmax(c.X, c.W, c.S, c.scale2, table_of(c)))


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
    gemv_argmax_kernel(
        "spark_w4a16_gemv_rows",
        [
            pointer("W", "u8", "r", lambda c: (c.N, c.K // 2), align=WIDE_LOAD, early=True),
            pointer("S", "u8", "r", lambda c: (c.N, c.K // 16), align=WIDE_LOAD, early=True),
        ],
        whole(256),
        reference.spark_w4a16_gemv_rows_argmax,
        _spark_w4a16_gemv_rows_argmax,
        shared_bytes=26624,
        threads=128,
        factors=(f32("scale2"),),
    ),
)
