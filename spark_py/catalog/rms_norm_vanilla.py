# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue row of module `rms_norm_vanilla`. Rows T = grid x, H = hidden_size; any H >= 1."""

from __future__ import annotations

from ..reference import rms_norm_vanilla as reference
from .norm import BLOCK_TEXT, GRID_TEXT, needs_a_row, row, row_geometry, rows
from .spec import Call, KernelSpec, f32, pointer, u32


def _rms_norm_vanilla(c: Call) -> None:
    c.output[...] = reference.rms_norm_vanilla(c.input, c.weight, c.eps)


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="rms_norm_vanilla",
        function="rms_norm_vanilla",
        params=(
            pointer("input", "bf16", "r", rows),
            pointer("weight", "bf16", "r", row),
            pointer("output", "bf16", "w", rows),
            u32("hidden_size"),
            f32("eps"),
        ),
        grid_text=GRID_TEXT,
        block_text=BLOCK_TEXT,
        geometry=row_geometry,
        reference=reference.rms_norm_vanilla,
        run=_rms_norm_vanilla,
        shared_bytes=128,
        preconditions=needs_a_row,
    ),
)
