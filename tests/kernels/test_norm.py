# SPDX-License-Identifier: AGPL-3.0-only
"""Module norm: three RMS norms against an FP64 oracle, the reference, and each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops import norm as ops
from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend, KernelHandle
from spark_py.testing import (
    BF16,
    Array,
    Output,
    alloc_or_skip,
    any_bits,
    assert_rounds,
    assert_same_bits,
    assert_ulps,
    download,
    f64,
    normal,
    upload,
)

from .support import checks

EPS = 1e-6

# FP32: at most 3 + 10 additions deep per 1024 elements, rsqrtf within 2 ulp, a division and three products.
FP32_BOUND = 2.0**-18
# Against the reference only the rounding of r differs: one BF16 step where a value sits on a boundary.
REFERENCE_ULPS, REFERENCE_L2 = 1, 2.0**-10

SHAPES = [(1, 1), (1, 2), (4, 3), (3, 31), (2, 33), (5, 128), (3, 1023), (2, 1026), (3, 2049), (2, 5120), (1, 16385)]


def reference(name: str) -> Any:
    spec = catalog.find("norm", name)
    assert spec is not None
    return spec.reference


def oracle(x: Array, weight: Array, eps: float, plus: float = 1.0) -> Array:
    """The formula in FP64. A mean of squares beyond FP32 counts as infinite there."""
    values = f64(x)
    mean = (values * values).sum(axis=-1, keepdims=True) / x.shape[-1]
    return values * (1.0 / np.sqrt(mean + np.float64(np.float32(eps)))) * (plus + f64(weight))


def inputs(rng: np.random.Generator, rows: int, size: int) -> tuple[Array, Array]:
    """Rows of very different magnitude, some near sqrt(eps), where eps counts."""
    scale = 10.0 ** rng.uniform(-4, 3, (rows, 1))
    return (rng.standard_normal((rows, size)) * scale).astype(BF16), normal(rng, size)


def run_rms_norm(gpu: GpuBackend, x: Array, weight: Array, eps: float, in_place: bool = False, shift: int = 0) -> Array:
    rows, size = x.shape
    output = Output(gpu, x.shape, content=x if in_place else None, shift=shift)
    source = output.ptr if in_place else upload(gpu, x, shift)
    kernel = gpu.kernel("norm", "rms_norm")
    ops.rms_norm(gpu, kernel, source, upload(gpu, weight, shift), output.ptr, rows, size, eps, gpu.default_stream())
    return output.read()


@checks("norm::rms_norm")
def check_rms_norm(gpu: GpuBackend, rng: np.random.Generator) -> None:
    for rows, size in SHAPES:
        for in_place, shift in ((False, 0), (True, 0), (False, 2)):
            x, weight = inputs(rng, rows, size)
            got = run_rms_norm(gpu, x, weight, EPS, in_place, shift)
            what = f"[{rows}, {size}] in_place={in_place} shift={shift}"
            assert_rounds(got, oracle(x, weight, EPS), FP32_BOUND, what=what)
            assert_ulps(got, reference("rms_norm")(x, weight, EPS), REFERENCE_ULPS, REFERENCE_L2, what)


@checks("norm::rms_norm_residual")
def check_rms_norm_residual(gpu: GpuBackend, rng: np.random.Generator) -> None:
    kernel = gpu.kernel("norm", "rms_norm_residual")
    for rows, size in SHAPES:
        for in_place in (False, True):
            x, weight = inputs(rng, rows, size)
            output = Output(gpu, x.shape, content=x if in_place else None)
            copy = Output(gpu, x.shape)
            source = output.ptr if in_place else upload(gpu, x)
            ops.rms_norm_residual(
                gpu, kernel, source, upload(gpu, weight), output.ptr, copy.ptr, rows, size, EPS, gpu.default_stream()
            )
            what = f"[{rows}, {size}] in_place={in_place}"
            assert_same_bits(copy.read(), x, what)
            assert_rounds(output.read(), oracle(x, weight, EPS), FP32_BOUND, what=what)
            assert_ulps(output.read(), reference("rms_norm_residual")(x, weight, EPS)[0], REFERENCE_ULPS, REFERENCE_L2)


def lost_in_rounding(rng: np.random.Generator, rows: int, size: int) -> tuple[Array, Array]:
    """hidden and src whose sums all round down by almost half a step: rounded and unrounded sums then differ by up to
    0.4 % in the mean square as well, and using the one for the other shows in most outputs."""
    hidden = (1.0 + rng.integers(0, 8, (rows, size)) / 128.0).astype(BF16)
    return hidden, np.full((rows, size), 0.00375).astype(BF16)


def check_adding(
    gpu: GpuBackend, rng: np.random.Generator, kernel: KernelHandle, expected_of: Any, plus: float
) -> None:
    """A kernel that adds and normalises: `kernel`, its reference, and what is added to the weight."""
    for rows, size in SHAPES:
        for aliased, rounding in ((False, False), (True, False), (True, True)):
            weight = normal(rng, size)
            if rounding:
                hidden, src = lost_in_rounding(rng, rows, size)
            else:
                (hidden, _), (src, _) = inputs(rng, rows, size), inputs(rng, rows, size)
            stream, kept = Output(gpu, hidden.shape, content=hidden), Output(gpu, hidden.shape)
            output = Output(gpu, hidden.shape, content=src if aliased else None)
            source = output.ptr if aliased else upload(gpu, src)
            ops.residual_add_rms_norm(
                gpu, kernel, stream.ptr, source, upload(gpu, weight), output.ptr, kept.ptr, rows, size, EPS,
                gpu.default_stream(),
            )  # fmt: skip
            what = f"[{rows}, {size}] aliased={aliased} rounding={rounding}"
            sums = (f64(hidden) + f64(src)).astype(np.float32)
            rounded = sums.astype(BF16)
            assert_same_bits(stream.read(), rounded, what)
            assert_same_bits(kept.read(), rounded, what)
            mean = (f64(sums) ** 2).sum(axis=-1, keepdims=True) / size
            exact = f64(rounded) / np.sqrt(mean + np.float64(np.float32(EPS))) * (plus + f64(weight))
            assert_rounds(output.read(), exact, FP32_BOUND, what=what)
            expected = expected_of(hidden, src, weight, EPS)[1]
            assert_ulps(output.read(), expected, REFERENCE_ULPS, REFERENCE_L2, what)


@checks("norm::residual_add_rms_norm")
def check_residual_add_rms_norm(gpu: GpuBackend, rng: np.random.Generator) -> None:
    kernel = gpu.kernel("norm", "residual_add_rms_norm")
    check_adding(gpu, rng, kernel, reference("residual_add_rms_norm"), 1.0)


def test_rms_norm(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_rms_norm(gpu, rng)


def test_rms_norm_residual(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_rms_norm_residual(gpu, rng)


def test_residual_add_rms_norm(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_residual_add_rms_norm(gpu, rng)


@pytest.mark.parametrize("size", [31, 128, 5120])
def test_a_row_does_not_depend_on_the_others(gpu: GpuBackend, rng: np.random.Generator, size: int) -> None:
    x, weight = inputs(rng, 7, size)
    together = run_rms_norm(gpu, x, weight, EPS)
    for row in range(7):
        assert_same_bits(run_rms_norm(gpu, x[row : row + 1], weight, EPS)[0], together[row], f"row {row}")


def test_wide_and_narrow_rows_have_the_same_bits(gpu: GpuBackend, rng: np.random.Generator) -> None:
    x, weight = inputs(rng, 3, 5119)
    assert_same_bits(run_rms_norm(gpu, x, weight, EPS, shift=2), run_rms_norm(gpu, x, weight, EPS))


def test_rows_of_nan_infinity_and_zero(gpu: GpuBackend, rng: np.random.Generator) -> None:
    x, weight = normal(rng, 4, 96), normal(rng, 96)
    x[0, 17] = np.nan
    x[1, 40] = np.inf
    x[2] = 0.0
    got = f64(run_rms_norm(gpu, x, weight, EPS))
    assert np.isnan(got[0]).all()
    assert np.isnan(got[1, 40])
    assert (np.delete(got[1], 40) == 0.0).all()
    assert (got[2] == 0.0).all()
    assert_rounds(got[3].astype(BF16), oracle(x[3:], weight, EPS)[0], FP32_BOUND)


def test_the_copy_keeps_every_bit(gpu: GpuBackend, rng: np.random.Generator) -> None:
    x, weight = any_bits(rng, 3, 1001), normal(rng, 1001)
    output, copy = Output(gpu, x.shape), Output(gpu, x.shape)
    kernel, stream = gpu.kernel("norm", "rms_norm_residual"), gpu.default_stream()
    ops.rms_norm_residual(gpu, kernel, upload(gpu, x), upload(gpu, weight), output.ptr, copy.ptr, 3, 1001, EPS, stream)
    assert_same_bits(copy.read(), x)


@pytest.mark.parametrize(
    ("rows", "size", "eps"), [(0, 8, EPS), (1, 0, EPS), (-1, 8, EPS), (1, 8, float("nan")), (1, 8, -1.0)]
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, rows: int, size: int, eps: float
) -> None:
    ptr, kernel = upload(gpu, normal(rng, 8)), gpu.kernel("norm", "rms_norm")
    with pytest.raises(InvalidArgumentError):
        ops.rms_norm(gpu, kernel, ptr, ptr, ptr, rows, size, eps, gpu.default_stream())


@pytest.mark.gpu_only("8.6 GB of rows: too much to normalise on a CPU in a test")
@pytest.mark.no_sanitizer("8.6 GB of checked loads take minutes")
def test_rows_past_2_to_the_32(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_far_rows(gpu, rng)


@checks("norm::rms_norm@far")
def check_far_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rows, size = (1 << 20) + 3, 4096
    x, weight = inputs(rng, 1, size)
    data = alloc_or_skip(gpu, 2 * rows * size)
    gpu.memset(data, 0, 2 * rows * size)
    last = data.offset(2 * (rows - 1) * size)
    gpu.copy_h2d(x.reshape(-1).view(np.uint8), last)
    kernel, stream = gpu.kernel("norm", "rms_norm"), gpu.default_stream()
    ops.rms_norm(gpu, kernel, data, upload(gpu, weight), data, rows, size, EPS, stream)
    got = download(gpu, last, x.shape, BF16)
    gpu.free(data)
    assert_rounds(got, oracle(x, weight, EPS), FP32_BOUND, what="the last row")
