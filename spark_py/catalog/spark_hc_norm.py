# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `spark_hc_norm`: T tokens, hc = hc_mult, H = hidden_size."""

from __future__ import annotations

from ..reference import spark_hc_norm as reference
from ..reference.hyper_connection import BLOCK, SHARES, mix_rows
from .hyper_connection import needs_iterations, needs_streams
from .spec import Call, Dim3, KernelSpec, ceil_div, f32, pointer, u32

STEP = 64
_BLOCK_TEXT = "(min(hidden_size, 1024), 1, 1)"


def _threads(c: Call) -> Dim3:
    return min(c.hidden_size, 1024), 1, 1


def _whole(c: Call) -> None:
    if c.hidden_size % STEP:
        raise ValueError(f"hidden_size is {c.hidden_size}: a multiple of {STEP} is needed")


def _needs_streams(c: Call) -> None:
    needs_streams(c)
    _whole(c)


def _needs_iterations(c: Call) -> None:
    needs_iterations(c)
    _whole(c)


def _expand_sum(c: Call) -> None:
    c.streams[...] = reference.spark_hc_expand_sum(c.own, c.common, c.hc_mult)


def _pre_norm(c: Call) -> None:
    c.output[...], c.post_out[...], c.comb_out[...] = reference.spark_hc_pre_norm(
        c.streams, c.shares, c.hc_scale, c.hc_base, c.weight, c.sinkhorn_iters, c.norm_eps, c.hc_eps, c.eps
    )


def _head_norm(c: Call) -> None:
    c.y_out[...], c.output[...] = reference.spark_hc_head_norm(
        c.streams, c.shares, c.head_scale, c.head_base, c.weight, c.norm_eps, c.hc_eps, c.eps
    )


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="spark_hc_norm",
        function="spark_hc_expand_sum",
        params=(
            pointer("own", "bf16", "r", lambda c: (c.grid[2], c.hc_mult if c.apart else 1, c.hidden_size), align=8),
            pointer("common", "bf16", "r", lambda c: (c.grid[2], c.hidden_size), align=8),
            pointer("streams", "f32", "w", lambda c: (c.grid[2], c.hc_mult, c.hidden_size), align=16),
            u32("hidden_size"),
            u32("hc_mult"),
            u32("apart"),
        ),
        grid_text="(ceil(hidden_size / 1024), hc_mult, tokens)",
        block_text="(256, 1, 1)",
        geometry=lambda c: ((ceil_div(c.hidden_size, 4 * BLOCK), c.hc_mult, c.grid[2]), (BLOCK, 1, 1), 0),
        reference=reference.spark_hc_expand_sum,
        run=_expand_sum,
        optional=True,
        preconditions=_needs_streams,
    ),
    KernelSpec(
        module="spark_hc_norm",
        function="spark_hc_pre_norm",
        params=(
            pointer("streams", "f32", "r", lambda c: (c.grid[1], c.hc_mult, c.hidden_size), align=8),
            pointer("shares", "f32", "r", lambda c: (c.grid[1], mix_rows(c.hc_mult) + 1, SHARES)),
            pointer("hc_scale", "f32", "r", lambda c: (3,)),
            pointer("hc_base", "f32", "r", lambda c: (mix_rows(c.hc_mult),)),
            pointer("weight", "bf16", "r", lambda c: (c.hidden_size,), align=4),
            pointer("output", "bf16", "w", lambda c: (c.grid[1], c.hidden_size), align=4),
            pointer("post_out", "f32", "w", lambda c: (c.grid[1], c.hc_mult)),
            pointer("comb_out", "f32", "w", lambda c: (c.grid[1], c.hc_mult, c.hc_mult)),
            u32("hidden_size"),
            u32("hc_mult"),
            u32("sinkhorn_iters"),
            f32("norm_eps"),
            f32("hc_eps"),
            f32("eps"),
        ),
        grid_text="(2, tokens, 1)",
        block_text=_BLOCK_TEXT,
        geometry=lambda c: ((2, c.grid[1], 1), _threads(c), 0),
        reference=reference.spark_hc_pre_norm,
        run=_pre_norm,
        shared_bytes=128,
        optional=True,
        preconditions=_needs_iterations,
    ),
    KernelSpec(
        module="spark_hc_norm",
        function="spark_hc_head_norm",
        params=(
            pointer("streams", "f32", "r", lambda c: (c.grid[0], c.hc_mult, c.hidden_size), align=8),
            pointer("shares", "f32", "r", lambda c: (c.grid[0], c.hc_mult + 1, SHARES)),
            pointer("head_scale", "f32", "r", lambda c: (1,)),
            pointer("head_base", "f32", "r", lambda c: (c.hc_mult,)),
            pointer("weight", "bf16", "r", lambda c: (c.hidden_size,), align=4),
            pointer("y_out", "bf16", "w", lambda c: (c.grid[0], c.hidden_size), align=4),
            pointer("output", "bf16", "w", lambda c: (c.grid[0], c.hidden_size), align=4),
            u32("hidden_size"),
            u32("hc_mult"),
            f32("norm_eps"),
            f32("hc_eps"),
            f32("eps"),
        ),
        grid_text="(tokens, 1, 1)",
        block_text=_BLOCK_TEXT,
        geometry=lambda c: ((c.grid[0], 1, 1), _threads(c), 0),
        reference=reference.spark_hc_head_norm,
        run=_head_norm,
        shared_bytes=128,
        optional=True,
        preconditions=_needs_streams,
    ),
)
