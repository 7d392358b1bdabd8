# SPDX-License-Identifier: AGPL-3.0-only
"""Module spark_w4a16_gemv_rows: right within a tensor core's sums, and a row's bits are its own in every launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from spark_py.ops import spark_w4a16_gemv_rows as ops
from spark_py.ops.spark_w4a16_gemv_rows import Nvfp4Projection
from spark_py.runtime.errors import ArgumentPointerError
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.testing import normal, upload
from spark_py.testing.cases.w4a16_gemv import nvfp4

from .gemv_rows import IMPOSSIBLE, Rows
from .support import checks

NAMES = ("spark_w4a16_gemv_rows", "spark_w4a16_gemv_rows")


@dataclass(frozen=True)
class Weight:
    """An NVFP4 weight on the device."""

    weight: DevicePtr
    weight_scale: DevicePtr
    weight_scale_2: float = 0.0123


ROWS = Rows(NAMES[0], ops.spark_w4a16_gemv_rows, Nvfp4Projection, Weight, nvfp4, step=256, off_step=128)


@checks("::".join(NAMES))
def check_w4a16_gemv_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ROWS.check_cases(gpu, rng)


def test_w4a16_gemv_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_w4a16_gemv_rows(gpu, rng)


def test_a_row_and_a_matrix_do_not_depend_on_the_others(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ROWS.check_alone_and_together(gpu, rng, 768)


def test_queries_and_gates_are_taken_apart(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ROWS.check_queries_and_gates(gpu, rng, 256)


@IMPOSSIBLE
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, Any], name: str
) -> None:
    ROWS.check_refused(gpu, rng, change, name)


def test_a_scale_that_is_not_finite_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ROWS.check_refused(gpu, rng, {}, "weight_scale_2", weight_scale_2=float("inf"))


@pytest.mark.host_only("the catalogue's rules are applied where arguments are bound to a reference")
def test_operands_off_16_bytes_are_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, kernel, stream = upload(gpu, normal(rng, 512)), gpu.kernel(*NAMES), gpu.default_stream()
    for x, codes, scales in ((ptr.offset(2), ptr, ptr), (ptr, ptr.offset(8), ptr), (ptr, ptr, ptr.offset(8))):
        with pytest.raises(ArgumentPointerError, match="16"):
            ops.spark_w4a16_gemv_rows(
                gpu, kernel, x, [Nvfp4Projection(Weight(codes, scales), ptr, 1, 1)], 1, 256, stream
            )
