# SPDX-License-Identifier: AGPL-3.0-only
"""Module spark_v4_paged_decode: attention over scattered latent rows equals contiguous attention in FP64, with sink,
window and the rotation back; a sequence is a sequence anywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from spark_py.ops import spark_v4_paged_decode as ops
from spark_py.runtime.errors import ArgumentPointerError, ArgumentRangeError, InvalidArgumentError
from spark_py.runtime.gpu import DevicePtr, GpuBackend
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
from spark_py.testing.cases.spark_v4_paged_decode import SHAPES, attend, draw_sinks, lengths_for, turned_back

from . import v4_oracle
from .support import checks

MODULE = "spark_v4_paged_decode"
WIDE, NARROW = "spark_v4_paged_decode", "spark_v4_paged_decode_fp8"
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
THETA = 1e4


@dataclass(frozen=True)
class Case:
    """Queries [S, heads, d], and for each sequence its rows [L, d] (BF16, or E4M3) and the blocks that hold them."""

    query: Array
    rows: list[Array]
    pages: list[Array]
    blocks: int
    block_size: int
    positions: Array
    sinks: Array
    rope_dim: int
    window: int

    @property
    def scale(self) -> float:
        return float(np.float32(1.0 / np.sqrt(self.query.shape[2])))

    def only(self, chosen: Sequence[int]) -> Case:
        """The same sequences in the same blocks, `chosen` of them, in that order."""
        rows, pages = [self.rows[i] for i in chosen], [self.pages[i] for i in chosen]
        return replace(
            self, query=self.query[list(chosen)], rows=rows, pages=pages, positions=self.positions[list(chosen)]
        )


def draw(
    rng: np.random.Generator,
    lengths: Sequence[int],
    heads: int,
    size: int,
    rope_dim: int,
    block_size: int,
    window: int,
    narrow: bool = False,
) -> Case:
    """Blocks of all sequences are scattered over a pool with a few to spare. Scores spread over about +-8, and
    positions are not those that the lengths would give."""
    rows = [normal(rng, length, size).astype(E4M3 if narrow else BF16) for length in lengths]
    counts = [-(-length // block_size) for length in lengths]
    blocks = sum(counts) + 3
    pages = np.split(rng.permutation(blocks)[: sum(counts)], np.cumsum(counts)[:-1])
    query, positions = normal(rng, len(lengths), heads, size, scale=2.5), rng.integers(0, 5000, len(lengths))
    sinks = draw_sinks(rng, heads)
    return Case(query, rows, list(pages), blocks, block_size, positions.astype(np.uint32), sinks, rope_dim, window)


def pool_of(case: Case) -> Array:
    """The pool [blocks, block_size, d]; every slot that holds no position is NaN, and those that the window hides."""
    made = np.full((case.blocks, case.block_size, case.query.shape[2]), np.nan, case.rows[0].dtype)
    for rows, blocks in zip(case.rows, case.pages, strict=True):
        for position in v4_oracle.visible(len(rows), case.window or len(rows)):
            made[blocks[position // case.block_size], position % case.block_size] = rows[position]
    return made


def run(gpu: GpuBackend, case: Case, spare: int = 0, sinks: bool = True) -> Array:
    """The outputs [S, heads, d]. Block tables are `spare` longer than needed, and name blocks that do not exist
    wherever no position is."""
    count, heads, size = case.query.shape
    most = max(max(map(len, case.pages)), 1) + spare
    tables = np.full((count, most), 1 << 29, np.int32)
    for row, blocks in zip(tables, case.pages, strict=True):
        row[: len(blocks)] = blocks
    pool, output = pool_of(case), Output(gpu, case.query.shape)
    function = WIDE if pool.dtype == BF16 else NARROW
    launch: Callable[..., None] = getattr(ops, function)
    launch(
        gpu, gpu.kernel(MODULE, function), upload(gpu, case.query), upload(gpu, pool.view(np.uint8)), output.ptr,
        upload(gpu, tables), upload(gpu, np.array([len(rows) for rows in case.rows], np.int32)),
        upload(gpu, case.positions), upload(gpu, case.sinks) if sinks else DevicePtr.NULL, most, count, heads, size,
        case.rope_dim, case.block_size, case.scale, THETA, case.window, gpu.default_stream(),
    )  # fmt: skip
    return output.read()


def compare(got: Array, case: Case, what: str, sinks: bool = True) -> None:
    """Against the model's steps over contiguous rows: attention with a sink, then the rotation back."""
    used = case.sinks if sinks else np.full_like(case.sinks, -np.inf)
    for sequence, rows in enumerate(case.rows):
        if len(rows) == 0:
            assert (got[sequence].view(np.uint8) == POISON).all(), f"{what}: an empty sequence was written"
            continue
        position = int(case.positions[sequence])
        mixed = v4_oracle.attention(case.query[sequence], rows, used, case.window or len(rows), case.scale)
        exact = v4_oracle.rope(mixed[None], np.array([position]), THETA, case.rope_dim, inverse=True)[0]
        seen = f64(rows)[list(v4_oracle.visible(len(rows), case.window or len(rows)))]
        lost = attend(f64(case.query[sequence]), seen, f64(used), case.scale)[1]
        slack = turned_back(mixed, lost, position, case.rope_dim, THETA)[1]
        assert_rounds(got[sequence], exact, 0.0, slack, f"{what}, sequence {sequence} of length {len(rows)}")


