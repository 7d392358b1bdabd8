# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `w4a16_gemv` for joint projections of two and three rows."""

from __future__ import annotations

from ..reference import w4a16_gemv_joint_batch as reference
from ..reference.quantize_nvfp4 import GROUP
from .spec import Call, KernelSpec, ParamSpec, f32, pointer, u32
from .w4a16_gemv import (
    ACTIVATIONS_ALIGN,
    BLOCK_TEXT,
    NARROW_CODES_ALIGN,
    activations,
    codes,
    outputs_a_block,
    scales,
    whole_chunks,
)

SHARED_BYTES = {2: 128, 3: 160}


def _whole_heads(c: Call) -> None:
    whole_chunks(c)
    rows = 2 * c.num_heads * c.head_dim
    if rows != c.N:
        raise ValueError(f"N is {c.N}: it must be 2 * num_heads * head_dim = {rows}")


def _whole_chunks(c: Call) -> None:
    if c.K_in % GROUP:
        raise ValueError(f"K_in is {c.K_in}: it must be a multiple of {GROUP}")


def _w4a16_gemv_qg_batch(c: Call) -> None:
    c.C[...] = reference.w4a16_gemv_qg_batch(c.A, c.B_packed, c.B_scale, c.scale2, c.num_heads, c.head_dim)


def _w4a16_gemv_dual_batch(c: Call) -> None:
    first, second = reference.w4a16_gemv_dual_batch(
        c.A, c.B0_packed, c.B0_scale, c.B0_scale2, c.B1_packed, c.B1_scale, c.B1_scale2
    )
    c.C0[...] = first
    c.C1[...] = second


def _weight(number: int, rows: int) -> tuple[ParamSpec, ...]:
    return (
        pointer(f"B{number}_packed", "u8", "r", lambda c: (c.N, c.K_in // 2), align=NARROW_CODES_ALIGN),
        pointer(f"B{number}_scale", "u8", "r", lambda c: (c.N, c.K_in // GROUP)),
        f32(f"B{number}_scale2"),
        pointer(f"C{number}", "bf16", "w", lambda c: (rows, c.N)),
    )


def _qg(rows: int) -> KernelSpec:
    return KernelSpec(
        module="w4a16_gemv",
        function=f"w4a16_gemv_qg_batch{rows}",
        params=(
            activations(lambda c: (rows,)),
            codes("B_packed", NARROW_CODES_ALIGN),
            scales("B_scale"),
            f32("scale2"),
            pointer("C", "bf16", "w", lambda c: (rows, c.N)),
            u32("N"),
            u32("K"),
            u32("num_heads"),
            u32("head_dim"),
        ),
        grid_text="(ceil(N / 4), 1, 1)",
        block_text=BLOCK_TEXT,
        geometry=outputs_a_block(4),
        reference=reference.w4a16_gemv_qg_batch,
        run=_w4a16_gemv_qg_batch,
        shared_bytes=SHARED_BYTES[rows],
        optional=True,
        preconditions=_whole_heads,
    )


def _dual(rows: int) -> KernelSpec:
    return KernelSpec(
        module="w4a16_gemv",
        function=f"w4a16_gemv_dual_batch{rows}",
        params=(
            pointer("A", "bf16", "r", lambda c: (rows, c.K_in), align=ACTIVATIONS_ALIGN),
            *_weight(0, rows),
            *_weight(1, rows),
            u32("N"),
            u32("K_in"),
        ),
        grid_text="(ceil(N / 4), 1, 2)",
        block_text=BLOCK_TEXT,
        geometry=outputs_a_block(4, 2),
        reference=reference.w4a16_gemv_dual_batch,
        run=_w4a16_gemv_dual_batch,
        shared_bytes=SHARED_BYTES[rows],
        optional=True,
        preconditions=_whole_chunks,
    )


KERNELS: tuple[KernelSpec, ...] = (*map(_qg, SHARED_BYTES), *map(_dual, SHARED_BYTES))
