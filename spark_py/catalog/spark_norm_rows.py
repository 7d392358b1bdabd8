# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `spark_norm_rows`: a block a row, or two; H = hidden_size, even and at most 8192."""

from __future__ import annotations

from ..reference import spark_norm_rows as reference
from .norm import BLOCK_TEXT
from .spec import Call, KernelSpec, f32, pointer, u32

MAX_HIDDEN = 8192
_PAIR = 4


def _needs_pairs(c: Call) -> None:
    if c.hidden_size % 2 or not 2 <= c.hidden_size <= MAX_HIDDEN:
        raise ValueError(f"hidden_size is {c.hidden_size}: an even number from 2 to {MAX_HIDDEN} is needed")


def _row(c: Call) -> tuple[int, ...]:
    return (c.hidden_size,)


def _rows(c: Call) -> tuple[int, ...]:
    return c.grid[0], c.hidden_size


def _inputs(c: Call) -> tuple[int, ...]:
    return c.grid[1], c.hidden_size


def _spark_norm_concat(c: Call) -> None:
    weights = c.first_weight, c.second_weight
    c.out[...] = reference.spark_norm_concat(c.first, c.second, weights, c.eps, bool(c.one_plus))


def _spark_add_then_norm(c: Call) -> None:
    added, normed = reference.spark_add_then_norm(c.hidden, c.src, c.weight, c.eps, bool(c.one_plus))
    c.hidden[...] = added
    c.output[...] = normed


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="spark_norm_rows",
        function="spark_norm_concat",
        params=(
            pointer("first", "bf16", "r", _inputs, align=_PAIR),
            pointer("second", "bf16", "r", _inputs, align=_PAIR),
            pointer("first_weight", "bf16", "r", _row, align=_PAIR, early=True),
            pointer("second_weight", "bf16", "r", _row, align=_PAIR, early=True),
            pointer("out", "bf16", "w", lambda c: (c.grid[1], 2 * c.hidden_size), align=_PAIR),
            u32("hidden_size"),
            u32("one_plus"),
            f32("eps"),
        ),
        grid_text="(2, rows, 1)",
        block_text=BLOCK_TEXT,
        geometry=lambda c: ((2, c.grid[1], 1), (min(c.hidden_size, 1024), 1, 1), 0),
        reference=reference.spark_norm_concat,
        run=_spark_norm_concat,
        shared_bytes=128,
        optional=True,
        preconditions=_needs_pairs,
    ),
    KernelSpec(
        module="spark_norm_rows",
        function="spark_add_then_norm",
        params=(
            pointer("hidden", "bf16", "rw", _rows, align=_PAIR),
            pointer("src", "bf16", "r", _rows, align=_PAIR),
            pointer("weight", "bf16", "r", _row, align=_PAIR, early=True),
            pointer("output", "bf16", "w", _rows, align=_PAIR),
            u32("hidden_size"),
            u32("one_plus"),
            f32("eps"),
        ),
        grid_text="(rows, 1, 1)",
        block_text=BLOCK_TEXT,
        geometry=lambda c: ((c.grid[0], 1, 1), (min(c.hidden_size, 1024), 1, 1), 0),
        reference=reference.spark_add_then_norm,
        run=_spark_add_then_norm,
        shared_bytes=128,
        optional=True,
        preconditions=_needs_pairs,
    ),
)
