# SPDX-License-Identifier: AGPL-3.0-only
"""`spark-py demo --kernels`: the kernels there are, and one of them run here and held against its formula."""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

import click
import numpy as np
import numpy.typing as npt

from spark_py.catalog import all_kernels
from spark_py.catalog.spec import DTYPES
from spark_py.ops.norm import residual_add_rms_norm
from spark_py.runtime import open_backend
from spark_py.runtime.gpu import DevicePtr, GpuBackend

BF16 = DTYPES["bf16"]
ROWS, HIDDEN, EPS = 4, 2048, 1e-6
LIMIT = 1
"""ulp. FP32 sums err by far less than a BF16 ulp, so that a result can only fall on the other side of one rounding."""


def ulp_distance(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """How many BF16 numbers lie between the elements of two BF16 arrays; +0 and -0 are the same."""

    def order(x: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        bits: npt.NDArray[np.int64] = x.view(np.uint16).astype(np.int64)
        return np.where(bits < 0x8000, bits, 0x8000 - bits)

    distance: npt.NDArray[np.int64] = np.abs(order(a) - order(b))
    return distance


def formula(
    hidden: npt.NDArray[Any], src: npt.NDArray[Any], weight: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """(sum, norm) of residual_add_rms_norm in FP64, rounded to BF16 where the kernel stores. BF16 [ROWS, HIDDEN]."""
    total = hidden.astype(np.float64) + src.astype(np.float64)
    rounded = total.astype(BF16)
    scale = 1.0 / np.sqrt(np.mean(total * total, axis=1, keepdims=True) + EPS)
    return rounded, (rounded.astype(np.float64) * scale * (1.0 + weight.astype(np.float64))).astype(BF16)


def run_kernel(
    gpu: GpuBackend, hidden: npt.NDArray[Any], src: npt.NDArray[Any], weight: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """(sum, norm) as the backend computes them. Nothing is left allocated."""
    stream = gpu.default_stream()
    pointers: list[DevicePtr] = []

    def upload(array: npt.NDArray[Any], label: str) -> DevicePtr:
        pointers.append(gpu.alloc(array.nbytes, label))
        gpu.copy_h2d(array, pointers[-1])
        return pointers[-1]

    try:
        sums, addend, scale = upload(hidden, "hidden"), upload(src, "src"), upload(weight, "weight")
        poison = np.full_like(hidden, np.nan)
        output, residual = upload(poison, "output"), upload(poison, "residual")
        kernel = gpu.kernel("norm", "residual_add_rms_norm")
        residual_add_rms_norm(gpu, kernel, sums, addend, scale, output, residual, ROWS, HIDDEN, EPS, stream)
        results = np.empty_like(hidden), np.empty_like(hidden)
        gpu.copy_d2h_on_stream(residual, results[0], stream)
        gpu.copy_d2h_on_stream(output, results[1], stream)
        return results
    finally:
        for ptr in pointers:
            gpu.free(ptr)


def demo_kernels(backend: Literal["auto", "cuda", "emulated", "host"], seed: int, as_json: bool) -> None:
    """List the kernels, run residual_add_rms_norm on random data, and compare it with its formula in FP64."""
    modules: dict[str, list[str]] = {}
    for spec in all_kernels():
        modules.setdefault(spec.module, []).append(spec.function)
    rng = np.random.default_rng(seed)
    hidden, src = (rng.standard_normal((ROWS, HIDDEN)).astype(BF16) for _ in range(2))
    weight = (0.1 * rng.standard_normal(HIDDEN)).astype(BF16)
    wanted = formula(hidden, src, weight)
    with open_backend(backend) as gpu:
        got = run_kernel(gpu, hidden, src, weight)
        name, device = gpu.name, gpu.device_name()
    distances = {
        output: ulp_distance(mine, exact) for output, mine, exact in zip(("sum", "norm"), got, wanted, strict=True)
    }
    worst = max(int(distance.max()) for distance in distances.values())
    if as_json:
        outputs = {
            output: {"elements": d.size, "differing": int(np.count_nonzero(d)), "max_ulp": int(d.max())}
            for output, d in distances.items()
        }
        result = {
            "kernel": "norm::residual_add_rms_norm", "backend": name, "device": device, "rows": ROWS, "hidden": HIDDEN,
            "seed": seed, "outputs": outputs, "limit_ulp": LIMIT, "kernels": modules,
        }  # fmt: skip
        click.echo(json.dumps(result, indent=2))
    else:
        click.echo(f"{sum(map(len, modules.values()))} kernels in {len(modules)} modules")
        for module, functions in modules.items():
            click.echo(f"  {module}: {', '.join(functions)}")
        click.echo(f"norm::residual_add_rms_norm on {ROWS} x {HIDDEN} BF16, seed {seed}")
        click.echo(f"  backend {name}, device {device}")
        for output, d in distances.items():
            click.echo(f"  {output}: {np.count_nonzero(d)} of {d.size} differ from FP64, max {d.max()} ulp")
    if worst > LIMIT:
        click.echo(f"error: the kernel is wrong: more than {LIMIT} ulp from its formula", err=True)
        sys.exit(1)
