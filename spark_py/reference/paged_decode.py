# SPDX-License-Identifier: AGPL-3.0-only
"""Module `paged_decode`: attention of one query row a sequence over a paged cache.

Formula: o = sum over p of exp(s_p - max) v_p / sum over p of exp(s_p - max), s_p = (q . k_p) * scale.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ._bf16 import WARP, Bf16Array, F32Array, halving_sum, to_bf16, to_f32

LOWEST = np.float32(-1.0e30)


def window_start(length: int, sliding_window: int) -> int:
    """The first position that is seen: length - sliding_window where 0 < sliding_window < length, else 0."""
    return length - sliding_window if 0 < sliding_window < length else 0


def scores(query: F32Array, keys: F32Array, scale: np.float32) -> F32Array:
    """(q . k_p) * scale: FP32 [g, hd] and [n, hd] give FP32 [n, g], in the order of the kernel.

    The 32 lanes of a warp own vectors of 8, 4, 2 or 1 elements in turn; a lane adds its products in ascending order,
    then lanes add up as the tree 16, 8, 4, 2, 1.
    """
    per = query.shape[1] // WARP
    width = next(w for w in (8, 4, 2, 1) if per % w == 0)
    products = (keys[:, None, :] * query).reshape(keys.shape[0], query.shape[0], per // width, WARP, width)
    lanes = np.zeros((keys.shape[0], query.shape[0], WARP), np.float32)
    for vector in range(per // width):
        for element in range(width):
            lanes += products[:, :, vector, :, element]
    result: F32Array = halving_sum(lanes) * scale
    return result


def folding_sum(values: F32Array) -> F32Array:
    """Sum over the first axis, overwriting `values`: the upper half is added to the lower until one row is left."""
    count = values.shape[0]
    while count > 1:
        half = (count + 1) // 2
        values[: count - half] += values[half:count]
        count = half
    total: F32Array = values[0]
    return total


def attend(query: Bf16Array, keys: Bf16Array, values: Bf16Array, scale: float, output_scale: float = 1.0) -> Bf16Array:
    """Attention of one sequence: BF16 [nq, hd] over BF16 [n, nkv, hd], n >= 1, gives BF16 [nq, hd].

    Query head h reads cache head h // (nq // nkv). All in FP32, the result times output_scale rounded at the end. A row
    whose weights are all zero (scores of -Inf, or far below -1e30) gives 0.
    """
    heads, size = query.shape
    group = heads // keys.shape[1]
    result = np.empty((heads, size), query.dtype)
    with np.errstate(all="ignore"):
        for head in range(keys.shape[1]):
            mine = slice(head * group, (head + 1) * group)
            seen = scores(to_f32(query[mine]), to_f32(keys[:, head]), np.float32(scale))
            weights = np.exp(seen - np.fmax.reduce(seen, axis=0, initial=LOWEST))
            sums = folding_sum(weights[:, :, None] * to_f32(values[:, head])[:, None, :])
            total = folding_sum(weights)[:, None]
            mean = np.where(total == 0.0, np.float32(0.0), sums / total)
            result[mine] = to_bf16(mean * np.float32(output_scale))
    return result


def paged_decode_attn(
    query: Bf16Array,
    k_cache: Bf16Array,
    v_cache: Bf16Array,
    output: Bf16Array,
    block_tables: npt.NDArray[np.int32],
    seq_lens: npt.NDArray[np.int32],
    scale: float,
    sliding_window: int,
) -> None:
    """output[s] = `attend` over the positions [`window_start`, seq_lens[s]) of sequence s, for each s of length > 0.

    query, output: BF16 [S, nq, hd]; k_cache, v_cache: BF16 [blocks, block_size, nkv, hd]; block_tables: int32 [S, m];
    seq_lens: int32 [S]. Rows of output for a sequence of length 0 stay as they are. Nothing past a sequence's length is
    read, and a sequence's bits depend on that sequence alone.
    """
    block_size = k_cache.shape[1]
    for sequence, length in enumerate(seq_lens.tolist()):
        if length <= 0:
            continue
        positions = np.arange(window_start(length, sliding_window), length)
        blocks, offsets = block_tables[sequence, positions // block_size], positions % block_size
        keys, values = k_cache[blocks, offsets], v_cache[blocks, offsets]
        output[sequence] = attend(query[sequence], keys, values, scale)
