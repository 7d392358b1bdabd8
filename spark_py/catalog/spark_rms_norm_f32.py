# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue row of module `spark_rms_norm_f32`. Rows T = grid x, H = hidden_size; any H >= 1."""

from __future__ import annotations

from ..reference import spark_rms_norm_f32 as reference
from .norm import BLOCK_TEXT, GRID_TEXT, needs_a_row, norm_params, row_geometry
from .spec import Call, KernelSpec


def _run(c: Call) -> None:
    c.output[...] = reference.spark_rms_norm_f32(c.input, c.weight, c.eps)


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="spark_rms_norm_f32",
        function="spark_rms_norm_f32",
        params=norm_params("f32"),
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
