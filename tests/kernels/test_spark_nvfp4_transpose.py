# SPDX-License-Identifier: AGPL-3.0-only
"""Module spark_nvfp4_transpose: bytes turned bit for bit, with zeros behind them, from any address."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops import spark_nvfp4_transpose as ops
from spark_py.runtime.errors import ArgumentRangeError, InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.runtime.launch import KernelLaunch
from spark_py.testing import Array, Output, alloc_or_skip, assert_same_bits, download, upload

from .support import checks

MODULE = "spark_nvfp4_transpose"
U8 = np.dtype(np.uint8)

# (rows, columns, ldb): edges of tiles of 64 both ways, and of words of 4.
SHAPES = [
    (1, 1, 4),
    (3, 5, 4),
    (5, 2, 16),
    (63, 66, 64),
    (64, 64, 64),
    (65, 67, 128),
    (100, 128, 160),
    (130, 7, 256),
    (66, 129, 68),
]


def run(gpu: GpuBackend, source: Array, ldb: int, shift: int = 0) -> Array:
    rows, columns = source.shape
    output, kernel = Output(gpu, (columns, ldb), U8), gpu.kernel(MODULE, MODULE)
    ops.spark_nvfp4_transpose(
        gpu, kernel, upload(gpu, source, shift), output.ptr, rows, columns, ldb, gpu.default_stream()
    )
    return output.read()


@checks(f"{MODULE}::{MODULE}")
def check_transpose(gpu: GpuBackend, rng: np.random.Generator) -> None:
    spec = catalog.CATALOG[MODULE, MODULE]
    for rows, columns, ldb in SHAPES:
        for shift in (0, 1, 4):
            source = rng.integers(1, 256, (rows, columns), np.uint8)
            got, what = run(gpu, source, ldb, shift), f"[{rows}, {columns}] to {ldb}, {shift} bytes on"
            assert_same_bits(got[:, :rows], np.ascontiguousarray(source.T), what)
            assert not got[:, rows:].any(), f"{what}: padding"
            assert_same_bits(spec.reference(source, ldb), got, f"reference {what}")


def test_transpose(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_transpose(gpu, rng)


@pytest.mark.parametrize(
    ("change", "name"),
    [({"rows": 0}, "rows"), ({"columns": 0}, "columns"), ({"ldb": 6}, "ldb"), ({"ldb": 4}, "ldb"), ({"ldb": 0}, "ldb")],
)
def test_impossible_numbers_are_refused(gpu: GpuBackend, change: dict[str, Any], name: str) -> None:
    ptr, kernel = upload(gpu, np.zeros(64, np.uint8)), gpu.kernel(MODULE, MODULE)
    numbers: dict[str, Any] = {"rows": 5, "columns": 8, "ldb": 8} | change
    with pytest.raises(InvalidArgumentError) as error:
        ops.spark_nvfp4_transpose(gpu, kernel, ptr, ptr, **numbers, stream=gpu.default_stream())
    assert error.value.name == name


def test_a_target_off_4_bytes_is_refused(gpu: GpuBackend) -> None:
    ptr, kernel = upload(gpu, np.zeros(64, np.uint8)), gpu.kernel(MODULE, MODULE)
    with pytest.raises(InvalidArgumentError) as error:
        ops.spark_nvfp4_transpose(gpu, kernel, ptr, ptr.offset(2), 4, 4, 4, gpu.default_stream())
    assert error.value.name == "target"


@pytest.mark.host_only("the catalogue's rules are applied where arguments are bound to a reference")
def test_rows_longer_than_ldb_in_a_bare_launch_are_refused(gpu: GpuBackend) -> None:
    ptr = upload(gpu, np.zeros(64, np.uint8))
    launch = KernelLaunch(gpu, gpu.kernel(MODULE, MODULE)).grid((1, 1, 1)).block((256, 1, 1)).arg_ptr(ptr).arg_ptr(ptr)
    with pytest.raises(ArgumentRangeError, match="ldb is 4"):
        launch.arg_u32(5).arg_u32(4).arg_u32(4).launch(gpu.default_stream())


@pytest.mark.gpu_only("a source and a target of 4.3 GB: more than a CPU test should allocate")
@pytest.mark.no_sanitizer("8.6 GB of shadow memory")
def test_matrices_past_2_to_the_32(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_far(gpu, rng)


@checks(f"{MODULE}::{MODULE}@far")
def check_far(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """The last row and the last column of both matrices lie past 2^32 bytes."""
    rows, columns = (1 << 16) + 8, 1 << 16
    source, target = alloc_or_skip(gpu, rows * columns), alloc_or_skip(gpu, rows * columns)
    gpu.memset(source, 0, rows * columns)
    row = rng.integers(0, 256, columns, np.uint8)
    gpu.copy_h2d(row, source.offset((rows - 1) * columns))
    ops.spark_nvfp4_transpose(
        gpu, gpu.kernel(MODULE, MODULE), source, target, rows, columns, rows, gpu.default_stream()
    )
    gpu.synchronize(gpu.default_stream())
    for column in (0, 1, columns // 2, columns - 1):
        got = download(gpu, target.offset(column * rows), (rows,), U8)
        assert not got[:-1].any()
        assert got[-1] == row[column]
    gpu.free(source)
    gpu.free(target)
