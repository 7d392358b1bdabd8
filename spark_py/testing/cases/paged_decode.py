# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module paged_decode: blocks scattered over a pool in which everything else is NaN."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...catalog.spec import Call
from ..case import Argument, Case, Draw
from ..compare import f64, rounds
from ..inputs import BF16, Array, normal

LENGTHS = [1, 0, 15, 16, 17, 127, 129]
# (q heads, kv heads, head_dim, block_size, window)
SHAPES = [
    (1, 1, 32, 16, 0),
    (4, 1, 64, 16, 0),
    (4, 4, 96, 7, 0),
    (8, 2, 128, 16, 0),
    (4, 1, 64, 16, 100),
    (8, 2, 128, 16, 16),
]


def _arguments(shape: tuple[int, ...], gap: int = 0) -> Draw:
    heads, kv_heads, size, block_size, window = shape

    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        counts = [-(-length // block_size) for length in LENGTHS]
        blocks, most = sum(counts) + 3, max(counts)
        pages = np.split(rng.permutation(blocks)[: sum(counts)], np.cumsum(counts)[:-1])
        tables = np.full((len(LENGTHS), most), 1 << 29, np.int32)
        pools = [np.full((blocks, block_size, kv_heads, size), np.nan, BF16) for _ in range(2)]
        for table, mine, length in zip(tables, pages, LENGTHS, strict=True):
            table[: len(mine)] = mine
            for cache in pools:
                for position, row in enumerate(normal(rng, length, kv_heads, size)):
                    cache[mine[position // block_size], position % block_size] = row
        query = np.full((len(LENGTHS), heads * size + gap), np.nan, BF16)
        query[:, : heads * size] = normal(rng, len(LENGTHS), heads * size, scale=2.5)
        flat = query.reshape(-1)[: query.size - gap]
        made: dict[str, Argument] = {"Q": flat, "K_cache": pools[0], "V_cache": pools[1], "block_tables": tables}
        made |= {"seq_lens": np.array(LENGTHS, np.int32), "max_blocks_per_seq": most, "num_q_heads": heads}
        made |= {"num_kv_heads": kv_heads, "head_dim": size, "block_size": block_size, "sliding_window": window}
        return made | {"inv_sqrt_d": float(1.0 / np.sqrt(size)), "q_stride": heads * size + gap}

    return draw


def _attend(c: Call, query: Array, table: Array, length: int) -> tuple[Array, Array]:
    """Attention of one sequence in FP64 and the error that FP32 is allowed: [nq, hd] each.

    A score is a sum of head_dim products and a product; its error shifts the weights by twice that. Exponentials are
    within a few ulp, and sums as deep as the sequence is long.
    """
    first = length - c.sliding_window if 0 < c.sliding_window < length else 0
    places = np.arange(first, length)
    rows = table[places // c.block_size], places % c.block_size
    group = c.num_q_heads // c.num_kv_heads
    k, v = (np.repeat(f64(cache[rows]), group, axis=1) for cache in (c.K_cache, c.V_cache))
    scores = np.einsum("hd,phd->ph", f64(query), k) * c.inv_sqrt_d
    depth = np.einsum("hd,phd->ph", np.abs(f64(query)), np.abs(k)) * c.inv_sqrt_d
    weights = np.exp(scores - scores.max(axis=0))
    weights /= weights.sum(axis=0)
    error = 2 * (40 * 2.0**-24 * depth).max(axis=0) + (len(places) + 64) * 2.0**-23
    return np.einsum("ph,phd->hd", weights, v), error[:, None] * np.einsum("ph,phd->hd", weights, np.abs(v))


def _all(c: Call) -> tuple[Array, Array]:
    step = c.Q.itemsize
    shape = (c.grid[1], c.num_q_heads, c.head_dim)
    query = np.lib.stride_tricks.as_strided(c.Q, shape, (c.q_stride * step, c.head_dim * step, step))
    exact, slack = f64(c.O).copy(), np.zeros(c.O.shape)  # an empty sequence leaves its rows alone
    for sequence, length in enumerate(c.seq_lens.tolist()):
        if length:
            exact[sequence], slack[sequence] = _attend(c, query[sequence], c.block_tables[sequence], length)
    return exact, slack


_CLOSE: Mapping[str, Any] = {"O": rounds(lambda c: _all(c)[0], slack=lambda c: _all(c)[1])}


def _case(shape: tuple[int, ...], gap: int = 0, **more: Any) -> Case:
    heads, kv_heads, size, block_size, window = shape
    name = f"{heads}/{kv_heads} heads of {size}, blocks of {block_size}, window {window}" + (
        f", {gap} apart" if gap else ""
    )
    return Case(name, _arguments(shape, gap), _CLOSE, (1, len(LENGTHS), 1), **more)


CASES: Mapping[str, tuple[Case, ...]] = {
    "paged_decode_attn": (
        *map(_case, SHAPES),
        _case((4, 1, 64, 16, 0), 64, tag="abi"),
        _case((4, 2, 256, 32, 0)),
        _case((2, 1, 128, 16, 1)),
        _case((2, 2, 512, 32, 0), tag="decision", subject="heads of more than 256"),
    ),
}
