# SPDX-License-Identifier: AGPL-3.0-only
"""The checked build finds every fault of the table, names it, and leaves right kernels alone in every order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spark_py.runtime.emulated import Schedule
from spark_py.runtime.errors import KernelFaultError
from tests.thin import thinned

from .faults import FAULTS, Fault
from .support import ORDERS, emulate, launch, order_id

_named = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)


def _launch(gpu: object, fault: Fault, rng: np.random.Generator) -> None:
    data, out = rng.random(fault.n, np.float32), np.zeros(fault.n, np.float32)
    launch(gpu, "k", fault.grid, fault.block, [data, out, fault.n], shared=fault.shared)  # type: ignore[arg-type]


@_named
def test_a_fault_is_found_and_named(fault: Fault, tmp_path: Path, rng: np.random.Generator) -> None:
    with emulate(tmp_path, fault.source(fault.bad), checked=True, schedule=Schedule(timeout=0.3)) as gpu:
        for _ in range(2):  # the second time: the backend went on
            with pytest.raises(KernelFaultError) as caught:
                _launch(gpu, fault, rng)
            assert type(caught.value) is fault.error, str(caught.value)
            missing = [words for words in ("kernels::k", *fault.words) if words not in str(caught.value)]
            assert not missing, f"{missing} not in: {caught.value}"
            assert caught.value.access is not None
            assert caught.value.access.block[0] < fault.grid
            assert caught.value.access.thread[0] < fault.block


@_named
@pytest.mark.parametrize("schedule", thinned(ORDERS, keep=[0]), ids=order_id)
def test_a_right_kernel_is_left_alone(
    fault: Fault, schedule: Schedule, tmp_path: Path, rng: np.random.Generator
) -> None:
    with emulate(tmp_path, fault.source(fault.good), checked=True, schedule=schedule) as gpu:
        _launch(gpu, fault, rng)


def test_the_next_launch_works(tmp_path: Path, rng: np.random.Generator) -> None:
    text = """
    extern "C" __global__ void bad(float* p) { if (threadIdx.x < 3u) { __syncthreads(); } p[threadIdx.x + 7] = 1.0f; }
    extern "C" __global__ void good(float* p) { p[threadIdx.x] = threadIdx.x; }
    """
    for checked in (False, True):
        with emulate(tmp_path / str(checked), text, checked=checked) as gpu:
            for _ in range(3):
                with pytest.raises(KernelFaultError):
                    launch(gpu, "bad", 2, 32, [np.zeros(32, np.float32)])
                (after,) = launch(gpu, "good", 1, 32, [np.zeros(32, np.float32)])
                assert (after == np.arange(32)).all()


def test_the_line_is_that_of_the_kernel(tmp_path: Path) -> None:
    text = """extern "C" __global__ void k(float* p, unsigned n) {
    float v = 0.0f;
    v += p[n];
    p[0] = v;
}
"""
    with emulate(tmp_path, text, checked=True) as gpu, pytest.raises(KernelFaultError) as caught:
        launch(gpu, "k", 1, 1, [np.zeros(8, np.float32), 8])
    assert caught.value.access is not None
    assert caught.value.access.line == f"{tmp_path / 'kernels.cu'}:3"


@pytest.mark.parametrize("fault", [f for f in FAULTS if "global write" in f.name], ids=lambda fault: fault.name)
def test_the_fast_build_finds_a_write_beside_a_buffer(fault: Fault, tmp_path: Path, rng: np.random.Generator) -> None:
    with emulate(tmp_path, fault.source(fault.bad)) as gpu:
        with pytest.raises(fault.error, match="0 bytes past the end"):
            _launch(gpu, fault, rng)
        gpu.check_red_zones()


def test_a_wild_pointer_leaves_the_process_alive(tmp_path: Path) -> None:
    text = 'extern "C" __global__ void k(float* p) { *(threadIdx.x == 9u ? (float*)64 : p) = 1.0f; }'
    with emulate(tmp_path, text) as gpu, pytest.raises(KernelFaultError, match="not there"):
        launch(gpu, "k", 1, 32, [np.zeros(8, np.float32)])
