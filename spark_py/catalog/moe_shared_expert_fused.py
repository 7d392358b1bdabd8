# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `moe_shared_expert_fused`: NVFP4 experts, blocks of 128 threads and eight outputs, a slot in
grid y.

The rows of the tables that a launch reads depend on expert ids in device memory: tables are declared up to the largest
of them, and what an entry points at is checked where it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..reference import moe_shared_expert_fused as reference
from .spec import Call, Dim3, KernelSpec, ParamSpec, Pointee, ceil_div, f32, pointer, table, u32

ACTIVATIONS_ALIGN = 16
CODES_ALIGN = 8
CHUNK = 16
ACTIVATION_BYTES = 4
"""Dynamic shared memory of a down projection, for each of its K inputs: the activation in FP32."""
BLOCK_TEXT = "(128, 1, 1)"

Rows = Callable[[Call], "tuple[int, ...]"]
Projection = Callable[[str], "tuple[ParamSpec, ...]"]


def one(c: Call) -> tuple[int, ...]:
    """The rows of a kernel for one row: no axis."""
    return ()


def several(c: Call) -> tuple[int, ...]:
    """The rows of a kernel for several: grid y."""
    return (c.grid[1],)


def geometry(rows: Rows, projections: int, shared: int = 0) -> Callable[[Call], tuple[Dim3, Dim3, int]]:
    """Eight outputs a block, a slot more than top_k; `shared` dynamic bytes for each of K."""

    def of(c: Call) -> tuple[Dim3, Dim3, int]:
        slots = c.top_k + 1
        y, z = (slots, projections) if rows is one else (c.grid[1], projections * slots)
        return (ceil_div(c.N, 8), y, z), (128, 1, 1), shared * c.K

    return of


def whole_chunks(c: Call) -> None:
    """K % 16 == 0."""
    if c.K % CHUNK:
        raise ValueError(f"K is {c.K}: it must be a multiple of {CHUNK}")


def entries(c: Call) -> tuple[int, ...]:
    """Length of the tables: up to the largest expert id of the launch."""
    return (int(c.expert_indices.max()) + 1 if c.expert_indices.size else 0,)


def indices(rows: Rows) -> ParamSpec:
    """Expert ids."""
    return pointer("expert_indices", "u32", "r", lambda c: (*rows(c), c.top_k))


