# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module spark_paged_decode_split: blocks scattered over a pool in which everything else is NaN."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from ...catalog.spec import Call
from ...reference.spark_paged_decode_split import MOST, splits_of
from ..case import Argument, Case, Draw
from ..compare import f64, rounds
from ..inputs import BF16, F32, Array, normal

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
LENGTHS = (1, 0, 15, 64, 65, 177)
LONG, LONGER = (2500, 3), (8300,)
# (q heads, kv heads, head_dim, block_size, window, lengths): groups of 1, 3, 6, 8 and more than a block takes
Shape = tuple[int, int, int, int, int, tuple[int, ...]]
SHAPES: tuple[Shape, ...] = (
    (2, 2, 64, 16, 0, LENGTHS),
    (6, 1, 256, 16, 0, LENGTHS),
    (8, 1, 128, 16, 100, LENGTHS),
    (3, 1, 192, 7, 0, LENGTHS),
    (11, 1, 64, 16, 1, LENGTHS),
    (3, 1, 64, 16, 0, LONG),
    (1, 1, 64, 16, 0, LONGER),
    (18, 2, 64, 16, 0, LONG),
)
# Of a score: products are exact, sums as deep as a tensor core's may lose a bit at each step.
SCORE_ERROR, WEIGHT_ERROR = 80 * 2.0**-23, 2.0**-16


def cached(codes: Array) -> Array:
    """The values of BF16 rows or E4M3 bytes, FP64."""
    return f64(codes.view(E4M3)) if codes.dtype == np.uint8 else f64(codes)


def split_oracle(query: Array, keys: Array, values: Array, scale: float) -> tuple[Array, Array, Array, Array, Array]:
    """One split in FP64: largest scores and sums of weights [nq], weighted values [nq, hd]; then the error that a
    largest score is allowed [nq], and that of weighted values relative to it [nq, hd].

    query BF16 [nq, hd]; keys and values FP64 [n, nkv, hd].
    """
    group = len(query) // keys.shape[1]
    k, v = np.repeat(keys, group, axis=1), np.repeat(values, group, axis=1)
    scores = np.einsum("hd,phd->ph", f64(query), k) * scale
    error = (SCORE_ERROR * np.einsum("hd,phd->ph", np.abs(f64(query)), np.abs(k)) * abs(scale)).max(axis=0)
    weights = np.exp(scores - scores.max(axis=0))
    relative = 2 * error + (len(keys) + 64) * 2.0**-22 + WEIGHT_ERROR
    sums = np.einsum("ph,phd->hd", weights, v), np.einsum("ph,phd->hd", weights, np.abs(v))
    return scores.max(axis=0), weights.sum(axis=0), sums[0], error, relative[:, None] * np.stack(sums)[1]


