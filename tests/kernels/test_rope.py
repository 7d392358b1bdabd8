# SPDX-License-Identifier: AGPL-3.0-only
"""Module rope: rotate-half pairs against FP64, at long positions and for every shape of the launch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops import rope as ops
from spark_py.runtime.errors import ArgumentRangeError, InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.runtime.launch import KernelLaunch
from spark_py.testing import Array, Output, any_bits, assert_rounds, assert_same_bits, f64, normal, upload

from .support import checks

# (batch, s, nq, nkv, head_dim, rotary_dim). half = rotary_dim / 2 below, equal to and above the 128 threads of a block,
# dividing 128 and not.
SHAPES = [
    (1, 1, 1, 1, 32, 32),
    (2, 5, 3, 1, 64, 64),
    (1, 7, 4, 2, 96, 96),
    (1, 9, 2, 1, 128, 64),
    (2, 3, 2, 2, 256, 256),
    (1, 4, 2, 1, 256, 64),
    (1, 3, 1, 1, 512, 512),
    (2, 4, 2, 1, 320, 300),
    (1, 60, 1, 1, 80, 10),
    (1, 130, 1, 1, 8, 2),
    (1, 3, 2, 1, 33, 6),
]
POSITIONS = [0, 1500, 30000, 131072]

# cosf and sinf within 2 ulp of a number up to 1, two products and a sum: 5 roundings of at most (|x0| + |x1|) each.
BOUND = 2.0**-22


def run(
    gpu: GpuBackend, q: Array, k: Array, positions: Array, rotary_dim: int, theta: float, shift: int = 0
) -> tuple[Array, Array]:
    batch, length, q_heads, size = q.shape
    outputs = [Output(gpu, x.shape, content=x, shift=shift) for x in (q, k)]
    ops.rope(
        gpu, gpu.kernel("rope", "rope_forward"), outputs[0].ptr, outputs[1].ptr, upload(gpu, positions), length,
        q_heads, k.shape[2], size, rotary_dim, theta, gpu.default_stream(), batch,
    )  # fmt: skip
    return outputs[0].read(), outputs[1].read()


def oracle(x: Array, positions: Array, rotary_dim: int, theta: float) -> tuple[Array, Array]:
    """The rotated elements in FP64, from the angle that the contract rounds to FP32, and the error that is allowed."""
    half = rotary_dim // 2
    theta = float(np.float32(theta))
    exponents = np.array([2 * i / rotary_dim for i in range(half)])
    angle = positions.astype(np.float64)[:, :, None, None] / theta**exponents
    rounded = f64(angle.astype(np.float32))
    first, second = f64(x[..., :half]), f64(x[..., half:rotary_dim])
    cosine, sine = np.cos(rounded), np.sin(rounded)
    exact = np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    slack = BOUND * (np.abs(first) + np.abs(second))
    # Where the FP64 angle lies on a rounding boundary of FP32, another pow may round it to the other side.
    either = (angle * (1 - 2.0**-50)).astype(np.float32) != (angle * (1 + 2.0**-50)).astype(np.float32)
    slack += np.where(either, angle * 2.0**-23, 0.0) * (np.abs(first) + np.abs(second))
    return exact, np.concatenate([slack, slack], axis=-1)


def compare(got: Array, x: Array, positions: Array, rotary_dim: int, theta: float, what: str) -> None:
    exact, slack = oracle(x, positions, rotary_dim, theta)
    assert_rounds(got[..., :rotary_dim], exact, 0.0, slack, what)
    if rotary_dim < x.shape[-1]:
        assert_same_bits(got[..., rotary_dim:], x[..., rotary_dim:], f"{what}, not rotated")


def draw_positions(rng: np.random.Generator, batch: int, length: int) -> Array:
    """Positions that do not ascend, the named ones among them."""
    chosen = rng.choice(POSITIONS, (batch, length)) + rng.integers(0, 3, (batch, length))
    return chosen.astype(np.uint32)


@checks("rope::rope_forward")
def check_rope(gpu: GpuBackend, rng: np.random.Generator) -> None:
    spec = catalog.find("rope", "rope_forward")
    assert spec is not None
    for batch, length, q_heads, kv_heads, size, rotary_dim in SHAPES:
        q, k = any_finite(rng, batch, length, q_heads, size), normal(rng, batch, length, kv_heads, size)
        positions, theta = draw_positions(rng, batch, length), float(rng.choice([10000.0, 1e6, 1e7]))
        what = f"[{batch}, {length}, {q_heads}+{kv_heads}, {size}] rotary_dim={rotary_dim} theta={theta}"
        for got, x in zip(run(gpu, q, k, positions, rotary_dim, theta), (q, k), strict=True):
            compare(got, x, positions, rotary_dim, theta, what)
            exact, slack = oracle(x, positions, rotary_dim, theta)
            reference = spec.reference(x, positions, rotary_dim, theta)
            assert_rounds(reference[..., :rotary_dim], exact, 0.0, slack, f"reference {what}")


def any_finite(rng: np.random.Generator, *shape: int) -> Array:
    """Normal numbers over many magnitudes."""
    return (rng.standard_normal(shape) * 10.0 ** rng.uniform(-3, 3, shape)).astype(normal(rng, 1).dtype)


def test_rope(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_rope(gpu, rng)


@pytest.mark.parametrize("position", POSITIONS)
def test_long_positions(gpu: GpuBackend, rng: np.random.Generator, position: int) -> None:
    """Against the angle that was never rounded: what FP32 costs is half an ulp of the angle, and nothing more."""
    q, k = normal(rng, 1, 1, 2, 128), normal(rng, 1, 1, 1, 128)
    positions = np.full((1, 1), position, np.uint32)
    for got, x in zip(run(gpu, q, k, positions, 128, 1e4), (q, k), strict=True):
        angle = position / 1e4 ** (np.arange(64) / 64)
        first, second = f64(x[..., :64]), f64(x[..., 64:])
        exact = np.concatenate(
            [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], axis=-1
        )
        size = np.abs(first) + np.abs(second)
        bound = np.concatenate([size, size], axis=-1) * (np.tile(angle, 2) * 2.0**-24 + BOUND)
        assert_rounds(got, exact, 0.0, bound, f"position {position}")


def test_position_zero_keeps_every_finite_bit(gpu: GpuBackend, rng: np.random.Generator) -> None:
    q, k = normal(rng, 1, 2, 3, 64), normal(rng, 1, 2, 1, 64)
    got = run(gpu, q, k, np.zeros((1, 2), np.uint32), 64, 1e4)
    assert_same_bits(got[0], q)
    assert_same_bits(got[1], k)


def test_a_token_does_not_depend_on_the_others(gpu: GpuBackend, rng: np.random.Generator) -> None:
    q, k, positions = normal(rng, 2, 9, 2, 96), normal(rng, 2, 9, 1, 96), draw_positions(rng, 2, 9)
    together = run(gpu, q, k, positions, 80, 1e6)
    for row, token in ((0, 0), (0, 8), (1, 4)):
        part = np.s_[row : row + 1, token : token + 1]
        alone = run(gpu, q[part], k[part], positions[part], 80, 1e6)
        for got, expected in zip(alone, together, strict=True):
            assert_same_bits(got, expected[part], f"token {token} of sequence {row}")


def test_rows_off_every_boundary(gpu: GpuBackend, rng: np.random.Generator) -> None:
    q, k, positions = normal(rng, 1, 3, 2, 66), normal(rng, 1, 3, 1, 66), draw_positions(rng, 1, 3)
    shifted = run(gpu, q, k, positions, 64, 1e4, shift=2)
    for got, expected in zip(shifted, run(gpu, q, k, positions, 64, 1e4), strict=True):
        assert_same_bits(got, expected)


def test_what_is_not_rotated_keeps_nan_payloads(gpu: GpuBackend, rng: np.random.Generator) -> None:
    q, k = any_bits(rng, 1, 4, 2, 256), any_bits(rng, 1, 4, 2, 256)
    for got, x in zip(run(gpu, q, k, draw_positions(rng, 1, 4), 32, 1e4), (q, k), strict=True):
        assert_same_bits(got[..., 32:], x[..., 32:])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"rotary_dim": 0}, "rotary_dim"),
        ({"rotary_dim": 7}, "rotary_dim"),
        ({"rotary_dim": 66}, "rotary_dim"),
        ({"head_dim": 0}, "head_dim"),
        ({"seq_len": 0}, "seq_len"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"theta": 0.0}, "theta"),
        ({"theta": float("nan")}, "theta"),
        ({"batch": 0}, "batch"),
    ],
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, Any], name: str
) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel("rope", "rope_forward")
    numbers: dict[str, Any] = {"seq_len": 1, "num_q_heads": 1, "num_kv_heads": 1, "head_dim": 64, "rotary_dim": 64}
    numbers |= {"theta": 1e4, "batch": 1} | change
    with pytest.raises(InvalidArgumentError) as error:
        ops.rope(gpu, kernel, ptr, ptr, ptr, **numbers, stream=gpu.default_stream())
    assert error.value.name == name


@pytest.mark.host_only("the catalogue's rules are applied where arguments are bound to a reference")
def test_an_odd_rotary_dim_in_a_bare_launch_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel("rope", "rope_forward")
    launch = KernelLaunch(gpu, kernel).grid((2, 1, 1)).block((128, 1, 1)).arg_ptr(ptr).arg_ptr(ptr).arg_ptr(ptr)
    with pytest.raises(ArgumentRangeError, match="rotary_dim is 5"):
        launch.arg_u32(1).arg_u32(1).arg_u32(1).arg_u32(8).arg_u32(5).arg_f32(1e4).launch(gpu.default_stream())
