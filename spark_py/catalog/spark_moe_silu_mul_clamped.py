# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue row of module `spark_moe_silu_mul_clamped`: eight elements a thread, 256 threads a block."""

from __future__ import annotations

from ..reference import spark_moe_silu_mul_clamped as reference
from .residual_add import BLOCK_TEXT
from .spec import Call, Dim3, KernelSpec, ceil_div, f32, pointer, u32

ELEMENTS = 2048


def _total(c: Call) -> tuple[int, ...]:
    return (c.total_elements,)


def _geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (ceil_div(c.total_elements, ELEMENTS), 1, 1), (256, 1, 1), 0


def _needs_a_limit(c: Call) -> None:
    if not c.limit > 0:
        raise ValueError(f"limit is {c.limit}: it must be above 0")


def _spark_moe_silu_mul_clamped(c: Call) -> None:
    c.output[...] = reference.spark_moe_silu_mul_clamped(c.gate, c.up, c.limit)


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="spark_moe_silu_mul_clamped",
        function="spark_moe_silu_mul_clamped",
        params=(
            pointer("gate", "bf16", "r", _total),
            pointer("up", "bf16", "r", _total),
            pointer("output", "bf16", "w", _total),
            u32("total_elements"),
            f32("limit"),
        ),
        grid_text="(ceil(total_elements / 2048), 1, 1)",
        block_text=BLOCK_TEXT,
        geometry=_geometry,
        reference=reference.spark_moe_silu_mul_clamped,
        run=_spark_moe_silu_mul_clamped,
        optional=True,
        preconditions=_needs_a_limit,
    ),
)
