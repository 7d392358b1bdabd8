# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `reshape_and_cache`: one block a row.

The cache rows that a launch writes depend on slots in device memory: a range is declared from those slots, so that one
beyond the cache's allocation is refused where memory is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..reference import reshape_and_cache as reference
from .spec import Call, Dim3, KernelSpec, f32, pointer, u32, u64


def _row(c: Call) -> int:
    return int(c.num_kv_heads * c.head_dim)


def _geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (c.grid[0], 1, 1), (256, 1, 1), 0


def _preconditions(c: Call) -> None:
    if c.block_size == 0:
        raise ValueError("block_size is 0: it must be at least 1")


def _source(stride: str) -> Callable[[Call], tuple[int, ...]]:
    """What rows `stride` elements apart touch, seen flat: the padding after the last row is not part of it."""
    return lambda c: ((c.grid[0] - 1) * getattr(c, stride) + _row(c),)


def _rows(c: Call, flat: np.ndarray[Any, Any], stride: int) -> np.ndarray[Any, Any]:
    step = flat.itemsize
    return np.lib.stride_tricks.as_strided(flat, (c.grid[0], _row(c)), (stride * step, step), writeable=False)


def _to_the_largest_slot(c: Call) -> tuple[int, ...]:
    """[largest slot + 1, row]: a view, so the slots that no row names cost nothing."""
    return int(c.slot_mapping.max(initial=-1)) + 1, _row(c)


def _fp8_preconditions(c: Call) -> None:
    _preconditions(c)
    if c.cache_stride < c.block_size * _row(c):
        dense = f"block_size * num_kv_heads * head_dim = {c.block_size * _row(c)}"
        raise ValueError(f"cache_stride is {c.cache_stride}: at least {dense} is needed")


def _to_the_end_of_the_largest_slot(c: Call) -> tuple[int, ...]:
    """Elements up to the end of the largest slot, seen flat: blocks may lie apart."""
    largest = int(c.slot_mapping.max(initial=-1))
    if largest < 0:
        return (0,)
    return (largest // c.block_size * c.cache_stride + (largest % c.block_size + 1) * _row(c),)


def _reshape_and_cache_flash(c: Call) -> None:
    reference.reshape_and_cache_flash(_rows(c, c.key, c.key_stride), c.k_cache, c.slot_mapping)
    reference.reshape_and_cache_flash(_rows(c, c.value, c.value_stride), c.v_cache, c.slot_mapping)


def _reshape_and_cache_flash_fp8(c: Call) -> None:
    where = c.slot_mapping
    key, value = _rows(c, c.key, c.key_stride), _rows(c, c.value, c.value_stride)
    reference.reshape_and_cache_flash_fp8(key, c.k_cache, where, c.k_scale, c.block_size, c.cache_stride)
    reference.reshape_and_cache_flash_fp8(value, c.v_cache, where, c.v_scale, c.block_size, c.cache_stride)


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="reshape_and_cache",
        function="reshape_and_cache_flash",
        params=(
            pointer("key", "bf16", "r", _source("key_stride")),
            pointer("value", "bf16", "r", _source("value_stride")),
            pointer("k_cache", "bf16", "w", _to_the_largest_slot),
            pointer("v_cache", "bf16", "w", _to_the_largest_slot),
            pointer("slot_mapping", "i64", "r", lambda c: (c.grid[0],)),
            u32("num_kv_heads"),
            u32("head_dim"),
            u32("block_size"),
            u32("key_stride"),
            u32("value_stride"),
        ),
        grid_text="(rows, 1, 1)",
        block_text="(256, 1, 1)",
        geometry=_geometry,
        reference=reference.reshape_and_cache_flash,
        run=_reshape_and_cache_flash,
        preconditions=_preconditions,
    ),
    KernelSpec(
        module="reshape_and_cache",
        function="reshape_and_cache_flash_fp8",
        params=(
            pointer("key", "bf16", "r", _source("key_stride")),
            pointer("value", "bf16", "r", _source("value_stride")),
            pointer("k_cache", "u8", "w", _to_the_end_of_the_largest_slot),
            pointer("v_cache", "u8", "w", _to_the_end_of_the_largest_slot),
            pointer("slot_mapping", "i64", "r", lambda c: (c.grid[0],)),
            u32("num_kv_heads"),
            u32("head_dim"),
            u32("block_size"),
            f32("k_scale"),
            f32("v_scale"),
            u32("key_stride"),
            u32("value_stride"),
            u64("cache_stride"),
        ),
        grid_text="(rows, 1, 1)",
        block_text="(256, 1, 1)",
        geometry=_geometry,
        reference=reference.reshape_and_cache_flash_fp8,
        run=_reshape_and_cache_flash_fp8,
        preconditions=_fp8_preconditions,
    ),
)
