# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `moe_expert_gemv_fused`: NVFP4 experts without a shared one; four outputs a block, eight
(_2x) or sixteen (_wide)."""

from __future__ import annotations

from collections.abc import Callable

from ..reference import moe_expert_gemv_fused as reference
from .moe_shared_expert_fused import BLOCK_TEXT, indices, one, routed, shared_row, slots, tables, whole_chunks
from .spec import Call, Dim3, KernelSpec, ceil_div, u32


def _geometry(outputs: int, z: int) -> Callable[[Call], tuple[Dim3, Dim3, int]]:
    return lambda c: ((ceil_div(c.N, outputs), c.top_k, z), (128, 1, 1), 0)


def _gate_up(c: Call) -> None:
    ids = c.expert_indices
    gate, up = routed(c, "gate_", ids), routed(c, "up_", ids)
    c.gate_out[...], c.up_out[...] = reference.moe_expert_gemv_gate_up(c.A, gate, up, c.N)


def _silu_down(c: Call) -> None:
    down = routed(c, "", c.expert_indices)
    c.C[...] = reference.moe_expert_gemv_silu_down(c.gate_out, c.up_out, down, c.N)


def _gate_up_spec(suffix: str, outputs: int) -> KernelSpec:
    return KernelSpec(
        module="moe_expert_gemv_fused",
        function=f"moe_expert_gemv_gate_up{suffix}",
        params=(
            shared_row("A", "r", one, "K"),
            *tables("gate_"),
            slots("gate_out", "w", one, "N"),
            *tables("up_"),
            slots("up_out", "w", one, "N"),
            indices(one),
            u32("N"),
            u32("K"),
            u32("top_k"),
        ),
        grid_text=f"(ceil(N / {outputs}), top_k, 2)",
        block_text=BLOCK_TEXT,
        geometry=_geometry(outputs, 2),
        reference=reference.moe_expert_gemv_gate_up,
        run=_gate_up,
        shared_bytes=64,
        optional=True,
        preconditions=whole_chunks,
    )


def _silu_down_spec(suffix: str, outputs: int) -> KernelSpec:
    return KernelSpec(
        module="moe_expert_gemv_fused",
        function=f"moe_expert_gemv_silu_down{suffix}",
        params=(
            slots("gate_out", "r", one, "K"),
            slots("up_out", "r", one, "K"),
            *tables(""),
            slots("C", "w", one, "N"),
            indices(one),
            u32("N"),
            u32("K"),
            u32("top_k"),
        ),
        grid_text=f"(ceil(N / {outputs}), top_k, 1)",
        block_text=BLOCK_TEXT,
        geometry=_geometry(outputs, 1),
        reference=reference.moe_expert_gemv_silu_down,
        run=_silu_down,
        shared_bytes=64,
        optional=True,
        preconditions=whole_chunks,
    )


KERNELS: tuple[KernelSpec, ...] = (
    _gate_up_spec("", 4),
    _gate_up_spec("_2x", 8),
    _silu_down_spec("", 4),
    _silu_down_spec("_2x", 8),
    _silu_down_spec("_wide", 16),
)
