# SPDX-License-Identifier: AGPL-3.0-only
"""Module spark_w8a16_rows: right within a tensor core's sums, and a row's bits are its own in every launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from spark_py.ops import spark_w8a16_rows as ops
from spark_py.ops.spark_w8a16_rows import W8Projection
from spark_py.runtime.errors import ArgumentPointerError, InvalidArgumentError
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.testing import Array, Output, assert_same_bits, normal, upload
from spark_py.testing.cases.spark_w8a16_rows import drawn

from .support import check_cases, checks

NAMES = ("spark_w8a16_rows", "spark_w8a16_rows")
Matrix = tuple[Array, Array]


@dataclass(frozen=True)
class Weight:
    """An E4M3 weight on the device."""

    weight: DevicePtr
    row_scale: DevicePtr


def run(gpu: GpuBackend, x: Array, matrices: list[Matrix], groups: int = 1) -> list[Array]:
    """The outputs [M, N] of x [M, groups * K] and matrices [N, K]."""
    outputs = [Output(gpu, (len(x), len(codes))) for codes, _ in matrices]
    projections = [
        W8Projection(Weight(upload(gpu, codes), upload(gpu, factors)), output.ptr, len(codes), len(codes))
        for (codes, factors), output in zip(matrices, outputs, strict=True)
    ]
    ops.spark_w8a16_rows(
        gpu, gpu.kernel(*NAMES), upload(gpu, x), projections, len(x), x.shape[1] // groups, gpu.default_stream(),
        groups=groups,
    )  # fmt: skip
    return [output.read() for output in outputs]


@checks("::".join(NAMES))
def check_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_cases(gpu, rng, "::".join(NAMES))


def test_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_rows(gpu, rng)


@pytest.mark.parametrize("k", [144, 1168])
def test_a_row_and_a_matrix_do_not_depend_on_the_others(gpu: GpuBackend, rng: np.random.Generator, k: int) -> None:
    x, matrices = normal(rng, 8, k), [drawn(rng, n, k) for n in (9, 134)]
    together = run(gpu, x, matrices)
    for rows in ([0], [5], [7, 2, 3]):
        for matrix, whole in zip(matrices, together, strict=True):
            assert_same_bits(run(gpu, x[rows], [matrix])[0], whole[rows], f"rows {rows}")
    # Rows of the matrix at another place of a tile.
    (codes, factors), whole = matrices[0], together[0]
    assert_same_bits(run(gpu, x[:1], [(codes[3:], factors)])[0], whole[:1, 3:], "other warps")


def test_the_second_matrix_may_read_rows_of_its_own(gpu: GpuBackend, rng: np.random.Generator) -> None:
    k, first, second = 272, normal(rng, 1, 272), normal(rng, 4, 272)
    matrices = [drawn(rng, n, k) for n in (20, 37)]
    outputs = [Output(gpu, (len(x), len(codes))) for x, (codes, _) in zip((first, second), matrices, strict=True)]
    parts = [
        W8Projection(Weight(upload(gpu, codes), upload(gpu, factors)), output.ptr, len(codes), len(codes))
        for (codes, factors), output in zip(matrices, outputs, strict=True)
    ]
    ops.spark_w8a16_rows(
        gpu, gpu.kernel(*NAMES), upload(gpu, first), parts, 1, k, gpu.default_stream(), other=(upload(gpu, second), 4)
    )
    for output, x, matrix in zip(outputs, (first, second), matrices, strict=True):
        assert_same_bits(output.read(), run(gpu, x, [matrix])[0])


def test_a_group_is_a_matrix_by_itself(gpu: GpuBackend, rng: np.random.Generator) -> None:
    k, n, groups = 144, 128, 2
    x, (codes, factors) = normal(rng, 3, groups * k), drawn(rng, groups * n, k)
    for rows in (1, 3):
        whole = run(gpu, x[:rows], [(codes, factors)], groups)[0]
        for g in range(groups):
            own = np.ascontiguousarray(x[:rows, g * k : (g + 1) * k])
            alone = run(gpu, own, [(codes[g * n : (g + 1) * n], factors[g : g + 1])])[0]
            assert_same_bits(alone, whole[:, g * n : (g + 1) * n], f"group {g}")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"m": 0}, "m"),
        ({"m": 9}, "m"),
        ({"k": 24}, "k"),
        ({"n": 0}, "n"),
        ({"stride": 3}, "stride"),
        ({"parts": 0}, "projections"),
        ({"parts": 3}, "projections"),
        ({"parts": 2, "groups": 2}, "projections"),
        ({"groups": 0}, "groups"),
        ({"groups": 2}, "n"),
    ],
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, Any], name: str
) -> None:
    ptr = upload(gpu, normal(rng, 64))
    numbers = {"m": 1, "k": 16, "n": 8, "stride": 8, "parts": 1, "groups": 1} | change
    one = replace(W8Projection(Weight(ptr, ptr), ptr, 8, 8), n=numbers["n"], stride=numbers["stride"])
    parts, stream = [one] * numbers["parts"], gpu.default_stream()
    with pytest.raises(InvalidArgumentError) as error:
        ops.spark_w8a16_rows(
            gpu, gpu.kernel(*NAMES), ptr, parts, numbers["m"], numbers["k"], stream, groups=numbers["groups"]
        )
    assert error.value.name == name


@pytest.mark.host_only("the catalogue's rules are applied where arguments are bound to a reference")
def test_operands_off_their_addresses_are_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, stream = upload(gpu, normal(rng, 512)), gpu.default_stream()
    for x, codes in ((ptr.offset(8), ptr), (ptr, ptr.offset(8))):
        one = W8Projection(Weight(codes, ptr), ptr, 1, 1)
        with pytest.raises(ArgumentPointerError, match="16"):
            ops.spark_w8a16_rows(gpu, gpu.kernel(*NAMES), x, [one], 1, 16, stream)
