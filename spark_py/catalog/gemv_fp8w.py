# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `gemv_fp8w`: a block a row to quantise; four outputs a block, or eight for several rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..reference import gemv_fp8w as reference
from .spec import Call, Dim3, KernelSpec, ParamSpec, ceil_div, pointer, u32

WIDE_LOAD = 16
MAX_ROWS = 8
BLOCK_TEXT = "(256, 1, 1)"


def _row_geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (c.N, 1, 1), (256, 1, 1), 0


def outputs_a_block(outputs: int) -> Callable[[Call], tuple[Dim3, Dim3, int]]:
    """Geometry of a grid over N."""
    return lambda c: ((ceil_div(c.N, outputs), 1, 1), (256, 1, 1), 0)


def whole_chunks(c: Call) -> None:
    """K % 16 == 0: a row of another length would put the next one off its 16-byte address."""
    if c.K % reference.CHUNK:
        raise ValueError(f"K is {c.K}: it must be a multiple of {reference.CHUNK}")


def some_rows(c: Call) -> None:
    """`whole_chunks`, and what the kernels for several rows need besides."""
    whole_chunks(c)
    if not 1 <= c.M <= MAX_ROWS:
        raise ValueError(f"M is {c.M}: 1 to {MAX_ROWS} rows are taken")
    if c.out_stride < c.N:
        raise ValueError(f"out_stride is {c.out_stride}: rows of N = {c.N} outputs would overlap")


def one_row(scales: ParamSpec) -> tuple[ParamSpec, ...]:
    """Parameters of a kernel for one row."""
    return (
        pointer("A", "bf16", "r", lambda c: (c.K,), align=WIDE_LOAD),
        pointer("B", "u8", "r", lambda c: (c.N, c.K), align=WIDE_LOAD),
        scales,
        pointer("C", "bf16", "w", lambda c: (c.N,)),
        u32("N"),
        u32("K"),
    )


def several_rows(scales: ParamSpec) -> tuple[ParamSpec, ...]:
    """Parameters of a kernel for M rows; seen flat, the padding after the last row of output is not part of it."""
    return (
        pointer("A", "bf16", "r", lambda c: (c.M, c.K), align=WIDE_LOAD),
        pointer("B", "u8", "r", lambda c: (c.N, c.K), align=WIDE_LOAD),
        scales,
        pointer("C", "bf16", "w", lambda c: ((c.M - 1) * c.out_stride + c.N,)),
        u32("M"),
        u32("N"),
        u32("K"),
        u32("out_stride"),
    )


def rows_of_output(c: Call) -> np.ndarray[Any, Any]:
    """C as [M, N], rows out_stride apart."""
    step = c.C.itemsize
    return np.lib.stride_tricks.as_strided(c.C, (c.M, c.N), (c.out_stride * step, step))


def _quantize_bf16_to_fp8(c: Call) -> None:
    c.output[...], c.row_scales[...] = reference.quantize_bf16_to_fp8(c.input)


def _dense_gemv_fp8w(c: Call) -> None:
    c.C[...] = reference.dense_gemv_fp8w(c.A, c.B, c.row_scale)


def _dense_gemv_fp8w_batchm(c: Call) -> None:
    rows_of_output(c)[...] = reference.dense_gemv_fp8w_batchm(c.A, c.B, c.row_scale)


_ROW_SCALE = pointer("row_scale", "f32", "r", lambda c: (c.N,))

KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="gemv_fp8w",
        function="quantize_bf16_to_fp8",
        params=(
            pointer("input", "bf16", "r", lambda c: (c.N, c.K)),
            pointer("output", "u8", "w", lambda c: (c.N, c.K)),
            pointer("row_scales", "f32", "w", lambda c: (c.N,)),
            u32("N"),
            u32("K"),
        ),
        grid_text="(N, 1, 1)",
        block_text=BLOCK_TEXT,
        geometry=_row_geometry,
        reference=reference.quantize_bf16_to_fp8,
        run=_quantize_bf16_to_fp8,
        shared_bytes=32,
    ),
    KernelSpec(
        module="gemv_fp8w",
        function="dense_gemv_fp8w",
        params=one_row(_ROW_SCALE),
        grid_text="(ceil(N / 4), 1, 1)",
        block_text=BLOCK_TEXT,
        geometry=outputs_a_block(4),
        reference=reference.dense_gemv_fp8w,
        run=_dense_gemv_fp8w,
        shared_bytes=32,
        preconditions=whole_chunks,
    ),
    KernelSpec(
        module="gemv_fp8w",
        function="spark_dense_gemv_fp8w_batchm",
        params=several_rows(_ROW_SCALE),
        grid_text="(ceil(N / 8), 1, 1)",
        block_text=BLOCK_TEXT,
        geometry=outputs_a_block(8),
        reference=reference.dense_gemv_fp8w_batchm,
        run=_dense_gemv_fp8w_batchm,
        shared_bytes=512,
        optional=True,
        preconditions=some_rows,
    ),
)
