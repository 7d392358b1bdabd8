# SPDX-License-Identifier: AGPL-3.0-only
"""Module spark_fp8_gemv_rows: right within a tensor core's sums, and a row's bits are its own in every launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops import spark_fp8_gemv_rows as ops
from spark_py.ops.spark_fp8_gemv_rows import Fp8Projection
from spark_py.runtime.errors import ArgumentPointerError, InvalidArgumentError
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.testing import Array, Output, assert_same_bits, normal, run_case, upload
from spark_py.testing.cases import cases_of

from .support import checks

NAMES = ("spark_fp8_gemv_rows", "spark_fp8_gemv_rows")


@dataclass(frozen=True)
class Weight:
    """An E4M3 weight on the device."""

    weight: DevicePtr
    row_scale: DevicePtr


def run(gpu: GpuBackend, x: Array, matrices: Sequence[tuple[Array, Array]], head_dim: int = 0) -> list[Array]:
    """The outputs [M, N] of x [M, K] and matrices of bytes and scales."""
    outputs = [Output(gpu, (len(x), len(codes))) for codes, _ in matrices]
    projections = [
        Fp8Projection(Weight(upload(gpu, codes), upload(gpu, scales)), output.ptr, len(codes), len(codes))
        for (codes, scales), output in zip(matrices, outputs, strict=True)
    ]
    kernel, stream = gpu.kernel(*NAMES), gpu.default_stream()
    ops.spark_fp8_gemv_rows(gpu, kernel, upload(gpu, x), projections, len(x), x.shape[1], stream, head_dim=head_dim)
    return [output.read() for output in outputs]


def drawn(rng: np.random.Generator, count: int, size: int) -> tuple[Array, Array]:
    """Bytes of any value but NaN, and scales."""
    codes = (rng.integers(0, 0x7F, (count, size)) | rng.choice([0, 0x80], (count, size))).astype(np.uint8)
    return codes, rng.uniform(0.01, 1, count).astype(np.float32)


@checks("::".join(NAMES))
def check_fp8_gemv_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    spec = catalog.CATALOG[NAMES]
    for case in cases_of(spec):
        wrong = run_case(gpu, spec, case, rng)
        assert not wrong, f"{case.name}: {'; '.join(map(str, wrong))}"


def test_fp8_gemv_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_fp8_gemv_rows(gpu, rng)


def test_a_row_and_a_matrix_do_not_depend_on_the_others(gpu: GpuBackend, rng: np.random.Generator) -> None:
    x, matrices = normal(rng, 8, 784), [drawn(rng, n, 784) for n in (32, 19, 5)]
    together = run(gpu, x, matrices)
    for rows in ([0], [7, 2, 3]):
        for matrix, whole in zip(matrices, together, strict=True):
            assert_same_bits(run(gpu, x[rows], [matrix])[0], whole[rows], f"rows {rows}")
    parts = run(gpu, x, [(codes[3:], scales[3:]) for codes, scales in matrices])
    for whole, part in zip(together, parts, strict=True):
        assert_same_bits(part, whole[:, 3:], "other tiles")


def test_queries_and_gates_are_taken_apart(gpu: GpuBackend, rng: np.random.Generator) -> None:
    x, matrix, other = normal(rng, 2, 256), drawn(rng, 3 * 2 * 24, 256), drawn(rng, 48, 256)
    plain, split = run(gpu, x, [matrix, other]), run(gpu, x, [matrix, other], 24)
    assert_same_bits(split[0], plain[0].reshape(2, 3, 2, 24).swapaxes(1, 2).reshape(2, -1))
    assert_same_bits(split[1], plain[1])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"m": 0}, "m"),
        ({"m": 9}, "m"),
        ({"k": 24}, "k"),
        ({"n": 0}, "n"),
        ({"stride": 3}, "stride"),
        ({"parts": 0}, "projections"),
        ({"parts": 4}, "projections"),
        ({"head_dim": 3}, "n"),
    ],
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, Any], name: str
) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel(*NAMES)
    numbers: dict[str, Any] = {"m": 1, "k": 16, "n": 4, "stride": 4, "parts": 1, "head_dim": 0} | change
    weight = Weight(ptr, ptr)
    parts = [Fp8Projection(weight, ptr, numbers["n"], numbers["stride"])] * numbers["parts"]
    with pytest.raises(InvalidArgumentError) as error:
        ops.spark_fp8_gemv_rows(
            gpu, kernel, ptr, parts, numbers["m"], numbers["k"], gpu.default_stream(), head_dim=numbers["head_dim"]
        )
    assert error.value.name == name


@pytest.mark.host_only("the catalogue's rules are applied where arguments are bound to a reference")
def test_operands_off_16_bytes_are_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, kernel, stream = upload(gpu, normal(rng, 512)), gpu.kernel(*NAMES), gpu.default_stream()
    for x, codes in ((ptr.offset(2), ptr), (ptr, ptr.offset(8))):
        with pytest.raises(ArgumentPointerError, match="16"):
            ops.spark_fp8_gemv_rows(gpu, kernel, x, [Fp8Projection(Weight(codes, ptr), ptr, 1, 1)], 1, 16, stream)
