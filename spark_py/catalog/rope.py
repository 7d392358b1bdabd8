# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue row of module `rope`: a block of 128 threads a head, with as many tokens as it has threads for."""

from __future__ import annotations

from ..reference import rope as reference
from .spec import Call, Dim3, KernelSpec, ceil_div, f32, pointer, u32

BLOCK = 128


def _tokens(c: Call) -> int:
    return max(1, BLOCK // max(1, int(c.rotary_dim) // 2))


def _geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    heads = c.num_q_heads + c.num_kv_heads
    return (heads, ceil_div(c.seq_len, _tokens(c)), c.grid[2]), (BLOCK, 1, 1), 0


def _preconditions(c: Call) -> None:
    if c.rotary_dim % 2 or not 2 <= c.rotary_dim <= c.head_dim:
        raise ValueError(f"rotary_dim is {c.rotary_dim}: an even number from 2 to head_dim = {c.head_dim} is needed")
    if not 0.0 < c.theta < float("inf"):
        raise ValueError(f"theta is {c.theta}: a finite number above 0 is needed")


def _rope_forward(c: Call) -> None:
    c.Q[...] = reference.rope_forward(c.Q, c.positions, c.rotary_dim, c.theta)
    c.K[...] = reference.rope_forward(c.K, c.positions, c.rotary_dim, c.theta)


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="rope",
        function="rope_forward",
        params=(
            pointer("Q", "bf16", "rw", lambda c: (c.grid[2], c.seq_len, c.num_q_heads, c.head_dim)),
            pointer("K", "bf16", "rw", lambda c: (c.grid[2], c.seq_len, c.num_kv_heads, c.head_dim)),
            pointer("positions", "u32", "r", lambda c: (c.grid[2], c.seq_len)),
            u32("seq_len"),
            u32("num_q_heads"),
            u32("num_kv_heads"),
            u32("head_dim"),
            u32("rotary_dim"),
            f32("theta"),
        ),
        grid_text="(num_q_heads + num_kv_heads, ceil(seq_len / max(1, 128 / (rotary_dim / 2))), batch)",
        block_text="(128, 1, 1)",
        geometry=_geometry,
        reference=reference.rope_forward,
        run=_rope_forward,
        preconditions=_preconditions,
    ),
)
