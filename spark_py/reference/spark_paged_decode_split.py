# SPDX-License-Identifier: AGPL-3.0-only
"""Module `spark_paged_decode_split`: attention of one query row a sequence, split along the sequence and merged.

Formula: of split i, m_i = the largest score (-1e30 at least), w_i = sum of exp(s_p - m_i), u_i = sum of exp(s_p - m_i)
v_p; o = sum of e_i u_i / sum of e_i w_i with e_i = exp(m_i - largest m).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ._bf16 import Bf16Array, F32Array, sigmoid, to_bf16, to_f32
from ._e4m3 import U8Array, from_e4m3
from .paged_decode import LOWEST, folding_sum, scores, window_start

MOST = 64
"""Splits of a sequence, at most."""
SHORTEST, ENOUGH = 64, 256
FEW_HEADS = 16
STEP = 16


def _whole_steps(positions: int) -> int:
    return -(-positions // STEP) * STEP


def split_length(seen: int, num_q_heads: int) -> int:
    """Positions of every split but the last: the least multiple of 16 that makes 32 splits do, or 64 where there are 16
    query heads or fewer, but at least 64; from 256 on, that makes 64 splits do."""
    most = MOST if num_q_heads <= FEW_HEADS else MOST // 2
    few, many = _whole_steps(-(-seen // most)), _whole_steps(-(-seen // MOST))
    return max(SHORTEST, min(few, max(ENOUGH, many)))


def splits_of(length: int, sliding_window: int, num_q_heads: int) -> list[tuple[int, int]]:
    """The splits [begin, end) of a sequence, in order; none of an empty one."""
    if length <= 0:
        return []
    first = window_start(length, sliding_window)
    step = split_length(length - first, num_q_heads)
    return [(at, min(at + step, length)) for at in range(first, length, step)]


def _split(
    query: Bf16Array,
    caches: tuple[npt.NDArray[Any], npt.NDArray[Any]],
    widen: Callable[[npt.NDArray[Any]], F32Array],
    partial: F32Array,
    sums: F32Array,
    block_tables: npt.NDArray[np.int32],
    seq_lens: npt.NDArray[np.int32],
    scale: float,
    sliding_window: int,
) -> None:
    block_size, heads = caches[0].shape[1], query.shape[1]
    group = heads // caches[0].shape[2]
    for sequence, length in enumerate(seq_lens.tolist()):
        for split, (begin, end) in enumerate(splits_of(length, sliding_window, heads)):
            positions = np.arange(begin, end)
            rows = block_tables[sequence, positions // block_size], positions % block_size
            keys, values = (widen(cache[rows]) for cache in caches)
            with np.errstate(all="ignore"):
                for head in range(keys.shape[1]):
                    mine = slice(head * group, (head + 1) * group)
                    seen = scores(to_f32(query[sequence, mine]), keys[:, head], np.float32(scale))
                    top = np.fmax.reduce(seen, axis=0, initial=LOWEST)
                    weights = np.exp(seen - top)
                    partial[sequence, mine, split] = folding_sum(weights[:, :, None] * values[:, head][:, None, :])
                    sums[sequence, mine, split, 0], sums[sequence, mine, split, 1] = top, folding_sum(weights)


def spark_paged_decode_split(
    query: Bf16Array,
    k_cache: Bf16Array,
    v_cache: Bf16Array,
    partial: F32Array,
    sums: F32Array,
    block_tables: npt.NDArray[np.int32],
    seq_lens: npt.NDArray[np.int32],
    scale: float,
    sliding_window: int,
) -> None:
    """partial[s, h, i] = u_i and sums[s, h, i] = (m_i, w_i) of every split i of sequence s; the rest stays as it is.

    query: BF16 [S, nq, hd]; k_cache, v_cache: BF16 [blocks, block_size, nkv, hd]; partial: FP32 [S, nq, 64, hd]; sums:
    FP32 [S, nq, 64, 2]; block_tables: int32 [S, m]; seq_lens: int32 [S]. s_p = (q . k_p) * scale, all in FP32. Where
    the splits lie depends on the number of positions seen alone.
    """
    _split(query, (k_cache, v_cache), to_f32, partial, sums, block_tables, seq_lens, scale, sliding_window)


def spark_paged_decode_split_fp8(
    query: Bf16Array,
    k_cache: U8Array,
    v_cache: U8Array,
    partial: F32Array,
    sums: F32Array,
    block_tables: npt.NDArray[np.int32],
    seq_lens: npt.NDArray[np.int32],
    scale: float,
    sliding_window: int,
) -> None:
    """As `spark_paged_decode_split` over E4M3 bytes [blocks, block_size, nkv, hd], in strides of any size."""

    def widen(codes: npt.NDArray[Any]) -> F32Array:
        return to_f32(from_e4m3(codes))

    _split(query, (k_cache, v_cache), widen, partial, sums, block_tables, seq_lens, scale, sliding_window)


def spark_paged_decode_merge(
    partial: F32Array,
    sums: F32Array,
    output: Bf16Array,
    gate: Bf16Array | None,
    seq_lens: npt.NDArray[np.int32],
    output_scale: float,
    sliding_window: int,
) -> None:
    """output[s] = bf16(o * output_scale) of every sequence s of length > 0, and of that bf16(it * sigmoid(gate[s])).

    partial: FP32 [S, nq, 64, hd]; sums: FP32 [S, nq, 64, 2]; output and gate: BF16 [S, nq, hd]; seq_lens: int32 [S].
    A row whose weights are all zero gives 0.
    """
    for sequence, length in enumerate(seq_lens.tolist()):
        count = len(splits_of(length, sliding_window, output.shape[1]))
        if count == 0:
            continue
        with np.errstate(all="ignore"):
            tops, weights = sums[sequence, :, :count, 0], sums[sequence, :, :count, 1]
            shares = np.exp(tops - np.fmax.reduce(tops, axis=1, initial=LOWEST)[:, None]).astype(np.float32)
            total = folding_sum((shares * weights).T.copy())[:, None]
            added = folding_sum((shares[:, :, None] * partial[sequence, :, :count]).swapaxes(0, 1).copy())
            mean = np.where(total == 0.0, np.float32(0.0), added / total)
            merged = to_bf16(mean * np.float32(output_scale))
            if gate is not None:
                merged = to_bf16(to_f32(merged) * sigmoid(to_f32(gate[sequence])))
        output[sequence] = merged
