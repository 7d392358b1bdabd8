# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `hyper_connection`: one block a token, T = grid x; hc = hc_mult, H = hidden_size."""

from __future__ import annotations

from ..reference import hyper_connection as reference
from .spec import Call, Dim3, KernelSpec, f32, pointer, u32


def _geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (c.grid[0], 1, 1), (reference.BLOCK, 1, 1), 0


def _row(c: Call) -> tuple[int, ...]:
    return c.grid[0], c.hidden_size


def _streams(c: Call) -> tuple[int, ...]:
    return c.grid[0], c.hc_mult, c.hidden_size


def _mix(c: Call) -> tuple[int, ...]:
    return (reference.mix_rows(c.hc_mult),)


def needs_streams(c: Call) -> None:
    """1 to 4 streams of at least one element."""
    if not 1 <= c.hc_mult <= reference.MAX_STREAMS:
        raise ValueError(f"hc_mult is {c.hc_mult}: 1 to {reference.MAX_STREAMS} streams can be mixed")
    if c.hidden_size == 0:
        raise ValueError("hidden_size is 0: it must be at least 1")


def needs_iterations(c: Call) -> None:
    """`needs_streams`, and at least the one column step that always is."""
    needs_streams(c)
    if c.sinkhorn_iters == 0:
        raise ValueError("sinkhorn_iters is 0: it must be at least 1")


def _hc_expand(c: Call) -> None:
    c.streams[...] = reference.hc_expand(c.hidden, c.hc_mult)


def _hc_pre(c: Call) -> None:
    c.y_out[...], c.post_out[...], c.comb_out[...] = reference.hc_pre(
        c.streams, c.hc_fn, c.hc_scale, c.hc_base, c.sinkhorn_iters, c.norm_eps, c.hc_eps
    )


def _hc_post(c: Call) -> None:
    c.out[...] = reference.hc_post(c.block_out, c.residual, c.post, c.comb)


def _hc_head(c: Call) -> None:
    c.y_out[...] = reference.hc_head(c.streams, c.head_fn, c.head_scale, c.head_base, c.norm_eps, c.hc_eps)


GRID_TEXT = "(tokens, 1, 1)"
BLOCK_TEXT = "(256, 1, 1)"

KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="hyper_connection",
        function="hc_expand",
        params=(
            pointer("hidden", "bf16", "r", _row),
            pointer("streams", "f32", "w", _streams),
            u32("hidden_size"),
            u32("hc_mult"),
        ),
        grid_text=GRID_TEXT,
        block_text=BLOCK_TEXT,
        geometry=_geometry,
        reference=reference.hc_expand,
        run=_hc_expand,
        preconditions=needs_streams,
    ),
    KernelSpec(
        module="hyper_connection",
        function="hc_pre",
        params=(
            pointer("streams", "f32", "r", _streams),
            pointer("hc_fn", "f32", "r", lambda c: (*_mix(c), c.hc_mult * c.hidden_size)),
            pointer("hc_scale", "f32", "r", lambda c: (3,)),
            pointer("hc_base", "f32", "r", _mix),
            pointer("y_out", "bf16", "w", _row),
            pointer("post_out", "f32", "w", lambda c: (c.grid[0], c.hc_mult)),
            pointer("comb_out", "f32", "w", lambda c: (c.grid[0], c.hc_mult, c.hc_mult)),
            u32("hidden_size"),
            u32("hc_mult"),
            u32("sinkhorn_iters"),
            f32("norm_eps"),
            f32("hc_eps"),
        ),
        grid_text=GRID_TEXT,
        block_text=BLOCK_TEXT,
        geometry=_geometry,
        reference=reference.hc_pre,
        run=_hc_pre,
        shared_bytes=1140,
        preconditions=needs_iterations,
    ),
    KernelSpec(
        module="hyper_connection",
        function="hc_post",
        params=(
            pointer("block_out", "bf16", "r", _row),
            pointer("residual", "f32", "r", _streams),
            pointer("post", "f32", "r", lambda c: (c.grid[0], c.hc_mult)),
            pointer("comb", "f32", "r", lambda c: (c.grid[0], c.hc_mult, c.hc_mult)),
            pointer("out", "f32", "w", _streams),
            u32("hidden_size"),
            u32("hc_mult"),
        ),
        grid_text=GRID_TEXT,
        block_text=BLOCK_TEXT,
        geometry=_geometry,
        reference=reference.hc_post,
        run=_hc_post,
        preconditions=needs_streams,
    ),
    KernelSpec(
        module="hyper_connection",
        function="hc_head",
        params=(
            pointer("streams", "f32", "r", _streams),
            pointer("head_fn", "f32", "r", lambda c: (c.hc_mult, c.hc_mult * c.hidden_size)),
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
        geometry=_geometry,
        reference=reference.hc_head,
        run=_hc_head,
        shared_bytes=1044,
        preconditions=needs_streams,
    ),
)
