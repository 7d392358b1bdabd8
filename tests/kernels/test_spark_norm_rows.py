# SPDX-License-Identifier: AGPL-3.0-only
"""Module spark_norm_rows: the bits of norms, concatenation and addition one after the other, on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_py.ops import spark_norm_rows as ops
from spark_py.ops.norm import rms_norm
from spark_py.ops.residual_add import residual_add
from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.gpu import DevicePtr, GpuBackend, KernelHandle
from spark_py.testing import BF16, Array, Output, assert_same_bits, normal, upload
from spark_py.testing.cases.norm import EPS, magnitudes
from spark_py.testing.cases.spark_norm_rows import SHAPES

from .support import check_cases, checks

MODULE = "spark_norm_rows"
CONCAT, ADD = "spark_norm_concat", "spark_add_then_norm"


def norm_kernel(gpu: GpuBackend, one_plus: bool) -> KernelHandle:
    return gpu.kernel("norm", "rms_norm") if one_plus else gpu.kernel("rms_norm_vanilla", "rms_norm_vanilla")


def normed(gpu: GpuBackend, x: Array, weight: DevicePtr, one_plus: bool) -> Array:
    """The row's norm by the kernel that does nothing else."""
    output, stream = Output(gpu, x.shape), gpu.default_stream()
    rms_norm(gpu, norm_kernel(gpu, one_plus), upload(gpu, x), weight, output.ptr, *x.shape, EPS, stream)
    return output.read()


@checks(f"{MODULE}::{CONCAT}")
def check_concat(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_cases(gpu, rng, f"{MODULE}::{CONCAT}")
    for rows, size, one_plus in SHAPES:
        pair = [magnitudes(rng, (rows, size), BF16) for _ in range(2)]
        weights = [upload(gpu, normal(rng, size)) for _ in range(2)]
        output = Output(gpu, (rows, 2 * size))
        ops.spark_norm_concat(
            gpu, gpu.kernel(MODULE, CONCAT), *(upload(gpu, x) for x in pair), *weights, output.ptr, rows, size,
            one_plus, EPS, gpu.default_stream(),
        )  # fmt: skip
        wanted = [normed(gpu, x, weight, one_plus) for x, weight in zip(pair, weights, strict=True)]
        assert_same_bits(output.read(), np.concatenate(wanted, axis=1), f"{rows} rows of {size}")


@checks(f"{MODULE}::{ADD}")
def check_add(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_cases(gpu, rng, f"{MODULE}::{ADD}")
    stream = gpu.default_stream()
    for rows, size, one_plus in SHAPES:
        hidden, src = (magnitudes(rng, (rows, size), BF16) for _ in range(2))
        weight = upload(gpu, normal(rng, size))
        fused, into, added = (
            Output(gpu, hidden.shape, content=hidden),
            Output(gpu, src.shape, content=src),
            upload(gpu, src),
        )
        # In place of the added row.
        ops.spark_add_then_norm(
            gpu, gpu.kernel(MODULE, ADD), fused.ptr, into.ptr, weight, into.ptr, rows, size, one_plus, EPS, stream
        )
        single = Output(gpu, hidden.shape, content=hidden)
        residual_add(gpu, gpu.kernel("residual_add", "bf16_residual_add"), single.ptr, added, rows * size, stream)
        wanted = single.read()
        assert_same_bits(fused.read(), wanted, f"sums of {rows} rows of {size}")
        assert_same_bits(into.read(), normed(gpu, wanted, weight, one_plus), f"{rows} rows of {size}")


def test_concat(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_concat(gpu, rng)


def test_add(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_add(gpu, rng)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 7}, "hidden_size"),
        ({"hidden_size": 8194}, "hidden_size"),
        ({"num_tokens": 0}, "num_tokens"),
        ({"eps": -1.0}, "eps"),
    ],
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, Any], name: str
) -> None:
    ptr, stream = upload(gpu, normal(rng, 64)), gpu.default_stream()
    numbers: dict[str, Any] = {"num_tokens": 1, "hidden_size": 8, "one_plus": True, "eps": EPS, "stream": stream}
    for launch, function, pointers in ((ops.spark_norm_concat, CONCAT, 5), (ops.spark_add_then_norm, ADD, 4)):
        with pytest.raises(InvalidArgumentError) as error:
            launch(gpu, gpu.kernel(MODULE, function), *[ptr] * pointers, **numbers | change)
        assert error.value.name == name
