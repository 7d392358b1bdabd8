# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue row of module `dense_gemv_bf16_batchm`: four outputs of up to 16 rows a block of 256 threads."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..reference import dense_gemv_bf16_batchm as reference
from .gemv import WIDE_LOAD, whole_chunks
from .spec import Call, Dim3, KernelSpec, ceil_div, pointer, u32

MAX_ROWS = 16


def _geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (ceil_div(c.N, 4), 1, 1), (256, 1, 1), 0


def _preconditions(c: Call) -> None:
    whole_chunks(c)
    if not 1 <= c.M <= MAX_ROWS:
        raise ValueError(f"M is {c.M}: 1 to {MAX_ROWS} rows are taken")
    if c.out_stride < c.N:
        raise ValueError(f"out_stride is {c.out_stride}: rows of N = {c.N} outputs would overlap")


def _strided(c: Call) -> tuple[int, ...]:
    """What the rows touch, seen flat: the padding after the last one is not part of it."""
    return ((c.M - 1) * c.out_stride + c.N,)


def _dense_gemv_bf16_batchm(c: Call) -> None:
    step = c.C.itemsize
    rows: np.ndarray[Any, Any] = np.lib.stride_tricks.as_strided(c.C, (c.M, c.N), (c.out_stride * step, step))
    rows[...] = reference.dense_gemv_bf16_batchm(c.A, c.B)


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="dense_gemv_bf16_batchm",
        function="dense_gemv_bf16_batchm",
        params=(
            pointer("A", "bf16", "r", lambda c: (c.M, c.K), align=WIDE_LOAD),
            pointer("B", "bf16", "r", lambda c: (c.N, c.K), align=WIDE_LOAD),
            pointer("C", "bf16", "w", _strided),
            u32("M"),
            u32("N"),
            u32("K"),
            u32("out_stride"),
        ),
        grid_text="(ceil(N / 4), 1, 1)",
        block_text="(256, 1, 1)",
        geometry=_geometry,
        reference=reference.dense_gemv_bf16_batchm,
        run=_dense_gemv_bf16_batchm,
        shared_bytes=16896,
        optional=True,
        preconditions=_preconditions,
    ),
)
