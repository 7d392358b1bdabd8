# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `moe_topk_sqrt`: one block of 256 threads a token."""

from __future__ import annotations

from ..reference import moe_topk_sqrt as reference
from .moe_topk import needs_experts
from .spec import Call, Dim3, KernelSpec, ParamSpec, f32, pointer, u32

_SCALARS: tuple[ParamSpec, ...] = (u32("num_experts"), u32("top_k"), u32("normalize"), f32("scaling_factor"))


def _geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (1, 1, 1), (256, 1, 1), 0


def _row_geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (c.grid[0], 1, 1), (256, 1, 1), 0


def _moe_topk_sqrtsoftplus(c: Call) -> None:
    indices, weights = reference.moe_topk_sqrtsoftplus(
        c.gate_logits[None], c.bias, c.top_k, bool(c.normalize), c.scaling_factor
    )
    c.expert_indices[...], c.expert_weights[...] = indices[0], weights[0]


def _moe_topk_sqrtsoftplus_batched(c: Call) -> None:
    c.expert_indices[...], c.expert_weights[...] = reference.moe_topk_sqrtsoftplus(
        c.gate_logits, c.bias, c.top_k, bool(c.normalize), c.scaling_factor
    )


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="moe_topk_sqrt",
        function="moe_topk_sqrtsoftplus",
        params=(
            pointer("gate_logits", "bf16", "r", lambda c: (c.num_experts,)),
            pointer("bias", "f32", "r", lambda c: (c.num_experts,)),
            pointer("expert_indices", "u32", "w", lambda c: (c.top_k,)),
            pointer("expert_weights", "f32", "w", lambda c: (c.top_k,)),
            *_SCALARS,
        ),
        grid_text="(1, 1, 1)",
        block_text="(256, 1, 1)",
        geometry=_geometry,
        reference=reference.moe_topk_sqrtsoftplus,
        run=_moe_topk_sqrtsoftplus,
        shared_bytes=4416,
        optional=True,
        preconditions=needs_experts,
    ),
    KernelSpec(
        module="moe_topk_sqrt",
        function="moe_topk_sqrtsoftplus_batched",
        params=(
            pointer("gate_logits", "bf16", "r", lambda c: (c.grid[0], c.num_experts)),
            pointer("bias", "f32", "r", lambda c: (c.num_experts,)),
            pointer("expert_indices", "u32", "w", lambda c: (c.grid[0], c.top_k)),
            pointer("expert_weights", "f32", "w", lambda c: (c.grid[0], c.top_k)),
            *_SCALARS,
        ),
        grid_text="(tokens, 1, 1)",
        block_text="(256, 1, 1)",
        geometry=_row_geometry,
        reference=reference.moe_topk_sqrtsoftplus,
        run=_moe_topk_sqrtsoftplus_batched,
        shared_bytes=4416,
        optional=True,
        preconditions=needs_experts,
    ),
)