def check(gpu: GpuBackend, rng: np.random.Generator, narrow: bool) -> None:
    for number, (heads, size, rope_dim, block_size, window) in enumerate(SHAPES):
        case = draw(rng, lengths_for(window or 40), heads, size, rope_dim, block_size, window, narrow)
        what = f"{heads} heads of {size}, {rope_dim} rotated, blocks of {block_size}, window {window}"
        compare(run(gpu, case, number % 2), case, what)


@checks(f"{MODULE}::{WIDE}")
def check_bf16(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check(gpu, rng, False)


@checks(f"{MODULE}::{NARROW}")
def check_fp8(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check(gpu, rng, True)


def test_bf16(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_bf16(gpu, rng)


def test_fp8(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_fp8(gpu, rng)


@pytest.mark.parametrize("narrow", [False, True])
def test_the_models_own_sizes(gpu: GpuBackend, rng: np.random.Generator, narrow: bool) -> None:
    """64 heads of 512, window 128: below it, at it, past it, and far past it."""
    case = draw(rng, [127, 0, 128, 129, 384], 64, 512, 64, 16, 128, narrow)
    compare(run(gpu, case), case, f"narrow={narrow}")


@pytest.mark.parametrize("length", [15, 16, 17, 127, 128, 129])
def test_across_the_edges_of_blocks(gpu: GpuBackend, rng: np.random.Generator, length: int) -> None:
    case = draw(rng, [length], 2, 64, 16, 16, 0)
    compare(run(gpu, case), case, "no window")
    compare(run(gpu, replace(case, window=128)), replace(case, window=128), "window 128")


@pytest.mark.parametrize("narrow", [False, True])
def test_without_sinks(gpu: GpuBackend, rng: np.random.Generator, narrow: bool) -> None:
    case = draw(rng, [40, 7], 3, 64, 16, 16, 16, narrow)
    compare(run(gpu, case, sinks=False), case, "no sinks", sinks=False)


def test_a_sink_takes_weight_and_gives_no_value(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """A sink far above all scores leaves nothing, one far below leaves all; equal to the one row's score, it halves."""
    case = draw(rng, [1], 4, 64, 16, 16, 0)
    case.sinks[...] = 500.0
    assert (f64(run(gpu, case)) == 0.0).all()
    case.sinks[...] = -500.0
    assert_same_bits(run(gpu, case), run(gpu, case, sinks=False))
    case.query[...] = 0.0
    case.sinks[...] = 0.0
    assert_same_bits(run(gpu, case), (f64(run(gpu, case, sinks=False)) / 2).astype(BF16))


def test_queries_and_rows_shifted_alike_give_the_same(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """The rotation back makes attention one of distances: the same text 1000 positions on has the same outputs."""
    size, rope_dim, length = 64, 16, 30
    case = draw(rng, [length], 4, size, rope_dim, 16, 20)
    base, query = f64(case.rows[0]), f64(case.query[0])
    outputs = []
    for shift in (0, 1000):
        places = np.arange(length) + shift
        rows = v4_oracle.rope(base, places, THETA, rope_dim).astype(BF16)
        turned = v4_oracle.rope(query[None], places[-1:], THETA, rope_dim).astype(BF16)
        moved = replace(case, rows=[rows], query=turned, positions=places[-1:].astype(np.uint32))
        outputs.append(f64(run(gpu, moved)))
    # Rows and queries are rounded to BF16 after another rotation: scores of up to 8 move by some 2^-8 of themselves.
    assert np.linalg.norm(outputs[0] - outputs[1]) < 2.0**-5 * np.linalg.norm(outputs[0])


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(("size", "window"), [(64, 0), (264, 20)])
def test_a_sequence_and_a_head_do_not_depend_on_the_others(
    gpu: GpuBackend, rng: np.random.Generator, size: int, window: int, narrow: bool
) -> None:
    case = draw(rng, [*lengths_for(30), 200], 3, size, 8, 16, window, narrow)
    together = run(gpu, case)
    for chosen in ([0], [2], [8], [8, 3, 5], [3, 8]):
        assert_same_bits(run(gpu, case.only(chosen), spare=5), together[chosen], f"sequences {chosen}")
    for head in range(3):
        one = replace(case, query=np.ascontiguousarray(case.query[:, head : head + 1]), sinks=case.sinks[head:][:1])
        kept = [s for s, rows in enumerate(case.rows) if len(rows)]
        assert_same_bits(run(gpu, one)[kept, 0], together[kept, head], f"head {head}")


def test_where_the_blocks_lie_does_not_matter(gpu: GpuBackend, rng: np.random.Generator) -> None:
    case = draw(rng, [130, 47], 4, 128, 32, 16, 100)
    first, order = run(gpu, case), rng.permutation(case.blocks)
    assert_same_bits(run(gpu, replace(case, pages=[order[p] for p in case.pages])), first)
    apart = replace(case, pages=[np.arange(130), 130 + np.arange(47)], blocks=177, block_size=1)
    assert_same_bits(run(gpu, apart), first, "blocks of 1")


@pytest.mark.parametrize("size", [8, 64, 256, 264, 512])
def test_the_same_bits_over_a_bf16_pool_of_the_same_values(
    gpu: GpuBackend, rng: np.random.Generator, size: int
) -> None:
    """Every E4M3 is a BF16, so both kernels add up the same numbers in the same order."""
    case = draw(rng, [70, 9], 3, size, 8, 16, 50, narrow=True)
    wide = replace(case, rows=[rows.astype(np.float32).astype(BF16) for rows in case.rows])
    assert_same_bits(run(gpu, case), run(gpu, wide))


def test_extreme_scores(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """Huge scores do not overflow: one row takes all of the weight."""
    case = draw(rng, [40], 1, 64, 16, 16, 0)
    case.query[...] = 1e4
    case.rows[0][...] = -1e4
    case.rows[0][23] = 1e4
    case.positions[...] = 0
    assert_same_bits(run(gpu, case)[0, 0], case.rows[0][23])


def test_nan_in_a_used_slot_is_not_hidden(gpu: GpuBackend, rng: np.random.Generator) -> None:
    case = draw(rng, [50, 50], 3, 64, 16, 16, 30)
    case.rows[0][31, 5] = np.nan
    case.query[1, 2, 0] = np.nan
    got = np.isnan(f64(run(gpu, case)))
    assert got[0].all()
    assert got[1, 2].all()
    assert not got[1, :2].any()


@pytest.mark.parametrize("function", [WIDE, NARROW])
@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"head_dim": 60}, "head_dim"),
        ({"head_dim": 520}, "head_dim"),
        ({"head_dim": 0}, "head_dim"),
        ({"rope_dim": 0}, "rope_dim"),
        ({"rope_dim": 66}, "rope_dim"),
        ({"rope_dim": 7}, "rope_dim"),
        ({"num_heads": 0}, "num_heads"),
        ({"num_seqs": 0}, "num_seqs"),
        ({"sliding_window": -1}, "sliding_window"),
        ({"block_size": 0}, "block_size"),
        ({"max_blocks_per_seq": 0}, "max_blocks_per_seq"),
        ({"inv_sqrt_d": float("nan")}, "inv_sqrt_d"),
        ({"theta": 0.0}, "theta"),
    ],
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, function: str, change: dict[str, Any], name: str
) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel(MODULE, function)
    numbers: dict[str, Any] = {"max_blocks_per_seq": 1, "num_seqs": 1, "num_heads": 4, "head_dim": 64, "rope_dim": 16}
    numbers |= {"block_size": 16, "inv_sqrt_d": 0.125, "theta": 1e4, "sliding_window": 0} | change
    with pytest.raises(InvalidArgumentError) as error:
        getattr(ops, function)(gpu, kernel, *[ptr] * 7, **numbers, stream=gpu.default_stream())
    assert error.value.name == name


def test_rows_off_their_addresses_are_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, stream = upload(gpu, normal(rng, 64)), gpu.default_stream()
    off, numbers = ptr.offset(2), (1, 1, 1, 32, 8, 16, 1.0, 1e4, 0)
    for function, name, at in ((WIDE, "q", 0), (WIDE, "pool", 1), (NARROW, "pool", 1), (WIDE, "output", 2)):
        pointers = [off if i == at else ptr for i in range(7)]
        with pytest.raises(InvalidArgumentError, match="-byte address") as error:
            getattr(ops, function)(gpu, gpu.kernel(MODULE, function), *pointers, *numbers, stream)
        assert error.value.name == name


@pytest.mark.host_only("CUDA cannot see lengths and block ids on the device before the kernel reads")
def test_lengths_and_blocks_beyond_the_pool_are_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    kernel, pool = gpu.kernel(MODULE, WIDE), upload(gpu, normal(rng, 3, 16, 32))
    query, zero = upload(gpu, normal(rng, 32)), upload(gpu, np.zeros(1, np.uint32))

    def launch(length: int, table: list[int], window: int = 0) -> None:
        ops.spark_v4_paged_decode(
            gpu, kernel, query, pool, Output(gpu, (1, 1, 32)).ptr, upload(gpu, np.array(table, np.int32)),
            upload(gpu, np.array([length], np.int32)), zero, DevicePtr.NULL, len(table), 1, 1, 32, 8, 16, 1.0, 1e4,
            window, gpu.default_stream(),
        )  # fmt: skip

    launch(32, [2, 0])
    launch(16, [1, -1])
    launch(32, [-1, 2], 16)
    with pytest.raises(ArgumentRangeError, match="seq_lens holds 33"):
        launch(33, [2, 0])
    with pytest.raises(ArgumentRangeError, match="block -1"):
        launch(32, [-1, 2], 17)
    with pytest.raises(ArgumentPointerError) as error:
        launch(17, [1, 3])
    assert error.value.parameter == "pool"


@pytest.mark.gpu_only("a pool of 4.3 GB: more than a CPU test should allocate")
@pytest.mark.no_sanitizer("4.3 GB of shadow memory")
def test_blocks_past_2_to_the_32_elements(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_far_blocks(gpu, rng)


@checks(f"{MODULE}::{NARROW}@far")
def check_far_blocks(gpu: GpuBackend, rng: np.random.Generator) -> None:
    size, last = 512, (1 << 32) // (16 * 512)
    case = draw(rng, [16], 2, size, 64, 16, 0, narrow=True)
    pool = alloc_or_skip(gpu, 16 * size * (last + 1))
    gpu.memset(pool, 0x7F, 16 * size)
    gpu.copy_h2d(case.rows[0].view(np.uint8).reshape(-1), pool.offset(16 * size * last))
    output = Output(gpu, (1, 2, size))
    ops.spark_v4_paged_decode_fp8(
        gpu, gpu.kernel(MODULE, NARROW), upload(gpu, case.query), pool, output.ptr,
        upload(gpu, np.array([last], np.int32)), upload(gpu, np.array([16], np.int32)), upload(gpu, case.positions),
        upload(gpu, case.sinks), 1, 1, 2, size, 64, 16, case.scale, THETA, 0, gpu.default_stream(),
    )  # fmt: skip
    got = output.read()
    gpu.free(pool)
    compare(got, case, f"block {last}")
