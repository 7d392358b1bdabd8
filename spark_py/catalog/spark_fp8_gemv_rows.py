# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue row of module `spark_fp8_gemv_rows`: blocks take tiles of 16 outputs in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..reference import spark_fp8_gemv_rows as reference
from .spec import Call, KernelSpec, ParamSpec, pointer, u32

ROWS, CHUNK, WIDE_LOAD = 8, 16, 16
MATRICES = range(3)


def _outputs(c: Call, i: int) -> int:
    return int(getattr(c, f"N{i}"))


def _stride(c: Call, i: int) -> int:
    return int(getattr(c, f"stride{i}"))


def _preconditions(c: Call) -> None:
    if c.K % CHUNK or c.K == 0:
        raise ValueError(f"K is {c.K}: a multiple of {CHUNK} is needed")
    if not 1 <= c.M <= ROWS:
        raise ValueError(f"M is {c.M}: 1 to {ROWS} rows are taken")
    if c.N0 == 0:
        raise ValueError("N0 is 0: at least one output is needed")
    for i in MATRICES:
        if _outputs(c, i) and _stride(c, i) < _outputs(c, i):
            raise ValueError(f"stride{i} is {_stride(c, i)}: rows of N{i} = {_outputs(c, i)} outputs would overlap")
    if c.head_dim and c.N0 % (2 * c.head_dim):
        raise ValueError(f"N0 is {c.N0}: whole heads of query and gate, 2 * {c.head_dim} each, are needed")


def _codes(i: int) -> ParamSpec:
    return pointer(f"W{i}", "u8", "r", lambda c: (_outputs(c, i), c.K), align=WIDE_LOAD, optional=i > 0)


def _scales(i: int) -> ParamSpec:
    return pointer(f"S{i}", "f32", "r", lambda c: (_outputs(c, i),), optional=i > 0)


def _touched(i: int) -> Callable[[Call], tuple[int, ...]]:
    """What the rows of an output touch, seen flat: the padding after the last one is not part of it."""
    return lambda c: ((c.M - 1) * _stride(c, i) + _outputs(c, i) if _outputs(c, i) else 0,)


def _rows(i: int) -> ParamSpec:
    return pointer(f"Y{i}", "bf16", "w", _touched(i), optional=i > 0)


def _spark_fp8_gemv_rows(c: Call) -> None:
    for i in MATRICES:
        if _outputs(c, i):
            flat = getattr(c, f"Y{i}")
            shape, strides = (c.M, _outputs(c, i)), (_stride(c, i) * flat.itemsize, flat.itemsize)
            rows: np.ndarray[Any, Any] = np.lib.stride_tricks.as_strided(flat, shape, strides)
            weight = getattr(c, f"W{i}"), getattr(c, f"S{i}")
            rows[...] = reference.spark_fp8_gemv_rows(c.X, *weight, c.head_dim if i == 0 else 0)


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="spark_fp8_gemv_rows",
        function="spark_fp8_gemv_rows",
        params=(
            pointer("X", "bf16", "r", lambda c: (c.M, c.K), align=WIDE_LOAD),
            *(_codes(i) for i in MATRICES),
            *(_scales(i) for i in MATRICES),
            *(_rows(i) for i in MATRICES),
            u32("M"),
            *(u32(f"N{i}") for i in MATRICES),
            u32("K"),
            *(u32(f"stride{i}") for i in MATRICES),
            u32("head_dim"),
        ),
        grid_text="(any, 1, 1)",
        block_text="(256, 1, 1)",
        geometry=lambda c: ((c.grid[0], 1, 1), (256, 1, 1), 0),
        reference=reference.spark_fp8_gemv_rows,
        run=_spark_fp8_gemv_rows,
        shared_bytes=36864,
        optional=True,
        preconditions=_preconditions,
    ),
)
