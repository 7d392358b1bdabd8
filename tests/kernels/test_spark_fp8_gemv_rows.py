# SPDX-License-Identifier: AGPL-3.0-only
"""Module spark_fp8_gemv_rows: right within a tensor core's sums, and a row's bits are its own in every launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from spark_py.ops import spark_fp8_gemv_rows as ops
from spark_py.ops.spark_fp8_gemv_rows import Fp8Projection
from spark_py.runtime.errors import ArgumentPointerError
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.testing import Array, normal, upload

from .gemv_rows import IMPOSSIBLE, Rows
from .support import checks

NAMES = ("spark_fp8_gemv_rows", "spark_fp8_gemv_rows")


@dataclass(frozen=True)
class Weight:
    """An E4M3 weight on the device."""

    weight: DevicePtr
    row_scale: DevicePtr


def drawn(rng: np.random.Generator, count: int, size: int) -> tuple[Array, Array]:
    """Bytes of any value but NaN, and scales."""
    codes = (rng.integers(0, 0x7F, (count, size)) | rng.choice([0, 0x80], (count, size))).astype(np.uint8)
    return codes, rng.uniform(0.01, 1, count).astype(np.float32)


ROWS = Rows(NAMES[0], ops.spark_fp8_gemv_rows, Fp8Projection, Weight, drawn, step=16, off_step=24)


@checks("::".join(NAMES))
def check_fp8_gemv_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ROWS.check_cases(gpu, rng)


def test_fp8_gemv_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_fp8_gemv_rows(gpu, rng)


def test_a_row_and_a_matrix_do_not_depend_on_the_others(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ROWS.check_alone_and_together(gpu, rng, 784)


def test_queries_and_gates_are_taken_apart(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ROWS.check_queries_and_gates(gpu, rng, 256)


@IMPOSSIBLE
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, Any], name: str
) -> None:
    ROWS.check_refused(gpu, rng, change, name)


@pytest.mark.host_only("the catalogue's rules are applied where arguments are bound to a reference")
def test_operands_off_16_bytes_are_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, kernel, stream = upload(gpu, normal(rng, 512)), gpu.kernel(*NAMES), gpu.default_stream()
    for x, codes in ((ptr.offset(2), ptr), (ptr, ptr.offset(8))):
        with pytest.raises(ArgumentPointerError, match="16"):
            ops.spark_fp8_gemv_rows(gpu, kernel, x, [Fp8Projection(Weight(codes, ptr), ptr, 1, 1)], 1, 16, stream)
