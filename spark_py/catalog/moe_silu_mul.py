# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue row of module `moe_silu_mul`: one element a thread, 256 threads a block."""

from __future__ import annotations

from ..reference import moe_silu_mul as reference
from .residual_add import BLOCK_TEXT, elementwise
from .spec import Call, KernelSpec, pointer, u32


def _total(c: Call) -> tuple[int, ...]:
    return (c.total_elements,)


def _moe_silu_mul(c: Call) -> None:
    c.output[...] = reference.moe_silu_mul(c.gate, c.up)


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="moe_silu_mul",
        function="moe_silu_mul",
        params=(
            pointer("gate", "bf16", "r", _total),
            pointer("up", "bf16", "r", _total),
            pointer("output", "bf16", "w", _total),
            u32("total_elements"),
        ),
        grid_text="(ceil(total_elements / 256), 1, 1)",
        block_text=BLOCK_TEXT,
        geometry=elementwise("total_elements"),
        reference=reference.moe_silu_mul,
        run=_moe_silu_mul,
    ),
)
