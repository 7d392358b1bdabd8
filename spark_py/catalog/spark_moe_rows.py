# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `spark_moe_rows`: the experts of T rows in a launch; rows in grid y, slots in grid z."""

from __future__ import annotations

from collections.abc import Callable

from ..reference import spark_moe_rows as reference
from .gemv import WIDE_LOAD, whole_chunks
from .moe_shared_expert_fused_bf16 import (
    BLOCK_TEXT,
    chosen,
    down_params,
    gate_up_params,
    gate_up_results,
    needs_slots,
)
from .residual_add import BLOCK
from .residual_add import BLOCK_TEXT as ELEMENTWISE_TEXT
from .spec import Call, Dim3, KernelSpec, ceil_div, pointer, u32


def _rows(c: Call) -> tuple[int, ...]:
    return (c.grid[1],)


def _geometry(projections: int) -> Callable[[Call], tuple[Dim3, Dim3, int]]:
    return lambda c: ((ceil_div(c.N, 8), c.grid[1], projections * (c.top_k + 1)), (128, 1, 1), 0)


def _blend_geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (ceil_div(c.hidden, BLOCK), c.grid[1], 1), (BLOCK, 1, 1), 0


def _gate_up(c: Call) -> None:
    gate, up = chosen(c, "gate_weight_ptrs"), chosen(c, "up_weight_ptrs")
    results = reference.spark_moe_expert_gate_up_shared_bf16_rows(c.A, gate, up, c.sh_gate_weight, c.sh_up_weight, c.N)
    gate_up_results(c, results)


def _down(c: Call) -> None:
    weights = chosen(c, "weight_ptrs")
    c.C[...], c.sh_down_out[...] = reference.spark_moe_expert_silu_down_shared_bf16_rows(
        c.gate_out, c.up_out, weights, c.sh_gate_in, c.sh_up_in, c.sh_down_weight, c.N
    )


def _blend(c: Call) -> None:
    c.output[...] = reference.spark_moe_weighted_sum_blend_rows(
        c.expert_out, c.expert_weights, c.shared_out, c.input, c.gate_weight
    )


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="spark_moe_rows",
        function="spark_moe_expert_gate_up_shared_bf16_rows",
        params=gate_up_params(_rows),
        grid_text="(ceil(N / 8), rows, 2 * (top_k + 1))",
        block_text=BLOCK_TEXT,
        geometry=_geometry(2),
        reference=reference.spark_moe_expert_gate_up_shared_bf16_rows,
        run=_gate_up,
        optional=True,
        preconditions=needs_slots,
    ),
    KernelSpec(
        module="spark_moe_rows",
        function="spark_moe_expert_silu_down_shared_bf16_rows",
        params=down_params(_rows),
        grid_text="(ceil(N / 8), rows, top_k + 1)",
        block_text=BLOCK_TEXT,
        geometry=_geometry(1),
        reference=reference.spark_moe_expert_silu_down_shared_bf16_rows,
        run=_down,
        shared_bytes=8320,
        optional=True,
        preconditions=needs_slots,
    ),
    KernelSpec(
        module="spark_moe_rows",
        function="spark_moe_weighted_sum_blend_rows",
        params=(
            pointer("output", "bf16", "w", lambda c: (*_rows(c), c.hidden)),
            pointer("expert_out", "bf16", "r", lambda c: (*_rows(c), c.top_k, c.hidden)),
            pointer("expert_weights", "f32", "r", lambda c: (*_rows(c), c.top_k)),
            pointer("shared_out", "bf16", "r", lambda c: (*_rows(c), c.hidden)),
            pointer("input", "bf16", "r", lambda c: (*_rows(c), c.K), align=WIDE_LOAD),
            pointer("gate_weight", "bf16", "r", lambda c: (c.K,), align=WIDE_LOAD, optional=True),
            u32("hidden"),
            u32("top_k"),
            u32("K"),
        ),
        grid_text="(ceil(hidden / 256), rows, 1)",
        block_text=ELEMENTWISE_TEXT,
        geometry=_blend_geometry,
        reference=reference.spark_moe_weighted_sum_blend_rows,
        run=_blend,
        shared_bytes=128,
        optional=True,
        preconditions=whole_chunks,
    ),
)
