# SPDX-License-Identifier: AGPL-3.0-only
"""Module `spark_v4_paged_decode`: DeepSeek-V4's attention of one query row a sequence over a paged pool of latent rows.

Formula: o = sum over p of exp(s_p - m) row_p / (sum over p of exp(s_p - m) + exp(sink - m)), s_p = (q . row_p) * scale,
then the tail of o turned by the angle of minus the query's position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ._bf16 import Bf16Array, F32Array, U32Array, halving_sum, padded, to_bf16, to_f32
from ._e4m3 import U8Array, from_e4m3
from .paged_decode import LOWEST, folding_sum, window_start
from .spark_v4_rope import rotate

I32Array = npt.NDArray[np.int32]


def attend(query: Bf16Array, rows: Bf16Array, sinks: F32Array | None, scale: float) -> F32Array:
    """Attention of one sequence before the rotation: BF16 [heads, d] over BF16 [n, d], n >= 1, gives FP32 [heads, d].

    Rows are keys and values both. sinks: FP32 [heads] or None. A head whose weights are all zero gives 0.
    """
    with np.errstate(all="ignore"):
        values = to_f32(rows)
        size = 1 << (values.shape[1] - 1).bit_length()
        seen = halving_sum(padded(values[:, None, :] * to_f32(query), size)) * np.float32(scale)
        top = np.fmax.reduce(seen, axis=0, initial=LOWEST)
        if sinks is not None:
            top = np.fmax(top, sinks)
        weights = np.exp(seen - top)
        sums = folding_sum(weights[:, :, None] * values[:, None, :])
        total = folding_sum(weights)
        if sinks is not None:
            total = total + np.exp(sinks - top)
        result: F32Array = np.where(total[:, None] == 0.0, np.float32(0.0), sums / total[:, None])
    return result


def _decode(
    query: Bf16Array,
    pool: np.ndarray[Any, Any],
    read: Callable[[np.ndarray[Any, Any]], Bf16Array],
    output: Bf16Array,
    block_tables: I32Array,
    seq_lens: I32Array,
    positions: U32Array,
    sinks: F32Array | None,
    rope_dim: int,
    scale: float,
    theta: float,
    sliding_window: int,
) -> None:
    """The kernels over a pool whose rows `read` gives as BF16."""
    block_size, start = pool.shape[1], query.shape[2] - rope_dim
    for sequence, length in enumerate(seq_lens.tolist()):
        if length <= 0:
            continue
        places = np.arange(window_start(length, sliding_window), length)
        rows = read(pool[block_tables[sequence, places // block_size], places % block_size])
        mixed = attend(query[sequence], rows, sinks, scale)
        own = positions[sequence : sequence + 1]
        mixed[:, start:] = rotate(mixed[None, :, start:], own, theta, inverse=True)[0]
        output[sequence] = to_bf16(mixed)


def spark_v4_paged_decode(
    query: Bf16Array,
    pool: Bf16Array,
    output: Bf16Array,
    block_tables: I32Array,
    seq_lens: I32Array,
    positions: U32Array,
    sinks: F32Array | None,
    rope_dim: int,
    scale: float,
    theta: float,
    sliding_window: int,
) -> None:
    """output[s] = `attend` over the positions [`window_start`, seq_lens[s]) of sequence s, its tail turned back.

    query, output: BF16 [S, heads, d]; pool: BF16 [blocks, block_size, d]; block_tables: int32 [S, m]; seq_lens: int32
    [S]; positions: u32 [S], of the queries; sinks: FP32 [heads] or None. All in FP32, rounded once. Rows of output for
    a sequence of length 0 stay as they are. A sequence's bits depend on that sequence alone.
    """
    numbers = rope_dim, scale, theta, sliding_window
    _decode(query, pool, lambda rows: rows, output, block_tables, seq_lens, positions, sinks, *numbers)


def spark_v4_paged_decode_fp8(
    query: Bf16Array,
    pool: U8Array,
    output: Bf16Array,
    block_tables: I32Array,
    seq_lens: I32Array,
    positions: U32Array,
    sinks: F32Array | None,
    rope_dim: int,
    scale: float,
    theta: float,
    sliding_window: int,
) -> None:
    """As `spark_v4_paged_decode` over a pool of E4M3 bytes with a scale of 1."""
    numbers = rope_dim, scale, theta, sliding_window
    _decode(query, pool, from_e4m3, output, block_tables, seq_lens, positions, sinks, *numbers)
