# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue row of module `spark_rms_norm_f32`. Rows T = grid x, H = hidden_size; any H >= 1."""

from __future__ import annotations

from ..reference import spark_rms_norm_f32 as reference
from .norm import BLOCK_TEXT, GRID_TEXT, needs_a_row, row, row_geometry, rows
from .spec import Call, KernelSpec, f32, pointer, u32


def _run(c: Call) -> None:
    c.output[...] = reference.spark_rms_norm_f32(c.input, c.weight, c.eps)


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="spark_rms_norm_f32",
        function="spark_rms_norm_f32",
        params=(
            pointer("input", "f32", "r", rows),
            pointer("weight", "bf16", "r", row),
            pointer("output", "bf16", "w", rows),
            u32("hidden_size"),
            f32("eps"),
        ),
        grid_text=GRID_TEXT,
        block_text=BLOCK_TEXT,
        geometry=row_geometry,
        reference=reference.spark_rms_norm_f32,
        run=_run,
        shared_bytes=128,
        optional=True,
        preconditions=needs_a_row,
    ),
)
