# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `spark_mxfp4_experts`: parameters of the `_rows` forms of `spark_moe_expert_mxfp4`, blocks
of 256 threads with 64 outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..reference import spark_mxfp4_experts as reference
from .moe_shared_expert_fused import each_row, several
from .spark_moe_expert_mxfp4 import KERNELS as ORDERED
from .spark_moe_expert_mxfp4 import experts
from .spec import Call, Dim3, KernelSpec, ceil_div

OUTPUTS = 64


def _geometry(projections: int, planes: int) -> Callable[[Call], tuple[Dim3, Dim3, int]]:
    def of(c: Call) -> tuple[Dim3, Dim3, int]:
        grid = (ceil_div(c.N, OUTPUTS), c.grid[1], projections * c.top_k)
        return grid, (256, 1, 1), planes * 2048 * ceil_div(c.K, 1024)

    return of


def _gate_up(c: Call) -> None:
    for x, ids, gate_out, up_out in each_row(c, several, "A", "expert_indices", "gate_out", "up_out"):
        gate, up = experts(c, "gate_", ids), experts(c, "up_", ids)
        gate_out[...], up_out[...] = reference.spark_mxfp4_experts_gate_up(x, gate, up, c.N)


def _silu_down(c: Call) -> None:
    for gate, up, ids, out in each_row(c, several, "gate_out", "up_out", "expert_indices", "C"):
        out[...] = reference.spark_mxfp4_experts_silu_down(gate, up, experts(c, "", ids), c.N, c.limit)


_ORDERED = {spec.function: spec for spec in ORDERED}

KERNELS: tuple[KernelSpec, ...] = (
    replace(
        _ORDERED["spark_moe_expert_gate_up_mxfp4_rows"],
        module="spark_mxfp4_experts",
        function="spark_mxfp4_experts_gate_up",
        grid_text="(ceil(N / 64), rows, 2 * top_k)",
        block_text="(256, 1, 1)",
        geometry=_geometry(2, 1),
        reference=reference.spark_mxfp4_experts_gate_up,
        run=_gate_up,
    ),
    replace(
        _ORDERED["spark_moe_expert_silu_down_clamped_mxfp4_rows"],
        module="spark_mxfp4_experts",
        function="spark_mxfp4_experts_silu_down",
        grid_text="(ceil(N / 64), rows, top_k)",
        block_text="(256, 1, 1)",
        geometry=_geometry(1, 3),
        reference=reference.spark_mxfp4_experts_silu_down,
        run=_silu_down,
    ),
)
