# SPDX-License-Identifier: AGPL-3.0-only
"""Module argmax: the lowest index of the maximum on every path, never NaN, never padding; and its log-probability."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops import argmax as ops
from spark_py.runtime import open_backend
from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.testing import BF16, F32, U32, Array, Output, alloc_or_skip, any_bits, assert_same_bits, normal, upload

from .support import checks

VOCABULARIES = [1, 2, 31, 33, 1024, 1027, 8193, 151669, 248319]
TIES = [(0, 5), (31, 32), (1, 2), (5, 1027), (1023, 1024), (7, 8), (4095, 32768), (1031, 2047)]
PADDING = 3.0e38

# __expf within (2 + 1.173 |v - max|) ulp for the terms that count (|v - max| < 20), logf and the sum within 8 ulp of
# a result below 16.
LOGPROB_BOUND = 2e-5


def reference(name: str) -> Any:
    spec = catalog.find("argmax", name)
    assert spec is not None
    return spec.reference


def oracle_index(row: Array) -> int:
    """One pass in Python, keeping the first strict maximum among what is not NaN."""
    best: tuple[float, int] | None = None
    for i, value in enumerate(row.astype(np.float64).tolist()):
        if not math.isnan(value) and (best is None or value > best[0]):
            best = value, i
    return 0 if best is None else best[1]


def oracle_logprob(row: Array) -> float:
    """ln softmax at the maximum, by exact summation in FP64."""
    values = row.astype(np.float64).tolist()
    if any(map(math.isnan, values)) or max(values) == -math.inf or values.count(math.inf) > 1:
        return math.nan
    top = max(values)
    return 0.0 if top == math.inf else -math.log(math.fsum(math.exp(v - top) for v in values))


def single(gpu: GpuBackend, row: Array, shift: int = 0) -> int:
    """The winner by `argmax_bf16`; the row ends where its allocation ends."""
    out = Output(gpu, (1,), U32)
    kernel = gpu.kernel("argmax", "argmax_bf16")
    ops.argmax_bf16(gpu, kernel, upload(gpu, row, shift), out.ptr, row.size, gpu.default_stream())
    return int(out.read()[0])


def batch(gpu: GpuBackend, rows: Array, stride: int, shift: int = 0) -> tuple[Array, Array, Array]:
    """Winners by `argmax_bf16_batch`; winners and log-probabilities by `argmax_bf16_batch_lp`.

    Rows are `stride` apart with huge values between them, none after the last.
    """
    count, n = rows.shape
    flat = np.full((count, stride), PADDING).astype(BF16)
    flat[:, :n] = rows
    logits = upload(gpu, flat.reshape(-1)[: (count - 1) * stride + n], shift)
    out, out_lp, logprob = Output(gpu, (count,), U32), Output(gpu, (count,), U32), Output(gpu, (count,), F32)
    stream = gpu.default_stream()
    ops.argmax_bf16_batch(gpu, gpu.kernel("argmax", "argmax_bf16_batch"), logits, out.ptr, count, n, stride, stream)
    kernel = gpu.kernel("argmax", "argmax_bf16_batch_lp")
    ops.argmax_bf16_batch_lp(gpu, kernel, logits, out_lp.ptr, logprob.ptr, count, n, stride, stream)
    return out.read(), out_lp.read(), logprob.read()


def cases(rng: np.random.Generator, n: int) -> list[Array]:
    """Rows of n logits: random, the maximum first or last, ties that fit, values far below zero, NaN among them."""
    rows = [normal(rng, n, scale=4.0)]
    rows[0][-1] = 100.0
    rows.append(normal(rng, n, scale=4.0))
    rows[1][0] = 100.0
    for pair in TIES:
        if pair[1] < n:
            row = normal(rng, n)
            row[list(pair)] = 50.0
            rows.append(row)
    # No planted maximum: many entries share in the sum of a log-probability.
    rows += [normal(rng, n, scale=0.5), normal(rng, n, scale=4.0)]
    rows.append((-(10.0 ** rng.uniform(31, 38, n))).astype(BF16))
    holes = normal(rng, n, scale=4.0)
    holes[rng.random(n) < 0.3] = np.nan
    holes[0] = np.nan
    holes[n // 2] = -1000.0
    rows.append(holes)
    if n > 9:
        # NaN just before the maximum, wherever chunks of 8 begin.
        for at in range(1, 9):
            row = normal(rng, n)
            row[at - 1], row[at] = np.nan, 60.0
            rows.append(row)
    return rows


@checks("argmax::argmax_bf16")
def check_argmax(gpu: GpuBackend, rng: np.random.Generator) -> None:
    for n in VOCABULARIES:
        for number, row in enumerate(cases(rng, n)):
            got = single(gpu, row, shift=2 * (number % 8))
            assert got == oracle_index(row), f"n={n} case {number}"
            assert got == int(reference("argmax_bf16")(row[None])[0])
    for row, winner in hopeless_rows():
        for shift in (0, 6):
            assert single(gpu, row, shift) == winner, f"n={row.size} shift={shift}"


@checks("argmax::argmax_bf16_batch")
def check_argmax_batch(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_batches(gpu, rng)


@checks("argmax::argmax_bf16_batch_lp")
def check_argmax_batch_lp(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_batches(gpu, rng, logprobs=True)
    for row, expected in undefined_rows(rng):
        got = float(batch(gpu, row[None], row.size)[2][0])
        assert (math.isnan(got) and math.isnan(expected)) or got == expected, f"{row[:8]}...: {got}, not {expected}"


def check_batches(gpu: GpuBackend, rng: np.random.Generator, logprobs: bool = False) -> None:
    for n, stride in ((1, 1), (1, 3), (31, 31), (33, 40), (1027, 1027), (1024, 1537), (8193, 8200), (151669, 151680)):
        rows = np.stack(cases(rng, n))
        plain, winners, logprob = batch(gpu, rows, stride, shift=2 * (n % 8))
        expected = np.array([oracle_index(row) for row in rows], np.uint32)
        assert_same_bits(winners if logprobs else plain, expected, f"n={n} stride={stride}")
        if logprobs:
            exact = np.array([oracle_logprob(row) for row in rows])
            assert (np.isnan(logprob) == np.isnan(exact)).all(), f"n={n}"
            assert np.nanmax(np.abs(logprob - exact)) <= LOGPROB_BOUND, f"n={n} stride={stride}"
            assert np.nanmax(logprob) <= 0.0
            assert not np.signbit(logprob[logprob == 0.0]).any()


def hopeless_rows() -> list[tuple[Array, int]]:
    """Rows without a finite winner, and signed zeros, with the index that is meant."""
    nan, inf = np.nan, np.inf
    rows: list[tuple[Array, int]] = []
    for n in (1, 9, 2051):
        rows.append((np.full(n, nan).astype(BF16), 0))
        rows.append((np.full(n, -inf).astype(BF16), 0))
        rows.append((np.full(n, -3.3e38).astype(BF16), 0))
    mixed = np.full(2051, nan).astype(BF16)
    mixed[[1300, 700]] = -inf
    rows.append((mixed, 700))
    mixed = np.full(2051, -inf).astype(BF16)
    mixed[:5] = nan
    rows.append((mixed, 5))
    # Alone among the elements before the first 16-byte address (with a shift of 6 bytes) and after the last.
    for at in (2, 10):
        edge = np.full(11, nan).astype(BF16)
        edge[at] = -inf
        rows.append((edge, at))
    zeros = np.full(40, -1.0).astype(BF16)
    zeros[[7, 30]] = [-0.0, 0.0]
    rows.append((zeros, 7))
    infinite = np.zeros(1030).astype(BF16)
    infinite[[3, 1027]] = inf
    rows.append((infinite, 3))
    nan_first = np.zeros(12).astype(BF16)
    nan_first[0], nan_first[7] = nan, 2.0
    rows.append((nan_first, 7))
    return rows


def undefined_rows(rng: np.random.Generator) -> list[tuple[Array, float]]:
    """Rows with NaN and infinities, with the log-probability that is meant."""
    rows: list[tuple[Array, float]] = []
    for n in (9, 1200):
        for at, value, expected in (
            ((n - 1,), np.nan, math.nan),
            ((0,), np.nan, math.nan),
            ((2, n - 1), np.inf, math.nan),
            ((n - 2,), np.inf, 0.0),
        ):
            row = normal(rng, n)
            row[list(at)] = value
            rows.append((row, expected))
        rows.append((np.full(n, -np.inf).astype(BF16), math.nan))
        rows.append((np.full(n, np.nan).astype(BF16), math.nan))
        alone = np.full(n, -np.inf).astype(BF16)
        alone[n // 2] = -5.0
        rows.append((alone, 0.0))
    return rows


def test_argmax(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_argmax(gpu, rng)


def test_argmax_batch(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_argmax_batch(gpu, rng)


def test_argmax_batch_lp(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_argmax_batch_lp(gpu, rng)


def test_all_paths_agree_on_random_bits(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rows = any_bits(rng, 6, 5001)
    # Few distinct values: ties everywhere.
    rows[3:] = rng.integers(-3, 4, (3, 5001)).astype(BF16)
    plain, with_lp, _ = batch(gpu, rows, 5003)
    alone = np.array([single(gpu, row) for row in rows], np.uint32)
    assert_same_bits(plain, alone)
    assert_same_bits(with_lp, alone)
    assert (alone < 5001).all()


def test_values_that_tie_only_after_rounding(gpu: GpuBackend) -> None:
    row = np.zeros(300).astype(BF16)
    row[[20, 200]] = np.array([1.0, 1.001]).astype(BF16)
    assert single(gpu, row) == 20


def test_rows_past_2_to_the_32(gpu: GpuBackend) -> None:
    check_far_rows(gpu)


@checks("argmax::argmax_bf16_batch@far")
def check_far_rows(gpu: GpuBackend, rng: np.random.Generator | None = None) -> None:
    """Three rows 2**31 elements apart: the third starts at element 2**32. Only the rows themselves are written."""
    if gpu.name == "host":
        # Untouched memory stays unmapped when fresh memory is not poisoned.
        with open_backend("host", poison=False) as sparse:
            far_rows(sparse)
    else:
        far_rows(gpu)


def far_rows(gpu: GpuBackend) -> None:
    stride, n = 2**31, 70
    logits = alloc_or_skip(gpu, 2 * (2 * stride + n))
    for row in range(3):
        values = np.zeros(n).astype(BF16)
        values[10 + row] = 1.0
        gpu.copy_h2d(values.view(np.uint8), logits.offset(2 * row * stride))
    out, kernel = Output(gpu, (3,), U32), gpu.kernel("argmax", "argmax_bf16_batch")
    ops.argmax_bf16_batch(gpu, kernel, logits, out.ptr, 3, n, stride, gpu.default_stream())
    assert out.read().tolist() == [10, 11, 12]
    gpu.free(logits)


@pytest.mark.parametrize(
    ("rows", "n", "stride", "name"),
    [
        (0, 4, 4, "rows"),
        (1, 0, 4, "n"),
        (1, 4, 0, "row_stride"),
        (2, 4, 3, "row_stride"),
        (1, 2**32, 2**32, "row_stride"),
    ],
)
def test_impossible_numbers_are_refused(gpu: GpuBackend, rows: int, n: int, stride: int, name: str) -> None:
    ptr: DevicePtr = upload(gpu, np.zeros(8).astype(BF16))
    with pytest.raises(InvalidArgumentError) as error:
        ops.argmax_bf16_batch(
            gpu, gpu.kernel("argmax", "argmax_bf16_batch"), ptr, ptr, rows, n, stride, gpu.default_stream()
        )
    assert error.value.name == name


def test_an_empty_row_is_refused(gpu: GpuBackend) -> None:
    ptr = upload(gpu, np.zeros(8).astype(BF16))
    with pytest.raises(InvalidArgumentError, match="n is 0"):
        ops.argmax_bf16(gpu, gpu.kernel("argmax", "argmax_bf16"), ptr, ptr, 0, gpu.default_stream())
