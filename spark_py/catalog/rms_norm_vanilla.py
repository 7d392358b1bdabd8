# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue row of module `rms_norm_vanilla`. Rows T = grid x, H = hidden_size; any H >= 1."""

from __future__ import annotations

from ..reference import rms_norm_vanilla as reference
from .norm import BLOCK_TEXT, GRID_TEXT, needs_a_row, norm_params, row_geometry
from .spec import Call, KernelSpec


def _rms_norm_vanilla(c: Call) -> None:
    c.output[...] = reference.rms_norm_vanilla(c.input, c.weight, c.eps)


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="rms_norm_vanilla",
        function="rms_norm_vanilla",
        params=norm_params("bf16"),
        grid_text=GRID_TEXT,
        block_text=BLOCK_TEXT,
        geometry=row_geometry,
        reference=reference.rms_norm_vanilla,
        run=_rms_norm_vanilla,
        shared_bytes=128,
        preconditions=needs_a_row,
    ),
)
