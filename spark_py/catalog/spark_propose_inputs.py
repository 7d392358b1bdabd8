# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue row of module `spark_propose_inputs`: a grid of (blocks, rows, parts).

What a launch reads and writes depends on `used`, `sources` and `tokens`, which may be host memory; ranges are declared
from their content, so that what lies beyond an allocation is refused where memory is checked.
"""

from __future__ import annotations

from ..reference import spark_propose_inputs as reference
from .spec import Call, Dim3, KernelSpec, Pointee, ceil_div, pointer, table, u32

PIECE = 16
PARTS = 3
_BLOCK_BYTES = 256 * PIECE


def _rows(c: Call) -> tuple[int, ...]:
    return (c.grid[1],)


def _used_bytes(c: Call) -> tuple[int, ...]:
    return (PIECE * int(c.used[0]),)


def _geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (ceil_div(max(c.row_bytes, 2 * c.hidden_size), _BLOCK_BYTES), c.grid[1], PARTS), (256, 1, 1), 0


def _whole_elements(c: Call) -> None:
    if c.row_bytes % 2 or c.row_bytes == 0:
        raise ValueError(f"row_bytes is {c.row_bytes}: a positive even number is needed")


def _run(c: Call) -> None:
    rows = [c.behind("sources", i) for i in range(c.grid[1])]
    c.slab[...], c.hidden[...], c.embed[...] = reference.spark_propose_inputs(c.given, rows, c.tokens, c.embed_table)


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="spark_propose_inputs",
        function="spark_propose_inputs",
        params=(
            pointer("given", "u8", "r", _used_bytes, align=PIECE),
            pointer("used", "u32", "r", lambda c: (1,)),
            table("sources", _rows, Pointee("u8", lambda c: (c.row_bytes,), 2)),
            pointer("tokens", "u32", "r", _rows),
            pointer("embed_table", "bf16", "r", lambda c: (int(c.tokens.max()) + 1, c.hidden_size)),
            pointer("slab", "u8", "w", _used_bytes, align=PIECE),
            pointer("hidden", "u8", "w", lambda c: (c.grid[1], c.row_bytes), align=2),
            pointer("embed", "bf16", "w", lambda c: (c.grid[1], c.hidden_size)),
            u32("row_bytes"),
            u32("hidden_size"),
        ),
        grid_text="(ceil(max(row_bytes, 2 * hidden_size) / 4096), rows, 3)",
        block_text="(256, 1, 1)",
        geometry=_geometry,
        reference=reference.spark_propose_inputs,
        run=_run,
        optional=True,
        preconditions=_whole_elements,
    ),
)
