# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `spark_mxfp4_gemv`: MXFP4 weights, four or (for several rows) eight outputs a block."""

from __future__ import annotations

from ..reference import spark_mxfp4_gemv as reference
from .gemv_fp8w import BLOCK_TEXT, MAX_ROWS, WIDE_LOAD, outputs_a_block, rows_of_output
from .spec import Call, KernelSpec, pointer, u32


def whole_chunks(c: Call) -> None:
    """K % 32 == 0: a block scale covers 32 values."""
    if c.K % reference.CHUNK:
        raise ValueError(f"K is {c.K}: it must be a multiple of {reference.CHUNK}")


def _some_rows(c: Call) -> None:
    whole_chunks(c)
    if not 1 <= c.M <= MAX_ROWS:
        raise ValueError(f"M is {c.M}: 1 to {MAX_ROWS} rows are taken")
    if c.out_stride < c.N:
        raise ValueError(f"out_stride is {c.out_stride}: rows of N = {c.N} outputs would overlap")


def _mxfp4_gemv(c: Call) -> None:
    c.C[...] = reference.spark_mxfp4_gemv(c.A, c.B_packed, c.B_scale)


def _mxfp4_gemv_batchm(c: Call) -> None:
    rows_of_output(c)[...] = reference.spark_mxfp4_gemv_batchm(c.A, c.B_packed, c.B_scale)


_WEIGHT = (
    pointer("B_packed", "u8", "r", lambda c: (c.N, c.K // 2), align=WIDE_LOAD),
    pointer("B_scale", "u8", "r", lambda c: (c.N, c.K // reference.CHUNK)),
)

KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="spark_mxfp4_gemv",
        function="spark_mxfp4_gemv",
        params=(
            pointer("A", "bf16", "r", lambda c: (c.K,), align=WIDE_LOAD),
            *_WEIGHT,
            pointer("C", "bf16", "w", lambda c: (c.N,)),
            u32("N"),
            u32("K"),
        ),
        grid_text="(ceil(N / 4), 1, 1)",
        block_text=BLOCK_TEXT,
        geometry=outputs_a_block(4),
        reference=reference.spark_mxfp4_gemv,
        run=_mxfp4_gemv,
        shared_bytes=32,
        optional=True,
        preconditions=whole_chunks,
    ),
    KernelSpec(
        module="spark_mxfp4_gemv",
        function="spark_mxfp4_gemv_batchm",
        params=(
            pointer("A", "bf16", "r", lambda c: (c.M, c.K), align=WIDE_LOAD),
            *_WEIGHT,
            # Seen flat, the padding after the last row of output is not part of it.
            pointer("C", "bf16", "w", lambda c: ((c.M - 1) * c.out_stride + c.N,)),
            u32("M"),
            u32("N"),
            u32("K"),
            u32("out_stride"),
        ),
        grid_text="(ceil(N / 8), 1, 1)",
        block_text=BLOCK_TEXT,
        geometry=outputs_a_block(8),
        reference=reference.spark_mxfp4_gemv_batchm,
        run=_mxfp4_gemv_batchm,
        shared_bytes=512,
        optional=True,
        preconditions=_some_rows,
    ),
)
