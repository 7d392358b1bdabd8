# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue row of module `spark_residual_add_rms_norm_vanilla`. Rows T = grid x, H = hidden_size; any H >= 1."""

from __future__ import annotations

from ..reference import spark_residual_add_rms_norm_vanilla as reference
from .norm import BLOCK_TEXT, GRID_TEXT, needs_a_row, row, row_geometry, rows
from .spec import Call, KernelSpec, f32, pointer, u32


def _run(c: Call) -> None:
    rounded, output = reference.spark_residual_add_rms_norm_vanilla(c.hidden, c.src, c.weight, c.eps)
    c.hidden[...] = rounded
    c.residual[...] = rounded
    c.output[...] = output


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="spark_residual_add_rms_norm_vanilla",
        function="spark_residual_add_rms_norm_vanilla",
        params=(
            pointer("hidden", "bf16", "rw", rows),
            pointer("src", "bf16", "r", rows),
            pointer("weight", "bf16", "r", row, early=True),
            pointer("output", "bf16", "w", rows),
            pointer("residual", "bf16", "w", rows),
            u32("hidden_size"),
            f32("eps"),
        ),
        grid_text=GRID_TEXT,
        block_text=BLOCK_TEXT,
        geometry=row_geometry,
        reference=reference.spark_residual_add_rms_norm_vanilla,
        run=_run,
        shared_bytes=128,
        optional=True,
        preconditions=needs_a_row,
    ),
)
