# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue row of module `spark_moe_expert_silu_down_clamped_bf16`: parameters and geometry of
`spark_moe_expert_silu_down_shared_bf16_rows`, and the limit."""

from __future__ import annotations

from ..reference import spark_moe_expert_silu_down_clamped_bf16 as reference
from .moe_shared_expert_fused_bf16 import BLOCK_TEXT, chosen, down_params, needs_slots
from .spark_moe_expert_silu_down_clamped import needs_a_limit
from .spec import Call, Dim3, KernelSpec, ceil_div, f32


def _geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (ceil_div(c.N, 8), c.grid[1], c.top_k + 1), (128, 1, 1), 0


def _preconditions(c: Call) -> None:
    needs_slots(c)
    needs_a_limit(c)


def _run(c: Call) -> None:
    weights = chosen(c, "weight_ptrs")
    c.C[...], c.sh_down_out[...] = reference.spark_moe_expert_silu_down_clamped_bf16_rows(
        c.gate_out, c.up_out, weights, c.sh_gate_in, c.sh_up_in, c.sh_down_weight, c.N, c.limit
    )


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="spark_moe_expert_silu_down_clamped_bf16",
        function="spark_moe_expert_silu_down_clamped_bf16_rows",
        params=(*down_params(lambda c: (c.grid[1],)), f32("limit")),
        grid_text="(ceil(N / 8), rows, top_k + 1)",
        block_text=BLOCK_TEXT,
        geometry=_geometry,
        reference=reference.spark_moe_expert_silu_down_clamped_bf16_rows,
        run=_run,
        shared_bytes=8320,
        optional=True,
        preconditions=_preconditions,
    ),
)
