# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `w8a16_gemv`: block-scaled E4M3, four or (for several rows) eight outputs a block."""

from __future__ import annotations

from ..reference import w8a16_gemv as reference
from .gemv_fp8w import (
    BLOCK_TEXT,
    one_row,
    outputs_a_block,
    rows_of_output,
    several_rows,
    some_rows,
    whole_chunks,
)
from .spec import Call, KernelSpec, ceil_div, pointer


def _w8a16_gemv(c: Call) -> None:
    c.C[...] = reference.w8a16_gemv(c.A, c.B, c.block_scale)


def _w8a16_gemv_batchm(c: Call) -> None:
    rows_of_output(c)[...] = reference.w8a16_gemv_batchm(c.A, c.B, c.block_scale)


_BLOCK_SCALE = pointer(
    "block_scale", "f32", "r", lambda c: (ceil_div(c.N, reference.BLOCK), ceil_div(c.K, reference.BLOCK))
)

KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="w8a16_gemv",
        function="w8a16_gemv",
        params=one_row(_BLOCK_SCALE),
        grid_text="(ceil(N / 4), 1, 1)",
        block_text=BLOCK_TEXT,
        geometry=outputs_a_block(4),
        reference=reference.w8a16_gemv,
        run=_w8a16_gemv,
        shared_bytes=1056,
        optional=True,
        preconditions=whole_chunks,
    ),
    KernelSpec(
        module="w8a16_gemv",
        function="spark_w8a16_gemv_batchm",
        params=several_rows(_BLOCK_SCALE),
        grid_text="(ceil(N / 8), 1, 1)",
        block_text=BLOCK_TEXT,
        geometry=outputs_a_block(8),
        reference=reference.w8a16_gemv_batchm,
        run=_w8a16_gemv_batchm,
        shared_bytes=512,
        optional=True,
        preconditions=some_rows,
    ),
)
