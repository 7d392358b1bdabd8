# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue row of module `spark_w8a16_rows`: blocks take tiles of 16 outputs in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from ..reference import spark_w8a16_rows as reference
from .spec import Call, KernelSpec, ParamSpec, ceil_div, pointer, u32

ROWS, STEP, TILE = 8, 16, 16
MATRICES = range(2)


def _outputs(c: Call, i: int) -> int:
    return int(getattr(c, f"N{i}"))


def _stride(c: Call, i: int) -> int:
    return int(getattr(c, f"stride{i}"))


def _rows(c: Call, i: int) -> int:
    return int(getattr(c, f"M{i}"))


def _operand(name: str, dtype: str, shape: Callable[[Call, int], tuple[int, ...]], align: int = 0) -> list[ParamSpec]:
    def shape_of(i: int) -> Callable[[Call], tuple[int, ...]]:
        return lambda c: shape(c, i)

    access: Literal["r", "w"] = "w" if name == "Y" else "r"
    early = name == "W"
    return [
        pointer(f"{name}{i}", dtype, access, shape_of(i), align=align, optional=i > 0, early=early) for i in MATRICES
    ]


def _touched(c: Call, i: int) -> tuple[int, ...]:
    """What the rows of an output touch, seen flat: the padding after the last one is not part of it."""
    return ((_rows(c, i) - 1) * _stride(c, i) + _outputs(c, i) if _outputs(c, i) else 0,)


def _factors(c: Call, i: int) -> tuple[int, ...]:
    return ceil_div(_outputs(c, i), 128), ceil_div(c.K, 128)


def rows_of(c: Call, flat: np.ndarray[Any, Any], i: int) -> np.ndarray[Any, Any]:
    """The rows [M, N] of output i in `flat`, to be written."""
    shape, strides = (_rows(c, i), _outputs(c, i)), (_stride(c, i) * flat.itemsize, flat.itemsize)
    return np.lib.stride_tricks.as_strided(flat, shape, strides)


def _preconditions(c: Call) -> None:
    if c.K % STEP or c.K == 0:
        raise ValueError(f"K is {c.K}: a multiple of {STEP} is needed")
    if c.N0 == 0:
        raise ValueError("N0 is 0: at least one output is needed")
    for i in MATRICES:
        if _outputs(c, i) and not 1 <= _rows(c, i) <= ROWS:
            raise ValueError(f"M{i} is {_rows(c, i)}: 1 to {ROWS} rows are taken")
        if _outputs(c, i) and _stride(c, i) < _outputs(c, i):
            raise ValueError(f"stride{i} is {_stride(c, i)}: rows of N{i} = {_outputs(c, i)} outputs would overlap")
    if c.groups == 0 or c.N0 % c.groups:
        raise ValueError(f"groups is {c.groups}: it must divide N0 = {c.N0}")
    if c.groups > 1 and (c.N1 or c.N0 // c.groups % TILE):
        raise ValueError(f"groups is {c.groups}: N1 = 0 and a multiple of {TILE} outputs a group are needed")


def _run(c: Call) -> None:
    for i in MATRICES:
        if _outputs(c, i):
            operands = getattr(c, f"X{i}"), getattr(c, f"W{i}"), getattr(c, f"S{i}"), c.groups
            rows_of(c, getattr(c, f"Y{i}"), i)[...] = reference.spark_w8a16_rows(*operands)


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="spark_w8a16_rows",
        function="spark_w8a16_rows",
        params=(
            *_operand("X", "bf16", lambda c, i: (_rows(c, i), c.groups * c.K if i == 0 else c.K), align=16),
            *_operand("W", "u8", lambda c, i: (_outputs(c, i), c.K), align=16),
            *_operand("S", "f32", _factors),
            *_operand("Y", "bf16", _touched),
            u32("M0"),
            u32("M1"),
            u32("N0"),
            u32("N1"),
            u32("K"),
            u32("stride0"),
            u32("stride1"),
            u32("groups"),
        ),
        grid_text="(any, 1, 1)",
        block_text="(256, 1, 1)",
        geometry=lambda c: ((c.grid[0], 1, 1), (256, 1, 1), 0),
        reference=reference.spark_w8a16_rows,
        run=_run,
        shared_bytes=40960,
        optional=True,
        preconditions=_preconditions,
    ),
)
