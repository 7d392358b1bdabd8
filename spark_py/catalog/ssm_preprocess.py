# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue row of module `ssm_preprocess`: one block a row, which waits in dynamic shared memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..reference import ssm_preprocess as reference
from .spec import Call, Dim3, KernelSpec, pointer, u32


def _row(c: Call) -> int:
    return int(2 * c.num_heads * c.head_dim)


def _geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (c.grid[0], 1, 1), (256, 1, 1), 2 * _row(c)


def _preconditions(c: Call) -> None:
    if c.stride < _row(c):
        raise ValueError(f"stride is {c.stride}: rows of 2 * num_heads * head_dim = {_row(c)} elements would overlap")


def _strided(c: Call) -> tuple[int, ...]:
    """What the rows touch, seen flat: the padding after the last one is not part of it."""
    return ((c.grid[0] - 1) * c.stride + _row(c),)


def _deinterleave_qg(c: Call) -> None:
    step = c.data.itemsize
    rows: np.ndarray[Any, Any] = np.lib.stride_tricks.as_strided(c.data, (c.grid[0], _row(c)), (c.stride * step, step))
    rows[...] = reference.deinterleave_qg(rows, c.num_heads, c.head_dim)


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="ssm_preprocess",
        function="deinterleave_qg",
        params=(pointer("data", "bf16", "rw", _strided), u32("num_heads"), u32("head_dim"), u32("stride")),
        grid_text="(rows, 1, 1)",
        block_text="(256, 1, 1), dynamic shared memory 4 * num_heads * head_dim bytes",
        geometry=_geometry,
        reference=reference.deinterleave_qg,
        run=_deinterleave_qg,
        preconditions=_preconditions,
    ),
)
