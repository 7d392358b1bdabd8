# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue row of module `paged_decode_fp8`: one block a query head and sequence, over a cache of E4M3.

As for `paged_decode`, the cache's range is declared from lengths and block ids in device memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..reference import paged_decode_fp8 as reference
from .paged_decode import check, geometry, largest_block, queries, queries_touched
from .spec import Call, KernelSpec, f32, pointer, u32, u64

LOAD = 8


def _block(c: Call) -> int:
    return int(c.block_size * c.num_kv_heads * c.head_dim)


def _preconditions(c: Call) -> None:
    check(c)
    if c.cache_stride < _block(c) or c.cache_stride % LOAD:
        dense = f"block_size * num_kv_heads * head_dim = {_block(c)}"
        raise ValueError(f"cache_stride is {c.cache_stride}: a multiple of {LOAD}, at least {dense}, is needed")


def _cache(c: Call) -> tuple[int, ...]:
    """Elements up to the end of the largest block in use, seen flat: blocks may lie apart."""
    largest = largest_block(c)
    return (largest * c.cache_stride + _block(c),) if largest >= 0 else (0,)


def _blocks(c: Call, flat: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    shape = (largest_block(c) + 1, c.block_size, c.num_kv_heads, c.head_dim)
    strides = (c.cache_stride, c.num_kv_heads * c.head_dim, c.head_dim, 1)
    return np.lib.stride_tricks.as_strided(flat, shape, strides, writeable=False)


def _paged_decode_attn_fp8(c: Call) -> None:
    k_cache, v_cache = _blocks(c, c.K_cache), _blocks(c, c.V_cache)
    scales = c.inv_sqrt_d, c.k_scale, c.v_scale
    reference.paged_decode_attn_fp8(queries(c), k_cache, v_cache, c.O, c.block_tables, c.seq_lens, *scales)


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="paged_decode_fp8",
        function="paged_decode_attn_fp8",
        params=(
            pointer("Q", "bf16", "r", queries_touched),
            pointer("K_cache", "u8", "r", _cache, align=LOAD),
            pointer("V_cache", "u8", "r", _cache, align=LOAD),
            pointer("O", "bf16", "w", lambda c: (c.grid[1], c.num_q_heads, c.head_dim)),
            pointer("block_tables", "i32", "r", lambda c: (c.grid[1], c.max_blocks_per_seq)),
            pointer("seq_lens", "i32", "r", lambda c: (c.grid[1],)),
            u32("max_blocks_per_seq"),
            u32("num_q_heads"),
            u32("num_kv_heads"),
            u32("head_dim"),
            u32("block_size"),
            f32("inv_sqrt_d"),
            f32("k_scale"),
            f32("v_scale"),
            u32("q_stride"),
            u64("cache_stride"),
        ),
        grid_text="(num_q_heads, sequences, 1)",
        block_text="(256, 1, 1)",
        geometry=geometry,
        reference=reference.paged_decode_attn_fp8,
        run=_paged_decode_attn_fp8,
        shared_bytes=8256,
        preconditions=_preconditions,
    ),
)
