# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue row of module `paged_decode`: one block a query head and sequence.

The cache rows that a launch reads depend on lengths and block ids in device memory: ranges are declared from those, so
that a block beyond the cache's allocation is refused where memory is checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..reference import paged_decode as reference
from .spec import Call, Dim3, KernelSpec, ceil_div, f32, pointer, u32

WIDE_LOAD = 16
HEAD_STEP = 32
MAX_HEAD_DIM = 512


def geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    """One block of 256 threads a query head and sequence."""
    return (c.num_q_heads, c.grid[1], 1), (256, 1, 1), 0


def blocks_in_use(c: Call, sliding_window: int = 0) -> Iterator[np.ndarray[Any, Any]]:
    """For each sequence that has any, the block ids of the positions it sees."""
    for row, length in zip(c.block_tables, c.seq_lens.tolist(), strict=True):
        if length > 0:
            first = reference.window_start(length, sliding_window) // c.block_size
            yield row[first : ceil_div(length, c.block_size)]


def check(c: Call, sliding_window: int = 0) -> None:
    """ValueError for numbers that no kernel of this kind takes, and for lengths and block ids that cannot be."""
    if c.head_dim % HEAD_STEP or not HEAD_STEP <= c.head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {c.head_dim}: a multiple of {HEAD_STEP} up to {MAX_HEAD_DIM} is needed")
    if c.num_kv_heads == 0 or c.num_q_heads % c.num_kv_heads:
        raise ValueError(f"num_q_heads is {c.num_q_heads}: a multiple of num_kv_heads = {c.num_kv_heads} is needed")
    if c.block_size == 0:
        raise ValueError("block_size is 0: it must be at least 1")
    longest = int(c.seq_lens.max(initial=0))
    if longest > c.max_blocks_per_seq * c.block_size:
        room = f"{c.max_blocks_per_seq} blocks of {c.block_size}"
        raise ValueError(f"seq_lens holds {longest}, more positions than the {room} of a block table")
    for sequence, blocks in enumerate(blocks_in_use(c, sliding_window)):
        if blocks.min() < 0:
            raise ValueError(f"block_tables names block {blocks.min()} in row {sequence} of those in use")


def largest_block(c: Call, sliding_window: int = 0) -> int:
    """The largest block id in use; -1 where there is none."""
    return max((int(blocks.max()) for blocks in blocks_in_use(c, sliding_window)), default=-1)


def _cache(c: Call) -> tuple[int, ...]:
    """[largest block + 1, block_size, nkv, hd]: a view, so blocks that no sequence names cost nothing."""
    return largest_block(c, c.sliding_window) + 1, c.block_size, c.num_kv_heads, c.head_dim


def queries_touched(c: Call) -> tuple[int, ...]:
    """What the rows touch, seen flat: the padding after the last one is not part of it."""
    return ((c.grid[1] - 1) * c.q_stride + c.num_q_heads * c.head_dim,)


def queries(c: Call) -> np.ndarray[Any, Any]:
    """The query rows [S, nq, hd]: a view."""
    step = c.Q.itemsize
    shape = (c.grid[1], c.num_q_heads, c.head_dim)
    strides = (c.q_stride * step, c.head_dim * step, step)
    return np.lib.stride_tricks.as_strided(c.Q, shape, strides, writeable=False)


def _paged_decode_attn(c: Call) -> None:
    reference.paged_decode_attn(
        queries(c), c.K_cache, c.V_cache, c.O, c.block_tables, c.seq_lens, c.inv_sqrt_d, c.sliding_window
    )


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="paged_decode",
        function="paged_decode_attn",
        params=(
            pointer("Q", "bf16", "r", queries_touched),
            pointer("K_cache", "bf16", "r", _cache, align=WIDE_LOAD),
            pointer("V_cache", "bf16", "r", _cache, align=WIDE_LOAD),
            pointer("O", "bf16", "w", lambda c: (c.grid[1], c.num_q_heads, c.head_dim)),
            pointer("block_tables", "i32", "r", lambda c: (c.grid[1], c.max_blocks_per_seq)),
            pointer("seq_lens", "i32", "r", lambda c: (c.grid[1],)),
            u32("max_blocks_per_seq"),
            u32("num_q_heads"),
            u32("num_kv_heads"),
            u32("head_dim"),
            u32("block_size"),
            f32("inv_sqrt_d"),
            u32("q_stride"),
            u32("sliding_window"),
        ),
        grid_text="(num_q_heads, sequences, 1)",
        block_text="(256, 1, 1)",
        geometry=geometry,
        reference=reference.paged_decode_attn,
        run=_paged_decode_attn,
        shared_bytes=8256,
        preconditions=lambda c: check(c, c.sliding_window),
    ),
)
