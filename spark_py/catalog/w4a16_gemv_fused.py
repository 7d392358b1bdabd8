# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `w4a16_gemv_fused`: two NVFP4 projections, grid z says which."""

from __future__ import annotations

from ..reference import w4a16_gemv_fused as reference
from .spec import Call, KernelSpec, ParamSpec, f32, pointer, u32
from .w4a16_gemv import BLOCK_TEXT, activations, codes, one, outputs_a_block, scales, whole_chunks

_PARAMS: tuple[ParamSpec, ...] = (
    activations(one),
    codes("B1_packed"),
    scales("B1_scale"),
    f32("scale2_1"),
    pointer("C1", "bf16", "w", lambda c: (c.N,)),
    codes("B2_packed"),
    scales("B2_scale"),
    f32("scale2_2"),
    pointer("C2", "bf16", "w", lambda c: (c.N,)),
    u32("N"),
    u32("K"),
)


def _w4a16_gemv_dual(c: Call) -> None:
    first, second = reference.w4a16_gemv_dual(
        c.A, c.B1_packed, c.B1_scale, c.scale2_1, c.B2_packed, c.B2_scale, c.scale2_2
    )
    c.C1[...] = first
    c.C2[...] = second


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="w4a16_gemv_fused",
        function="w4a16_gemv_dual",
        params=_PARAMS,
        grid_text="(ceil(N / 4), 1, 2)",
        block_text=BLOCK_TEXT,
        geometry=outputs_a_block(4, 2),
        reference=reference.w4a16_gemv_dual,
        run=_w4a16_gemv_dual,
        shared_bytes=96,
        preconditions=whole_chunks,
    ),
    KernelSpec(
        module="w4a16_gemv_fused",
        function="w4a16_gemv_dual_sw",
        params=_PARAMS,
        grid_text="(ceil(N / 8), 1, 2)",
        block_text=BLOCK_TEXT,
        geometry=outputs_a_block(8, 2),
        reference=reference.w4a16_gemv_dual,
        run=_w4a16_gemv_dual,
        shared_bytes=512,
        optional=True,
        preconditions=whole_chunks,
    ),
)
