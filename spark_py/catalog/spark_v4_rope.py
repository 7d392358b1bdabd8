# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue row of module `spark_v4_rope`: a block of 256 threads a row and eight heads."""

from __future__ import annotations

from ..reference import spark_v4_rope as reference
from .spec import Call, Dim3, KernelSpec, ceil_div, f32, pointer, u32

HEADS = 8
MAX_ROPE_DIM = 512
PAIR_BYTES = 4


def check_rotation(c: Call) -> None:
    """ValueError for a rotation that the kernels of this kind do not do."""
    if c.head_dim % 2:
        raise ValueError(f"head_dim is {c.head_dim}: an even number is needed")
    if c.rope_dim % 2 or not 2 <= c.rope_dim <= min(c.head_dim, MAX_ROPE_DIM):
        limit = f"an even number from 2 to head_dim = {c.head_dim} and {MAX_ROPE_DIM}"
        raise ValueError(f"rope_dim is {c.rope_dim}: {limit} is needed")
    if not 0.0 < c.theta < float("inf"):
        raise ValueError(f"theta is {c.theta}: a finite number above 0 is needed")


def _geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (c.grid[0], ceil_div(c.heads, HEADS), 1), (256, 1, 1), 0


def _spark_v4_rope(c: Call) -> None:
    c.x[...] = reference.spark_v4_rope(c.x, c.positions, c.rope_dim, c.theta, c.inverse != 0)


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="spark_v4_rope",
        function="spark_v4_rope",
        params=(
            pointer("x", "bf16", "rw", lambda c: (c.grid[0], c.heads, c.head_dim), align=PAIR_BYTES),
            pointer("positions", "u32", "r", lambda c: (c.grid[0],)),
            u32("heads"),
            u32("head_dim"),
            u32("rope_dim"),
            f32("theta"),
            u32("inverse"),
        ),
        grid_text="(rows, ceil(heads / 8), 1)",
        block_text="(256, 1, 1)",
        geometry=_geometry,
        reference=reference.spark_v4_rope,
        run=_spark_v4_rope,
        shared_bytes=2048,
        optional=True,
        preconditions=check_rotation,
    ),
)
