# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue row of `moe_expert_gemv::moe_weighted_sum_blend`: one element a thread, 256 threads a block."""

from __future__ import annotations

from ..reference import moe_weighted_sum_blend as reference
from .gemv import WIDE_LOAD, whole_chunks
from .residual_add import BLOCK_TEXT, elementwise
from .spec import Call, KernelSpec, pointer, u32


def _row(c: Call) -> tuple[int, ...]:
    return (c.hidden,)


def _gate(c: Call) -> tuple[int, ...]:
    return (c.K,)


def _moe_weighted_sum_blend(c: Call) -> None:
    c.output[...] = reference.moe_weighted_sum_blend(
        c.expert_out, c.expert_weights, c.shared_out, c.input, c.gate_weight
    )


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="moe_expert_gemv",
        function="moe_weighted_sum_blend",
        params=(
            pointer("output", "bf16", "w", _row),
            pointer("expert_out", "bf16", "r", lambda c: (c.top_k, c.hidden)),
            pointer("expert_weights", "f32", "r", lambda c: (c.top_k,)),
            pointer("shared_out", "bf16", "r", _row),
            pointer("input", "bf16", "r", _gate, align=WIDE_LOAD),
            pointer("gate_weight", "bf16", "r", _gate, align=WIDE_LOAD, optional=True),
            u32("hidden"),
            u32("top_k"),
            u32("K"),
        ),
        grid_text="(ceil(hidden / 256), 1, 1)",
        block_text=BLOCK_TEXT,
        geometry=elementwise("hidden"),
        reference=reference.moe_weighted_sum_blend,
        run=_moe_weighted_sum_blend,
        shared_bytes=36,
        preconditions=whole_chunks,
    ),
)
