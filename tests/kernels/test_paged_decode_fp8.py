# SPDX-License-Identifier: AGPL-3.0-only
"""Module paged_decode_fp8: attention over scattered E4M3 blocks, scales included, equals attention in FP64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from spark_py.ops import paged_decode, reshape_and_cache
from spark_py.ops import paged_decode_fp8 as ops
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
    relative_l2,
    upload,
)

from .support import checks
from .test_paged_decode import LENGTHS, draw, oracle

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
NAMES = ("paged_decode_fp8", "paged_decode_attn_fp8")
# (nq, nkv, head_dim, block_size): head sizes of every vector width, groups of 1, 4 and 8.
SHAPES = [
    (1, 1, 32, 16),
    (4, 1, 64, 16),
    (4, 4, 96, 7),
    (8, 2, 128, 16),
    (8, 1, 256, 16),
    (2, 2, 512, 32),
    (2, 1, 160, 1),
    (1, 1, 448, 16),
]
SCALES = [(1.0, 1.0), (0.03, 0.5), (0.75, 0.003), (2.0, 3.0)]


@dataclass(frozen=True)
class Fp8Case:
    """As `test_paged_decode.Case`, but keys and values are E4M3 bytes, with their scales."""

    query: Array
    keys: list[Array]
    values: list[Array]
    pages: list[Array]
    blocks: int
    block_size: int
    scales: tuple[float, float]

    def only(self, chosen: Sequence[int]) -> Fp8Case:
        """The same sequences in the same blocks, `chosen` of them, in that order."""
        pick = [[group[i] for i in chosen] for group in (self.keys, self.values, self.pages)]
        return Fp8Case(self.query[list(chosen)], *pick, self.blocks, self.block_size, self.scales)


def draw_fp8(
    rng: np.random.Generator,
    lengths: Sequence[int],
    heads: int,
    kv_heads: int,
    size: int,
    block_size: int,
    scales: tuple[float, float] = (1.0, 1.0),
) -> Fp8Case:
    """Queries, keys and values of `draw`, the latter in steps of their scales."""
    case = draw(rng, lengths, heads, kv_heads, size, block_size, 0)
    keys, values = (
        [np.clip(f64(rows) / scale, -448, 448).astype(E4M3).view(np.uint8) for rows in group]
        for group, scale in zip((case.keys, case.values), scales, strict=True)
    )
    return Fp8Case(case.query, keys, values, case.pages, case.blocks, block_size, scales)


def decoded(codes: Array) -> Array:
    """Values of E4M3 bytes, FP64."""
    return f64(codes.view(E4M3))


def pool(case: Fp8Case, rows: list[Array], block_gap: int) -> Array:
    """The pool [blocks, block stride]; every slot that holds no position and every gap is NaN, of either sign."""
    row = int(np.prod(rows[0].shape[1:]))
    made = np.full((case.blocks, case.block_size * row + block_gap), 0x7F, np.uint8)
    made[:, ::2] = 0xFF
    for array, blocks in zip(rows, case.pages, strict=True):
        for position, codes in enumerate(array):
            start = position % case.block_size * row
            made[blocks[position // case.block_size], start : start + row] = codes.reshape(-1)
    return made


def scale_of(case: Fp8Case) -> float:
    return float(np.float32(1.0 / np.sqrt(case.query.shape[2])))


def run(gpu: GpuBackend, case: Fp8Case, gap: int = 0, pool_gap: int = 0, block_gap: int = 0) -> Array:
    """The outputs [S, nq, hd]. Queries lie `gap` elements apart and blocks `block_gap`, with NaN between; block tables
    are `pool_gap` longer than needed, and name blocks that do not exist wherever no position is."""
    count, heads, size = case.query.shape
    most = max(max(map(len, case.pages)), 1) + pool_gap
    tables = np.full((count, most), 1 << 29, np.int32)
    for row, blocks in zip(tables, case.pages, strict=True):
        row[: len(blocks)] = blocks
    apart = np.full((count, heads * size + gap), np.nan, BF16)
    apart[:, : heads * size] = case.query.reshape(count, -1)
    k_pool, v_pool = (pool(case, rows, block_gap) for rows in (case.keys, case.values))
    lengths = np.array([len(keys) for keys in case.keys], np.int32)
    output = Output(gpu, case.query.shape)
    ops.paged_decode_attn_fp8(
        gpu, gpu.kernel(*NAMES), upload(gpu, apart), upload(gpu, k_pool), upload(gpu, v_pool), output.ptr,
        upload(gpu, tables), upload(gpu, lengths), most, count, heads, case.keys[0].shape[1], size, case.block_size,
        scale_of(case), *case.scales, heads * size + gap, k_pool.shape[1], gpu.default_stream(),
    )  # fmt: skip
    return output.read()


def attention(case: Fp8Case, sequence: int) -> tuple[Array, Array]:
    """Attention of one sequence in FP64, and the error that FP32 is allowed: that of `oracle`, and a rounding more for
    the factor of a score (at most a tenth of what 22 may cost) and for the output."""
    keys, values = decoded(case.keys[sequence]), decoded(case.values[sequence])
    k_scale, v_scale = (float(np.float32(scale)) for scale in case.scales)
    exact, slack = oracle(case.query[sequence], keys, values, scale_of(case) * k_scale)
    return exact * v_scale, (1.1 * slack + np.abs(exact) * 2.0**-23) * v_scale


def compare(got: Array, case: Fp8Case, what: str) -> None:
    for sequence, keys in enumerate(case.keys):
        if len(keys) == 0:
            assert (got[sequence].view(np.uint8) == POISON).all(), f"{what}: an empty sequence was written"
            continue
        exact, slack = attention(case, sequence)
        assert_rounds(got[sequence], exact, 0.0, slack, f"{what}, sequence {sequence} of length {len(keys)}")


@checks("paged_decode_fp8::paged_decode_attn_fp8")
def check_paged_decode_fp8(gpu: GpuBackend, rng: np.random.Generator) -> None:
    for number, (heads, kv_heads, size, block_size) in enumerate(SHAPES):
        scales = SCALES[number % len(SCALES)]
        case = draw_fp8(rng, LENGTHS, heads, kv_heads, size, block_size, scales)
        what = f"{heads}/{kv_heads} heads of {size}, blocks of {block_size}, scales {scales}"
        compare(run(gpu, case, 32 * (number % 3), number % 2, 8 * (number % 4)), case, what)


def test_paged_decode_fp8(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_paged_decode_fp8(gpu, rng)


@pytest.mark.parametrize("scales", SCALES)
def test_long_sequences(gpu: GpuBackend, rng: np.random.Generator, scales: tuple[float, float]) -> None:
    case = draw_fp8(rng, [4096, 0, 257], 4, 1, 64, 16, scales)
    compare(run(gpu, case), case, f"scales {scales}")


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (8, 1), (24, 4)])
@pytest.mark.parametrize("size", range(32, 513, 32))
def test_every_head_size_and_group(
    gpu: GpuBackend, rng: np.random.Generator, size: int, heads: int, kv_heads: int
) -> None:
    case = draw_fp8(rng, [37], heads, kv_heads, size, 16, (0.03, 0.5))
    compare(run(gpu, case), case, f"{heads}/{kv_heads} heads of {size}")


@pytest.mark.parametrize("size", [32, 64, 96, 128, 256, 384, 512])
def test_the_same_bits_as_over_a_bf16_cache_of_the_same_values(
    gpu: GpuBackend, rng: np.random.Generator, size: int
) -> None:
    """Every E4M3 is a BF16, so with scales of 1 both kernels add up the same numbers in the same order."""
    length, blocks = 133, 9
    case = draw_fp8(rng, [length], 4, 2, size, 16)
    order = rng.permutation(blocks).astype(np.int32)
    caches = []
    for rows in (case.keys[0], case.values[0]):
        whole = np.full((blocks * 16, 2, size), np.nan, BF16)
        whole[:length] = decoded(rows).astype(BF16)
        cache = np.empty((blocks, 16, 2, size), BF16)
        cache[order] = whole.reshape(cache.shape)
        caches.append(upload(gpu, cache))
    output = Output(gpu, case.query.shape)
    paged_decode.paged_decode_attn(
        gpu, gpu.kernel("paged_decode", "paged_decode_attn"), upload(gpu, case.query), *caches, output.ptr,
        upload(gpu, order), upload(gpu, np.array([length], np.int32)), blocks, 1, 4, 2, size, 16, scale_of(case),
        4 * size, 0, gpu.default_stream(),
    )  # fmt: skip
    assert_same_bits(run(gpu, case), output.read())


@pytest.mark.parametrize("size", [64, 96, 256])
def test_a_sequence_does_not_depend_on_the_others(gpu: GpuBackend, rng: np.random.Generator, size: int) -> None:
    case = draw_fp8(rng, [*LENGTHS, 700, 33], 4, 2, size, 16, (0.03, 0.5))
    together = run(gpu, case)
    for chosen in ([0], [2], [7], [8], [9], [9, 3, 5], [3, 9]):
        got = run(gpu, case.only(chosen), gap=64, pool_gap=5, block_gap=40)
        assert_same_bits(got, together[chosen], f"sequences {chosen}")


def test_what_was_written_is_read(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """Keys and values far beyond 448, written and read with scales that hold them; unit scales would saturate."""
    length, kv_heads, size, stride = 45, 2, 128, 16 * 2 * 128 + 64
    keys, values = (normal(rng, length, kv_heads, size, scale=spread) for spread in (3000.0, 2000.0))
    query = normal(rng, 1, 4, size, scale=1 / 3000)
    pages = np.array([2, 0, 3], np.int32)
    slots = (pages[np.arange(length) // 16] * 16 + np.arange(length) % 16).astype(np.int64)
    errors = []
    for scales in ((40.0, 30.0), (1.0, 1.0)):
        caches = [Output(gpu, (4, stride), np.dtype(np.uint8)) for _ in range(2)]
        reshape_and_cache.reshape_and_cache_fp8(
            gpu, gpu.kernel("reshape_and_cache", "reshape_and_cache_flash_fp8"), upload(gpu, keys), upload(gpu, values),
            caches[0].ptr, caches[1].ptr, upload(gpu, slots), length, kv_heads, size, 16, *scales, kv_heads * size,
            kv_heads * size, stride, gpu.default_stream(),
        )  # fmt: skip
        output = Output(gpu, query.shape)
        ops.paged_decode_attn_fp8(
            gpu, gpu.kernel(*NAMES), upload(gpu, query), caches[0].ptr, caches[1].ptr, output.ptr, upload(gpu, pages),
            upload(gpu, np.array([length], np.int32)), 3, 1, 4, kv_heads, size, 16, float(size**-0.5), *scales,
            4 * size, stride, gpu.default_stream(),
        )  # fmt: skip
        wide, _ = oracle(query[0], keys, values, size**-0.5)
        errors.append(relative_l2(output.read()[0], wide))
    # E4M3 is within 1/16 of a number; errors of a sum of 45 partly cancel, those of saturation do not.
    assert errors[0] < 1 / 16
    assert errors[1] > 1 / 2


def test_nan_in_a_used_slot_is_not_hidden(gpu: GpuBackend, rng: np.random.Generator) -> None:
    for rows in ("keys", "values"):
        case = draw_fp8(rng, [50, 50], 2, 2, 64, 16)
        getattr(case, rows)[0][31, 1, 5] = 0xFF
        got = f64(run(gpu, case))
        assert np.isnan(got[0, 1]).all() if rows == "keys" else np.isnan(got[0, 1, 5])
        assert np.isfinite(got[0, 0]).all()
        assert np.isfinite(got[1]).all()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"head_dim": 48}, "head_dim"),
        ({"head_dim": 544, "q_stride": 4096}, "head_dim"),
        ({"num_q_heads": 3}, "num_q_heads"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"num_seqs": 0}, "num_seqs"),
        ({"q_stride": 255}, "q_stride"),
        ({"block_size": 0}, "block_size"),
        ({"max_blocks_per_seq": 0}, "max_blocks_per_seq"),
        ({"cache_stride": 2040}, "cache_stride"),
        ({"cache_stride": 2052}, "cache_stride"),
        ({"cache_stride": 1 << 64}, "cache_stride"),
        *(
            ({name: bad}, name)
            for name in ("k_scale", "v_scale")
            for bad in (0.0, -0.5, float("nan"), float("inf"), 1e-45, 1e39)
        ),
    ],
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, Any], name: str
) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel(*NAMES)
    numbers: dict[str, Any] = {"max_blocks_per_seq": 1, "num_seqs": 1, "num_q_heads": 4, "num_kv_heads": 2}
    numbers |= {"head_dim": 64, "block_size": 16, "inv_sqrt_d": 0.125, "k_scale": 1.0, "v_scale": 1.0}
    numbers |= {"q_stride": 256, "cache_stride": 2048} | change
    with pytest.raises(InvalidArgumentError) as error:
        ops.paged_decode_attn_fp8(gpu, kernel, ptr, ptr, ptr, ptr, ptr, ptr, **numbers, stream=gpu.default_stream())
    assert error.value.name == name


def test_a_cache_off_8_bytes_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr = upload(gpu, normal(rng, 64))
    with pytest.raises(InvalidArgumentError, match="8-byte") as error:
        ops.paged_decode_attn_fp8(
            gpu, gpu.kernel(*NAMES), ptr, ptr, ptr.offset(4), ptr, ptr, ptr, 1, 1, 1, 1, 32, 16, 1.0, 1.0, 1.0, 32, 512,
            gpu.default_stream(),
        )  # fmt: skip
    assert error.value.name == "v_cache"


@pytest.mark.host_only("CUDA cannot see lengths and block ids on the device before the kernel reads")
def test_lengths_and_blocks_beyond_the_cache_are_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    # Three blocks of 512, 520 apart: the last one ends where the allocation ends.
    kernel, cache = gpu.kernel(*NAMES), upload(gpu, np.zeros(2 * 520 + 512, np.uint8))
    query = upload(gpu, normal(rng, 32))

    def launch(length: int, table: list[int]) -> None:
        ops.paged_decode_attn_fp8(
            gpu, kernel, query, cache, cache, query, upload(gpu, np.array(table, np.int32)),
            upload(gpu, np.array([length], np.int32)), len(table), 1, 1, 1, 32, 16, 1.0, 1.0, 1.0, 32, 520,
            gpu.default_stream(),
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


@pytest.mark.gpu_only("a cache of 4.3 GB: more than a CPU test should allocate")
@pytest.mark.no_sanitizer("4.3 GB of shadow memory")
def test_blocks_past_2_to_the_32_elements(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_far_blocks(gpu, rng)


@checks("paged_decode_fp8::paged_decode_attn_fp8@far")
def check_far_blocks(gpu: GpuBackend, rng: np.random.Generator) -> None:
    size, stride, last = 512, 1 << 20, 1 << 12
    case = draw_fp8(rng, [16], 1, 1, size, 16)
    case.values[0][...] = case.keys[0]
    cache = alloc_or_skip(gpu, stride * last + 16 * size)
    gpu.memset(cache, 0x7F, 16 * size)
    gpu.copy_h2d(case.keys[0].reshape(-1), cache.offset(stride * last))
    output = Output(gpu, (1, 1, size))
    ops.paged_decode_attn_fp8(
        gpu, gpu.kernel(*NAMES), upload(gpu, case.query), cache, cache, output.ptr,
        upload(gpu, np.array([last], np.int32)), upload(gpu, np.array([16], np.int32)), 1, 1, 1, 1, size, 16,
        scale_of(case), 1.0, 1.0, size, stride, gpu.default_stream(),
    )  # fmt: skip
    got = output.read()
    gpu.free(cache)
    compare(got, case, "block 4096")
