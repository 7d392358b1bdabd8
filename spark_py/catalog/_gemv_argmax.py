# SPDX-License-Identifier: AGPL-3.0-only
"""What the catalogue rows of `spark_gemv_argmax.cuh` share: up to eight rows through one matrix to their winners."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._gemv_rows import WIDE_LOAD, some_rows
from .spec import Call, KernelSpec, ParamSpec, pointer, u32


def table_of(c: Call) -> Any:
    """The embedding table; None where no embeddings are asked for."""
    if c.best.any() or c.done.any():
        raise ValueError("best and done are not zero: a launch with the same memory is not over, or never ended")
    return None if c.embed is None else c.embed_table


def put(c: Call, found: tuple[Any, Any]) -> None:
    """Put what a reference found where it belongs."""
    c.ids[...], rows = found
    if rows is not None:
        c.embed[...] = rows


def gemv_argmax_kernel(
    module: str,
    operands: list[ParamSpec],
    whole_rows: Callable[[Call], None],
    reference: Callable[..., Any],
    run: Callable[[Call], None],
    shared_bytes: int,
    factors: tuple[ParamSpec, ...] = (),
    threads: int = 256,
) -> KernelSpec:
    """The row of kernel `module`_argmax. `whole_rows` says what K may be; `factors` come last; `threads` are a
    block's."""

    def preconditions(c: Call) -> None:
        whole_rows(c)
        some_rows(c)
        if c.N == 0:
            raise ValueError("N is 0: at least one output is needed")

    return KernelSpec(
        module=module,
        function=f"{module}_argmax",
        params=(
            pointer("X", "bf16", "r", lambda c: (c.M, c.K), align=WIDE_LOAD),
            *operands,
            pointer("ids", "u32", "w", lambda c: (c.M,)),
            pointer("embed_table", "bf16", "r", lambda c: (c.N, c.K), align=WIDE_LOAD, optional=True),
            pointer("embed", "bf16", "w", lambda c: (c.M, c.K), align=WIDE_LOAD, optional=True),
            pointer("best", "u64", "rw", lambda c: (c.M,)),
            pointer("done", "u32", "rw", lambda c: (1,)),
            u32("M"),
            u32("N"),
            u32("K"),
            *factors,
        ),
        grid_text="(any, 1, 1)",
        block_text=f"({threads}, 1, 1)",
        geometry=lambda c: ((c.grid[0], 1, 1), (threads, 1, 1), 0),
        reference=reference,
        run=run,
        shared_bytes=shared_bytes,
        optional=True,
        preconditions=preconditions,
    )
