# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `spark_moe_expert_mxfp4`: MXFP4 experts without a shared one, blocks of 128 threads, with
eight outputs of the gate and up projections and 32 of the down projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..reference import spark_moe_expert_mxfp4 as reference
from .moe_shared_expert_fused import (
    ACTIVATION_BYTES,
    BLOCK_TEXT,
    Rows,
    each_row,
    entries,
    indices,
    one,
    several,
    shared_row,
    slots,
)
from .spark_moe_expert_silu_down_clamped import needs_a_limit
from .spark_mxfp4_gemv import whole_chunks
from .spec import Call, Dim3, KernelSpec, ParamSpec, Pointee, ceil_div, f32, table, u32

CODES_ALIGN = 16
CHUNK = 32


def _geometry(rows: Rows, projections: int, outputs: int, shared: int) -> Callable[[Call], tuple[Dim3, Dim3, int]]:
    """`outputs` a block; `shared` dynamic bytes for each of K."""

    def of(c: Call) -> tuple[Dim3, Dim3, int]:
        y, z = (c.top_k, projections) if rows is one else (c.grid[1], projections * c.top_k)
        return (ceil_div(c.N, outputs), y, z), (128, 1, 1), shared * c.K

    return of


def _tables(prefix: str) -> tuple[ParamSpec, ...]:
    return (
        table(f"{prefix}packed_ptrs", entries, Pointee("u8", lambda c: (c.N, c.K // 2), CODES_ALIGN)),
        table(f"{prefix}scale_ptrs", entries, Pointee("u8", lambda c: (c.N, c.K // CHUNK))),
    )


def experts(c: Call, prefix: str, ids: Any) -> list[reference.Mxfp4 | None]:
    """Those that `ids` name, of the tables with `prefix`; None for one that is elsewhere."""
    found: list[reference.Mxfp4 | None] = []
    for expert in ids.tolist():
        packed = c.behind(f"{prefix}packed_ptrs", expert)
        found.append(None if packed is None else (packed, c.behind(f"{prefix}scale_ptrs", expert)))
    return found


def _gate_up(rows: Rows) -> Callable[[Call], None]:
    def run(c: Call) -> None:
        for x, ids, gate_out, up_out in each_row(c, rows, "A", "expert_indices", "gate_out", "up_out"):
            gate, up = experts(c, "gate_", ids), experts(c, "up_", ids)
            gate_out[...], up_out[...] = reference.spark_moe_expert_gate_up_mxfp4(x, gate, up, c.N)

    return run


def _silu_down(rows: Rows) -> Callable[[Call], None]:
    def run(c: Call) -> None:
        for gate, up, ids, out in each_row(c, rows, "gate_out", "up_out", "expert_indices", "C"):
            down = experts(c, "", ids)
            out[...] = reference.spark_moe_expert_silu_down_clamped_mxfp4(gate, up, down, c.N, c.limit)

    return run


def _down_preconditions(c: Call) -> None:
    whole_chunks(c)
    needs_a_limit(c)


def _gate_up_spec(function: str, rows: Rows) -> KernelSpec:
    return KernelSpec(
        module="spark_moe_expert_mxfp4",
        function=function,
        params=(
            shared_row("A", "r", rows, "K"),
            *_tables("gate_"),
            slots("gate_out", "w", rows, "N"),
            *_tables("up_"),
            slots("up_out", "w", rows, "N"),
            indices(rows),
            u32("N"),
            u32("K"),
            u32("top_k"),
        ),
        grid_text="(ceil(N / 8), top_k, 2)" if rows is one else "(ceil(N / 8), rows, 2 * top_k)",
        block_text=BLOCK_TEXT,
        geometry=_geometry(rows, 2, 8, 0),
        reference=reference.spark_moe_expert_gate_up_mxfp4,
        run=_gate_up(rows),
        optional=True,
        preconditions=whole_chunks,
    )


def _silu_down_spec(function: str, rows: Rows) -> KernelSpec:
    return KernelSpec(
        module="spark_moe_expert_mxfp4",
        function=function,
        params=(
            slots("gate_out", "r", rows, "K"),
            slots("up_out", "r", rows, "K"),
            *_tables(""),
            slots("C", "w", rows, "N"),
            indices(rows),
            u32("N"),
            u32("K"),
            u32("top_k"),
            f32("limit"),
        ),
        grid_text="(ceil(N / 32), top_k, 1)" if rows is one else "(ceil(N / 32), rows, top_k)",
        block_text=BLOCK_TEXT,
        geometry=_geometry(rows, 1, 32, ACTIVATION_BYTES),
        reference=reference.spark_moe_expert_silu_down_clamped_mxfp4,
        run=_silu_down(rows),
        optional=True,
        preconditions=_down_preconditions,
    )


KERNELS: tuple[KernelSpec, ...] = (
    _gate_up_spec("spark_moe_expert_gate_up_mxfp4", one),
    _silu_down_spec("spark_moe_expert_silu_down_clamped_mxfp4", one),
    _gate_up_spec("spark_moe_expert_gate_up_mxfp4_rows", several),
    _silu_down_spec("spark_moe_expert_silu_down_clamped_mxfp4_rows", several),
)