def _arguments(shape: Shape, fp8: bool, gap: int) -> Draw:
    heads, kv_heads, size, block_size, window, lengths = shape
    row = kv_heads * size
    stride = block_size * row + (64 if gap else 0)

    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        counts = [-(-length // block_size) for length in lengths]
        blocks, most = sum(counts) + 3, max(counts) + gap
        pages = np.split(rng.permutation(blocks)[: sum(counts)], np.cumsum(counts)[:-1])
        tables = np.full((len(lengths), most), 1 << 29, np.int32)
        pools = [np.full((blocks, stride), 0x7F if fp8 else np.nan, np.uint8 if fp8 else BF16) for _ in range(2)]
        for table, mine, length in zip(tables, pages, lengths, strict=True):
            table[: len(mine)] = mine
            for pool in pools:
                rows = normal(rng, length, row)
                stored = rows.astype(np.float32).astype(E4M3).view(np.uint8) if fp8 else rows
                for position, each in enumerate(stored):
                    start = position % block_size * row
                    pool[mine[position // block_size], start : start + row] = each
        lens = np.full((len(lengths), 1 + gap), 1 << 28, np.int32)
        lens[:, 0] = lengths
        query = np.full((len(lengths), heads * size + 8 * gap), np.nan, BF16)
        query[:, : heads * size] = normal(rng, len(lengths), heads * size, scale=2.5)
        made: dict[str, Argument] = {"Q": query.reshape(-1)[: query.size - 8 * gap], "K_cache": pools[0]}
        made |= {"V_cache": pools[1], "block_tables": tables, "seq_lens": lens.reshape(-1)[: lens.size - gap]}
        made |= {"table_stride": most, "lens_stride": 1 + gap, "num_q_heads": heads, "num_kv_heads": kv_heads}
        made |= {"head_dim": size, "block_size": block_size, "scale": float(1.0 / np.sqrt(size))}
        return made | {"q_stride": heads * size + 8 * gap, "cache_stride": stride, "sliding_window": window}

    return draw


def _splits(c: Call) -> Iterator[tuple[int, int, tuple[Array, ...]]]:
    """Sequence, number and oracle of each split."""
    row = c.num_kv_heads * c.head_dim
    for sequence, length in enumerate(c.seq_lens[:: c.lens_stride].tolist()):
        start = sequence * c.q_stride
        query = c.Q[start : start + c.num_q_heads * c.head_dim].reshape(c.num_q_heads, c.head_dim)
        table = c.block_tables.reshape(-1)[sequence * c.table_stride :]
        for split, (begin, end) in enumerate(splits_of(length, c.sliding_window, c.num_q_heads)):
            places = np.arange(begin, end)
            at = table[places // c.block_size].astype(np.int64) * c.cache_stride + places % c.block_size * row
            k, v = (
                cached(pool.reshape(-1)[at[:, None] + np.arange(row)]).reshape(len(places), c.num_kv_heads, c.head_dim)
                for pool in (c.K_cache, c.V_cache)
            )
            yield sequence, split, split_oracle(query, k, v, c.scale)


def _partial(c: Call, slack: bool) -> Array:
    made = np.zeros(c.partial.shape) if slack else f64(c.partial)
    for sequence, split, (_, _, values, error, allowed) in _splits(c):
        # The largest score's own error scales what it is relative to.
        made[sequence, :, split] = allowed + error[:, None] * np.abs(values) if slack else values
    return made


def _sums(c: Call, slack: bool) -> Array:
    made = np.zeros(c.sums.shape) if slack else f64(c.sums)
    for sequence, split, (tops, weights, _, error, _) in _splits(c):
        relative = 3 * error + 2.0**-14
        made[sequence, :, split] = np.stack(
            [error + 2.0**-22, relative * weights] if slack else [tops, weights], axis=1
        )
    return made


_CLOSE: Mapping[str, Any] = {
    "partial": rounds(lambda c: _partial(c, False), slack=lambda c: _partial(c, True)),
    "sums": rounds(lambda c: _sums(c, False), slack=lambda c: _sums(c, True)),
}


def _case(shape: Shape, fp8: bool = False, gap: int = 0) -> Case:
    heads, kv_heads, size, block_size, window, lengths = shape
    name = (
        f"{heads}/{kv_heads} heads of {size}, blocks of {block_size}, window {window}, up to {max(lengths)} positions"
    )
    name += f", everything {gap} apart" if gap else ""
    parts = -(-(heads // kv_heads) // 8)
    return Case(name, _arguments(shape, fp8, gap), _CLOSE, (kv_heads * parts, MOST, len(lengths)))


def merged(c: Call) -> tuple[Array, Array]:
    """Attention from splits in FP64, and the error that FP32 is allowed: [S, nq, hd] each."""
    exact, slack = f64(c.O).copy(), np.zeros(c.O.shape)
    for sequence, length in enumerate(c.seq_lens[:: c.lens_stride].tolist()):
        count = len(splits_of(length, c.sliding_window, c.num_q_heads))
        if count:
            tops, weights = np.moveaxis(f64(c.sums[sequence, :, :count]), 2, 0)
            shares = np.exp(tops - tops.max(axis=1, keepdims=True))
            total = (shares * weights).sum(axis=1)[:, None]
            parts = f64(c.partial[sequence, :, :count])
            exact[sequence] = np.einsum("hs,hsd->hd", shares, parts) / total * c.output_scale
            depth = np.einsum("hs,hsd->hd", shares, np.abs(parts)) / total * abs(c.output_scale)
            slack[sequence] = (count + 32) * 2.0**-22 * depth
    return exact, slack


def _gated(c: Call, slack: bool) -> Array:
    """The output; with a gate the rounded mean times a sigmoid, where a mean may round either way."""
    exact, error = merged(c)
    if c.gate is None:
        return error if slack else exact
    shape = (c.grid[1], c.num_q_heads * c.head_dim)
    rows = np.lib.stride_tricks.as_strided(c.gate, shape, (2 * c.gate_stride, 2))
    gates = (1.0 / (1.0 + np.exp(-f64(rows)))).reshape(exact.shape)
    written = np.repeat(c.seq_lens[:: c.lens_stride] > 0, c.num_q_heads * c.head_dim).reshape(exact.shape)
    low, high = f64((exact - error).astype(BF16)), f64((exact + error).astype(BF16))
    middle, half = (low + high) / 2 * gates, (high - low) / 2 * gates + 2.0**-21 * np.abs(exact)
    return np.where(written, half, 0.0) if slack else np.where(written, middle, exact)


def _merge_arguments(lengths: tuple[int, ...], heads: int, size: int, window: int, gated: bool, gap: int) -> Draw:
    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        partial = np.full((len(lengths), heads, MOST, size), np.nan, F32)
        sums = np.full((len(lengths), heads, MOST, 2), np.nan, F32)
        for sequence, length in enumerate(lengths):
            count = len(splits_of(length, window, heads))
            partial[sequence, :, :count] = rng.standard_normal((heads, count, size))
            sums[sequence, :, :count, 0] = rng.standard_normal((heads, count)) * 3
            sums[sequence, :, :count, 1] = rng.uniform(1, 20, (heads, count))
        lens = np.full((len(lengths), 1 + gap), 1 << 28, np.int32)
        lens[:, 0] = lengths
        stride = heads * size + gap
        gate = np.full((len(lengths), stride), np.nan, BF16)
        gate[:, : heads * size] = normal(rng, len(lengths), heads * size, scale=2)
        made: dict[str, Argument] = {"partial": partial, "sums": sums, "lens_stride": 1 + gap, "num_q_heads": heads}
        made |= {"gate": gate.reshape(-1)[: gate.size - gap] if gated else None, "gate_stride": stride}
        made |= {"seq_lens": lens.reshape(-1)[: lens.size - gap], "head_dim": size, "sliding_window": window}
        return made | {"output_scale": 0.75}

    return draw


def _merge(lengths: tuple[int, ...], heads: int, size: int, window: int, gated: bool, gap: int = 0) -> Case:
    name = f"{heads} heads of {size}, window {window}, up to {max(lengths)} positions{', gated' if gated else ''}"
    bound = rounds(lambda c: _gated(c, False), slack=lambda c: _gated(c, True))
    arguments = _merge_arguments(lengths, heads, size, window, gated, gap)
    return Case(
        name + (f", everything {gap} apart" if gap else ""), arguments, {"O": bound}, (heads, len(lengths), size // 64)
    )


CASES: Mapping[str, tuple[Case, ...]] = {
    "spark_paged_decode_split": (*map(_case, SHAPES), _case(SHAPES[0], gap=2), _case(SHAPES[2], gap=1)),
    "spark_paged_decode_split_fp8": (*(_case(shape, True) for shape in SHAPES[:3]), _case(SHAPES[0], True, 2)),
    "spark_paged_decode_merge": (
        _merge((1, 0, 65, 4096), 2, 64, 0, False),
        _merge((500, 70), 3, 256, 0, True),
        _merge((9000, 0, 300), 1, 192, 200, True, 3),
        _merge((100_000,), 1, 128, 0, False),
        _merge((2500,), 18, 64, 0, False),
    ),
}
