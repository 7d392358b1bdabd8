# SPDX-License-Identifier: AGPL-3.0-only
"""Module paged_decode: attention over scattered blocks equals contiguous attention in FP64; a row is a row anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from spark_py.ops import paged_decode as ops
from spark_py.runtime.errors import ArgumentPointerError, ArgumentRangeError, InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.testing import (
    BF16,
    POISON,
    Array,
    Output,
    alloc_or_skip,
    assert_rounds,
    assert_same_bits,
    f64,
    normal,
    upload,
)

from .support import checks

LENGTHS = [1, 0, 15, 16, 17, 127, 128, 129]
# (nq, nkv, head_dim, block_size, window): head sizes of every vector width, groups of 1, 4 and 8.
SHAPES = [
    (1, 1, 32, 16, 0),
    (4, 1, 64, 16, 0),
    (4, 4, 96, 7, 0),
    (8, 2, 128, 16, 0),
    (8, 1, 256, 16, 0),
    (2, 2, 512, 32, 0),
    (4, 1, 64, 16, 100),
    (8, 1, 128, 16, 16),
    (2, 1, 160, 1, 1),
    (1, 1, 448, 16, 5000),
]


@dataclass(frozen=True)
class Case:
    """Queries [S, nq, hd], and for each sequence its keys and values [L, nkv, hd] and the blocks that hold them."""

    query: Array
    keys: list[Array]
    values: list[Array]
    pages: list[Array]
    blocks: int
    block_size: int
    window: int

    @property
    def lengths(self) -> list[int]:
        return [len(keys) for keys in self.keys]

    def only(self, chosen: Sequence[int]) -> Case:
        """The same sequences in the same blocks, `chosen` of them, in that order."""
        pick = [[group[i] for i in chosen] for group in (self.keys, self.values, self.pages)]
        return Case(self.query[list(chosen)], *pick, self.blocks, self.block_size, self.window)


def draw(
    rng: np.random.Generator, lengths: Sequence[int], heads: int, kv_heads: int, size: int, block_size: int, window: int
) -> Case:
    """Blocks of all sequences are scattered over a pool with a few to spare. Scores spread over about +-8."""
    keys = [normal(rng, length, kv_heads, size) for length in lengths]
    values = [normal(rng, length, kv_heads, size) for length in lengths]
    counts = [-(-length // block_size) for length in lengths]
    blocks = sum(counts) + 3
    pages = np.split(rng.permutation(blocks)[: sum(counts)], np.cumsum(counts)[:-1])
    query = normal(rng, len(lengths), heads, size, scale=2.5)
    return Case(query, keys, values, list(pages), blocks, block_size, window)


def pool(case: Case, rows: list[Array]) -> Array:
    """The pool [blocks, block_size, nkv, hd]; every slot that holds no position is NaN."""
    made = np.full((case.blocks, case.block_size, *rows[0].shape[1:]), np.nan, BF16)
    for array, blocks in zip(rows, case.pages, strict=True):
        for position, row in enumerate(array):
            made[blocks[position // case.block_size], position % case.block_size] = row
    return made


def scale_of(case: Case) -> float:
    return float(np.float32(1.0 / np.sqrt(case.query.shape[2])))


def run(gpu: GpuBackend, case: Case, gap: int = 0, pool_gap: int = 0) -> Array:
    """The outputs [S, nq, hd]. Queries lie `gap` elements apart with NaN between; block tables are `pool_gap` longer
    than needed, and name blocks that do not exist wherever no position is."""
    count, heads, size = case.query.shape
    most = max(max(map(len, case.pages)), 1) + pool_gap
    tables = np.full((count, most), 1 << 29, np.int32)
    for row, blocks in zip(tables, case.pages, strict=True):
        row[: len(blocks)] = blocks
    apart = np.full((count, heads * size + gap), np.nan, BF16)
    apart[:, : heads * size] = case.query.reshape(count, -1)
    output = Output(gpu, case.query.shape)
    ops.paged_decode_attn(
        gpu, gpu.kernel("paged_decode", "paged_decode_attn"), upload(gpu, apart), upload(gpu, pool(case, case.keys)),
        upload(gpu, pool(case, case.values)), output.ptr, upload(gpu, tables),
        upload(gpu, np.array(case.lengths, np.int32)), most, count, heads, case.keys[0].shape[1], size, case.block_size,
        scale_of(case), heads * size + gap, case.window, gpu.default_stream(),
    )  # fmt: skip
    return output.read()


def oracle(query: Array, keys: Array, values: Array, scale: float) -> tuple[Array, Array]:
    """Attention of one sequence in FP64, and the error that FP32 is allowed: [nq, hd] each.

    A score is a sum of head_dim products 21 additions deep and a product; its error shifts the weights by twice that.
    expf is within 2 ulp, of differences that are rounded once; sums are length / 8 + 8 additions deep.
    """
    group = query.shape[0] // keys.shape[1]
    k, v = np.repeat(f64(keys), group, axis=1), np.repeat(f64(values), group, axis=1)
    scores = np.einsum("hd,phd->ph", f64(query), k) * scale
    depth = np.einsum("hd,phd->ph", np.abs(f64(query)), np.abs(k)) * scale
    weights = np.exp(scores - scores.max(axis=0))
    weights /= weights.sum(axis=0)
    score_error = (22 * 2.0**-24 * depth).max(axis=0)
    relative = 2 * score_error + (len(keys) / 8 + 24) * 2.0**-23
    return np.einsum("ph,phd->hd", weights, v), relative[:, None] * np.einsum("ph,phd->hd", weights, np.abs(v))


def compare(got: Array, case: Case, what: str) -> None:
    for sequence, length in enumerate(case.lengths):
        if length == 0:
            assert (got[sequence].view(np.uint8) == POISON).all(), f"{what}: an empty sequence was written"
            continue
        first = length - case.window if 0 < case.window < length else 0
        keys, values = case.keys[sequence][first:], case.values[sequence][first:]
        exact, slack = oracle(case.query[sequence], keys, values, scale_of(case))
        assert_rounds(got[sequence], exact, 0.0, slack, f"{what}, sequence {sequence} of length {length}")


@checks("paged_decode::paged_decode_attn")
def check_paged_decode(gpu: GpuBackend, rng: np.random.Generator) -> None:
    for number, (heads, kv_heads, size, block_size, window) in enumerate(SHAPES):
        case = draw(rng, LENGTHS, heads, kv_heads, size, block_size, window)
        what = f"{heads}/{kv_heads} heads of {size}, blocks of {block_size}, window {window}"
        compare(run(gpu, case, gap=32 * (number % 3), pool_gap=number % 2), case, what)


def test_paged_decode(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_paged_decode(gpu, rng)


@pytest.mark.parametrize("window", [0, 1, 16, 100, 4095, 4096])
def test_long_sequences(gpu: GpuBackend, rng: np.random.Generator, window: int) -> None:
    case = draw(rng, [4096, 0, 257], 4, 1, 64, 16, window)
    compare(run(gpu, case), case, f"window {window}")


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 1), (8, 1), (8, 8), (24, 4)])
@pytest.mark.parametrize("size", [32, 64, 96, 128, 256, 512])
def test_every_head_size_and_group(
    gpu: GpuBackend, rng: np.random.Generator, size: int, heads: int, kv_heads: int
) -> None:
    case = draw(rng, [37], heads, kv_heads, size, 16, 0)
    compare(run(gpu, case), case, f"{heads}/{kv_heads} heads of {size}")


def test_a_window_of_one_gives_the_last_value(gpu: GpuBackend, rng: np.random.Generator) -> None:
    case = draw(rng, LENGTHS, 2, 1, 128, 16, 1)
    got = run(gpu, case)
    for sequence, length in enumerate(case.lengths):
        if length:
            for head in range(2):
                assert_same_bits(got[sequence, head], case.values[sequence][-1, 0])


@pytest.mark.parametrize(("size", "window"), [(64, 0), (96, 20), (256, 0)])
def test_a_sequence_does_not_depend_on_the_others(
    gpu: GpuBackend, rng: np.random.Generator, size: int, window: int
) -> None:
    case = draw(rng, [*LENGTHS, 700, 33], 4, 2, size, 16, window)
    together = run(gpu, case)
    for chosen in ([0], [2], [7], [8], [9], [9, 3, 5], [3, 9]):
        got = run(gpu, case.only(chosen), gap=64, pool_gap=5)
        assert_same_bits(got, together[chosen], f"sequences {chosen}")


def test_where_the_blocks_lie_does_not_matter(gpu: GpuBackend, rng: np.random.Generator) -> None:
    case = draw(rng, [130, 47], 4, 1, 128, 16, 0)
    first = run(gpu, case)
    order = rng.permutation(case.blocks)
    moved = Case(
        case.query, case.keys, case.values, [order[p] for p in case.pages], case.blocks, case.block_size, case.window
    )
    assert_same_bits(run(gpu, moved), first)
    apart = Case(case.query, case.keys, case.values, [np.arange(130), 130 + np.arange(47)], 177, 1, case.window)
    assert_same_bits(run(gpu, apart), first, "blocks of 1")


def test_extreme_scores(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """Weights that underflow are zero, equal scores share alike, and huge scores do not overflow."""
    case = draw(rng, [40], 1, 1, 64, 16, 0)
    case.query[...] = 0.0
    exact = f64(case.values[0]).mean(axis=0)
    assert_rounds(run(gpu, case)[0], exact, 0.0, np.abs(f64(case.values[0])).mean(axis=0) * 2.0**-20)
    case.query[...] = 1e4
    case.keys[0][...] = -1e4
    case.keys[0][23] = 1e4
    assert_same_bits(run(gpu, case)[0], case.values[0][23])


def test_nan_in_a_used_slot_is_not_hidden(gpu: GpuBackend, rng: np.random.Generator) -> None:
    for rows in ("keys", "values"):
        case = draw(rng, [50, 50], 2, 2, 64, 16, 0)
        getattr(case, rows)[0][31, 1, 5] = np.nan
        got = f64(run(gpu, case))
        assert np.isnan(got[0, 1]).all() if rows == "keys" else np.isnan(got[0, 1, 5])
        assert np.isfinite(got[0, 0]).all()
        assert np.isfinite(got[1]).all()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"head_dim": 48}, "head_dim"),
        ({"head_dim": 544, "q_stride": 4096}, "head_dim"),
        ({"head_dim": 0}, "head_dim"),
        ({"num_q_heads": 3}, "num_q_heads"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"num_seqs": 0}, "num_seqs"),
        ({"q_stride": 255}, "q_stride"),
        ({"sliding_window": -1}, "sliding_window"),
        ({"block_size": 0}, "block_size"),
        ({"max_blocks_per_seq": 0}, "max_blocks_per_seq"),
    ],
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, Any], name: str
) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel("paged_decode", "paged_decode_attn")
    numbers: dict[str, Any] = {"max_blocks_per_seq": 1, "num_seqs": 1, "num_q_heads": 4, "num_kv_heads": 2}
    numbers |= {"head_dim": 64, "block_size": 16, "inv_sqrt_d": 0.125, "q_stride": 256, "sliding_window": 0} | change
    with pytest.raises(InvalidArgumentError) as error:
        ops.paged_decode_attn(gpu, kernel, ptr, ptr, ptr, ptr, ptr, ptr, **numbers, stream=gpu.default_stream())
    assert error.value.name == name


def test_a_cache_off_16_bytes_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel("paged_decode", "paged_decode_attn")
    with pytest.raises(InvalidArgumentError, match="16-byte") as error:
        ops.paged_decode_attn(
            gpu, kernel, ptr, ptr, ptr.offset(2), ptr, ptr, ptr, 1, 1, 1, 1, 32, 16, 1.0, 32, 0, gpu.default_stream()
        )
    assert error.value.name == "v_cache"


@pytest.mark.host_only("CUDA cannot see lengths and block ids on the device before the kernel reads")
def test_lengths_and_blocks_beyond_the_cache_are_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    kernel, cache = gpu.kernel("paged_decode", "paged_decode_attn"), upload(gpu, normal(rng, 3, 16, 1, 32))
    query = upload(gpu, normal(rng, 32))

    def launch(length: int, table: list[int]) -> None:
        ops.paged_decode_attn(
            gpu, kernel, query, cache, cache, query, upload(gpu, np.array(table, np.int32)),
            upload(gpu, np.array([length], np.int32)), len(table), 1, 1, 1, 32, 16, 1.0, 32, 0, gpu.default_stream(),
        )  # fmt: skip

    launch(32, [2, 0])
    launch(16, [1, -1])
    with pytest.raises(ArgumentRangeError, match="seq_lens holds 33"):
        launch(33, [2, 0])
    with pytest.raises(ArgumentRangeError, match="block -1"):
        launch(17, [1, -1])
    with pytest.raises(ArgumentPointerError) as error:
        launch(17, [1, 3])
    assert error.value.parameter == "K_cache"


@pytest.mark.gpu_only("a cache of 8.6 GB: more than a CPU test should allocate")
@pytest.mark.no_sanitizer("8.6 GB of shadow memory")
def test_blocks_past_2_to_the_32_elements(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_far_blocks(gpu, rng)


@checks("paged_decode::paged_decode_attn@far")
def check_far_blocks(gpu: GpuBackend, rng: np.random.Generator) -> None:
    size, last = 512, (1 << 32) // (16 * 512)
    rows, query = normal(rng, 16, 1, size), normal(rng, 1, size)
    cache = alloc_or_skip(gpu, 2 * 16 * size * (last + 1))
    gpu.memset(cache, 0xFF, 2 * 16 * size)
    gpu.copy_h2d(rows.reshape(-1).view(np.uint8), cache.offset(2 * 16 * size * last))
    output, kernel = Output(gpu, (1, size)), gpu.kernel("paged_decode", "paged_decode_attn")
    ops.paged_decode_attn(
        gpu, kernel, upload(gpu, query), cache, cache, output.ptr, upload(gpu, np.array([last], np.int32)),
        upload(gpu, np.array([16], np.int32)), 1, 1, 1, 1, size, 16, 0.0625, size, 0, gpu.default_stream(),
    )  # fmt: skip
    got = output.read()
    gpu.free(cache)
    exact, slack = oracle(query, rows, rows, 0.0625)
    assert_rounds(got, exact, 0.0, slack)
