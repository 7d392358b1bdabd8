# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `spark_qk_norm_rope_cache`: a block a head of a row, a thread an element.

As in `reshape_and_cache`, the cache's range is declared from the slots in device memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..reference import spark_qk_norm_rope_cache as reference
from .spec import Call, Dim3, KernelSpec, ParamSpec, f32, pointer, u32, u64

LARGEST_HEAD = 256


def _geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (c.num_q_heads + 2 * c.num_kv_heads, c.grid[1], 1), (c.head_dim, 1, 1), 0


def _row(c: Call) -> int:
    return int(c.num_kv_heads * c.head_dim)


def _preconditions(c: Call) -> None:
    if not 2 <= c.head_dim <= LARGEST_HEAD:
        raise ValueError(f"head_dim is {c.head_dim}: 2 to {LARGEST_HEAD} is taken")
    if c.rotary_dim % 2 or not 2 <= c.rotary_dim <= c.head_dim:
        raise ValueError(f"rotary_dim is {c.rotary_dim}: an even number from 2 to head_dim = {c.head_dim} is needed")
    for name in ("num_q_heads", "num_kv_heads", "block_size", "position_stride", "slot_stride"):
        if getattr(c, name) == 0:
            raise ValueError(f"{name} is 0: it must be at least 1")
    if c.cache_stride < c.block_size * _row(c):
        raise ValueError(f"cache_stride is {c.cache_stride}: at least {c.block_size * _row(c)} is needed")
    if c.q_stride < c.num_q_heads * c.head_dim:
        raise ValueError(f"q_stride is {c.q_stride}: at least {c.num_q_heads * c.head_dim} is needed")


def _slots(c: Call) -> np.ndarray[Any, Any]:
    slots: np.ndarray[Any, Any] = c.slots[:: c.slot_stride]
    return slots


def _cache(c: Call) -> tuple[int, ...]:
    """Elements up to the end of the last slot that is written."""
    starts = (s // c.block_size * c.cache_stride + s % c.block_size * _row(c) for s in _slots(c).tolist() if s >= 0)
    last = max(starts, default=-1)
    return (last + _row(c) if last >= 0 else 0,)


def _apart(stride: str) -> Callable[[Call], tuple[int, ...]]:
    return lambda c: ((c.grid[1] - 1) * getattr(c, stride) + 1,)


def _queries(c: Call) -> np.ndarray[Any, Any]:
    step, shape = c.Q.itemsize, (c.grid[1], c.num_q_heads, c.head_dim)
    return np.lib.stride_tricks.as_strided(c.Q, shape, (c.q_stride * step, c.head_dim * step, step))


def _arguments(c: Call) -> tuple[Any, ...]:
    positions = c.positions[:: c.position_stride]
    return (
        _queries(c), c.K, c.V, (c.q_weight, c.k_weight), (c.k_cache, c.v_cache), positions, _slots(c), c.rotary_dim,
        c.block_size, c.cache_stride, c.eps, c.theta, bool(c.one_plus),
    )  # fmt: skip


def _spark_qk_norm_rope_cache(c: Call) -> None:
    reference.spark_qk_norm_rope_cache(*_arguments(c))


def _spark_qk_norm_rope_cache_fp8(c: Call) -> None:
    arguments = *_arguments(c), (c.k_scale, c.v_scale)
    reference.spark_qk_norm_rope_cache_fp8(*arguments)


def _params(dtype: str, *more: ParamSpec) -> tuple[ParamSpec, ...]:
    return (
        pointer("Q", "bf16", "rw", lambda c: ((c.grid[1] - 1) * c.q_stride + c.num_q_heads * c.head_dim,)),
        pointer("K", "bf16", "rw", lambda c: (c.grid[1], c.num_kv_heads, c.head_dim)),
        pointer("V", "bf16", "r", lambda c: (c.grid[1], c.num_kv_heads, c.head_dim)),
        pointer("q_weight", "bf16", "r", lambda c: (c.head_dim,), optional=True, early=True),
        pointer("k_weight", "bf16", "r", lambda c: (c.head_dim,), optional=True, early=True),
        pointer("k_cache", dtype, "w", _cache),
        pointer("v_cache", dtype, "w", _cache),
        pointer("positions", "u32", "r", _apart("position_stride")),
        pointer("slots", "i64", "r", _apart("slot_stride")),
        u32("position_stride"),
        u32("slot_stride"),
        u32("num_q_heads"),
        u32("num_kv_heads"),
        u32("head_dim"),
        u32("rotary_dim"),
        u32("block_size"),
        u32("q_stride"),
        u64("cache_stride"),
        u32("one_plus"),
        f32("eps"),
        f32("theta"),
        *more,
    )


KERNELS: tuple[KernelSpec, ...] = tuple(
    KernelSpec(
        module="spark_qk_norm_rope_cache",
        function=function.__name__,
        params=params,
        grid_text="(num_q_heads + 2 * num_kv_heads, rows, 1)",
        block_text="(head_dim, 1, 1)",
        geometry=_geometry,
        reference=function,
        run=run,
        shared_bytes=1152,
        optional=True,
        preconditions=_preconditions,
    )
    for function, run, params in (
        (reference.spark_qk_norm_rope_cache, _spark_qk_norm_rope_cache, _params("bf16")),
        (
            reference.spark_qk_norm_rope_cache_fp8,
            _spark_qk_norm_rope_cache_fp8,
            _params("u8", f32("k_scale"), f32("v_scale")),
        ),
    )
)
