# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `moe_shared_expert_fused_bf16`: eight outputs a block of 128 threads, a slot in grid y.

How long the tables are no parameter says: they are declared up to the largest expert that the launch asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..reference import moe_shared_expert_fused_bf16 as reference
from .gemv import WIDE_LOAD, whole_chunks
from .spec import Call, Dim3, KernelSpec, ParamSpec, Pointee, ceil_div, pointer, table, u32

HALF_CHUNK = 8
"""Bytes of the loads of gate and up."""
BLOCK_TEXT = "(128, 1, 1)"

Rows = Callable[[Call], "tuple[int, ...]"]


def one_row(c: Call) -> tuple[int, ...]:
    """The rows of a kernel for one row: no axis."""
    return ()


def _table(name: str) -> ParamSpec:
    weights = Pointee("bf16", lambda c: (c.N, c.K), WIDE_LOAD)
    return table(name, lambda c: (int(c.expert_indices.max()) + 1,), weights)


def _shared_weight(name: str) -> ParamSpec:
    return pointer(name, "bf16", "r", lambda c: (c.N, c.K), align=WIDE_LOAD, optional=True)


def gate_up_params(rows: Rows) -> tuple[ParamSpec, ...]:
    """The parameters of a gate and up projection of `rows(call)` rows."""
    return (
        pointer("A", "bf16", "r", lambda c: (*rows(c), c.K), align=WIDE_LOAD),
        _table("gate_weight_ptrs"),
        pointer("gate_out", "bf16", "w", lambda c: (*rows(c), c.top_k, c.N)),
        _table("up_weight_ptrs"),
        pointer("up_out", "bf16", "w", lambda c: (*rows(c), c.top_k, c.N)),
        pointer("expert_indices", "u32", "r", lambda c: (*rows(c), c.top_k)),
        _shared_weight("sh_gate_weight"),
        pointer("sh_gate_out", "bf16", "w", lambda c: (*rows(c), c.N)),
        _shared_weight("sh_up_weight"),
        pointer("sh_up_out", "bf16", "w", lambda c: (*rows(c), c.N)),
        u32("N"),
        u32("K"),
        u32("top_k"),
    )


def down_params(rows: Rows) -> tuple[ParamSpec, ...]:
    """The parameters of a down projection of `rows(call)` rows."""
    return (
        pointer("gate_out", "bf16", "r", lambda c: (*rows(c), c.top_k, c.K), align=HALF_CHUNK),
        pointer("up_out", "bf16", "r", lambda c: (*rows(c), c.top_k, c.K), align=HALF_CHUNK),
        _table("weight_ptrs"),
        pointer("C", "bf16", "w", lambda c: (*rows(c), c.top_k, c.N)),
        pointer("expert_indices", "u32", "r", lambda c: (*rows(c), c.top_k)),
        pointer("sh_gate_in", "bf16", "r", lambda c: (*rows(c), c.K), align=HALF_CHUNK),
        pointer("sh_up_in", "bf16", "r", lambda c: (*rows(c), c.K), align=HALF_CHUNK),
        _shared_weight("sh_down_weight"),
        pointer("sh_down_out", "bf16", "w", lambda c: (*rows(c), c.N)),
        u32("N"),
        u32("K"),
        u32("top_k"),
    )


def chosen(c: Call, name: str) -> list[Any]:
    """The weights behind a table, nested as expert_indices is."""
    flat = [c.behind(name, int(expert)) for expert in c.expert_indices.reshape(-1)]
    if c.expert_indices.ndim == 1:
        return flat
    return [flat[first : first + c.top_k] for first in range(0, len(flat), c.top_k)]


def needs_slots(c: Call) -> None:
    """Whole chunks, and at least one expert a row."""
    whole_chunks(c)
    if c.top_k == 0:
        raise ValueError("top_k is 0: a row needs at least one expert")


def _geometry(z: int) -> Callable[[Call], tuple[Dim3, Dim3, int]]:
    return lambda c: ((ceil_div(c.N, 8), c.top_k + 1, z), (128, 1, 1), 0)


def gate_up_results(c: Call, results: tuple[np.ndarray[Any, Any], ...]) -> None:
    """Put what a gate and up projection gives where it belongs."""
    c.gate_out[...], c.up_out[...], c.sh_gate_out[...], c.sh_up_out[...] = results


def _gate_up(c: Call) -> None:
    gate, up = chosen(c, "gate_weight_ptrs"), chosen(c, "up_weight_ptrs")
    results = reference.moe_expert_gate_up_shared_bf16(c.A, gate, up, c.sh_gate_weight, c.sh_up_weight, c.N)
    gate_up_results(c, results)


def _down(c: Call) -> None:
    weights = chosen(c, "weight_ptrs")
    c.C[...], c.sh_down_out[...] = reference.moe_expert_silu_down_shared_bf16(
        c.gate_out, c.up_out, weights, c.sh_gate_in, c.sh_up_in, c.sh_down_weight, c.N
    )


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="moe_shared_expert_fused_bf16",
        function="moe_expert_gate_up_shared_bf16",
        params=gate_up_params(one_row),
        grid_text="(ceil(N / 8), top_k + 1, 2)",
        block_text=BLOCK_TEXT,
        geometry=_geometry(2),
        reference=reference.moe_expert_gate_up_shared_bf16,
        run=_gate_up,
        optional=True,
        preconditions=needs_slots,
    ),
    KernelSpec(
        module="moe_shared_expert_fused_bf16",
        function="moe_expert_silu_down_shared_bf16",
        params=down_params(one_row),
        grid_text="(ceil(N / 8), top_k + 1, 1)",
        block_text=BLOCK_TEXT,
        geometry=_geometry(1),
        reference=reference.moe_expert_silu_down_shared_bf16,
        run=_down,
        shared_bytes=8192,
        optional=True,
        preconditions=needs_slots,
    ),
)
