# SPDX-License-Identifier: AGPL-3.0-only
"""Kernels of a `dependent` module that do not keep the rules of spark_dependent.cuh."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from spark_py.runtime import GpuBackend, open_backend
from spark_py.runtime.errors import DependenceError
from spark_py.runtime.manifest import kernels_path

from .support import launch

RIGHT = """
    __shared__ float part[64];
    spark_let_next_start();
    part[threadIdx.x] = 2.0f;
    spark_wait_for_previous();
    out[threadIdx.x] = data[threadIdx.x] * part[threadIdx.x];
"""
WAIT = "    spark_wait_for_previous();\n"
NEVER = RIGHT.replace(WAIT, "")
SOME = RIGHT.replace(WAIT, "    if (threadIdx.x == 41u) { return; }\n" + WAIT)
READS = RIGHT.replace(WAIT, "    part[threadIdx.x] = data[threadIdx.x];\n" + WAIT)
STORES = RIGHT.replace(WAIT, "    out[threadIdx.x] = 1.0f;\n" + WAIT)
ADDS = RIGHT.replace(WAIT, "    atomicAdd(out, 1.0f);\n" + WAIT)


@contextmanager
def _backend(folder: Path, body: str, checked: bool, dependent: bool = True) -> Iterator[GpuBackend]:
    """A backend whose module `kernels` has k(data, out) with this body."""
    head = '#include "spark_dependent.cuh"\nextern "C" __global__ void k(const float* data, float* out) {'
    (folder / "k.cu").write_text(f"{head}{body}}}\n")
    (folder / "kernels.toml").write_text(
        f'[modules.kernels]\nsource = "k.cu"\nflags = ["-I{kernels_path()}"]\ndependent = {str(dependent).lower()}\n'
    )
    with open_backend("emulated", kernels=folder, checked=checked) as gpu:
        yield gpu


def _run(gpu: GpuBackend) -> None:
    data, out = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    assert (launch(gpu, "k", 1, 64, [data, out])[1] == 2.0 * data).all()


@pytest.mark.parametrize("checked", [False, True])
def test_who_waits_first_is_left_alone(tmp_path: Path, checked: bool) -> None:
    with _backend(tmp_path, RIGHT, checked) as gpu:
        _run(gpu)


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize(("body", "thread"), [(NEVER, 0), (SOME, 41)], ids=["none", "one"])
def test_a_thread_that_ends_without_waiting(tmp_path: Path, body: str, thread: int, checked: bool) -> None:
    with _backend(tmp_path, body, checked) as gpu:
        with pytest.raises(DependenceError, match="kernels::k") as caught:
            _run(gpu)
        assert caught.value.access is not None
        if body is SOME or not checked:
            assert "ends without spark_wait_for_previous" in str(caught.value)
            assert caught.value.access.thread == (thread, 0, 0)


@pytest.mark.parametrize(
    ("body", "verb"), [(READS, "reads"), (STORES, "writes"), (ADDS, "updates")], ids=["read", "store", "atomic"]
)
def test_what_is_used_before_the_wait(tmp_path: Path, body: str, verb: str) -> None:
    with _backend(tmp_path, body, True) as gpu:
        with pytest.raises(DependenceError, match=f"{verb}.* global memory before spark_wait_for_previous") as caught:
            _run(gpu)
        assert caught.value.access is not None
        assert caught.value.nbytes == 4


def test_other_modules_need_not_wait(tmp_path: Path) -> None:
    with _backend(tmp_path, NEVER, True, dependent=False) as gpu:
        _run(gpu)
