# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `embed_from_argmax`.

The rows that a launch reads depend on ids in device memory: a range is declared from those ids, so that an id beyond
the table's allocation is refused where memory is checked.
"""

from __future__ import annotations

from ..reference import embed_from_argmax as reference
from .spec import Call, Dim3, KernelSpec, ceil_div, pointer, u32


def _one(c: Call) -> tuple[int, ...]:
    return (1,)


def _row(c: Call) -> tuple[int, ...]:
    return (c.hidden_size,)


def _row_start(c: Call) -> int:
    return int(c.argmax_result[0]) * int(c.hidden_size)


def _rows_to_the_largest_id(c: Call) -> tuple[int, ...]:
    """[max id + 1, H]: a view, so the rows that no id names cost nothing."""
    return int(c.token_ids.max()) + 1, c.hidden_size


def _element_geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (ceil_div(c.hidden_size, 256), 1, 1), (256, 1, 1), 0


def _row_geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (c.grid[0], 1, 1), (256, 1, 1), 0


def _embed_from_argmax(c: Call) -> None:
    row, token = reference.embed_from_argmax(c.embed_table, c.argmax_result)
    c.output[...] = row
    c.token_id_out[...] = token


def _batched_embed(c: Call) -> None:
    c.output[...] = reference.batched_embed(c.token_ids, c.embed_table)


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="embed_from_argmax",
        function="embed_from_argmax",
        params=(
            pointer("argmax_result", "u32", "r", _one),
            pointer("embed_table", "bf16", "r", _row, offset=_row_start),
            pointer("output", "bf16", "w", _row),
            pointer("token_id_out", "u32", "w", _one),
            u32("hidden_size"),
        ),
        grid_text="(ceil(hidden_size / 256), 1, 1)",
        block_text="(256, 1, 1)",
        geometry=_element_geometry,
        reference=reference.embed_from_argmax,
        run=_embed_from_argmax,
    ),
    KernelSpec(
        module="embed_from_argmax",
        function="batched_embed",
        params=(
            pointer("token_ids", "u32", "r", lambda c: (c.grid[0],)),
            pointer("embed_table", "bf16", "r", _rows_to_the_largest_id),
            pointer("output", "bf16", "w", lambda c: (c.grid[0], c.hidden_size)),
            u32("hidden_size"),
        ),
        grid_text="(rows, 1, 1)",
        block_text="(256, 1, 1)",
        geometry=_row_geometry,
        reference=reference.batched_embed,
        run=_batched_embed,
        optional=True,
    ),
)