def tables(prefix: str) -> tuple[ParamSpec, ...]:
    """Codes, scales and factors of a projection."""
    return (
        table(f"{prefix}packed_ptrs", entries, Pointee("u8", lambda c: (c.N, c.K // 2), CODES_ALIGN)),
        table(f"{prefix}scale_ptrs", entries, Pointee("u8", lambda c: (c.N, c.K // CHUNK))),
        pointer(f"{prefix}scale2_vals", "f32", "r", entries),
    )


def _shared(prefix: str) -> tuple[ParamSpec, ...]:
    return (
        pointer(f"{prefix}_packed", "u8", "r", lambda c: (c.N, c.K // 2), align=CODES_ALIGN, optional=True),
        pointer(f"{prefix}_scale", "u8", "r", lambda c: (c.N, c.K // CHUNK), optional=True),
        f32(f"{prefix}_s2"),
    )


def routed(c: Call, prefix: str, ids: Any) -> list[reference.Nvfp4 | None]:
    """The experts `ids` of a projection."""
    found: list[reference.Nvfp4 | None] = []
    for expert in ids.tolist():
        packed = c.behind(f"{prefix}packed_ptrs", expert)
        scale2 = float(getattr(c, f"{prefix}scale2_vals")[expert])
        found.append(None if packed is None else (packed, c.behind(f"{prefix}scale_ptrs", expert), scale2))
    return found


def and_shared(c: Call, prefix: str, shared: str, has: str, ids: Any) -> list[reference.Nvfp4 | None]:
    """`routed`, and the shared expert."""
    weight = getattr(c, f"{shared}_packed"), getattr(c, f"{shared}_scale"), getattr(c, f"{shared}_s2")
    return [*routed(c, prefix, ids), None if getattr(c, f"{has}_packed") is None else weight]


def complete(*names: str) -> Callable[[Call], None]:
    """The first of the shared expert's tensors says whether there is one; then all have to be there."""

    def check(c: Call) -> None:
        whole_chunks(c)
        for name in names[1:]:
            if getattr(c, names[0]) is not None and getattr(c, name) is None:
                raise ValueError(f"{name} is NULL and {names[0]} is not: a shared expert needs both")

    return check


def each_row(c: Call, rows: Rows, *names: str) -> list[tuple[Any, ...]]:
    """(views of the parameters `names`) for each row of the launch."""
    arrays = [getattr(c, name) for name in names]
    return list(zip(*arrays, strict=True)) if rows(c) else [tuple(arrays)]


def _gate_up(rows: Rows) -> Callable[[Call], None]:
    def run(c: Call) -> None:
        names = ("A", "expert_indices", "gate_out", "up_out", "sh_gate_out", "sh_up_out")
        for x, ids, gate_out, up_out, sh_gate_out, sh_up_out in each_row(c, rows, *names):
            gate = and_shared(c, "gate_", "sh_gate", "sh_gate", ids)
            up = and_shared(c, "up_", "sh_up", "sh_gate", ids)
            gates, ups = reference.moe_expert_gate_up_shared(x, gate, up, c.N)
            gate_out[...], sh_gate_out[...] = gates[:-1], gates[-1]
            up_out[...], sh_up_out[...] = ups[:-1], ups[-1]

    return run


def _silu_down(rows: Rows) -> Callable[[Call], None]:
    def run(c: Call) -> None:
        names = ("gate_out", "up_out", "expert_indices", "sh_gate_in", "sh_up_in", "C", "sh_down_out")
        for gate, up, ids, sh_gate, sh_up, out, sh_out in each_row(c, rows, *names):
            down = and_shared(c, "", "sh_down", "sh_down", ids)
            gates, ups = np.concatenate([gate, sh_gate[None]]), np.concatenate([up, sh_up[None]])
            result = reference.moe_expert_silu_down_shared(gates, ups, down, c.N)
            out[...], sh_out[...] = result[:-1], result[-1]

    return run


def slots(name: str, access: Any, rows: Rows, width: str) -> ParamSpec:
    """BF16 [rows, top_k, width]."""
    align = ACTIVATIONS_ALIGN if access == "r" else 2
    return pointer(name, "bf16", access, lambda c: (*rows(c), c.top_k, getattr(c, width)), align=align)


def shared_row(name: str, access: Any, rows: Rows, width: str) -> ParamSpec:
    """BF16 [rows, width]."""
    align = ACTIVATIONS_ALIGN if access == "r" else 2
    return pointer(name, "bf16", access, lambda c: (*rows(c), getattr(c, width)), align=align)


def gate_up_params(rows: Rows, routed_of: Projection, shared_of: Projection) -> tuple[ParamSpec, ...]:
    """Parameters of a gate/up launch: `routed_of` and `shared_of` give those of a projection in the experts' format."""
    return (
        shared_row("A", "r", rows, "K"),
        *routed_of("gate_"),
        slots("gate_out", "w", rows, "N"),
        *routed_of("up_"),
        slots("up_out", "w", rows, "N"),
        indices(rows),
        *shared_of("sh_gate"),
        shared_row("sh_gate_out", "w", rows, "N"),
        *shared_of("sh_up"),
        shared_row("sh_up_out", "w", rows, "N"),
        u32("N"),
        u32("K"),
        u32("top_k"),
    )


def _gate_up_spec(function: str, rows: Rows) -> KernelSpec:
    return KernelSpec(
        module="moe_shared_expert_fused",
        function=function,
        params=gate_up_params(rows, tables, _shared),
        grid_text="(ceil(N / 8), top_k + 1, 2)" if rows is one else "(ceil(N / 8), rows, 2 * (top_k + 1))",
        block_text=BLOCK_TEXT,
        geometry=geometry(rows, 2),
        reference=reference.moe_expert_gate_up_shared,
        run=_gate_up(rows),
        shared_bytes=64 if rows is one else 0,
        optional=rows is not one,
        preconditions=complete("sh_gate_packed", "sh_gate_scale", "sh_up_packed", "sh_up_scale"),
    )


def silu_down_params(rows: Rows) -> tuple[ParamSpec, ...]:
    """Parameters of the down projection."""
    return (
        slots("gate_out", "r", rows, "K"),
        slots("up_out", "r", rows, "K"),
        *tables(""),
        slots("C", "w", rows, "N"),
        indices(rows),
        shared_row("sh_gate_in", "r", rows, "K"),
        shared_row("sh_up_in", "r", rows, "K"),
        *_shared("sh_down"),
        shared_row("sh_down_out", "w", rows, "N"),
        u32("N"),
        u32("K"),
        u32("top_k"),
    )


def _silu_down_spec(function: str, rows: Rows) -> KernelSpec:
    return KernelSpec(
        module="moe_shared_expert_fused",
        function=function,
        params=silu_down_params(rows),
        grid_text="(ceil(N / 8), top_k + 1, 1)" if rows is one else "(ceil(N / 8), rows, top_k + 1)",
        block_text=BLOCK_TEXT,
        geometry=geometry(rows, 1, ACTIVATION_BYTES),
        reference=reference.moe_expert_silu_down_shared,
        run=_silu_down(rows),
        shared_bytes=64 if rows is one else 0,
        optional=rows is not one,
        preconditions=complete("sh_down_packed", "sh_down_scale"),
    )


KERNELS: tuple[KernelSpec, ...] = (
    _gate_up_spec("moe_expert_gate_up_shared", one),
    _silu_down_spec("moe_expert_silu_down_shared", one),
    _gate_up_spec("spark_moe_expert_gate_up_shared_rows", several),
    _silu_down_spec("spark_moe_expert_silu_down_shared_rows", several),
)
