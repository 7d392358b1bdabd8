# SPDX-License-Identifier: AGPL-3.0-only
"""What the catalogue rows of a mixture in two launches share, whatever format its experts have; rows in grid y."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .gemv import WIDE_LOAD
from .spec import Call, Dim3, KernelSpec, ParamSpec, pointer, u32

Rule = Callable[[Call], None]
_Geometry = Callable[[Call], tuple[Dim3, Dim3, int]]
_SIZES = (u32("N"), u32("K"), u32("num_experts"), u32("top_k"))


def _rows(c: Call) -> int:
    return c.grid[1]


def _logits(c: Call) -> tuple[int, ...]:
    return _rows(c), c.num_experts


def _chosen(c: Call) -> tuple[int, ...]:
    return _rows(c), c.top_k


def gate_up_kernel(
    module: str,
    function: str,
    tables: Sequence[ParamSpec],
    shared: Sequence[ParamSpec],
    threads: int,
    grid_text: str,
    geometry: _Geometry,
    reference: Callable[..., Any],
    run: Rule,
    shared_bytes: int,
    needs: Rule,
) -> KernelSpec:
    """The row of a routing with gate, up and activation. `tables` and `shared` are the weights of experts and of the
    shared one; `needs` says what numbers are taken."""
    return KernelSpec(
        module=module,
        function=function,
        params=(
            pointer("A", "bf16", "r", lambda c: (_rows(c), c.K), align=WIDE_LOAD),
            pointer("gate_logits", "bf16", "r", _logits),
            *tables,
            pointer("expert_indices", "u32", "w", _chosen),
            *shared,
            pointer("activation", "f32", "w", lambda c: (_rows(c), c.top_k + 1, c.N)),
            *_SIZES,
        ),
        grid_text=grid_text,
        block_text=f"({threads}, 1, 1)",
        geometry=geometry,
        reference=reference,
        run=run,
        shared_bytes=shared_bytes,
        optional=True,
        preconditions=needs,
    )


def down_kernel(
    module: str,
    function: str,
    tables: Sequence[ParamSpec],
    shared: Sequence[ParamSpec],
    threads: int,
    outputs: int,
    geometry: _Geometry,
    reference: Callable[..., Any],
    run: Rule,
    shared_bytes: int,
    needs: Rule,
) -> KernelSpec:
    """The row of a down projection with the weighted sum, `outputs` of a block; the rest as above."""

    def preconditions(c: Call) -> None:
        needs(c)
        if c.gate_weight is not None and c.N % 8:
            raise ValueError(f"N is {c.N}: with a gate a multiple of 8 is needed")

    return KernelSpec(
        module=module,
        function=function,
        params=(
            pointer("activation", "f32", "r", lambda c: (_rows(c), c.top_k + 1, c.K), align=WIDE_LOAD),
            *tables,
            pointer("gate_logits", "bf16", "r", _logits),
            pointer("expert_indices", "u32", "r", _chosen),
            *shared,
            pointer("input", "bf16", "r", lambda c: (_rows(c), c.N), align=WIDE_LOAD),
            pointer("gate_weight", "bf16", "r", lambda c: (c.N,), align=WIDE_LOAD, optional=True),
            pointer("output", "bf16", "w", lambda c: (_rows(c), c.N)),
            *_SIZES,
            u32("normalize"),
        ),
        grid_text=f"(ceil(N / {outputs}), rows, 1)",
        block_text=f"({threads}, 1, 1)",
        geometry=geometry,
        reference=reference,
        run=run,
        shared_bytes=shared_bytes,
        optional=True,
        preconditions=preconditions,
    )
