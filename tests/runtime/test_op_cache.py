# SPDX-License-Identifier: AGPL-3.0-only
"""OpCache and the run's figures: what is remembered, for how long, and what a backend gives back."""

from __future__ import annotations

import pytest

from spark_py.runtime import DevicePtr, open_backend, run_metrics
from spark_py.runtime.errors import BackendClosedError, FunctionNotFoundError, InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.runtime.op_cache import OpCache


def test_a_kernel_is_looked_up_once(gpu: GpuBackend) -> None:
    cache = gpu.op_cache()
    assert cache is gpu.op_cache()
    first = cache.kernel(gpu, "norm", "rms_norm")
    assert cache.kernel(gpu, "norm", "rms_norm") is first
    assert first == gpu.kernel("norm", "rms_norm")
    with pytest.raises(FunctionNotFoundError):
        cache.kernel(gpu, "norm", "nothing")


def test_scratch_grows_and_keeps_what_was_handed_out(gpu: GpuBackend) -> None:
    cache = gpu.op_cache()
    small = cache.scratch(gpu, "a", 100)
    assert cache.scratch(gpu, "a", 60) == small
    assert cache.scratch(gpu, "b", 60) != small
    large = cache.scratch(gpu, "a", 101)
    assert large != small
    gpu.memset(small, 1, 100)  # still alive: queued work may use it
    gpu.memset(large, 2, 101)
    assert cache.scratch(gpu, "a", 100) == large
    for size in (0, -1, True, 1.0):
        with pytest.raises(InvalidArgumentError, match="nbytes"):
            cache.scratch(gpu, "a", size)  # type: ignore[arg-type]
    before = gpu.live_bytes()
    cache.release(gpu)
    assert gpu.live_bytes() == before - 100 - 60 - 101
    cache.release(gpu)
    assert cache.scratch(gpu, "a", 1) != DevicePtr.NULL


@pytest.mark.parametrize("swept", [False, True])
def test_scratch_is_no_leak(backend_name: str, swept: bool) -> None:
    backend = open_backend(backend_name, on_leak="raise")  # type: ignore[arg-type]
    backend.op_cache().scratch(backend, "a", 100)
    if swept:
        assert backend.sweep_unreleased() == 0
        assert backend.live_bytes() == 0
        backend.op_cache().scratch(backend, "a", 100)
    backend.close()
    with pytest.raises(BackendClosedError):
        backend.op_cache()


def test_marks() -> None:
    cache = OpCache()
    assert [cache.first_n("log", 2) for _ in range(4)] == [True, True, False, False]
    assert not cache.first_n("never", 0)
    assert [cache.once("x"), cache.once("x"), cache.once("y")] == [True, False, True]
    assert cache.first_shape("gemm", 1, 2, 3)
    assert not cache.first_shape("gemm", 1, 2, 3)
    assert cache.first_shape("gemm", 1, 2, 4)
    assert not cache.alloc_fell_back()
    cache.note_alloc_fallback()
    assert cache.alloc_fell_back()


def test_each_backend_has_its_own(gpu: GpuBackend, backend_name: str) -> None:
    with open_backend(backend_name) as other:  # type: ignore[arg-type]
        key = object()
        assert gpu.op_cache().once(key)
        assert other.op_cache().once(key)


def test_debug_sync_is_told(gpu: GpuBackend, backend_name: str) -> None:
    assert gpu.debug_sync_kernels() is False
    with open_backend(backend_name, debug_sync_kernels=True) as other:  # type: ignore[arg-type]
        assert other.debug_sync_kernels() is True


def test_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_metrics, "_baseline", [])
    assert run_metrics.baseline_free_bytes() is None
    run_metrics.set_baseline_free_bytes(123)
    assert run_metrics.baseline_free_bytes() == 123
    for bad in (-1, True, 1.5):
        with pytest.raises(InvalidArgumentError):
            run_metrics.set_baseline_free_bytes(bad)  # type: ignore[arg-type]
    assert run_metrics.baseline_free_bytes() == 123
    run_metrics.set_baseline_free_bytes(0)
    assert run_metrics.baseline_free_bytes() is None
    run_metrics.set_baseline_free_bytes(5)
    run_metrics.reset_for_new_run()
    assert run_metrics.baseline_free_bytes() is None
