# SPDX-License-Identifier: AGPL-3.0-only
"""What the catalogue rows of `spark_gemv_rows.cuh` share: up to eight rows through up to three matrices of a format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .spec import Call, KernelSpec, ParamSpec, pointer, u32

ROWS, WIDE_LOAD = 8, 16
MATRICES = range(3)


def outputs(c: Call, i: int) -> int:
    """N of matrix i; 0 where there is none."""
    return int(getattr(c, f"N{i}"))


def _stride(c: Call, i: int) -> int:
    return int(getattr(c, f"stride{i}"))


def whole(step: int) -> Callable[[Call], None]:
    """The rule that K is a multiple of `step`, and not 0."""

    def rule(c: Call) -> None:
        if c.K % step or c.K == 0:
            raise ValueError(f"K is {c.K}: a multiple of {step} is needed")

    return rule


def some_rows(c: Call) -> None:
    """As many rows as a launch takes."""
    if not 1 <= c.M <= ROWS:
        raise ValueError(f"M is {c.M}: 1 to {ROWS} rows are taken")


def operand(
    name: str, dtype: str, shape: Callable[[Call, int], tuple[int, ...]], align: int = 0, early: bool = True
) -> list[ParamSpec]:
    """A pointer for each matrix, W0 W1 W2 say; that of the first is needed. `early`: what the ring copies."""

    def shape_of(i: int) -> Callable[[Call], tuple[int, ...]]:
        return lambda c: shape(c, i)

    return [pointer(f"{name}{i}", dtype, "r", shape_of(i), align=align, optional=i > 0, early=early) for i in MATRICES]


def _touched(i: int) -> Callable[[Call], tuple[int, ...]]:
    """What the rows of an output touch, seen flat: the padding after the last one is not part of it."""
    return lambda c: ((c.M - 1) * _stride(c, i) + outputs(c, i) if outputs(c, i) else 0,)


def rows_of(c: Call, flat: np.ndarray[Any, Any], i: int) -> np.ndarray[Any, Any]:
    """The rows [M, N] of output i in `flat`, to be written."""
    shape, strides = (c.M, outputs(c, i)), (_stride(c, i) * flat.itemsize, flat.itemsize)
    return np.lib.stride_tricks.as_strided(flat, shape, strides)


def each_matrix(c: Call, *operands: str) -> Iterator[tuple[np.ndarray[Any, Any], list[Any]]]:
    """For every matrix that is there: its rows of output, and a reference's arguments: X, these operands, head_dim."""
    for i in MATRICES:
        if outputs(c, i):
            arguments = [c.X, *(getattr(c, f"{name}{i}") for name in operands), c.head_dim if i == 0 else 0]
            yield rows_of(c, getattr(c, f"Y{i}"), i), arguments


def gemv_rows_kernel(
    name: str,
    operands: list[ParamSpec],
    whole_rows: Callable[[Call], None],
    reference: Callable[..., Any],
    run: Callable[[Call], None],
    shared_bytes: int,
    factors: tuple[ParamSpec, ...] = (),
    threads: int = 256,
    padded: bool = False,
) -> KernelSpec:
    """The row of module and kernel `name`. `whole_rows` says what K may be; `factors` come before head_dim; `threads`
    are a block's; `padded`: a launch may have dynamic shared memory, which nobody uses."""

    def preconditions(c: Call) -> None:
        whole_rows(c)
        some_rows(c)
        if c.N0 == 0:
            raise ValueError("N0 is 0: at least one output is needed")
        for i in MATRICES:
            n, stride = outputs(c, i), _stride(c, i)
            if n and stride < n:
                raise ValueError(f"stride{i} is {stride}: rows of N{i} = {n} outputs would overlap")
        if c.head_dim and c.N0 % (2 * c.head_dim):
            raise ValueError(f"N0 is {c.N0}: whole heads of query and gate, 2 * {c.head_dim} each, are needed")

    return KernelSpec(
        module=name,
        function=name,
        params=(
            pointer("X", "bf16", "r", lambda c: (c.M, c.K), align=WIDE_LOAD),
            *operands,
            *(pointer(f"Y{i}", "bf16", "w", _touched(i), optional=i > 0) for i in MATRICES),
            u32("M"),
            *(u32(f"N{i}") for i in MATRICES),
            u32("K"),
            *(u32(f"stride{i}") for i in MATRICES),
            *factors,
            u32("head_dim"),
        ),
        grid_text="(any, 1, 1)",
        block_text=f"({threads}, 1, 1)",
        geometry=lambda c: ((c.grid[0], 1, 1), (threads, 1, 1), c.shared_mem if padded else 0),
        reference=reference,
        run=run,
        shared_bytes=shared_bytes,
        optional=True,
        preconditions=preconditions,
    )
