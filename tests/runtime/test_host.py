# SPDX-License-Identifier: AGPL-3.0-only
"""What the CPU backend adds for tests: red zones, poison, counters, failing lookups, a limit, foreign kernel sets."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from spark_py.runtime import KernelLaunch, open_backend
from spark_py.runtime.errors import (
    FunctionNotFoundError,
    GeometryError,
    InvalidArgumentError,
    ModuleNotFoundInSetError,
    OutOfDeviceMemoryError,
    RedZoneError,
    SignatureMismatchError,
)
from spark_py.runtime.host import HostBackend

from .support import BF16, Concat, read, refused, upload

pytestmark = pytest.mark.host_only("these are properties of the CPU backend itself")


# ---------------------------------------------------------------- red zones and poison


@pytest.mark.parametrize(("at", "text"), [(-1, "1 bytes before"), (-256, "256 bytes before"), (100, "0 bytes past")])
def test_red_zones(gpu: HostBackend, at: int, text: str) -> None:
    ptr = gpu.alloc(100, "guarded")
    gpu.check_red_zones()
    ctypes.memset(ptr.address + at, 0, 1)
    with refused(RedZoneError, text, "'guarded'"):
        gpu.check_red_zones()
    with refused(RedZoneError, text, "'guarded'", "test_host.py"):
        gpu.free(ptr)
    gpu.check_red_zones()
    assert gpu.live_bytes() == 0  # freed all the same


def test_red_zones_of_pinned_memory(gpu: HostBackend) -> None:
    ptr = gpu.alloc_host_pinned(64)
    ctypes.memset(ptr + 64, 0, 1)
    with refused(RedZoneError, "0 bytes past"):
        gpu.free_host_pinned(ptr, 64)


def test_a_red_zone_found_at_teardown() -> None:
    gpu = open_backend("host")
    ptr = gpu.alloc(64, "guarded")
    ctypes.memset(ptr.address + 64, 0, 1)
    with refused(RedZoneError, "'guarded'"):
        gpu.close()
    assert gpu.closed


def test_poison(gpu: HostBackend) -> None:
    ptr = gpu.alloc(64)
    assert read(gpu, ptr, 64) == b"\xff" * 64
    assert np.isnan(gpu.view(ptr, (32,), BF16).astype(np.float32)).all()
    gpu.memset(ptr, 0, 64)
    view = gpu.view(ptr, (64,), np.uint8)
    gpu.free(ptr)
    assert (view == 0xFF).all()  # a stale view meets poison, not another allocation's data


def test_no_poison() -> None:
    with open_backend("host", poison=False) as gpu:
        ptr = gpu.alloc(64)
        gpu.memset(ptr, 3, 64)
        view = gpu.view(ptr, (64,), np.uint8)
        gpu.free(ptr)
        assert (view == 3).all()


# ---------------------------------------------------------------- injected failures


def test_the_limit_of_one_allocation(gpu: HostBackend) -> None:
    gpu.set_max_allocation_bytes(1000)
    held = [gpu.alloc(1000) for _ in range(3)]  # each request, not the sum
    for allocate in (gpu.alloc, gpu.alloc_managed, gpu.alloc_host_pinned):
        with refused(OutOfDeviceMemoryError, "1001", "1000") as caught:
            allocate(1001)
        assert caught.value.requested == 1001
    assert gpu.live_bytes() == 3000
    gpu.set_max_allocation_bytes(None)
    gpu.free(gpu.alloc(1001))
    for ptr in held:
        gpu.free(ptr)
    with refused(InvalidArgumentError, "nbytes"):
        gpu.set_max_allocation_bytes(-1)


def test_failing_lookups(gpu: HostBackend) -> None:
    gpu.fail_lookup("residual_add", "bf16_concat")
    assert gpu.try_kernel("residual_add", "bf16_concat").is_null
    with refused(FunctionNotFoundError, "'bf16_concat'"):
        gpu.kernel("residual_add", "bf16_concat")
    assert gpu.kernel("residual_add", "bf16_residual_add")
    gpu.fail_lookup("norm")
    assert not gpu.has_module("norm")
    assert gpu.try_kernel("norm", "rms_norm").is_null
    with refused(ModuleNotFoundInSetError, "'norm'"):
        gpu.kernel("norm", "rms_norm")
    status = {(row.module, row.function): row.status for row in gpu.kernel_audit()}
    assert status["residual_add", "bf16_concat"] == "missing"
    assert status["norm", "rms_norm"] == "missing"
    assert status["residual_add", "bf16_residual_add"] == "used"


# ---------------------------------------------------------------- counters, under the names of the engine's mock


def test_copy_counters(gpu: HostBackend) -> None:
    a, b, other = gpu.alloc(64), gpu.alloc_managed(64), gpu.create_stream()
    gpu.alloc(0)
    host = gpu.alloc_host_pinned(64)
    assert (gpu.alloc_count, gpu.host_pinned_alloc_count) == (3, 1)
    gpu.reset_counters()
    gpu.copy_h2d(bytes(8), a)
    gpu.copy_h2d_async(bytes(8), a, other)
    gpu.copy_h2d_async_retained(bytes(8), a, other)
    gpu.copy_d2h(a, bytearray(8))
    gpu.copy_d2h_on_stream(a, bytearray(8), other)
    gpu.copy_d2h_async(a, bytearray(8), other)
    gpu.copy_d2h_async(a, bytearray(8), gpu.default_stream())
    gpu.copy_d2d(a, b, 8)
    gpu.copy_d2d_async(a, b, 8, other)
    gpu.copy_d2d_2d_async(a, 8, b, 8, 4, 4, other)
    gpu.synchronize(other)
    gpu.copy_d2h_async(a, bytearray(8), other)
    gpu.synchronize(gpu.default_stream())
    assert (gpu.alloc_count, gpu.host_pinned_alloc_count) == (0, 0)
    assert (gpu.h2d_blocking_count, gpu.h2d_async_count) == (1, 2)
    assert (gpu.d2h_blocking_count, gpu.d2h_async_count) == (2, 3)
    assert gpu.d2h_async_streams == [other, gpu.default_stream(), other]
    assert (gpu.d2d_count, gpu.d2d_2d_count) == (2, 1)
    assert (gpu.d2d_async_streams, gpu.d2d_2d_async_streams) == ([other], [other])
    assert gpu.sync_count == 2
    assert gpu.sync_d2h_async_counts == [(other, 2), (gpu.default_stream(), 3)]
    with refused(InvalidArgumentError, "overlap"):
        gpu.copy_d2d(a, a, 8)
    assert gpu.d2d_count == 2  # what was refused is not counted
    gpu.free_host_pinned(host, 64)


def test_launch_counters(gpu: HostBackend, rng: np.random.Generator) -> None:
    work = Concat(gpu, rng)
    other = gpu.create_stream()
    work.launch(other)
    KernelLaunch(gpu, work.kernel).grid([2, 1, 1]).block(work.BLOCK).cooperative().arg_ptr(work.a).arg_ptr(
        work.b
    ).arg_ptr(work.out).arg_u32(work.n).launch(gpu.default_stream())
    with pytest.raises(GeometryError):
        work.launch(grid=(0, 1, 1))
    gpu.set_kernel_max_dynamic_smem(work.kernel, 90 << 10)
    gpu.try_kernel("no", "such")
    assert (gpu.launch_count, gpu.cooperative_launch_count) == (2, 1)
    first, second = gpu.launches_snapshot()
    assert (first.func, first.grid, first.block) == (work.kernel, (2, 1, 1), (256, 1, 1))
    assert (first.shared_mem, first.stream, first.cooperative) == (0, other, False)
    assert first.args == (work.a, work.b, work.out, work.n)
    assert (second.grid, second.stream, second.cooperative) == ((2, 1, 1), gpu.default_stream(), True)
    assert [getattr(arg, "value", arg) for arg in second.args] == [work.a, work.b, work.out, work.n]
    assert gpu.kernel_lookups_snapshot() == [("residual_add", "bf16_concat"), ("no", "such")]
    assert gpu.max_dynamic_smem_calls == [(work.kernel, 90 << 10)]
    gpu.reset_counters()
    assert (gpu.launch_count, gpu.kernel_lookups_snapshot()) == (0, [])


def test_graph_launches_are_counted(gpu: HostBackend, rng: np.random.Generator) -> None:
    work, stream = Concat(gpu, rng), gpu.default_stream()
    gpu.begin_capture(stream)
    work.launch()
    graph = gpu.end_capture(stream)
    for _ in range(3):
        gpu.launch_graph(graph, stream)
    assert (gpu.launch_count, gpu.graph_launch_count) == (1, 3)


def test_read_alloc(gpu: HostBackend) -> None:
    ptr = upload(gpu, b"0123456789")
    assert gpu.read_alloc(ptr) == b"0123456789"
    assert gpu.d2h_blocking_count == 0


# ---------------------------------------------------------------- other kernel sets

CONCAT_SOURCE = """
extern "C" __global__ void bf16_concat({params}) {{ }}
extern "C" __global__ void not_in_the_catalogue(float* x) {{ }}
"""


def _folder(tmp_path: Path, params: str) -> Path:
    (tmp_path / "residual_add.cu").write_text("#include <cuda_bf16.h>\n" + CONCAT_SOURCE.format(params=params))
    (tmp_path / "KERNEL.toml").write_text('[modules]\nresidual_add = "residual_add"\n')
    return tmp_path


def test_a_set_of_the_same_abi(tmp_path: Path, rng: np.random.Generator) -> None:
    params = "const __nv_bfloat16* x, const __nv_bfloat16* y, __nv_bfloat16* z, unsigned int count"
    with open_backend("host", kernels=_folder(tmp_path, params)) as gpu:
        work = Concat(gpu, rng)
        work.launch()
        assert work.result == work.expected
        assert not gpu.has_module("norm")
        with refused(ModuleNotFoundInSetError, "'norm'", str(tmp_path)):
            gpu.kernel("norm", "rms_norm")
        with refused(FunctionNotFoundError, "not_in_the_catalogue", "catalogued"):
            gpu.kernel("residual_add", "not_in_the_catalogue")
        assert gpu.try_kernel("residual_add", "bf16_residual_add").is_null  # in the catalogue, not in this set
        gpu.sweep_unreleased()


@pytest.mark.parametrize(
    ("params", "difference"),
    [
        ("const __nv_bfloat16* a, const __nv_bfloat16* b, __nv_bfloat16* out", "4 parameters against 3"),
        (
            "const __nv_bfloat16* a, const __nv_bfloat16* b, __nv_bfloat16* out, unsigned int N, int k",
            "4 parameters against 5",
        ),
        ("const __nv_bfloat16* a, const __nv_bfloat16* b, __nv_bfloat16* out, unsigned long long N", "u64"),
        ("const float* a, const __nv_bfloat16* b, __nv_bfloat16* out, unsigned int N", "f32*"),
        ("const __nv_bfloat16* b, const __nv_bfloat16* a, __nv_bfloat16* out, unsigned int N", "stands at"),
    ],
)
def test_a_set_whose_parameters_differ(tmp_path: Path, params: str, difference: str) -> None:
    with open_backend("host", kernels=_folder(tmp_path, params)) as gpu:
        for lookup in (gpu.kernel, gpu.try_kernel):
            with refused(SignatureMismatchError, "residual_add::bf16_concat", difference):
                lookup("residual_add", "bf16_concat")


@pytest.mark.parametrize("ordinal", [-1, True, "0", None, 1.0], ids=repr)
def test_ordinals(ordinal: int) -> None:
    with refused(InvalidArgumentError, "ordinal"):
        open_backend("host", ordinal)


def test_backend_names() -> None:
    with refused(InvalidArgumentError, "'tpu'", "auto"):
        open_backend("tpu")  # type: ignore[arg-type]
