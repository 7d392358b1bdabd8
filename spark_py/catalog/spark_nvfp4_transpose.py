# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue row of module `spark_nvfp4_transpose`: tiles of 64 x 64 bytes."""

from __future__ import annotations

from ..reference import spark_nvfp4_transpose as reference
from .spec import Call, Dim3, KernelSpec, ceil_div, pointer, u32

TILE = 64
WORD = 4


def _geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (ceil_div(c.ldb, TILE), ceil_div(c.columns, TILE), 1), (256, 1, 1), 0


def _preconditions(c: Call) -> None:
    if c.ldb % WORD or c.ldb < c.rows:
        raise ValueError(f"ldb is {c.ldb}: a multiple of {WORD} and at least rows = {c.rows} is needed")


def _spark_nvfp4_transpose(c: Call) -> None:
    c.target[...] = reference.spark_nvfp4_transpose(c.source, c.ldb)


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="spark_nvfp4_transpose",
        function="spark_nvfp4_transpose",
        params=(
            pointer("source", "u8", "r", lambda c: (c.rows, c.columns)),
            pointer("target", "u8", "w", lambda c: (c.columns, c.ldb), align=WORD),
            u32("rows"),
            u32("columns"),
            u32("ldb"),
        ),
        grid_text="(ceil(ldb / 64), ceil(columns / 64), 1)",
        block_text="(256, 1, 1)",
        geometry=_geometry,
        reference=reference.spark_nvfp4_transpose,
        run=_spark_nvfp4_transpose,
        shared_bytes=4352,
        optional=True,
        preconditions=_preconditions,
    ),
)
