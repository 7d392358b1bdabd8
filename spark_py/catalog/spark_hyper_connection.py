# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `spark_hyper_connection`: many blocks a token, T = grid y; hc = hc_mult, H = hidden_size."""

from __future__ import annotations

from collections.abc import Callable

from ..reference import spark_hyper_connection as reference
from ..reference.hyper_connection import BLOCK, SHARES, mix_rows
from .hyper_connection import BLOCK_TEXT, needs_iterations, needs_streams
from .spec import Call, Dim3, KernelSpec, ceil_div, f32, pointer, u32

MIX_BLOCK = 64
ELEMENTS = 4 * BLOCK


def _row(c: Call) -> tuple[int, ...]:
    return c.grid[1], c.hidden_size


def _streams(c: Call) -> tuple[int, ...]:
    return c.grid[1], c.hc_mult, c.hidden_size


def _shares(rows: Callable[[Call], int]) -> Callable[[Call], tuple[int, ...]]:
    return lambda c: (c.grid[1], rows(c) + 1, SHARES)


def _mix_geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return ((c.rows + 1) * (BLOCK // MIX_BLOCK), c.grid[1], 1), (MIX_BLOCK, 1, 1), 0


def _geometry(more: int) -> Callable[[Call], tuple[Dim3, Dim3, int]]:
    return lambda c: ((ceil_div(c.hidden_size, ELEMENTS) + more, c.grid[1], 1), (BLOCK, 1, 1), 0)


def _needs_rows(c: Call) -> None:
    needs_streams(c)
    if c.rows == 0:
        raise ValueError("rows is 0: it must be at least 1")


def _spark_hc_mix(c: Call) -> None:
    c.shares[...] = reference.spark_hc_mix(c.streams, c.fn)


def _spark_hc_pre_finish(c: Call) -> None:
    c.y_out[...], c.post_out[...], c.comb_out[...] = reference.spark_hc_pre_finish(
        c.streams, c.shares, c.hc_scale, c.hc_base, c.sinkhorn_iters, c.norm_eps, c.hc_eps
    )


def _spark_hc_head_finish(c: Call) -> None:
    c.y_out[...] = reference.spark_hc_head_finish(c.streams, c.shares, c.head_scale, c.head_base, c.norm_eps, c.hc_eps)


def _spark_hc_post(c: Call) -> None:
    c.out[...] = reference.spark_hc_post(c.block_out, c.residual, c.post, c.comb)


GRID_TEXT = "(ceil(hidden_size / 1024), tokens, 1)"

KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="spark_hyper_connection",
        function="spark_hc_mix",
        params=(
            pointer("streams", "f32", "r", _streams),
            pointer("fn", "f32", "r", lambda c: (c.rows, c.hc_mult * c.hidden_size), early=True),
            pointer("shares", "f32", "w", _shares(lambda c: int(c.rows))),
            u32("hidden_size"),
            u32("hc_mult"),
            u32("rows"),
        ),
        grid_text="(4 * (rows + 1), tokens, 1)",
        block_text="(64, 1, 1)",
        geometry=_mix_geometry,
        reference=reference.spark_hc_mix,
        run=_spark_hc_mix,
        optional=True,
        preconditions=_needs_rows,
    ),
    KernelSpec(
        module="spark_hyper_connection",
        function="spark_hc_pre_finish",
        params=(
            pointer("streams", "f32", "r", _streams),
            pointer("shares", "f32", "r", _shares(lambda c: mix_rows(c.hc_mult))),
            pointer("hc_scale", "f32", "r", lambda c: (3,)),
            pointer("hc_base", "f32", "r", lambda c: (mix_rows(c.hc_mult),)),
            pointer("y_out", "bf16", "w", _row),
            pointer("post_out", "f32", "w", lambda c: (c.grid[1], c.hc_mult)),
            pointer("comb_out", "f32", "w", lambda c: (c.grid[1], c.hc_mult, c.hc_mult)),
            u32("hidden_size"),
            u32("hc_mult"),
            u32("sinkhorn_iters"),
            f32("norm_eps"),
            f32("hc_eps"),
        ),
        grid_text="(ceil(hidden_size / 1024) + 1, tokens, 1)",
        block_text=BLOCK_TEXT,
        geometry=_geometry(1),
        reference=reference.spark_hc_pre_finish,
        run=_spark_hc_pre_finish,
        optional=True,
        preconditions=needs_iterations,
    ),
    KernelSpec(
        module="spark_hyper_connection",
        function="spark_hc_head_finish",
        params=(
            pointer("streams", "f32", "r", _streams),
            pointer("shares", "f32", "r", _shares(lambda c: int(c.hc_mult))),
            pointer("head_scale", "f32", "r", lambda c: (1,)),
            pointer("head_base", "f32", "r", lambda c: (c.hc_mult,)),
            pointer("y_out", "bf16", "w", _row),
            u32("hidden_size"),
            u32("hc_mult"),
            f32("norm_eps"),
            f32("hc_eps"),
        ),
        grid_text=GRID_TEXT,
        block_text=BLOCK_TEXT,
        geometry=_geometry(0),
        reference=reference.spark_hc_head_finish,
        run=_spark_hc_head_finish,
        optional=True,
        preconditions=needs_streams,
    ),
    KernelSpec(
        module="spark_hyper_connection",
        function="spark_hc_post",
        params=(
            pointer("block_out", "bf16", "r", _row),
            pointer("residual", "f32", "r", _streams),
            pointer("post", "f32", "r", lambda c: (c.grid[1], c.hc_mult)),
            pointer("comb", "f32", "r", lambda c: (c.grid[1], c.hc_mult, c.hc_mult)),
            pointer("out", "f32", "w", _streams),
            u32("hidden_size"),
            u32("hc_mult"),
        ),
        grid_text=GRID_TEXT,
        block_text=BLOCK_TEXT,
        geometry=_geometry(0),
        reference=reference.spark_hc_post,
        run=_spark_hc_post,
        optional=True,
        preconditions=needs_streams,
    ),
)
