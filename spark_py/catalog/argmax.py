# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `argmax`: one block of 1024 threads a row."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..reference import argmax as reference
from .spec import Call, Dim3, KernelSpec, pointer, u32

BLOCK_TEXT = "(1024, 1, 1)"


def _one(c: Call) -> tuple[int, ...]:
    return (1,)


def _per_row(c: Call) -> tuple[int, ...]:
    return (c.grid[0],)


def _strided(c: Call) -> tuple[int, ...]:
    """What rows r * row_stride .. + n touch, seen flat: the padding after the last row is not part of it."""
    return ((c.grid[0] - 1) * c.row_stride + c.n,)


def _geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (1, 1, 1), (1024, 1, 1), 0


def _row_geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (c.grid[0], 1, 1), (1024, 1, 1), 0


def _needs_a_logit(c: Call) -> None:
    if c.n == 0:
        raise ValueError("n is 0: a row needs at least one logit")


def _rows(c: Call) -> np.ndarray[Any, Any]:
    step = c.logits.itemsize
    return np.lib.stride_tricks.as_strided(c.logits, (c.grid[0], c.n), (c.row_stride * step, step), writeable=False)


def _argmax_bf16(c: Call) -> None:
    c.out[...] = reference.argmax_rows(c.logits[None, :])


def _argmax_bf16_batch(c: Call) -> None:
    c.out[...] = reference.argmax_rows(_rows(c))


def _argmax_bf16_batch_lp(c: Call) -> None:
    logits = _rows(c)
    winners = reference.argmax_rows(logits)
    c.out[...] = winners
    c.out_logprob[...] = reference.argmax_logprobs(logits, winners)


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="argmax",
        function="argmax_bf16",
        params=(pointer("logits", "bf16", "r", lambda c: (c.n,)), pointer("out", "u32", "w", _one), u32("n")),
        grid_text="(1, 1, 1)",
        block_text=BLOCK_TEXT,
        geometry=_geometry,
        reference=reference.argmax_rows,
        run=_argmax_bf16,
        shared_bytes=8192,
        preconditions=_needs_a_logit,
    ),
    KernelSpec(
        module="argmax",
        function="argmax_bf16_batch",
        params=(
            pointer("logits", "bf16", "r", _strided),
            pointer("out", "u32", "w", _per_row),
            u32("n"),
            u32("row_stride"),
        ),
        grid_text="(rows, 1, 1)",
        block_text=BLOCK_TEXT,
        geometry=_row_geometry,
        reference=reference.argmax_rows,
        run=_argmax_bf16_batch,
        shared_bytes=8192,
        optional=True,
        preconditions=_needs_a_logit,
    ),
    KernelSpec(
        module="argmax",
        function="argmax_bf16_batch_lp",
        params=(
            pointer("logits", "bf16", "r", _strided),
            pointer("out", "u32", "w", _per_row),
            pointer("out_logprob", "f32", "w", _per_row),
            u32("n"),
            u32("row_stride"),
        ),
        grid_text="(rows, 1, 1)",
        block_text=BLOCK_TEXT,
        geometry=_row_geometry,
        reference=reference.argmax_logprobs,
        run=_argmax_bf16_batch_lp,
        shared_bytes=12288,
        optional=True,
        preconditions=_needs_a_logit,
    ),
)
