# SPDX-License-Identifier: AGPL-3.0-only
"""Module rms_norm_vanilla: the norm with the plain weight against an FP64 oracle and the reference."""

from __future__ import annotations

import numpy as np

from spark_py import catalog
from spark_py.ops import rms_norm_vanilla as ops
from spark_py.runtime.gpu import GpuBackend
from spark_py.testing import Output, assert_rounds, assert_ulps, normal, upload

from .support import checks
from .test_norm import EPS, FP32_BOUND, REFERENCE_L2, REFERENCE_ULPS, SHAPES, inputs, oracle


@checks("rms_norm_vanilla::rms_norm_vanilla")
def check_rms_norm_vanilla(gpu: GpuBackend, rng: np.random.Generator) -> None:
    kernel = gpu.kernel("rms_norm_vanilla", "rms_norm_vanilla")
    spec = catalog.find("rms_norm_vanilla", "rms_norm_vanilla")
    assert spec is not None
    for rows, size in SHAPES:
        for in_place in (False, True):
            x, weight = inputs(rng, rows, size)
            output = Output(gpu, x.shape, content=x if in_place else None)
            source = output.ptr if in_place else upload(gpu, x)
            ops.rms_norm(gpu, kernel, source, upload(gpu, weight), output.ptr, rows, size, EPS, gpu.default_stream())
            what = f"[{rows}, {size}] in_place={in_place}"
            assert_rounds(output.read(), oracle(x, weight, EPS, plus=0.0), FP32_BOUND, what=what)
            assert_ulps(output.read(), spec.reference(x, weight, EPS), REFERENCE_ULPS, REFERENCE_L2, what)


def test_rms_norm_vanilla(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_rms_norm_vanilla(gpu, rng)


def test_a_weight_of_ones_gives_rows_of_unit_mean_square(gpu: GpuBackend, rng: np.random.Generator) -> None:
    x = normal(rng, 3, 512, scale=7.0)
    output, ones = Output(gpu, x.shape), np.ones(512).astype(x.dtype)
    kernel = gpu.kernel("rms_norm_vanilla", "rms_norm_vanilla")
    ops.rms_norm(gpu, kernel, upload(gpu, x), upload(gpu, ones), output.ptr, 3, 512, EPS, gpu.default_stream())
    mean = (output.read().astype(np.float64) ** 2).mean(axis=1)
    # 512 roundings to BF16, each off by 2**-9 at most.
    assert np.abs(mean - 1.0).max() < 2.0**-8
