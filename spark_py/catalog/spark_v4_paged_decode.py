# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `spark_v4_paged_decode`: one block two query heads and a sequence.

As for `paged_decode`, the pool's range is declared from lengths and block ids in device memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..reference import spark_v4_paged_decode as reference
from .paged_decode import blocks_in_use, largest_block
from .spark_v4_qkv import check_head
from .spec import Call, Dim3, KernelSpec, ceil_div, f32, pointer, u32

HEADS = 1
LOAD = 16
FP8_LOAD = 8
PAIR_BYTES = 4


def _geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (ceil_div(c.num_heads, HEADS), c.grid[1], 1), (256, 1, 1), 0


def _preconditions(c: Call) -> None:
    check_head(c)
    if c.block_size == 0:
        raise ValueError("block_size is 0: it must be at least 1")
    longest = int(c.seq_lens.max(initial=0))
    if longest > c.max_blocks_per_seq * c.block_size:
        room = f"{c.max_blocks_per_seq} blocks of {c.block_size}"
        raise ValueError(f"seq_lens holds {longest}, more positions than the {room} of a block table")
    for sequence, blocks in enumerate(blocks_in_use(c, c.sliding_window)):
        if blocks.min() < 0:
            raise ValueError(f"block_tables names block {blocks.min()} in row {sequence} of those in use")


def _heads(c: Call) -> tuple[int, ...]:
    return c.grid[1], c.num_heads, c.head_dim


def _pool(c: Call) -> tuple[int, ...]:
    """[largest block + 1, block_size, head_dim]: a view, so blocks that no sequence names cost nothing."""
    return largest_block(c, c.sliding_window) + 1, c.block_size, c.head_dim


def _arguments(c: Call) -> tuple[Any, ...]:
    numbers = c.rope_dim, c.inv_sqrt_d, c.theta, c.sliding_window
    return c.Q, c.pool, c.O, c.block_tables, c.seq_lens, c.positions, c.sinks, *numbers


def _decode(c: Call) -> None:
    reference.spark_v4_paged_decode(*_arguments(c))


def _decode_fp8(c: Call) -> None:
    reference.spark_v4_paged_decode_fp8(*_arguments(c))


def _spec(function: Callable[..., Any], run: Callable[[Call], None], dtype: str, load: int) -> KernelSpec:
    return KernelSpec(
        module="spark_v4_paged_decode",
        function=function.__name__,
        params=(
            pointer("Q", "bf16", "r", _heads, align=LOAD),
            pointer("pool", dtype, "r", _pool, align=load),
            pointer("O", "bf16", "w", _heads, align=PAIR_BYTES),
            pointer("block_tables", "i32", "r", lambda c: (c.grid[1], c.max_blocks_per_seq)),
            pointer("seq_lens", "i32", "r", lambda c: (c.grid[1],)),
            pointer("positions", "u32", "r", lambda c: (c.grid[1],)),
            pointer("sinks", "f32", "r", lambda c: (c.num_heads,), optional=True),
            u32("max_blocks_per_seq"),
            u32("num_heads"),
            u32("head_dim"),
            u32("rope_dim"),
            u32("block_size"),
            f32("inv_sqrt_d"),
            f32("theta"),
            u32("sliding_window"),
        ),
        grid_text="(num_heads, sequences, 1)",
        block_text="(256, 1, 1)",
        geometry=_geometry,
        reference=function,
        run=run,
        shared_bytes=18496,
        optional=True,
        preconditions=_preconditions,
    )


KERNELS: tuple[KernelSpec, ...] = (
    _spec(reference.spark_v4_paged_decode, _decode, "bf16", LOAD),
    _spec(reference.spark_v4_paged_decode_fp8, _decode_fp8, "u8", FP8_LOAD),
)
