# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `quantize_nvfp4`: a maximum over everything, then one block of 256 threads a row."""

from __future__ import annotations

import numpy as np

from ..reference import quantize_nvfp4 as reference
from .spec import Call, Dim3, KernelSpec, f32, pointer, u32

BLOCK = 256
MOST_BLOCKS = 1024


def absmax_blocks(total: int) -> int:
    """Blocks of nvfp4_global_absmax for `total` elements."""
    return min(max(total // BLOCK, 1), MOST_BLOCKS)


def _absmax_geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (absmax_blocks(c.total_elements), 1, 1), (BLOCK, 1, 1), 0


def _row_geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (c.N, 1, 1), (BLOCK, 1, 1), 0


def _whole_groups(c: Call) -> None:
    if c.K % reference.GROUP:
        raise ValueError(f"K is {c.K}: it must be a multiple of {reference.GROUP}, or the rest of a row would be lost")


def _nvfp4_global_absmax(c: Call) -> None:
    found = np.array([reference.nvfp4_global_absmax(c.input)]).view(np.uint32)
    bits = c.global_max.view(np.uint32)
    np.maximum(bits, found, out=bits)


def _quantize_bf16_to_nvfp4(c: Call) -> None:
    c.packed_out[...], c.scale_out[...] = reference.quantize_bf16_to_nvfp4(c.input, c.scale2)


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="quantize_nvfp4",
        function="nvfp4_global_absmax",
        params=(
            pointer("input", "bf16", "r", lambda c: (c.total_elements,)),
            pointer("global_max", "f32", "rw", lambda c: (1,)),
            u32("total_elements"),
        ),
        grid_text="(clamp(total_elements / 256, 1, 1024), 1, 1)",
        block_text="(256, 1, 1)",
        geometry=_absmax_geometry,
        reference=reference.nvfp4_global_absmax,
        run=_nvfp4_global_absmax,
        shared_bytes=32,
    ),
    KernelSpec(
        module="quantize_nvfp4",
        function="quantize_bf16_to_nvfp4",
        params=(
            pointer("input", "bf16", "r", lambda c: (c.N, c.K)),
            pointer("packed_out", "u8", "w", lambda c: (c.N, c.K // 2)),
            pointer("scale_out", "u8", "w", lambda c: (c.N, c.K // reference.GROUP)),
            f32("scale2"),
            u32("N"),
            u32("K"),
        ),
        grid_text="(N, 1, 1)",
        block_text="(256, 1, 1)",
        geometry=_row_geometry,
        reference=reference.quantize_bf16_to_nvfp4,
        run=_quantize_bf16_to_nvfp4,
        preconditions=_whole_groups,
    ),
)
