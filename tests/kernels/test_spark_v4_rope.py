# SPDX-License-Identifier: AGPL-3.0-only
"""Module spark_v4_rope: neighbours of each head's tail against FP64, and back again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops import spark_v4_rope as ops
from spark_py.runtime.errors import ArgumentRangeError, InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.runtime.launch import KernelLaunch
from spark_py.testing import Array, Output, any_bits, assert_rounds, assert_same_bits, f64, normal, upload
from spark_py.testing.cases.spark_v4_rope import POSITIONS, SHAPES

from .support import checks
from .v4_oracle import rope as rope_fp64
from .v4_oracle import rope_slack

NAMES = ("spark_v4_rope", "spark_v4_rope")


def run(
    gpu: GpuBackend, x: Array, positions: Array, rope_dim: int, theta: float, inverse: bool = False, shift: int = 0
) -> Array:
    rows, heads, size = x.shape
    output = Output(gpu, x.shape, content=x, shift=shift)
    ops.spark_v4_rope(
        gpu, gpu.kernel(*NAMES), output.ptr, upload(gpu, positions), rows, heads, size, rope_dim, theta,
        gpu.default_stream(), inverse,
    )  # fmt: skip
    return output.read()


def draw_positions(rng: np.random.Generator, rows: int) -> Array:
    """Positions that do not ascend, near the named ones."""
    return (rng.choice(POSITIONS[1:], rows) - rng.integers(0, 3, rows)).astype(np.uint32)


def spread(rng: np.random.Generator, *shape: int) -> Array:
    """Normal numbers over many magnitudes."""
    return (rng.standard_normal(shape) * 10.0 ** rng.uniform(-3, 3, shape)).astype(normal(rng, 1).dtype)


@checks("spark_v4_rope::spark_v4_rope")
def check_rope(gpu: GpuBackend, rng: np.random.Generator) -> None:
    spec = catalog.CATALOG[NAMES]
    for number, (rows, heads, size, rope_dim) in enumerate(SHAPES):
        x, positions, theta = spread(rng, rows, heads, size), draw_positions(rng, rows), 1e4 if number else 1.6e5
        for inverse in (False, True):
            got, start = run(gpu, x, positions, rope_dim, theta, inverse), size - rope_dim
            reference = spec.reference(x, positions, rope_dim, theta, inverse)
            exact = rope_fp64(f64(x), positions, theta, rope_dim, inverse)
            slack = rope_slack(f64(x), positions, theta, rope_dim)
            for who, rotated in (("kernel", got), ("reference", reference)):
                what = f"{who} {[rows, heads, size]} rope_dim={rope_dim} theta={theta} inverse={inverse}"
                assert_rounds(rotated[..., start:], exact[..., start:], 0.0, slack[..., start:], what)
                if start:
                    assert_same_bits(rotated[..., :start], x[..., :start], f"{what}, before the tail")


def test_rope(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_rope(gpu, rng)


@pytest.mark.parametrize("position", POSITIONS)
def test_there_and_back(gpu: GpuBackend, rng: np.random.Generator, position: int) -> None:
    """Two roundings to BF16 of a pair, each of at most 2^-8 of its length in sum."""
    x, positions = normal(rng, 1, 8, 512), np.full(1, position, np.uint32)
    back = run(gpu, run(gpu, x, positions, 64, 1e4), positions, 64, 1e4, inverse=True)
    length = np.repeat(np.hypot(f64(x[..., 448::2]), f64(x[..., 449::2])), 2, axis=-1)
    assert (np.abs(f64(back[..., 448:]) - f64(x[..., 448:])) <= 2.0**-7 * length).all()
    assert_same_bits(back[..., :448], x[..., :448])


def test_position_zero_keeps_every_finite_bit(gpu: GpuBackend, rng: np.random.Generator) -> None:
    x = normal(rng, 3, 5, 64)
    for inverse in (False, True):
        assert_same_bits(run(gpu, x, np.zeros(3, np.uint32), 16, 1e4, inverse), x)


def test_a_row_does_not_depend_on_the_others(gpu: GpuBackend, rng: np.random.Generator) -> None:
    x, positions = normal(rng, 6, 11, 96), draw_positions(rng, 6)
    together = run(gpu, x, positions, 32, 1e4)
    for row in (0, 3, 5):
        alone = run(gpu, x[row : row + 1, :3], positions[row : row + 1], 32, 1e4, shift=4)
        assert_same_bits(alone[0], together[row, :3], f"row {row}")


def test_what_is_not_rotated_keeps_nan_payloads(gpu: GpuBackend, rng: np.random.Generator) -> None:
    x = any_bits(rng, 2, 9, 128)
    got = run(gpu, x, draw_positions(rng, 2), 32, 1e4)
    assert_same_bits(got[..., :96], x[..., :96])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"rows": 0}, "rows"),
        ({"heads": 0}, "heads"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": 63}, "head_dim"),
        ({"rope_dim": 0}, "rope_dim"),
        ({"rope_dim": 7}, "rope_dim"),
        ({"rope_dim": 66}, "rope_dim"),
        ({"head_dim": 1024, "rope_dim": 514}, "rope_dim"),
        ({"theta": 0.0}, "theta"),
        ({"theta": float("inf")}, "theta"),
    ],
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, Any], name: str
) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel(*NAMES)
    numbers: dict[str, Any] = {"rows": 1, "heads": 1, "head_dim": 64, "rope_dim": 64, "theta": 1e4} | change
    with pytest.raises(InvalidArgumentError) as error:
        ops.spark_v4_rope(gpu, kernel, ptr, ptr, **numbers, stream=gpu.default_stream())
    assert error.value.name == name


def test_heads_off_4_bytes_are_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel(*NAMES)
    with pytest.raises(InvalidArgumentError, match="4-byte"):
        ops.spark_v4_rope(gpu, kernel, ptr.offset(2), ptr, 1, 1, 32, 8, 1e4, gpu.default_stream())


@pytest.mark.host_only("the catalogue's rules are applied where arguments are bound to a reference")
def test_an_odd_tail_in_a_bare_launch_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel(*NAMES)
    launch = KernelLaunch(gpu, kernel).grid((1, 1, 1)).block((256, 1, 1)).arg_ptr(ptr).arg_ptr(ptr)
    with pytest.raises(ArgumentRangeError, match="rope_dim is 5"):
        launch.arg_u32(1).arg_u32(8).arg_u32(5).arg_f32(1e4).arg_u32(0).launch(gpu.default_stream())
