# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `spark_v4_qkv`: a warp a head of a query or a cache row.

As in `reshape_and_cache`, the pool's range is declared from the slots in device memory.
"""

from __future__ import annotations

from collections.abc import Callable

from ..reference import spark_v4_qkv as reference
from .spark_v4_rope import check_rotation
from .spec import Call, Dim3, KernelSpec, ParamSpec, ceil_div, f32, pointer, u32

HEADS = 8
WIDTH = 8
LOAD = 16
MAX_HEAD_DIM = 512


def check_head(c: Call) -> None:
    """ValueError for a head that a warp does not hold, or a rotation that cannot be."""
    if c.head_dim % WIDTH or not WIDTH <= c.head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {c.head_dim}: a multiple of {WIDTH} up to {MAX_HEAD_DIM} is needed")
    check_rotation(c)


def _query_geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (c.grid[0], ceil_div(c.heads, HEADS), 1), (256, 1, 1), 0


def _row_geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (c.grid[0], 1, 1), (32, 1, 1), 0


def _to_the_largest_slot(c: Call) -> tuple[int, ...]:
    """[largest slot + 1, head_dim]: a view, so the slots that no row names cost nothing."""
    return int(c.slot_mapping.max(initial=-1)) + 1, c.head_dim


def _q_norm_rope(c: Call) -> None:
    c.q[...] = reference.spark_v4_q_norm_rope(c.q, c.positions, c.rope_dim, c.eps, c.theta)


def _kv_assemble(c: Call) -> None:
    reference.spark_v4_kv_assemble(
        c.kv, c.weight, c.positions, c.pool, c.slot_mapping, c.rope_dim, c.eps, c.theta
    )  # fmt: skip


def _kv_assemble_fp8(c: Call) -> None:
    reference.spark_v4_kv_assemble_fp8(
        c.kv, c.weight, c.positions, c.pool, c.slot_mapping, c.rope_dim, c.eps, c.theta
    )  # fmt: skip


def _q_and_kv(c: Call) -> None:
    _q_norm_rope(c)
    _kv_assemble(c)


def _q_and_kv_fp8(c: Call) -> None:
    _q_norm_rope(c)
    _kv_assemble_fp8(c)


def _both_geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (c.grid[0], ceil_div(c.heads, HEADS) + 1, 1), (256, 1, 1), 0


def _positions() -> ParamSpec:
    return pointer("positions", "u32", "r", lambda c: (c.grid[0],))


def _assemble_params(dtype: str, align: int) -> tuple[ParamSpec, ...]:
    return (
        pointer("kv", "bf16", "r", lambda c: (c.grid[0], c.head_dim), align=LOAD),
        pointer("weight", "bf16", "r", lambda c: (c.head_dim,), align=LOAD),
        _positions(),
        pointer("pool", dtype, "w", _to_the_largest_slot, align=align),
        pointer("slot_mapping", "i64", "r", lambda c: (c.grid[0],)),
        u32("head_dim"),
        u32("rope_dim"),
        f32("eps"),
        f32("theta"),
    )


def _both(function: str, dtype: str, align: int, run: Callable[[Call], None]) -> KernelSpec:
    kv, weight, positions, pool, slot_mapping, *numbers = _assemble_params(dtype, align)
    return KernelSpec(
        module="spark_v4_qkv",
        function=function,
        params=(
            pointer("q", "bf16", "rw", lambda c: (c.grid[0], c.heads, c.head_dim), align=LOAD),
            kv,
            weight,
            positions,
            pool,
            slot_mapping,
            u32("heads"),
            *numbers,
        ),
        grid_text="(rows, ceil(heads / 8) + 1, 1)",
        block_text="(256, 1, 1)",
        geometry=_both_geometry,
        reference=reference.spark_v4_q_norm_rope,
        run=run,
        shared_bytes=2048,
        optional=True,
        preconditions=check_head,
    )


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="spark_v4_qkv",
        function="spark_v4_q_norm_rope",
        params=(
            pointer("q", "bf16", "rw", lambda c: (c.grid[0], c.heads, c.head_dim), align=LOAD),
            _positions(),
            u32("heads"),
            u32("head_dim"),
            u32("rope_dim"),
            f32("eps"),
            f32("theta"),
        ),
        grid_text="(rows, ceil(heads / 8), 1)",
        block_text="(256, 1, 1)",
        geometry=_query_geometry,
        reference=reference.spark_v4_q_norm_rope,
        run=_q_norm_rope,
        shared_bytes=2048,
        optional=True,
        preconditions=check_head,
    ),
    KernelSpec(
        module="spark_v4_qkv",
        function="spark_v4_kv_assemble",
        params=_assemble_params("bf16", LOAD),
        grid_text="(rows, 1, 1)",
        block_text="(32, 1, 1)",
        geometry=_row_geometry,
        reference=reference.spark_v4_kv_assemble,
        run=_kv_assemble,
        shared_bytes=2048,
        optional=True,
        preconditions=check_head,
    ),
    KernelSpec(
        module="spark_v4_qkv",
        function="spark_v4_kv_assemble_fp8",
        params=_assemble_params("u8", WIDTH),
        grid_text="(rows, 1, 1)",
        block_text="(32, 1, 1)",
        geometry=_row_geometry,
        reference=reference.spark_v4_kv_assemble_fp8,
        run=_kv_assemble_fp8,
        shared_bytes=2048,
        optional=True,
        preconditions=check_head,
    ),
    _both("spark_v4_q_and_kv", "bf16", LOAD, _q_and_kv),
    _both("spark_v4_q_and_kv_fp8", "u8", WIDTH, _q_and_kv_fp8),
)
