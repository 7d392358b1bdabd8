# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `spark_rms_norm_f32`. Rows T = grid x, H = hidden_size; any H >= 1."""

from __future__ import annotations

from ..reference import rms_norm_vanilla as vanilla
from ..reference import spark_rms_norm_f32 as reference
from .norm import BLOCK_TEXT, GRID_TEXT, needs_a_row, norm_params, row_geometry
from .spec import Call, KernelSpec, f32, pointer, u32


def _run(c: Call) -> None:
    c.output[...] = reference.spark_rms_norm_f32(c.input, c.weight, c.eps)


def _tokens(c: Call) -> int:
    return c.grid[0] // int(c.hc_mult + 1)


def _row(c: Call) -> tuple[int, ...]:
    return _tokens(c), c.hidden_size


def _stack(c: Call) -> tuple[int, ...]:
    return _tokens(c), c.hc_mult, c.hidden_size


def _weight(c: Call) -> tuple[int, ...]:
    return (c.hidden_size,)


def _run_both(c: Call) -> None:
    c.embed_out[...] = vanilla.rms_norm_vanilla(c.embed, c.embed_weight, c.eps)
    rows = c.streams.reshape(-1, c.hidden_size)
    c.streams_out[...] = reference.spark_rms_norm_f32(rows, c.stream_weight, c.eps).reshape(c.streams.shape)


def _needs_tokens(c: Call) -> None:
    needs_a_row(c)
    if c.hc_mult == 0 or c.grid[0] % (c.hc_mult + 1):
        raise ValueError(
            f"hc_mult is {c.hc_mult}: at least 1, and hc_mult + 1 of {c.grid[0]} blocks a token, are needed"
        )


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
    KernelSpec(
        module="spark_rms_norm_f32",
        function="spark_rms_norm_both",
        params=(
            pointer("embed", "bf16", "r", _row),
            pointer("embed_weight", "bf16", "r", _weight, early=True),
            pointer("embed_out", "bf16", "w", _row),
            pointer("streams", "f32", "r", _stack),
            pointer("stream_weight", "bf16", "r", _weight),
            pointer("streams_out", "bf16", "w", _stack),
            u32("hidden_size"),
            u32("hc_mult"),
            f32("eps"),
        ),
        grid_text="(tokens * (hc_mult + 1), 1, 1)",
        block_text=BLOCK_TEXT,
        geometry=row_geometry,
        reference=reference.spark_rms_norm_f32,
        run=_run_both,
        shared_bytes=128,
        optional=True,
        preconditions=_needs_tokens,
    ),
)
