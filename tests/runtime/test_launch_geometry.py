# SPDX-License-Identifier: AGPL-3.0-only
"""Grid, block and shared memory of a launch: each mistake is refused by name, by the first launch and by later ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_py.runtime import DevicePtr, GpuBackend
from spark_py.runtime.errors import ArgumentPointerError, GeometryError, InvalidArgumentError

from .support import Concat, refused, second_backend

CONCAT = "residual_add::bf16_concat"


@pytest.fixture
def work(gpu: GpuBackend, rng: np.random.Generator) -> Concat:
    return Concat(gpu, rng)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"grid": (0, 1, 1)}, ("grid", "x is 0")),
        ({"grid": (2, 0, 1)}, ("grid", "y is 0")),
        ({"grid": (2, 1, -1)}, ("grid", "z is -1")),
        ({"grid": (2, 65536, 1)}, ("grid", "y is 65536", "65535")),
        ({"grid": (2, 1, 65536)}, ("grid", "z is 65536", "65535")),
        ({"grid": (2**31, 1, 1)}, ("grid", "x is 2147483648", "2147483647")),
        ({"block": (0, 1, 1)}, ("block", "x is 0")),
        ({"block": (1025, 1, 1)}, ("block", "x is 1025", "1024")),
        ({"block": (1, 1, 65)}, ("block", "z is 65", "64")),
        ({"block": (32, 32, 2)}, ("block", "2048 threads", "1024")),
        ({"grid": (2, 1)}, ("grid", "three integers")),
        ({"grid": 2}, ("grid", "three integers")),
        ({"grid": (2.0, 1, 1.5)}, ("grid", "three integers")),
        ({"grid": (True, 2, 3)}, ("grid", "three integers")),
        ({"block": None}, ("block", "three integers")),
        ({"block": ("256", 1, 1)}, ("block", "three integers")),
        ({"shared_mem": -1}, ("shared memory", "-1")),
        ({"shared_mem": 1.5}, ("shared memory", "1.5")),
        ({"shared_mem": None}, ("shared memory", "None")),
    ],
    ids=str,
)
def test_geometry(work: Concat, changes: dict[str, Any], parts: tuple[str, ...]) -> None:
    with refused(GeometryError, CONCAT, *parts):
        work.launch(**changes)
    assert work.untouched


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"grid": (2.0, 1, 1)}, ("grid", "three integers")),
        ({"grid": (2, True, 1)}, ("grid", "three integers")),
        ({"grid": (2, 1, np.float32(1))}, ("grid", "three integers")),
        ({"block": (256, 1.0, 1)}, ("block", "three integers")),
        ({"block": (256, 1, np.True_)}, ("block", "three integers")),
        ({"shared_mem": 0.0}, ("shared memory", "0.0")),
        ({"shared_mem": False}, ("shared memory", "False")),
    ],
    ids=str,
)
def test_a_used_plan_refuses_what_only_equals_its_geometry(
    work: Concat, changes: dict[str, Any], parts: tuple[str, ...]
) -> None:
    """1.0 and True are equal to 1 and hash like it, so a table finds them; the first launch refuses them."""
    work.launch()
    work.launch()
    work.reset()
    with refused(GeometryError, CONCAT, *parts):
        work.launch(**changes)
    with refused(InvalidArgumentError, "stream"):
        work.launch(stream=float(work.gpu.default_stream()))
    assert work.untouched


def test_numpy_geometry_shares_the_plan(work: Concat) -> None:
    work.launch()
    plans = len(work.gpu._plans)  # type: ignore[attr-defined]
    for kind in (np.int32, np.uint64):
        work.reset()
        work.launch(grid=tuple(map(kind, work.grid)), block=np.array(work.BLOCK, kind), shared_mem=kind(0))
        assert work.result == work.expected
    assert len(work.gpu._plans) == plans  # type: ignore[attr-defined]


def test_too_much_shared_memory(gpu: GpuBackend, work: Concat) -> None:
    limit = gpu.limits.max_shared_default
    with refused(GeometryError, CONCAT, str(limit + 1), str(limit), "set_kernel_max_dynamic_smem"):
        work.launch(shared_mem=limit + 1)
    with refused(GeometryError, CONCAT, str(gpu.limits.max_shared_optin + 1), str(gpu.limits.max_shared_optin)):
        gpu.set_kernel_max_dynamic_smem(work.kernel, gpu.limits.max_shared_optin + 1)
    for wrong in (-1, 1.0, True, None):
        with refused(InvalidArgumentError, "nbytes"):
            gpu.set_kernel_max_dynamic_smem(work.kernel, wrong)  # type: ignore[arg-type]
    assert work.untouched


def test_the_limit_of_shared_memory_moves(gpu: GpuBackend) -> None:
    with second_backend(gpu) as other:
        kernel = other.kernel("residual_add", "bf16_concat")
        wanted = 90 << 10
        args = [DevicePtr(256)] * 3 + [1]

        def launch() -> None:
            # The pointers are bad, so nothing runs; shared memory is looked at before them.
            other.launch_typed(kernel, (1, 1, 1), (256, 1, 1), wanted, other.default_stream(), args)

        with refused(GeometryError, str(wanted)):
            launch()
        other.set_kernel_max_dynamic_smem(kernel, wanted)
        assert other.function_attributes(kernel).shared_dynamic_max == wanted
        for _ in range(2):
            with pytest.raises(ArgumentPointerError):
                launch()
        other.set_kernel_max_dynamic_smem(kernel, wanted - 1)
        with refused(GeometryError, str(wanted), str(wanted - 1)):
            launch()


@pytest.mark.host_only("the GPU runs any geometry; the CPU reference knows which one the kernel is written for")
def test_geometry_of_the_kernel(work: Concat) -> None:
    for changes in ({"grid": (3, 1, 1)}, {"block": (128, 1, 1)}, {"shared_mem": 16}):
        with refused(GeometryError, CONCAT, "needs"):
            work.launch(**changes)
    assert work.untouched
