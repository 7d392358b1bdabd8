# SPDX-License-Identifier: AGPL-3.0-only
"""Module spark_w4a16_gemv_rows: right within a tensor core's sums, and a row's bits are its own in every launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops import spark_w4a16_gemv_rows as ops
from spark_py.ops.spark_w4a16_gemv_rows import Nvfp4Projection
from spark_py.runtime.errors import ArgumentPointerError, InvalidArgumentError
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.testing import Array, Output, assert_same_bits, normal, run_case, upload
from spark_py.testing.cases import cases_of
from spark_py.testing.cases.w4a16_gemv import nvfp4

from .support import checks

NAMES = ("spark_w4a16_gemv_rows", "spark_w4a16_gemv_rows")


@dataclass(frozen=True)
class Weight:
    """An NVFP4 weight on the device."""

    weight: DevicePtr
    weight_scale: DevicePtr
    weight_scale_2: float = 0.0123


def run(gpu: GpuBackend, x: Array, matrices: Sequence[tuple[Array, Array]], head_dim: int = 0) -> list[Array]:
    """The outputs [M, N] of x [M, K] and matrices of codes and scales."""
    outputs = [Output(gpu, (len(x), len(packed))) for packed, _ in matrices]
    projections = [
        Nvfp4Projection(Weight(upload(gpu, packed), upload(gpu, scales)), output.ptr, len(packed), len(packed))
        for (packed, scales), output in zip(matrices, outputs, strict=True)
    ]
    kernel, stream = gpu.kernel(*NAMES), gpu.default_stream()
    ops.spark_w4a16_gemv_rows(gpu, kernel, upload(gpu, x), projections, len(x), x.shape[1], stream, head_dim=head_dim)
    return [output.read() for output in outputs]


@checks("::".join(NAMES))
def check_w4a16_gemv_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    spec = catalog.CATALOG[NAMES]
    for case in cases_of(spec):
        wrong = run_case(gpu, spec, case, rng)
        assert not wrong, f"{case.name}: {'; '.join(map(str, wrong))}"


def test_w4a16_gemv_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_w4a16_gemv_rows(gpu, rng)


def test_a_row_and_a_matrix_do_not_depend_on_the_others(gpu: GpuBackend, rng: np.random.Generator) -> None:
    x, matrices = normal(rng, 8, 768), [nvfp4(rng, n, 768) for n in (32, 19, 5)]
    together = run(gpu, x, matrices)
    for rows in ([0], [7, 2, 3]):
        for matrix, whole in zip(matrices, together, strict=True):
            assert_same_bits(run(gpu, x[rows], [matrix])[0], whole[rows], f"rows {rows}")
    parts = run(gpu, x, [(packed[3:], scales[3:]) for packed, scales in matrices])
    for whole, part in zip(together, parts, strict=True):
        assert_same_bits(part, whole[:, 3:], "other tiles")


def test_queries_and_gates_are_taken_apart(gpu: GpuBackend, rng: np.random.Generator) -> None:
    x, matrix, other = normal(rng, 2, 256), nvfp4(rng, 3 * 2 * 24, 256), nvfp4(rng, 48, 256)
    plain, split = run(gpu, x, [matrix, other]), run(gpu, x, [matrix, other], 24)
    assert_same_bits(split[0], plain[0].reshape(2, 3, 2, 24).swapaxes(1, 2).reshape(2, -1))
    assert_same_bits(split[1], plain[1])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"m": 0}, "m"),
        ({"m": 9}, "m"),
        ({"k": 128}, "k"),
        ({"n": 0}, "n"),
        ({"stride": 3}, "stride"),
        ({"parts": 0}, "projections"),
        ({"parts": 4}, "projections"),
        ({"head_dim": 3}, "n"),
        ({"scale": float("inf")}, "weight_scale_2"),
    ],
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, Any], name: str
) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel(*NAMES)
    numbers: dict[str, Any] = {"m": 1, "k": 256, "n": 4, "stride": 4, "parts": 1, "head_dim": 0, "scale": 1.0} | change
    weight = Weight(ptr, ptr, numbers["scale"])
    parts = [Nvfp4Projection(weight, ptr, numbers["n"], numbers["stride"])] * numbers["parts"]
    with pytest.raises(InvalidArgumentError) as error:
        ops.spark_w4a16_gemv_rows(
            gpu, kernel, ptr, parts, numbers["m"], numbers["k"], gpu.default_stream(), head_dim=numbers["head_dim"]
        )
    assert error.value.name == name


@pytest.mark.host_only("the catalogue's rules are applied where arguments are bound to a reference")
def test_operands_off_16_bytes_are_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, kernel, stream = upload(gpu, normal(rng, 512)), gpu.kernel(*NAMES), gpu.default_stream()
    for x, codes, scales in ((ptr.offset(2), ptr, ptr), (ptr, ptr.offset(8), ptr), (ptr, ptr, ptr.offset(8))):
        with pytest.raises(ArgumentPointerError, match="16"):
            ops.spark_w4a16_gemv_rows(
                gpu, kernel, x, [Nvfp4Projection(Weight(codes, scales), ptr, 1, 1)], 1, 256, stream
            )
