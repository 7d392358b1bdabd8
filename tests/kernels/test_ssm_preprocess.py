# SPDX-License-Identifier: AGPL-3.0-only
"""Module ssm_preprocess: queries and gates are told apart in place, bit for bit, whatever shared memory it takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops import ssm_preprocess as ops
from spark_py.runtime.errors import GeometryError, InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.runtime.launch import KernelLaunch
from spark_py.testing import POISON, Array, Output, any_bits, assert_same_bits, normal, upload

from .support import checks

# (rows, heads, head_dim, elements between rows, bytes past a 256-byte boundary). 64 x 256 takes 64 KiB of shared.
SHAPES = [
    (1, 1, 1, 0, 0),
    (1, 24, 256, 0, 0),
    (3, 4, 128, 0, 0),
    (2, 5, 64, 8, 16),
    (3, 3, 96, 5, 0),
    (2, 7, 33, 0, 0),
    (2, 16, 80, 3, 2),
    (1, 48, 256, 0, 0),
    (2, 64, 256, 0, 0),
]


def run(gpu: GpuBackend, rows: Array, heads: int, size: int, gap: int, shift: int) -> Array:
    """The rows afterwards; AssertionError where the elements between them changed."""
    count, row = rows.shape
    content = np.full((count, row + gap), 0, rows.dtype)
    content.view(np.uint8)[...] = POISON
    content[:, :row] = rows
    output = Output(gpu, content.shape, content=content, shift=shift)
    kernel = gpu.kernel("ssm_preprocess", "deinterleave_qg")
    ops.deinterleave_qg(gpu, kernel, output.ptr, count, heads, size, row + gap, gpu.default_stream())
    got = output.read()
    assert (np.ascontiguousarray(got[:, row:]).view(np.uint8) == POISON).all(), "between two rows"
    return np.ascontiguousarray(got[:, :row])


@checks("ssm_preprocess::deinterleave_qg")
def check_deinterleave(gpu: GpuBackend, rng: np.random.Generator) -> None:
    spec = catalog.find("ssm_preprocess", "deinterleave_qg")
    assert spec is not None
    for count, heads, size, gap, shift in SHAPES:
        rows = any_bits(rng, count, 2 * heads * size)
        expected = np.empty_like(rows)
        for head in range(heads):
            at = 2 * head * size
            expected[:, head * size : (head + 1) * size] = rows[:, at : at + size]
            expected[:, (heads + head) * size : (heads + head + 1) * size] = rows[:, at + size : at + 2 * size]
        what = f"{count} rows of {heads} x {size}, gap {gap}, shift {shift}"
        assert_same_bits(run(gpu, rows, heads, size, gap, shift), expected, what)
        assert_same_bits(spec.reference(rows, heads, size), expected, f"reference, {what}")


def test_deinterleave(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_deinterleave(gpu, rng)


def test_a_row_beyond_the_devices_shared_memory_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    heads = gpu.limits.max_shared_optin // (4 * 256) + 1
    ptr, kernel = upload(gpu, normal(rng, 2 * heads * 256)), gpu.kernel("ssm_preprocess", "deinterleave_qg")
    with pytest.raises(GeometryError, match=str(4 * heads * 256)):
        ops.deinterleave_qg(gpu, kernel, ptr, 1, heads, 256, 2 * heads * 256, gpu.default_stream())


def test_a_bare_launch_past_the_limit_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """The launcher raises the limit, not the launch. 128 KiB are more than any launch of these tests asks for."""
    ptr, kernel = upload(gpu, normal(rng, 2 * 128 * 256)), gpu.kernel("ssm_preprocess", "deinterleave_qg")
    launch = KernelLaunch(gpu, kernel).grid((1, 1, 1)).block((256, 1, 1)).shared_mem(4 * 128 * 256)
    with pytest.raises(GeometryError):
        launch.arg_ptr(ptr).arg_u32(128).arg_u32(256).arg_u32(2 * 128 * 256).launch(gpu.default_stream())


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"num_tokens": 0}, "num_tokens"),
        ({"num_heads": 0}, "num_heads"),
        ({"head_dim": 0}, "head_dim"),
        ({"stride": 15}, "stride"),
    ],
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, Any], name: str
) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel("ssm_preprocess", "deinterleave_qg")
    numbers = {"num_tokens": 1, "num_heads": 1, "head_dim": 8, "stride": 16} | change
    with pytest.raises(InvalidArgumentError) as error:
        ops.deinterleave_qg(gpu, kernel, ptr, **numbers, stream=gpu.default_stream())
    assert error.value.name == name
