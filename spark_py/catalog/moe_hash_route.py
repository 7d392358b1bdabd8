# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue row of module `moe_hash_route`.

The row of the table that a launch reads depends on an id in device memory: a range is declared from that id, so that an
id beyond the table's allocation is refused where memory is checked.
"""

from __future__ import annotations

from ..reference import moe_hash_route as reference
from ..reference.moe_topk_sqrt import MAX_TOP_K
from .spec import Call, Dim3, KernelSpec, f32, pointer, u32


def _geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (1, 1, 1), (256, 1, 1), 0


def _limits(c: Call) -> None:
    if c.num_experts == 0:
        raise ValueError("num_experts is 0: it must be at least 1")
    if not 1 <= c.top_k <= MAX_TOP_K:
        raise ValueError(f"top_k is {c.top_k}: 1 to {MAX_TOP_K} experts can be taken")


def _moe_hash_route(c: Call) -> None:
    c.expert_indices[...], c.expert_weights[...] = reference.moe_hash_route(
        c.gate_logits, c.tid2eid, bool(c.normalize), c.scaling_factor
    )


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="moe_hash_route",
        function="moe_hash_route",
        params=(
            pointer("gate_logits", "bf16", "r", lambda c: (c.num_experts,)),
            pointer(
                "tid2eid",
                "i64",
                "r",
                lambda c: (c.top_k,),
                offset=lambda c: int(c.token_id_ptr[0]) * int(c.top_k),
            ),
            pointer("token_id_ptr", "u32", "r", lambda c: (1,)),
            pointer("expert_indices", "u32", "w", lambda c: (c.top_k,)),
            pointer("expert_weights", "f32", "w", lambda c: (c.top_k,)),
            u32("num_experts"),
            u32("top_k"),
            u32("normalize"),
            f32("scaling_factor"),
        ),
        grid_text="(1, 1, 1)",
        block_text="(256, 1, 1)",
        geometry=_geometry,
        reference=reference.moe_hash_route,
        run=_moe_hash_route,
        optional=True,
        preconditions=_limits,
    ),
)
