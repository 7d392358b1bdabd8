# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module paged_decode_fp8: E4M3 blocks scattered over a pool in which everything else is NaN."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from ...catalog.spec import Call
from ..case import Argument, Case, Draw
from ..compare import f64, rounds
from ..inputs import BF16, Array, normal
from .paged_decode import LENGTHS

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
# (q heads, kv heads, head_dim, block_size, k_scale, v_scale)
Shape = tuple[int, int, int, int, float, float]
SHAPES: list[Shape] = [
    (1, 1, 32, 16, 1.0, 1.0),
    (4, 1, 64, 16, 0.03, 0.5),
    (4, 4, 96, 7, 1.0, 3.0),
    (8, 2, 128, 16, 2.0, 0.003),
    (4, 2, 256, 32, 0.03, 0.5),
]


def _arguments(shape: Shape, gap: int = 0, block_gap: int = 0) -> Draw:
    heads, kv_heads, size, block_size, k_scale, v_scale = shape
    row = kv_heads * size
    stride = block_size * row + block_gap

    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        counts = [-(-length // block_size) for length in LENGTHS]
        blocks, most = sum(counts) + 3, max(counts)
        pages = np.split(rng.permutation(blocks)[: sum(counts)], np.cumsum(counts)[:-1])
        tables = np.full((len(LENGTHS), most), 1 << 29, np.int32)
        pools = [np.full((blocks, stride), 0x7F, np.uint8) for _ in range(2)]
        for table, mine, length in zip(tables, pages, LENGTHS, strict=True):
            table[: len(mine)] = mine
            for cache, scale in zip(pools, (k_scale, v_scale), strict=True):
                steps = np.clip(f64(normal(rng, length, row)) / scale, -448, 448)
                for position, codes in enumerate(steps.astype(E4M3).view(np.uint8)):
                    start = position % block_size * row
                    cache[mine[position // block_size], start : start + row] = codes
        query = np.full((len(LENGTHS), heads * size + gap), np.nan, BF16)
        query[:, : heads * size] = normal(rng, len(LENGTHS), heads * size, scale=2.5)
        flat = query.reshape(-1)[: query.size - gap]
        made: dict[str, Argument] = {"Q": flat, "K_cache": pools[0], "V_cache": pools[1], "block_tables": tables}
        made |= {"seq_lens": np.array(LENGTHS, np.int32), "max_blocks_per_seq": most, "num_q_heads": heads}
        made |= {"num_kv_heads": kv_heads, "head_dim": size, "block_size": block_size, "cache_stride": stride}
        made |= {"inv_sqrt_d": float(1.0 / np.sqrt(size)), "q_stride": heads * size + gap}
        return made | {"k_scale": k_scale, "v_scale": v_scale}

    return draw


def _cached(c: Call, cache: Array, rows: Array) -> Array:
    """The values [n, nq, hd] of positions at the elements `rows` of a flat cache, FP64."""
    codes = cache[rows[:, None] + np.arange(c.num_kv_heads * c.head_dim)]
    values = f64(codes.view(E4M3)).reshape(len(rows), c.num_kv_heads, c.head_dim)
    return np.repeat(values, c.num_q_heads // c.num_kv_heads, axis=1)


def _attend(c: Call, query: Array, table: Array, length: int) -> tuple[Array, Array]:
    """Attention of one sequence in FP64 and the error that FP32 is allowed, as for `paged_decode`: [nq, hd] each."""
    places = np.arange(length)
    blocks, offsets = table[places // c.block_size].astype(np.int64), places % c.block_size
    rows = blocks * c.cache_stride + offsets * c.num_kv_heads * c.head_dim
    k, v = _cached(c, c.K_cache, rows), _cached(c, c.V_cache, rows) * float(np.float32(c.v_scale))
    factor = c.inv_sqrt_d * float(np.float32(c.k_scale))
    scores = np.einsum("hd,phd->ph", f64(query), k) * factor
    depth = np.einsum("hd,phd->ph", np.abs(f64(query)), np.abs(k)) * factor
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


def _case(shape: Shape, gap: int = 0, block_gap: int = 0, **more: Any) -> Case:
    heads, kv_heads, size, block_size, k_scale, v_scale = shape
    name = f"{heads}/{kv_heads} heads of {size}, blocks of {block_size}, scales {k_scale} and {v_scale}"
    if gap or block_gap:
        name += f", rows {gap} and blocks {block_gap} apart"
    return Case(name, _arguments(shape, gap, block_gap), _CLOSE, (1, len(LENGTHS), 1), **more)


CASES: Mapping[str, tuple[Case, ...]] = {
    "paged_decode_attn_fp8": (
        *map(_case, SHAPES),
        _case((4, 1, 64, 16, 0.03, 0.5), 64, tag="abi"),
        _case((4, 1, 256, 16, 0.03, 0.5), 0, 256, tag="abi"),
        _case((2, 2, 512, 32, 1.0, 1.0), tag="decision", subject="heads of more than 256"),
    ),
}
