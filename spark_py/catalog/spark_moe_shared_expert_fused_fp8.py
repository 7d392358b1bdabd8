# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `spark_moe_shared_expert_fused_fp8`: `moe_shared_expert_fused` with E4M3 experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..reference import spark_moe_shared_expert_fused_fp8 as reference
from .moe_shared_expert_fused import (
    ACTIVATION_BYTES,
    BLOCK_TEXT,
    Rows,
    complete,
    each_row,
    entries,
    gate_up_params,
    geometry,
    indices,
    one,
    several,
    shared_row,
    slots,
)
from .spec import Call, KernelSpec, ParamSpec, Pointee, pointer, table, u32

CODES_ALIGN = 16


def _tables(prefix: str) -> tuple[ParamSpec, ...]:
    return (
        table(f"{prefix}weight_ptrs", entries, Pointee("u8", lambda c: (c.N, c.K), CODES_ALIGN)),
        table(f"{prefix}scale_ptrs", entries, Pointee("f32", lambda c: (c.N,), 4)),
    )


def _shared(prefix: str) -> tuple[ParamSpec, ...]:
    return (
        pointer(f"{prefix}_weight", "u8", "r", lambda c: (c.N, c.K), align=CODES_ALIGN, optional=True),
        pointer(f"{prefix}_scale", "f32", "r", lambda c: (c.N,), optional=True),
    )


def _slots(c: Call, prefix: str, shared: str, has: str, ids: Any) -> list[reference.Fp8Rows | None]:
    found: list[reference.Fp8Rows | None] = []
    for expert in ids.tolist():
        weight = c.behind(f"{prefix}weight_ptrs", expert)
        found.append(None if weight is None else (weight, c.behind(f"{prefix}scale_ptrs", expert)))
    weight = getattr(c, f"{shared}_weight"), getattr(c, f"{shared}_scale")
    return [*found, None if getattr(c, f"{has}_weight") is None else weight]


def _gate_up(rows: Rows) -> Callable[[Call], None]:
    def run(c: Call) -> None:
        names = ("A", "expert_indices", "gate_out", "up_out", "sh_gate_out", "sh_up_out")
        for x, ids, gate_out, up_out, sh_gate_out, sh_up_out in each_row(c, rows, *names):
            gate = _slots(c, "gate_", "sh_gate", "sh_gate", ids)
            up = _slots(c, "up_", "sh_up", "sh_gate", ids)
            gates, ups = reference.spark_moe_expert_gate_up_shared_fp8(x, gate, up, c.N)
            gate_out[...], sh_gate_out[...] = gates[:-1], gates[-1]
            up_out[...], sh_up_out[...] = ups[:-1], ups[-1]

    return run


def _silu_down(rows: Rows) -> Callable[[Call], None]:
    def run(c: Call) -> None:
        names = ("gate_out", "up_out", "expert_indices", "sh_gate_in", "sh_up_in", "C", "sh_down_out")
        for gate, up, ids, sh_gate, sh_up, out, sh_out in each_row(c, rows, *names):
            down = _slots(c, "", "sh_down", "sh_down", ids)
            gates, ups = np.concatenate([gate, sh_gate[None]]), np.concatenate([up, sh_up[None]])
            result = reference.spark_moe_expert_silu_down_shared_fp8(gates, ups, down, c.N)
            out[...], sh_out[...] = result[:-1], result[-1]

    return run


def _gate_up_spec(function: str, rows: Rows) -> KernelSpec:
    return KernelSpec(
        module="spark_moe_shared_expert_fused_fp8",
        function=function,
        params=gate_up_params(rows, _tables, _shared),
        grid_text="(ceil(N / 8), top_k + 1, 2)" if rows is one else "(ceil(N / 8), rows, 2 * (top_k + 1))",
        block_text=BLOCK_TEXT,
        geometry=geometry(rows, 2),
        reference=reference.spark_moe_expert_gate_up_shared_fp8,
        run=_gate_up(rows),
        optional=True,
        preconditions=complete("sh_gate_weight", "sh_gate_scale", "sh_up_weight", "sh_up_scale"),
    )


def _silu_down_spec(function: str, rows: Rows) -> KernelSpec:
    return KernelSpec(
        module="spark_moe_shared_expert_fused_fp8",
        function=function,
        params=(
            slots("gate_out", "r", rows, "K"),
            slots("up_out", "r", rows, "K"),
            *_tables(""),
            slots("C", "w", rows, "N"),
            indices(rows),
            shared_row("sh_gate_in", "r", rows, "K"),
            shared_row("sh_up_in", "r", rows, "K"),
            *_shared("sh_down"),
            shared_row("sh_down_out", "w", rows, "N"),
            u32("N"),
            u32("K"),
            u32("top_k"),
        ),
        grid_text="(ceil(N / 8), top_k + 1, 1)" if rows is one else "(ceil(N / 8), rows, top_k + 1)",
        block_text=BLOCK_TEXT,
        geometry=geometry(rows, 1, ACTIVATION_BYTES),
        reference=reference.spark_moe_expert_silu_down_shared_fp8,
        run=_silu_down(rows),
        optional=True,
        preconditions=complete("sh_down_weight", "sh_down_scale"),
    )


KERNELS: tuple[KernelSpec, ...] = (
    _gate_up_spec("spark_moe_expert_gate_up_shared_fp8", one),
    _silu_down_spec("spark_moe_expert_silu_down_shared_fp8", one),
    _gate_up_spec("spark_moe_expert_gate_up_shared_fp8_rows", several),
    _silu_down_spec("spark_moe_expert_silu_down_shared_fp8_rows", several),
)
