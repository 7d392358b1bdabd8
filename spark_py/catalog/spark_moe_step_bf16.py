# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `spark_moe_step_bf16`: a mixture of BF16 experts in two launches; rows in grid y."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..reference import spark_moe_step_bf16 as reference
from ._moe_step import down_kernel, gate_up_kernel
from .gemv import WIDE_LOAD, whole_chunks
from .moe_shared_expert_fused_bf16 import chosen
from .moe_topk import needs_experts
from .spec import Call, Dim3, KernelSpec, ParamSpec, Pointee, ceil_div, pointer, table

THREADS, OUTPUTS = 256, 8
"""Threads of a block, and the outputs of one of the down projection, one a warp."""
RING = 65536
"""Dynamic shared bytes of a block's rings."""


def _needs(c: Call) -> None:
    needs_experts(c)
    whole_chunks(c)


def _table(name: str) -> ParamSpec:
    pointee = Pointee("bf16", lambda c: (c.N, c.K), WIDE_LOAD)
    return replace(table(name, lambda c: (c.num_experts,), pointee), early=True)


def _shared(name: str) -> ParamSpec:
    return pointer(name, "bf16", "r", lambda c: (c.N, c.K), align=WIDE_LOAD, optional=True, early=True)


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
    gate_up_kernel(
        "spark_moe_step_bf16",
        "spark_moe_route_gate_up_bf16",
        [_table("gate_weight_ptrs"), _table("up_weight_ptrs")],
        [_shared("sh_gate_weight"), _shared("sh_up_weight")],
        THREADS,
        "(any, rows, 1)",
        _gate_up_geometry,
        reference.spark_moe_route_gate_up_bf16,
        _gate_up,
        shared_bytes=9216,
        needs=_needs,
    ),
    down_kernel(
        "spark_moe_step_bf16",
        "spark_moe_down_blend_bf16",
        [_table("weight_ptrs")],
        [_shared("sh_down_weight")],
        THREADS,
        OUTPUTS,
        _down_geometry,
        reference.spark_moe_down_blend_bf16,
        _down,
        shared_bytes=6176,
        needs=_needs,
    ),
)
