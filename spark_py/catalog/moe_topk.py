# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `moe_topk`: one block of 256 threads a token."""

from __future__ import annotations

from ..reference import moe_topk as reference
from .spec import Call, Dim3, KernelSpec, pointer, u32


def _geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (1, 1, 1), (256, 1, 1), 0


def _row_geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (c.grid[0], 1, 1), (256, 1, 1), 0


def needs_experts(c: Call) -> None:
    """1 to 512 experts, of which 1 to 32 are chosen."""
    if not 1 <= c.num_experts <= reference.MAX_EXPERTS:
        raise ValueError(f"num_experts is {c.num_experts}: 1 to {reference.MAX_EXPERTS} can be routed to")
    most = min(c.num_experts, reference.MAX_TOP_K)
    if not 1 <= c.top_k <= most:
        raise ValueError(f"top_k is {c.top_k}: 1 to {most} of {c.num_experts} experts can be chosen")


def _moe_topk_softmax(c: Call) -> None:
    indices, weights = reference.moe_topk_softmax(c.gate_logits[None], c.top_k, bool(c.normalize))
    c.expert_indices[...], c.expert_weights[...] = indices[0], weights[0]


def _moe_topk_softmax_batched(c: Call) -> None:
    indices, weights = reference.moe_topk_softmax(c.gate_logits, c.top_k, bool(c.normalize))
    c.expert_indices[...], c.expert_weights[...] = indices, weights


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="moe_topk",
        function="moe_topk_softmax",
        params=(
            pointer("gate_logits", "bf16", "r", lambda c: (c.num_experts,)),
            pointer("expert_indices", "u32", "w", lambda c: (c.top_k,)),
            pointer("expert_weights", "f32", "w", lambda c: (c.top_k,)),
            u32("num_experts"),
            u32("top_k"),
            u32("normalize"),
        ),
        grid_text="(1, 1, 1)",
        block_text="(256, 1, 1)",
        geometry=_geometry,
        reference=reference.moe_topk_softmax,
        run=_moe_topk_softmax,
        shared_bytes=2368,
        preconditions=needs_experts,
    ),
    KernelSpec(
        module="moe_topk",
        function="moe_topk_softmax_batched",
        params=(
            pointer("gate_logits", "bf16", "r", lambda c: (c.grid[0], c.num_experts)),
            pointer("expert_indices", "u32", "w", lambda c: (c.grid[0], c.top_k)),
            pointer("expert_weights", "f32", "w", lambda c: (c.grid[0], c.top_k)),
            u32("num_experts"),
            u32("top_k"),
            u32("normalize"),
        ),
        grid_text="(tokens, 1, 1)",
        block_text="(256, 1, 1)",
        geometry=_row_geometry,
        reference=reference.moe_topk_softmax,
        run=_moe_topk_softmax_batched,
        shared_bytes=2368,
        optional=True,
        preconditions=needs_experts,
    ),
)
