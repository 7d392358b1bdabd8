# SPDX-License-Identifier: AGPL-3.0-only
"""What the tests of the kernels of spark_gemv_rows.cuh share: a format's weights are drawn, uploaded and launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.testing import Array, Output, assert_same_bits, normal, upload

from .support import check_cases

Matrix = tuple[Array, ...]
"""A weight's arrays, the rows of each of them those of the weight: codes and scales, say."""

IMPOSSIBLE = pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"m": 0}, "m"),
        ({"m": 9}, "m"),
        ({"k": None}, "k"),
        ({"n": 0}, "n"),
        ({"stride": 3}, "stride"),
        ({"parts": 0}, "projections"),
        ({"parts": 4}, "projections"),
        ({"head_dim": 3}, "n"),
    ],
)
"""Numbers that every launcher refuses, and the name in its error; for k, the `off_step` of the format."""


@dataclass(frozen=True)
class Rows:
    """A format: module and kernel `name`, its launcher, what makes a projection of (weight, output, n, stride) and a
    weight of pointers to a matrix's arrays, a draw of a matrix [n, k]; `step`, what k is a multiple of, and a k that is
    not."""

    name: str
    launch: Callable[..., None]
    projection: Callable[..., Any]
    weight: Callable[..., Any]
    drawn: Callable[[np.random.Generator, int, int], Matrix]
    step: int
    off_step: int

    def run(self, gpu: GpuBackend, x: Array, matrices: Sequence[Matrix], head_dim: int = 0) -> list[Array]:
        """The outputs [M, N] of x [M, K] and matrices [N, K]."""
        outputs = [Output(gpu, (len(x), len(matrix[0]))) for matrix in matrices]
        projections = [
            self.projection(
                self.weight(*(upload(gpu, part) for part in matrix)), output.ptr, len(matrix[0]), len(matrix[0])
            )
            for matrix, output in zip(matrices, outputs, strict=True)
        ]
        kernel, stream = gpu.kernel(self.name, self.name), gpu.default_stream()
        self.launch(gpu, kernel, upload(gpu, x), projections, len(x), x.shape[1], stream, head_dim=head_dim)
        return [output.read() for output in outputs]

    def check_cases(self, gpu: GpuBackend, rng: np.random.Generator) -> None:
        """Every case of the kernel."""
        check_cases(gpu, rng, f"{self.name}::{self.name}")

    def check_alone_and_together(self, gpu: GpuBackend, rng: np.random.Generator, k: int) -> None:
        """Bits of an output are the same with other rows, matrices and tiles around it."""
        x, matrices = normal(rng, 8, k), [self.drawn(rng, n, k) for n in (32, 19, 5)]
        together = self.run(gpu, x, matrices)
        for rows in ([0], [5], [7, 2, 3]):
            for matrix, whole in zip(matrices, together, strict=True):
                assert_same_bits(self.run(gpu, x[rows], [matrix])[0], whole[rows], f"rows {rows}")
        parts = self.run(gpu, x, [tuple(part[3:] for part in matrix) for matrix in matrices])
        for whole, part in zip(together, parts, strict=True):
            assert_same_bits(part, whole[:, 3:], "other tiles")

    def check_queries_and_gates(self, gpu: GpuBackend, rng: np.random.Generator, k: int) -> None:
        """head_dim moves outputs of the first matrix, and no bits."""
        x, matrix, other = normal(rng, 2, k), self.drawn(rng, 3 * 2 * 24, k), self.drawn(rng, 48, k)
        plain, split = self.run(gpu, x, [matrix, other]), self.run(gpu, x, [matrix, other], 24)
        assert_same_bits(split[0], plain[0].reshape(2, 3, 2, 24).swapaxes(1, 2).reshape(2, -1))
        assert_same_bits(split[1], plain[1])

    def check_refused(
        self, gpu: GpuBackend, rng: np.random.Generator, change: dict[str, Any], name: str, **weight: float
    ) -> None:
        """A launch with `change` is an InvalidArgumentError that names `name`; `weight` is of the weight."""
        ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel(self.name, self.name)
        numbers = {"m": 1, "k": self.step, "n": 4, "stride": 4, "parts": 1, "head_dim": 0} | change
        m, n, k = numbers["m"], numbers["n"], self.off_step if numbers["k"] is None else numbers["k"]
        arrays = len(self.drawn(rng, 1, self.step))
        one = self.projection(self.weight(*[ptr] * arrays, **weight), ptr, n, numbers["stride"])
        parts, stream = [one] * numbers["parts"], gpu.default_stream()
        with pytest.raises(InvalidArgumentError) as error:
            self.launch(gpu, kernel, ptr, parts, m, k, stream, head_dim=numbers["head_dim"])
        assert error.value.name == name
