# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue row of module `w4a16`: the tile GEMM over transposed NVFP4 weights, 128 outputs and 64 rows a block."""

from __future__ import annotations

from ..reference import w4a16_gemm_t as reference
from ..reference.quantize_nvfp4 import GROUP
from .spec import Call, Dim3, KernelSpec, ceil_div, f32, pointer, u32

OUTPUTS, ROWS = 128, 64
ALIGN = 16


def _geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (ceil_div(c.N, OUTPUTS), ceil_div(c.M, ROWS), 1), (128, 1, 1), 0


def _preconditions(c: Call) -> None:
    if c.K % GROUP:
        raise ValueError(f"K is {c.K}: it must be a multiple of {GROUP}")
    if c.ldb % ALIGN or c.ldb < c.N:
        raise ValueError(f"ldb is {c.ldb}: a multiple of {ALIGN} and at least N = {c.N} is needed")


def _w4a16_gemm_t(c: Call) -> None:
    c.C[...] = reference.w4a16_gemm_t(c.A, c.B_packed, c.B_scale, c.scale2, c.N)


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="w4a16",
        function="w4a16_gemm_t",
        params=(
            pointer("A", "bf16", "r", lambda c: (c.M, c.K), align=ALIGN),
            pointer("B_packed", "u8", "r", lambda c: (c.K // 2, c.ldb), align=ALIGN),
            pointer("B_scale", "u8", "r", lambda c: (c.K // GROUP, c.ldb), align=ALIGN),
            f32("scale2"),
            pointer("C", "bf16", "w", lambda c: (c.M, c.N)),
            u32("M"),
            u32("N"),
            u32("K"),
            u32("ldb"),
        ),
        grid_text="(ceil(N / 128), ceil(M / 64), 1)",
        block_text="(128, 1, 1)",
        geometry=_geometry,
        reference=reference.w4a16_gemm_t,
        run=_w4a16_gemm_t,
        shared_bytes=19584,
        optional=True,
        preconditions=_preconditions,
    ),
)
