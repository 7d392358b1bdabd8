# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `spark_moe_topk_sigmoid`: one warp a token."""

from __future__ import annotations

from ..reference import spark_moe_topk_sigmoid as reference
from .moe_topk import needs_experts
from .spec import Call, Dim3, KernelSpec, ParamSpec, f32, pointer, u32

_SCALARS: tuple[ParamSpec, ...] = (
    u32("num_experts"),
    u32("top_k"),
    u32("n_group"),
    u32("topk_group"),
    u32("normalize"),
    f32("scaling_factor"),
)


def _geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (1, 1, 1), (32, 1, 1), 0


def _row_geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (c.grid[0], 1, 1), (32, 1, 1), 0


def _needs_groups(c: Call) -> None:
    needs_experts(c)
    if not 1 <= c.n_group <= reference.MAX_GROUPS or c.num_experts % c.n_group:
        raise ValueError(f"n_group is {c.n_group}: 1 to {reference.MAX_GROUPS} equal groups of {c.num_experts} experts")
    size = c.num_experts // c.n_group
    if c.n_group > 1 and size < 2:
        raise ValueError(f"n_group is {c.n_group}: a group of {c.num_experts} experts needs two of them")
    if not 1 <= c.topk_group <= c.n_group or c.top_k > c.topk_group * size:
        raise ValueError(f"topk_group is {c.topk_group}: of {c.n_group} groups, enough for {c.top_k} experts")


def _weights(c: Call, rows: bool) -> None:
    logits = c.gate_logits if rows else c.gate_logits[None]
    indices, weights = reference.spark_moe_topk_sigmoid(
        logits, c.correction_bias, c.top_k, c.n_group, c.topk_group, bool(c.normalize), c.scaling_factor
    )
    c.expert_indices[...] = indices if rows else indices[0]
    c.expert_weights[...] = weights if rows else weights[0]


def _single(c: Call) -> None:
    _weights(c, False)


def _batched(c: Call) -> None:
    _weights(c, True)


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="spark_moe_topk_sigmoid",
        function="spark_moe_topk_sigmoid",
        params=(
            pointer("gate_logits", "bf16", "r", lambda c: (c.num_experts,)),
            pointer("correction_bias", "f32", "r", lambda c: (c.num_experts,), optional=True),
            pointer("expert_indices", "u32", "w", lambda c: (c.top_k,)),
            pointer("expert_weights", "f32", "w", lambda c: (c.top_k,)),
            *_SCALARS,
        ),
        grid_text="(1, 1, 1)",
        block_text="(32, 1, 1)",
        geometry=_geometry,
        reference=reference.spark_moe_topk_sigmoid,
        run=_single,
        optional=True,
        preconditions=_needs_groups,
    ),
    KernelSpec(
        module="spark_moe_topk_sigmoid",
        function="spark_moe_topk_sigmoid_batched",
        params=(
            pointer("gate_logits", "bf16", "r", lambda c: (c.grid[0], c.num_experts)),
            pointer("correction_bias", "f32", "r", lambda c: (c.num_experts,), optional=True),
            pointer("expert_indices", "u32", "w", lambda c: (c.grid[0], c.top_k)),
            pointer("expert_weights", "f32", "w", lambda c: (c.grid[0], c.top_k)),
            *_SCALARS,
        ),
        grid_text="(tokens, 1, 1)",
        block_text="(32, 1, 1)",
        geometry=_row_geometry,
        reference=reference.spark_moe_topk_sigmoid,
        run=_batched,
        optional=True,
        preconditions=_needs_groups,
    ),
)
