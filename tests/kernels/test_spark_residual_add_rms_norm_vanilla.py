# SPDX-License-Identifier: AGPL-3.0-only
"""Module spark_residual_add_rms_norm_vanilla: against an FP64 oracle, the reference, and two kernels that do it."""

from __future__ import annotations

import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops import spark_residual_add_rms_norm_vanilla as ops
from spark_py.ops.residual_add import residual_add
from spark_py.ops.rms_norm_vanilla import rms_norm
from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.testing import Output, assert_same_bits, normal, upload

from .support import checks
from .test_norm import EPS, check_adding, inputs

NAME = ("spark_residual_add_rms_norm_vanilla", "spark_residual_add_rms_norm_vanilla")


@checks("spark_residual_add_rms_norm_vanilla::spark_residual_add_rms_norm_vanilla")
def check_spark_residual_add_rms_norm_vanilla(gpu: GpuBackend, rng: np.random.Generator) -> None:
    spec = catalog.find(*NAME)
    assert spec is not None
    check_adding(gpu, rng, gpu.kernel(*NAME), spec.reference, 0.0)


def test_spark_residual_add_rms_norm_vanilla(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_spark_residual_add_rms_norm_vanilla(gpu, rng)


def test_a_row_does_not_depend_on_the_others(gpu: GpuBackend, rng: np.random.Generator) -> None:
    kernel, stream = gpu.kernel(*NAME), gpu.default_stream()
    (hidden, weight), (src, _) = inputs(rng, 5, 1026), inputs(rng, 5, 1026)

    def run(first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        rows = last - first
        into, kept = Output(gpu, (rows, 1026), content=hidden[first:last]), Output(gpu, (rows, 1026))
        output = Output(gpu, (rows, 1026))
        ops.residual_add_rms_norm(
            gpu, kernel, into.ptr, upload(gpu, src[first:last]), upload(gpu, weight), output.ptr, kept.ptr, rows, 1026,
            EPS, stream,
        )  # fmt: skip
        return into.read(), output.read()

    together = run(0, 5)
    for row in range(5):
        for all_rows, alone in zip(together, run(row, row + 1), strict=True):
            assert_same_bits(all_rows[row : row + 1], alone, f"row {row}")


def test_sums_that_are_exact_give_the_bits_of_the_two_kernels(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """Where no sum is rounded, the mean square is that of the rounded sums too."""
    stream, size = gpu.default_stream(), 640
    hidden = rng.integers(-64, 64, (3, size)).astype(normal(rng, 1).dtype)
    src, weight = rng.integers(-64, 64, (3, size)).astype(hidden.dtype), normal(rng, size)
    fused, kept, output = (
        Output(gpu, hidden.shape, content=hidden),
        Output(gpu, hidden.shape),
        Output(gpu, hidden.shape),
    )
    ops.residual_add_rms_norm(
        gpu, gpu.kernel(*NAME), fused.ptr, upload(gpu, src), upload(gpu, weight), output.ptr, kept.ptr, 3, size, EPS,
        stream,
    )  # fmt: skip
    added, normed = Output(gpu, hidden.shape, content=hidden), Output(gpu, hidden.shape)
    residual_add(gpu, gpu.kernel("residual_add", "bf16_residual_add"), added.ptr, upload(gpu, src), 3 * size, stream)
    vanilla = gpu.kernel("rms_norm_vanilla", "rms_norm_vanilla")
    rms_norm(gpu, vanilla, added.ptr, upload(gpu, weight), normed.ptr, 3, size, EPS, stream)
    assert_same_bits(fused.read(), added.read(), "hidden")
    assert_same_bits(output.read(), normed.read(), "output")


@pytest.mark.parametrize(
    ("rows", "size", "eps", "name"), [(0, 8, EPS, "num_tokens"), (1, 0, EPS, "hidden_size"), (1, 8, -1.0, "eps")]
)
def test_impossible_numbers_are_refused(gpu: GpuBackend, rows: int, size: int, eps: float, name: str) -> None:
    ptr, kernel = gpu.alloc(64), gpu.kernel(*NAME)
    with pytest.raises(InvalidArgumentError) as error:
        ops.residual_add_rms_norm(gpu, kernel, ptr, ptr, ptr, ptr, ptr, rows, size, eps, gpu.default_stream())
    assert error.value.name == name
