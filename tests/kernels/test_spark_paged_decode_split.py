# SPDX-License-Identifier: AGPL-3.0-only
"""Module spark_paged_decode_split: splits merged are attention over all positions; a sequence is one anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from spark_py.ops import paged_decode, residual_add
from spark_py.ops import spark_paged_decode_split as ops
from spark_py.reference.spark_paged_decode_split import split_length, splits_of
from spark_py.runtime.errors import ArgumentPointerError, ArgumentRangeError, InvalidArgumentError
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.testing import (
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
from spark_py.testing.cases.spark_paged_decode_split import E4M3, split_oracle

from .support import check_cases, checks

MODULE = "spark_paged_decode_split"
SPLIT, SPLIT_FP8, MERGE = "spark_paged_decode_split", "spark_paged_decode_split_fp8", "spark_paged_decode_merge"


def attend(
    gpu: GpuBackend,
    query: Array,
    caches: Sequence[Array],
    tables: Sequence[Sequence[int]],
    lengths: Sequence[int],
    window: int = 0,
    gate: Array | None = None,
    v_scale: float = 1.0,
) -> Array:
    """Split and merge: query BF16 [S, nq, hd], caches [blocks, block_size, nkv, hd] BF16 or E4M3."""
    count, heads, size = query.shape
    block_size, kv_heads = caches[0].shape[1:3]
    fp8 = caches[0].dtype == E4M3
    most = max(1, *map(len, tables))
    square = np.full((count, most), 1 << 29, np.int32)
    for row, table in zip(square, tables, strict=True):
        row[: len(table)] = table
    partial = Output(gpu, (ops.partial_bytes(count, heads, size) // 4,), np.dtype(np.float32))
    sums = Output(gpu, (ops.sums_bytes(count, heads) // 4,), np.dtype(np.float32))
    output, stream = Output(gpu, query.shape), gpu.default_stream()
    lens = upload(gpu, np.array(lengths, np.int32))
    k, v = (upload(gpu, cache.view(np.uint8) if fp8 else cache) for cache in caches)
    ops.spark_paged_decode_split(
        gpu, gpu.kernel(MODULE, SPLIT_FP8 if fp8 else SPLIT), upload(gpu, query), k, v, partial.ptr, sums.ptr,
        upload(gpu, square), lens, most, 1, count, heads, kv_heads, size, block_size, 1.0 / np.sqrt(size),
        heads * size, block_size * kv_heads * size, window, stream, fp8=fp8,
    )  # fmt: skip
    ops.spark_paged_decode_merge(
        gpu, gpu.kernel(MODULE, MERGE), partial.ptr, sums.ptr, output.ptr,
        DevicePtr.NULL if gate is None else upload(gpu, gate), lens, 1, count, heads, size, v_scale, heads * size,
        window, stream,
    )  # fmt: skip
    return output.read()


def draw(
    rng: np.random.Generator, lengths: Sequence[int], heads: int, kv_heads: int, size: int, block_size: int = 16
) -> tuple[Array, list[Array], list[list[int]]]:
    """Queries, caches and tables of sequences in scattered blocks."""
    counts = [-(-length // block_size) for length in lengths]
    order = rng.permutation(sum(counts) + 2)
    tables = [part.tolist() for part in np.split(order[: sum(counts)], np.cumsum(counts)[:-1])]
    caches = [normal(rng, len(order), block_size, kv_heads, size) for _ in range(2)]
    return normal(rng, len(lengths), heads, size, scale=2.5), caches, tables


@checks(f"{MODULE}::{SPLIT}")
def check_split(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_cases(gpu, rng, f"{MODULE}::{SPLIT}")


@checks(f"{MODULE}::{SPLIT_FP8}")
def check_split_fp8(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_cases(gpu, rng, f"{MODULE}::{SPLIT_FP8}")


@checks(f"{MODULE}::{MERGE}")
def check_merge(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_cases(gpu, rng, f"{MODULE}::{MERGE}")


def test_split(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_split(gpu, rng)


def test_split_fp8(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_split_fp8(gpu, rng)


def test_merge(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_merge(gpu, rng)


@pytest.mark.host_only("about where splits lie, not about kernels")
@pytest.mark.parametrize("heads", [1, 16, 17, 24])
def test_splits_cover_what_is_seen_and_number_at_most_64(heads: int) -> None:
    for length in (1, 16, 63, 64, 65, 2048, 2049, 4097, 8192, 8193, 16_385, 32_768, 1_000_001):
        for window in (0, 1, 100, length - 1, length):
            parts = splits_of(length, window, heads)
            first = length - window if 0 < window < length else 0
            assert [parts[0][0], *(end for _, end in parts)] == [*(begin for begin, _ in parts), length]
            assert parts[0][0] == first
            assert len(parts) <= (64 if heads <= 16 or length - first > 8192 else 32)
            assert {end - begin for begin, end in parts[:-1]} <= {split_length(length - first, heads)}
    assert splits_of(0, 0, heads) == splits_of(-1, 5, heads) == []


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(6, 1, 256), (12, 2, 64), (16, 1, 128)])
def test_merged_splits_are_attention(
    gpu: GpuBackend, rng: np.random.Generator, heads: int, kv_heads: int, size: int
) -> None:
    lengths = [1, 0, 63, 200]
    query, caches, tables = draw(rng, lengths, heads, kv_heads, size)
    got = attend(gpu, query, caches, tables, lengths)
    for sequence, length in enumerate(lengths):
        if length == 0:
            assert (got[sequence].view(np.uint8) == POISON).all(), "an empty sequence was written"
            continue
        at = np.array(tables[sequence])[np.arange(length) // 16], np.arange(length) % 16
        keys, values = (f64(cache[at]) for cache in caches)
        _, weights, sums, _, allowed = split_oracle(query[sequence], keys, values, float(np.float32(1 / np.sqrt(size))))
        assert_rounds(got[sequence], sums / weights[:, None], 0.0, 2 * allowed / weights[:, None], f"length {length}")


def test_a_gate_is_the_gate_kernel_afterwards(gpu: GpuBackend, rng: np.random.Generator) -> None:
    query, caches, tables = draw(rng, [100, 30], 6, 1, 64)
    gate = normal(rng, *query.shape, scale=2)
    plain, output = attend(gpu, query, caches, tables, [100, 30]), Output(gpu, query.shape)
    residual_add.sigmoid_gate_mul(
        gpu, gpu.kernel("residual_add", "sigmoid_gate_mul"), upload(gpu, plain), upload(gpu, gate), output.ptr,
        query.size, gpu.default_stream(),
    )  # fmt: skip
    assert_same_bits(attend(gpu, query, caches, tables, [100, 30], gate=gate), output.read())


@pytest.mark.parametrize("fp8", [False, True])
def test_a_sequence_does_not_depend_on_the_others(gpu: GpuBackend, rng: np.random.Generator, fp8: bool) -> None:
    lengths = [1, 0, 64, 65, 130]
    query, caches, tables = draw(rng, lengths, 6, 2, 64)
    if fp8:
        caches = [cache.astype(np.float32).astype(E4M3) for cache in caches]
    together = attend(gpu, query, caches, tables, lengths, 100, v_scale=0.5)
    for chosen in ([0], [3], [4, 1, 2]):
        some = [lengths[i] for i in chosen], [tables[i] for i in chosen]
        got = attend(gpu, query[chosen], caches, some[1], some[0], 100, v_scale=0.5)
        assert_same_bits(got, together[chosen], f"sequences {chosen}")


def test_close_to_the_kernel_of_one_block_a_head(gpu: GpuBackend, rng: np.random.Generator) -> None:
    lengths = [90, 17]
    query, caches, tables = draw(rng, lengths, 4, 1, 128)
    output, most = Output(gpu, query.shape), max(map(len, tables))
    square = np.array([table + [0] * (most - len(table)) for table in tables], np.int32)
    paged_decode.paged_decode_attn(
        gpu, gpu.kernel("paged_decode", "paged_decode_attn"), upload(gpu, query), upload(gpu, caches[0]),
        upload(gpu, caches[1]), output.ptr, upload(gpu, square), upload(gpu, np.array(lengths, np.int32)), most, 2, 4,
        1, 128, 16, 1 / np.sqrt(128), 4 * 128, 0, gpu.default_stream(),
    )  # fmt: skip
    got, other = f64(attend(gpu, query, caches, tables, lengths)), f64(output.read())
    assert (np.abs(got - other) <= 2.0**-7 * np.abs(other) + 2.0**-14).all()


def test_extreme_scores(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """Weights that underflow are zero, equal scores share alike, and huge scores do not overflow."""
    query, caches, tables = draw(rng, [150], 1, 1, 64)
    at = np.array(tables[0])[np.arange(150) // 16], np.arange(150) % 16
    values = f64(caches[1][at])[:, 0]
    query[...] = 0.0
    assert_rounds(
        attend(gpu, query, caches, tables, [150])[0, 0],
        values.mean(axis=0),
        0.0,
        np.abs(values).mean(axis=0) * 2.0**-15,
    )
    query[...] = 1e4
    caches[0][...] = -1e4
    caches[0][at[0][70], at[1][70]] = 1e4
    assert_same_bits(attend(gpu, query, caches, tables, [150])[0, 0], caches[1][at[0][70], at[1][70], 0])


def test_nan_in_a_used_slot_is_not_hidden(gpu: GpuBackend, rng: np.random.Generator) -> None:
    for which in (0, 1):
        query, caches, tables = draw(rng, [100, 50], 2, 2, 64)
        caches[which][tables[0][5], 3, 1, 7] = np.nan
        got = f64(attend(gpu, query, caches, tables, [100, 50]))
        assert np.isnan(got[0, 1]).all() if which == 0 else np.isnan(got[0, 1, 7])
        assert np.isfinite(got[0, 0]).all()
        assert np.isfinite(got[1]).all()


NUMBERS: dict[str, Any] = {"table_stride": 1, "lens_stride": 1, "num_seqs": 1, "num_q_heads": 4, "num_kv_heads": 2}
NUMBERS |= {
    "head_dim": 64,
    "block_size": 16,
    "scale": 0.125,
    "q_stride": 256,
    "cache_stride": 2048,
    "sliding_window": 0,
}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"head_dim": 96, "q_stride": 384}, "head_dim"),
        ({"head_dim": 320, "q_stride": 2048}, "head_dim"),
        ({"num_q_heads": 3}, "num_q_heads"),
        ({"num_seqs": 0}, "num_seqs"),
        ({"q_stride": 248}, "q_stride"),
        ({"q_stride": 260}, "q_stride"),
        ({"cache_stride": 2047}, "cache_stride"),
        ({"cache_stride": 2052}, "cache_stride"),
        ({"sliding_window": -1}, "sliding_window"),
        ({"lens_stride": 0}, "lens_stride"),
        ({"scale": float("nan")}, "scale"),
    ],
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, Any], name: str
) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel(MODULE, SPLIT)
    with pytest.raises(InvalidArgumentError) as error:
        ops.spark_paged_decode_split(gpu, kernel, *[ptr] * 7, **NUMBERS | change, stream=gpu.default_stream())
    assert error.value.name == name


def test_impossible_merges_and_addresses_are_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, stream = upload(gpu, normal(rng, 64)), gpu.default_stream()
    merge = gpu.kernel(MODULE, MERGE)
    for numbers, name in (((1, 1, 4, 96, 1.0, 384, 0), "head_dim"), ((1, 1, 4, 64, 1.0, 255, 0), "gate_stride")):
        with pytest.raises(InvalidArgumentError) as error:
            ops.spark_paged_decode_merge(gpu, merge, *[ptr] * 5, *numbers, stream)
        assert error.value.name == name
    for fp8, off in ((False, 8), (True, 4)):
        operands = [ptr, ptr, ptr.offset(off), *[ptr] * 4]
        with pytest.raises(InvalidArgumentError, match="-byte address") as error:
            ops.spark_paged_decode_split(
                gpu, gpu.kernel(MODULE, SPLIT_FP8 if fp8 else SPLIT), *operands, **NUMBERS, stream=stream, fp8=fp8
            )
        assert error.value.name == "v_cache"


@pytest.mark.host_only("CUDA cannot see lengths and block ids on the device before the kernel reads")
def test_blocks_beyond_the_cache_are_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    query, caches, _ = draw(rng, [32], 2, 2, 64)  # four blocks
    attend(gpu, query, caches, [[3, 0]], [32])
    with pytest.raises(ArgumentRangeError, match="block -1"):
        attend(gpu, query, caches, [[1, -1]], [17])
    with pytest.raises(ArgumentPointerError) as error:
        attend(gpu, query, caches, [[1, 4]], [17])
    assert error.value.parameter == "K_cache"


@pytest.mark.gpu_only("a cache of 8.6 GB: more than a CPU test should allocate")
@pytest.mark.no_sanitizer("8.6 GB of shadow memory")
def test_blocks_past_2_to_the_32_elements(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_far_blocks(gpu, rng)


@checks(f"{MODULE}::{SPLIT}@far")
def check_far_blocks(gpu: GpuBackend, rng: np.random.Generator) -> None:
    size, last = 256, (1 << 32) // (16 * 256)
    rows, query = normal(rng, 16, 1, size), normal(rng, 1, size)
    cache = alloc_or_skip(gpu, 2 * 16 * size * (last + 1))
    gpu.memset(cache, 0xFF, 2 * 16 * size)
    gpu.copy_h2d(rows.reshape(-1).view(np.uint8), cache.offset(2 * 16 * size * last))
    partial = Output(gpu, (64, size), np.dtype(np.float32))
    sums = Output(gpu, (64, 2), np.dtype(np.float32))
    ops.spark_paged_decode_split(
        gpu, gpu.kernel(MODULE, SPLIT), upload(gpu, query), cache, cache, partial.ptr, sums.ptr,
        upload(gpu, np.array([last], np.int32)), upload(gpu, np.array([16], np.int32)), 1, 1, 1, 1, 1, size, 16, 0.0625,
        size, 16 * size, 0, gpu.default_stream(),
    )  # fmt: skip
    got = partial.read()[0]
    gpu.free(cache)
    _, _, exact, error, allowed = split_oracle(query, f64(rows), f64(rows), 0.0625)
    assert (np.abs(f64(got) - exact[0]) <= allowed[0] + error[0] * np.abs(exact[0])).all()
