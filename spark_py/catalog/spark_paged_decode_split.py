# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `spark_paged_decode_split`: a block a split and cache head, then one a query head.

As for `paged_decode`, the cache's range is declared from lengths and block ids in device memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..reference import spark_paged_decode_split as reference
from .spec import Call, Dim3, KernelSpec, ceil_div, f32, pointer, u32, u64

Array = np.ndarray[Any, Any]

MOST = reference.MOST
HEADS = 8
HEAD_STEP, MAX_HEAD_DIM = 64, 256
LOAD = 8
"""Elements of a load."""


def _geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    parts = ceil_div(c.num_q_heads // c.num_kv_heads, HEADS)
    return (c.num_kv_heads * parts, MOST, c.grid[2]), (128, 1, 1), 0


def _tables(c: Call) -> Iterator[Array]:
    """The block table of each sequence, as long as the sequence."""
    for sequence, length in enumerate(_lengths(c)):
        start = sequence * c.table_stride
        yield c.block_tables[start : start + ceil_div(max(length, 0), c.block_size)]


def _lengths(c: Call) -> list[int]:
    lengths: list[int] = c.seq_lens[:: c.lens_stride].tolist()
    return lengths


def _seen(c: Call) -> Iterator[Array]:
    """The block ids that each sequence which has any reads."""
    for table, length in zip(_tables(c), _lengths(c), strict=True):
        splits = reference.splits_of(length, c.sliding_window, c.num_q_heads)
        if splits:
            yield table[splits[0][0] // c.block_size :]


def _largest(c: Call) -> int:
    return max((int(blocks.max()) for blocks in _seen(c)), default=-1)


def _block(c: Call) -> int:
    return int(c.block_size * c.num_kv_heads * c.head_dim)


def _cache(c: Call) -> tuple[int, ...]:
    """Elements up to the end of the largest block in use, seen flat: blocks may lie apart."""
    largest = _largest(c)
    return (largest * c.cache_stride + _block(c),) if largest >= 0 else (0,)


def _needs_head(c: Call) -> None:
    if c.head_dim % HEAD_STEP or not HEAD_STEP <= c.head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {c.head_dim}: a multiple of {HEAD_STEP} up to {MAX_HEAD_DIM} is needed")
    if c.lens_stride == 0:
        raise ValueError("lens_stride is 0: it must be at least 1")


def _preconditions(c: Call) -> None:
    _needs_head(c)
    if c.num_kv_heads == 0 or c.num_q_heads % c.num_kv_heads or c.num_q_heads == 0:
        raise ValueError(f"num_q_heads is {c.num_q_heads}: a multiple of num_kv_heads = {c.num_kv_heads} is needed")
    if c.block_size == 0:
        raise ValueError("block_size is 0: it must be at least 1")
    if c.cache_stride < _block(c) or c.cache_stride % LOAD:
        dense = f"block_size * num_kv_heads * head_dim = {_block(c)}"
        raise ValueError(f"cache_stride is {c.cache_stride}: a multiple of {LOAD}, at least {dense}, is needed")
    if c.q_stride < c.num_q_heads * c.head_dim or c.q_stride % LOAD:
        raise ValueError(f"q_stride is {c.q_stride}: a multiple of {LOAD}, at least num_q_heads * head_dim, is needed")
    for sequence, blocks in enumerate(_seen(c)):
        if blocks.min() < 0:
            raise ValueError(f"block_tables names block {blocks.min()} in row {sequence} of those in use")


def _table_entries(c: Call) -> tuple[int, ...]:
    """Elements up to the last entry in use."""
    ends = (s * c.table_stride + ceil_div(n, c.block_size) for s, n in enumerate(_lengths(c)) if n > 0)
    return (max(ends, default=0),)


def _queries(c: Call) -> Array:
    step = c.Q.itemsize
    shape = (c.grid[2], c.num_q_heads, c.head_dim)
    return np.lib.stride_tricks.as_strided(c.Q, shape, (c.q_stride * step, c.head_dim * step, step), writeable=False)


def _blocks(c: Call, flat: Array) -> Array:
    step = flat.itemsize
    shape = (_largest(c) + 1, c.block_size, c.num_kv_heads, c.head_dim)
    strides = (c.cache_stride, c.num_kv_heads * c.head_dim, c.head_dim, 1)
    return np.lib.stride_tricks.as_strided(flat, shape, tuple(s * step for s in strides), writeable=False)


def _square_tables(c: Call) -> Array:
    tables = list(_tables(c))
    square = np.zeros((len(tables), max(1, *map(len, tables), 1)), np.int32)
    for row, table in zip(square, tables, strict=True):
        row[: len(table)] = table
    return square


def _split_arguments(c: Call) -> tuple[Any, ...]:
    caches = _blocks(c, c.K_cache), _blocks(c, c.V_cache)
    lengths = np.array(_lengths(c), np.int32)
    return _queries(c), *caches, c.partial, c.sums, _square_tables(c), lengths, c.scale, c.sliding_window


def _spark_paged_decode_split(c: Call) -> None:
    reference.spark_paged_decode_split(*_split_arguments(c))


def _spark_paged_decode_split_fp8(c: Call) -> None:
    reference.spark_paged_decode_split_fp8(*_split_arguments(c))


def _gates(c: Call) -> Array | None:
    if c.gate is None:
        return None
    step = c.gate.itemsize
    shape = (c.grid[1], c.num_q_heads, c.head_dim)
    return np.lib.stride_tricks.as_strided(
        c.gate, shape, (c.gate_stride * step, c.head_dim * step, step), writeable=False
    )


def _spark_paged_decode_merge(c: Call) -> None:
    lengths = np.array(_lengths(c), np.int32)
    reference.spark_paged_decode_merge(c.partial, c.sums, c.O, _gates(c), lengths, c.output_scale, c.sliding_window)


def _partial(sequences: int) -> Callable[[Call], tuple[int, ...]]:
    return lambda c: (c.grid[sequences], c.num_q_heads, MOST, c.head_dim)


def _sums(sequences: int) -> Callable[[Call], tuple[int, ...]]:
    return lambda c: (c.grid[sequences], c.num_q_heads, MOST, 2)


def _lens(sequences: int) -> Callable[[Call], tuple[int, ...]]:
    return lambda c: ((c.grid[sequences] - 1) * c.lens_stride + 1,)


def _split(function: str, dtype: str, reference: Callable[..., None], run: Callable[[Call], None]) -> KernelSpec:
    element = 2 if dtype == "bf16" else 1
    return KernelSpec(
        module="spark_paged_decode_split",
        function=function,
        params=(
            pointer("Q", "bf16", "r", lambda c: ((c.grid[2] - 1) * c.q_stride + c.num_q_heads * c.head_dim,), align=16),
            pointer("K_cache", dtype, "r", _cache, align=LOAD * element),
            pointer("V_cache", dtype, "r", _cache, align=LOAD * element),
            pointer("partial", "f32", "w", _partial(2)),
            pointer("sums", "f32", "w", _sums(2)),
            pointer("block_tables", "i32", "r", _table_entries),
            pointer("seq_lens", "i32", "r", _lens(2)),
            u32("table_stride"),
            u32("lens_stride"),
            u32("num_q_heads"),
            u32("num_kv_heads"),
            u32("head_dim"),
            u32("block_size"),
            f32("scale"),
            u32("q_stride"),
            u64("cache_stride"),
            u32("sliding_window"),
        ),
        grid_text="(num_kv_heads * ceil(num_q_heads / num_kv_heads / 8), 64, sequences)",
        block_text="(128, 1, 1)",
        geometry=_geometry,
        reference=reference,
        run=run,
        shared_bytes=37632,
        optional=True,
        preconditions=_preconditions,
    )


KERNELS: tuple[KernelSpec, ...] = (
    _split("spark_paged_decode_split", "bf16", reference.spark_paged_decode_split, _spark_paged_decode_split),
    _split("spark_paged_decode_split_fp8", "u8", reference.spark_paged_decode_split_fp8, _spark_paged_decode_split_fp8),
    KernelSpec(
        module="spark_paged_decode_split",
        function="spark_paged_decode_merge",
        params=(
            pointer("partial", "f32", "r", _partial(1), align=16),
            pointer("sums", "f32", "r", _sums(1), align=8),
            pointer("O", "bf16", "w", lambda c: (c.grid[1], c.num_q_heads, c.head_dim)),
            pointer(
                "gate",
                "bf16",
                "r",
                lambda c: ((c.grid[1] - 1) * c.gate_stride + c.num_q_heads * c.head_dim,),
                optional=True,
            ),
            pointer("seq_lens", "i32", "r", _lens(1)),
            u32("lens_stride"),
            u32("num_q_heads"),
            u32("head_dim"),
            f32("output_scale"),
            u32("gate_stride"),
            u32("sliding_window"),
        ),
        grid_text="(num_q_heads, sequences, head_dim / 64)",
        block_text="(256, 1, 1)",
        geometry=lambda c: ((c.num_q_heads, c.grid[1], c.head_dim // HEAD_STEP), (256, 1, 1), 0),
        reference=reference.spark_paged_decode_merge,
        run=_spark_paged_decode_merge,
        shared_bytes=4356,
        optional=True,
        preconditions=_needs_head,
    ),
)
