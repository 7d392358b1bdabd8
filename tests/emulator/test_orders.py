# SPDX-License-Identifier: AGPL-3.0-only
"""This project's kernels give the same bytes in every order of threads and with several OS threads."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from spark_py import catalog
from spark_py.runtime import GpuBackend, open_backend
from spark_py.runtime.emulated import Schedule
from spark_py.runtime.errors import BackendUnavailableError

from ..kernels.support import CHECKS
from .support import ORDERS, emulate, launch, order_id

for _file in sorted((Path(__file__).parent.parent / "kernels").glob("test_*.py")):
    if _file.stem not in ("test_mutants", "test_abi"):
        importlib.import_module(f"{__package__.rpartition('.')[0]}.kernels.{_file.stem}")


def _runs_here(name: str) -> bool:
    module, _, function = name.partition("@")[0].partition("::")
    return "@far" not in name and not catalog.CATALOG[module, function].gpu_only


NAMES = sorted(filter(_runs_here, CHECKS))


@pytest.fixture(scope="module", params=[*ORDERS[1:], Schedule(workers=2)], ids=lambda s: f"{order_id(s)}-{s.workers}")
def ordered(request: pytest.FixtureRequest) -> Iterator[GpuBackend]:
    try:
        gpu = open_backend("emulated", schedule=request.param)
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    with gpu:
        yield gpu


@pytest.mark.deep
@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_passes_its_check_in_any_order(name: str, ordered: GpuBackend, rng: np.random.Generator) -> None:
    CHECKS[name](ordered, rng)
    ordered.sweep_unreleased()


REDUCTION = """
#include "spark_common.cuh"
extern "C" __global__ void k(const float* x, float* out, unsigned n) {
    float sum = 0.0f;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        sum += x[i] * x[i];
    }
    sum = spark_block_sum(sum);
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
"""


def test_a_reduction_has_the_same_bytes_in_every_order(tmp_path: Path, rng: np.random.Generator) -> None:
    from spark_py.runtime.manifest import kernels_path

    x = rng.standard_normal(100_000).astype(np.float32)
    seen: set[str] = set()
    for number, schedule in enumerate((*ORDERS, Schedule(workers=2), Schedule(workers=2, order="priority", seed=9))):
        for checked in (False, True):
            folder = tmp_path / f"{number}-{checked}"
            text = REDUCTION.replace('"spark_common.cuh"', f'"{kernels_path() / "spark_common.cuh"}"')
            with emulate(folder, text, schedule=schedule, checked=checked) as gpu:
                *_, out = launch(gpu, "k", 7, 300, [x, np.zeros(2100, np.float32), x.size])
            seen.add(hashlib.sha256(out.tobytes()).hexdigest())
    assert len(seen) == 1
