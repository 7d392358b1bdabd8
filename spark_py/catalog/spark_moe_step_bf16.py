# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `spark_moe_step_bf16`: a mixture of BF16 experts in two launches; rows in grid y."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..reference import spark_moe_step_bf16 as reference
from .gemv import WIDE_LOAD, whole_chunks
from .moe_shared_expert_fused_bf16 import chosen
from .moe_topk import needs_experts
from .spec import Call, Dim3, KernelSpec, ParamSpec, Pointee, ceil_div, pointer, table, u32

THREADS, OUTPUTS = 256, 8
"""Threads of a block, and the outputs of one of the down projection, one a warp."""
RING = 65536
"""Dynamic shared bytes of a block's rings."""


def _needs(c: Call) -> None:
    needs_experts(c)
    whole_chunks(c)


def _needs_blend(c: Call) -> None:
    _needs(c)
    if c.gate_weight is not None and c.N % 8:
        raise ValueError(f"N is {c.N}: with a gate a multiple of 8 is needed")


def _table(name: str) -> ParamSpec:
    pointee = Pointee("bf16", lambda c: (c.N, c.K), WIDE_LOAD)
    return replace(table(name, lambda c: (c.num_experts,), pointee), early=True)


def _shared(name: str) -> ParamSpec:
    return pointer(name, "bf16", "r", lambda c: (c.N, c.K), align=WIDE_LOAD, optional=True, early=True)


def _rows(c: Call) -> int:
    return c.grid[1]


def _gate_up_geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (c.grid[0], c.grid[1], 1), (THREADS, 1, 1), RING + 2 * c.K


def _down_geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (ceil_div(c.N, OUTPUTS), c.grid[1], 1), (THREADS, 1, 1), RING + 4 * (c.top_k + 1) * c.K


def _gate_up(c: Call) -> None:
    def behind(name: str) -> Any:
        return lambda expert: c.behind(name, expert)

    c.expert_indices[...], c.activation[...] = reference.spark_moe_route_gate_up_bf16(
        c.A, c.gate_logits, behind("gate_weight_ptrs"), behind("up_weight_ptrs"), c.sh_gate_weight, c.sh_up_weight,
        c.N, c.top_k,
    )  # fmt: skip


def _down(c: Call) -> None:
    c.output[...] = reference.spark_moe_down_blend_bf16(
        c.activation,
        chosen(c, "weight_ptrs"),
        c.gate_logits,
        c.expert_indices,
        c.sh_down_weight,
        c.input,
        c.gate_weight,
        c.N,
        bool(c.normalize),
    )


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="spark_moe_step_bf16",
        function="spark_moe_route_gate_up_bf16",
        params=(
            pointer("A", "bf16", "r", lambda c: (_rows(c), c.K), align=WIDE_LOAD),
            pointer("gate_logits", "bf16", "r", lambda c: (_rows(c), c.num_experts)),
            _table("gate_weight_ptrs"),
            _table("up_weight_ptrs"),
            pointer("expert_indices", "u32", "w", lambda c: (_rows(c), c.top_k)),
            _shared("sh_gate_weight"),
            _shared("sh_up_weight"),
            pointer("activation", "f32", "w", lambda c: (_rows(c), c.top_k + 1, c.N)),
            u32("N"),
            u32("K"),
            u32("num_experts"),
            u32("top_k"),
        ),
        grid_text="(any, rows, 1)",
        block_text="(256, 1, 1)",
        geometry=_gate_up_geometry,
        reference=reference.spark_moe_route_gate_up_bf16,
        run=_gate_up,
        shared_bytes=9216,
        optional=True,
        preconditions=_needs,
    ),
    KernelSpec(
        module="spark_moe_step_bf16",
        function="spark_moe_down_blend_bf16",
        params=(
            pointer("activation", "f32", "r", lambda c: (_rows(c), c.top_k + 1, c.K), align=WIDE_LOAD),
            _table("weight_ptrs"),
            pointer("gate_logits", "bf16", "r", lambda c: (_rows(c), c.num_experts)),
            pointer("expert_indices", "u32", "r", lambda c: (_rows(c), c.top_k)),
            _shared("sh_down_weight"),
            pointer("input", "bf16", "r", lambda c: (_rows(c), c.N), align=WIDE_LOAD),
            pointer("gate_weight", "bf16", "r", lambda c: (c.N,), align=WIDE_LOAD, optional=True),
            pointer("output", "bf16", "w", lambda c: (_rows(c), c.N)),
            u32("N"),
            u32("K"),
            u32("num_experts"),
            u32("top_k"),
            u32("normalize"),
        ),
        grid_text="(ceil(N / 8), rows, 1)",
        block_text="(256, 1, 1)",
        geometry=_down_geometry,
        reference=reference.spark_moe_down_blend_bf16,
        run=_down,
        shared_bytes=6176,
        optional=True,
        preconditions=_needs_blend,
    ),
)
