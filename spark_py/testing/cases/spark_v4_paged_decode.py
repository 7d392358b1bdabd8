# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module spark_v4_paged_decode: blocks scattered over a pool in which everything else is NaN, sinks that take
all of the weight or none of it, windows shorter and longer than a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from ...catalog.spec import Call
from ..case import Argument, Case, Draw
from ..compare import f64, rounds
from ..inputs import BF16, Array, normal
from .spark_v4_rope import BOUND, turned

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
# (heads, head_dim, rope_dim, block_size, window)
SHAPES = [(3, 32, 8, 16, 5), (4, 64, 16, 7, 16), (2, 512, 64, 16, 128), (1, 264, 10, 32, 20), (5, 8, 8, 1, 0)]
LARGEST = 8.0


def lengths_for(window: int) -> list[int]:
    """An empty sequence, one row, lengths around the window and around edges of blocks."""
    return [1, 0, 16, 17, max(window - 1, 2), max(window, 3), window + 1, 3 * window + 2]


def draw_sinks(rng: np.random.Generator, heads: int) -> Array:
    """One that takes nearly all of the weight, one that takes none, and ordinary ones."""
    sinks = (rng.standard_normal(heads) * 2).astype(np.float32)
    extremes = [LARGEST, -30.0][: heads - 1]
    sinks[rng.permutation(heads)[: len(extremes)]] = extremes
    return sinks


def attend(query: Array, rows: Array, sinks: Array | None, scale: float) -> tuple[Array, Array]:
    """Attention of one sequence in FP64 before the rotation, and the error that FP32 is allowed: [heads, d] each.

    A score is a sum of d products, 16 and then 5 additions deep, and a product; its error shifts the weights by twice
    that. expf is within 2 ulp, of differences that are rounded once; sums are n / 8 + 8 additions deep.
    """
    scores, depth = query @ rows.T * scale, np.abs(query) @ np.abs(rows).T * scale
    top = scores.max(axis=1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks[:, None])
    weights = np.exp(scores - top)
    total = weights.sum(axis=1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks[:, None] - top)
    weights /= total
    error = 2 * (22 * 2.0**-24 * depth).max(axis=1) + (len(rows) / 8 + 24) * 2.0**-23
    return weights @ rows, error[:, None] * (weights @ np.abs(rows))


def turned_back(exact: Array, slack: Array, position: int, rope_dim: int, theta: float) -> tuple[Array, Array]:
    """The heads with their tails turned back, and the error that is allowed by then."""
    exact, slack = exact.copy(), slack.copy()
    start = exact.shape[1] - rope_dim
    before = slack[:, start:]
    own = np.array([position], np.uint32)
    tail, lost = (part[0] for part in turned(exact[None, :, start:].copy(), own, theta, inverse=True))
    carried = np.repeat(before[:, 0::2] + before[:, 1::2], 2, axis=1)
    exact[:, start:], slack[:, start:] = tail, lost + carried * (1 + BOUND)
    return exact, slack


def _all(c: Call) -> tuple[Array, Array]:
    exact, slack = f64(c.O).copy(), np.zeros(c.O.shape)  # an empty sequence leaves its rows alone
    pool = c.pool.view(E4M3) if c.pool.dtype == np.uint8 else c.pool
    sinks = None if c.sinks is None else f64(c.sinks)
    for sequence, length in enumerate(c.seq_lens.tolist()):
        if length:
            places = np.arange(max(length - c.sliding_window, 0) if c.sliding_window else 0, length)
            rows = f64(pool[c.block_tables[sequence, places // c.block_size], places % c.block_size])
            made = attend(f64(c.Q[sequence]), rows, sinks, c.inv_sqrt_d)
            position = int(c.positions[sequence])
            exact[sequence], slack[sequence] = turned_back(*made, position, c.rope_dim, c.theta)
    return exact, slack


_CLOSE: Mapping[str, Any] = {"O": rounds(lambda c: _all(c)[0], slack=lambda c: _all(c)[1])}


def _arguments(shape: tuple[int, ...], narrow: bool, sinks: bool) -> Draw:
    heads, size, rope_dim, block_size, window = shape
    lengths = lengths_for(window or 40)

    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        counts = [-(-length // block_size) for length in lengths]
        blocks, most = sum(counts) + 3, max(counts)
        pages = np.split(rng.permutation(blocks)[: sum(counts)], np.cumsum(counts)[:-1])
        tables = np.full((len(lengths), most), 1 << 29, np.int32)
        pool = np.full((blocks, block_size, size), np.nan, BF16)
        for table, mine, length in zip(tables, pages, lengths, strict=True):
            table[: len(mine)] = mine
            for position, row in enumerate(normal(rng, length, size)):
                pool[mine[position // block_size], position % block_size] = row
        made: dict[str, Argument] = {"Q": normal(rng, len(lengths), heads, size, scale=2.5), "block_tables": tables}
        made |= {"pool": pool.astype(E4M3).view(np.uint8) if narrow else pool}
        made |= {"seq_lens": np.array(lengths, np.int32), "max_blocks_per_seq": most, "num_heads": heads}
        # Positions that the lengths do not give: a cache may hold fewer rows than the text has tokens.
        made |= {"positions": rng.integers(0, 4000, len(lengths)).astype(np.uint32)}
        made |= {"sinks": draw_sinks(rng, heads) if sinks else None, "head_dim": size, "rope_dim": rope_dim}
        made |= {"block_size": block_size, "inv_sqrt_d": float(1.0 / np.sqrt(size)), "sliding_window": window}
        return made | {"theta": float(rng.choice([10000.0, 160000.0]))}

    return draw


def _cases(narrow: bool) -> tuple[Case, ...]:
    return tuple(
        Case(
            f"{shape[0]} heads of {shape[1]}, {shape[2]} rotated, blocks of {shape[3]}, window {shape[4]}"
            + ("" if sinks else ", no sinks"),
            _arguments(shape, narrow, sinks),
            _CLOSE,
            (1, len(lengths_for(1)), 1),
        )
        for number, shape in enumerate(SHAPES)
        for sinks in ((True, False) if number == 1 else (True,))
    )


CASES: Mapping[str, tuple[Case, ...]] = {
    "spark_v4_paged_decode": _cases(False),
    "spark_v4_paged_decode_fp8": _cases(True),
}
