# SPDX-License-Identifier: AGPL-3.0-only
"""Module spark_rms_norm_f32: FP32 rows against an FP64 oracle and the reference; BF16 numbers as rms_norm_vanilla."""

from __future__ import annotations

import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops.rms_norm_vanilla import rms_norm as vanilla_norm
from spark_py.ops.spark_rms_norm_f32 import rms_norm, rms_norm_both
from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.testing import F32, Array, Output, assert_rounds, assert_same_bits, assert_ulps, normal, upload

from .support import check_cases, checks
from .test_norm import EPS, FP32_BOUND, REFERENCE_L2, REFERENCE_ULPS, SHAPES, inputs, oracle

NAME = ("spark_rms_norm_f32", "spark_rms_norm_f32")


def rows_of(rng: np.random.Generator, rows: int, size: int) -> Array:
    """Rows of very different magnitude, every bit of FP32 in use."""
    return (rng.standard_normal((rows, size)) * 10.0 ** rng.uniform(-4, 3, (rows, 1))).astype(F32)


def run(gpu: GpuBackend, x: Array, weight: Array, shift: int = 0) -> Array:
    output = Output(gpu, x.shape, shift=shift)
    source, weights = upload(gpu, x, 2 * shift), upload(gpu, weight, shift)
    rms_norm(gpu, gpu.kernel(*NAME), source, weights, output.ptr, *x.shape, EPS, gpu.default_stream())
    return output.read()


@checks("spark_rms_norm_f32::spark_rms_norm_f32")
def check_spark_rms_norm_f32(gpu: GpuBackend, rng: np.random.Generator) -> None:
    spec = catalog.find(*NAME)
    assert spec is not None
    for rows, size in SHAPES:
        for shift in (0, 2):
            x, weight = rows_of(rng, rows, size), normal(rng, size)
            got, what = run(gpu, x, weight, shift), f"[{rows}, {size}] shift={shift}"
            assert_rounds(got, oracle(x, weight, EPS, plus=0.0), FP32_BOUND, what=what)
            assert_ulps(got, spec.reference(x, weight, EPS), REFERENCE_ULPS, REFERENCE_L2, what)


@checks("spark_rms_norm_f32::spark_rms_norm_both")
def check_both(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_cases(gpu, rng, "spark_rms_norm_f32::spark_rms_norm_both")
    for tokens, hc, size in ((1, 4, 64), (2, 3, 33), (2, 1, 2050)):
        embed, weights = normal(rng, tokens, size), [normal(rng, size) for _ in range(2)]
        streams = rows_of(rng, tokens * hc, size)
        first, second = Output(gpu, (tokens, size)), Output(gpu, (tokens * hc, size))
        rms_norm_both(
            gpu, gpu.kernel("spark_rms_norm_f32", "spark_rms_norm_both"), upload(gpu, embed), upload(gpu, weights[0]),
            first.ptr, upload(gpu, streams), upload(gpu, weights[1]), second.ptr, tokens, size, hc, EPS,
            gpu.default_stream(),
        )  # fmt: skip
        alone, kernel = Output(gpu, (tokens, size)), gpu.kernel("rms_norm_vanilla", "rms_norm_vanilla")
        vanilla_norm(
            gpu, kernel, upload(gpu, embed), upload(gpu, weights[0]), alone.ptr, tokens, size, EPS, gpu.default_stream()
        )
        assert_same_bits(first.read(), alone.read(), f"{tokens} rows of {size}")
        assert_same_bits(second.read(), run(gpu, streams, weights[1]), f"{hc} streams of {size}")


def test_spark_rms_norm_both(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_both(gpu, rng)


def test_spark_rms_norm_f32(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_spark_rms_norm_f32(gpu, rng)


@pytest.mark.parametrize("size", [33, 1026])
def test_bf16_numbers_have_the_bits_of_the_norm_of_bf16(gpu: GpuBackend, rng: np.random.Generator, size: int) -> None:
    x, weight = inputs(rng, 4, size)
    output, kernel = Output(gpu, x.shape), gpu.kernel("rms_norm_vanilla", "rms_norm_vanilla")
    vanilla_norm(gpu, kernel, upload(gpu, x), upload(gpu, weight), output.ptr, 4, size, EPS, gpu.default_stream())
    assert_same_bits(run(gpu, x.astype(F32), weight), output.read())


def test_a_row_does_not_depend_on_the_others(gpu: GpuBackend, rng: np.random.Generator) -> None:
    x, weight = rows_of(rng, 3, 514), normal(rng, 514)
    together = run(gpu, x, weight)
    for row in range(3):
        assert_same_bits(together[row : row + 1], run(gpu, x[row : row + 1], weight), f"row {row}")


@pytest.mark.parametrize(
    ("rows", "size", "eps", "name"), [(0, 8, EPS, "num_tokens"), (1, 0, EPS, "hidden_size"), (1, 8, -1.0, "eps")]
)
def test_impossible_numbers_are_refused(gpu: GpuBackend, rows: int, size: int, eps: float, name: str) -> None:
    ptr = gpu.alloc(64)
    with pytest.raises(InvalidArgumentError) as error:
        rms_norm(gpu, gpu.kernel(*NAME), ptr, ptr, ptr, rows, size, eps, gpu.default_stream())
    assert error.value.name == name
