# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `norm`. Rows T = grid x, H = hidden_size; any H >= 1."""

from __future__ import annotations

from ..reference import norm as reference
from .spec import Call, Dim3, KernelSpec, ParamSpec, f32, pointer, u32


def row_geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    """One block a row, min(H, 1024) threads."""
    return (c.grid[0], 1, 1), (min(c.hidden_size, 1024), 1, 1), 0


def rows(c: Call) -> tuple[int, ...]:
    """[T, H]"""
    return c.grid[0], c.hidden_size


def row(c: Call) -> tuple[int, ...]:
    """[H]"""
    return (c.hidden_size,)


def needs_a_row(c: Call) -> None:
    """H = 0 has no mean."""
    if c.hidden_size == 0:
        raise ValueError("hidden_size is 0: it must be at least 1")


GRID_TEXT = "(rows, 1, 1)"
BLOCK_TEXT = "(min(hidden_size, 1024), 1, 1)"


def norm_params(input_type: str) -> tuple[ParamSpec, ...]:
    """Parameters of a norm of rows of `input_type` into rows in BF16."""
    return (
        pointer("input", input_type, "r", rows),
        pointer("weight", "bf16", "r", row, early=True),
        pointer("output", "bf16", "w", rows),
        u32("hidden_size"),
        f32("eps"),
    )


def _rms_norm(c: Call) -> None:
    c.output[...] = reference.rms_norm(c.input, c.weight, c.eps)


def _rms_norm_residual(c: Call) -> None:
    output, copy = reference.rms_norm_residual(c.input, c.weight, c.eps)
    c.output[...] = output
    c.residual[...] = copy


def _residual_add_rms_norm(c: Call) -> None:
    rounded, output = reference.residual_add_rms_norm(c.hidden, c.src, c.weight, c.eps)
    c.hidden[...] = rounded
    c.residual[...] = rounded
    c.output[...] = output


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="norm",
        function="rms_norm",
        params=norm_params("bf16"),
        grid_text=GRID_TEXT,
        block_text=BLOCK_TEXT,
        geometry=row_geometry,
        reference=reference.rms_norm,
        run=_rms_norm,
        shared_bytes=128,
        preconditions=needs_a_row,
    ),
    KernelSpec(
        module="norm",
        function="rms_norm_residual",
        params=(
            pointer("input", "bf16", "r", rows),
            pointer("weight", "bf16", "r", row, early=True),
            pointer("output", "bf16", "w", rows),
            pointer("residual", "bf16", "w", rows),
            u32("hidden_size"),
            f32("eps"),
        ),
        grid_text=GRID_TEXT,
        block_text=BLOCK_TEXT,
        geometry=row_geometry,
        reference=reference.rms_norm_residual,
        run=_rms_norm_residual,
        shared_bytes=128,
        preconditions=needs_a_row,
    ),
    KernelSpec(
        module="norm",
        function="residual_add_rms_norm",
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
        reference=reference.residual_add_rms_norm,
        run=_residual_add_rms_norm,
        shared_bytes=128,
        preconditions=needs_a_row,
    ),
)
