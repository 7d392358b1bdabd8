# SPDX-License-Identifier: AGPL-3.0-only
"""Allocations: what is handed out, what `free` refuses, and what reports and teardown say."""

from __future__ import annotations

import inspect
import itertools
import logging
from typing import Any

import numpy as np
import pytest

from spark_py.runtime import DevicePtr, GpuBackend, HostPtr
from spark_py.runtime.errors import (
    BackendClosedError,
    DoubleFreeError,
    FreedPointerError,
    InvalidArgumentError,
    InvalidPointerError,
    LeakError,
    OutOfBoundsError,
    OutOfDeviceMemoryError,
    UnknownPointerError,
)

from .support import Concat, read, refused, second_backend, upload

BAD_SIZES = [-1, 2**63, 1.0, True, None, "8", np.float32(8), DevicePtr(8)]


def _line() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


# ---------------------------------------------------------------- alloc and free


def test_alloc(gpu: GpuBackend) -> None:
    before = gpu.live_bytes()
    ptrs = [gpu.alloc(size) for size in (1, 255, 256, 257, 100_000)]
    assert all(ptr.address % 256 == 0 and not ptr.is_null for ptr in ptrs)
    ends = [ptr.address + size for ptr, size in zip(ptrs, (1, 255, 256, 257, 100_000), strict=True)]
    spans = sorted(zip(ptrs, ends, strict=True))
    assert all(end <= start.address for (_, end), (start, _) in itertools.pairwise(spans))
    assert gpu.live_bytes() - before == 100_769
    for ptr in ptrs:
        gpu.free(ptr)
    assert gpu.live_bytes() == before


def test_numpy_sizes(gpu: GpuBackend) -> None:
    ptr = gpu.alloc(np.int32(64))
    gpu.memset(ptr, np.uint8(7), np.int64(64))
    assert read(gpu, ptr, 64) == b"\x07" * 64


@pytest.mark.parametrize("which", ["alloc", "alloc_managed", "alloc_host_pinned"])
def test_nothing_is_null(gpu: GpuBackend, which: str) -> None:
    before = gpu.live_bytes()
    assert int(getattr(gpu, which)(0)) == 0
    assert gpu.live_bytes() == before


@pytest.mark.parametrize("which", ["alloc", "alloc_managed", "alloc_host_pinned"])
@pytest.mark.parametrize("size", BAD_SIZES, ids=repr)
def test_sizes_that_are_none(gpu: GpuBackend, which: str, size: Any) -> None:
    with refused(InvalidArgumentError, "nbytes"):
        getattr(gpu, which)(size)


def test_free_of_null(gpu: GpuBackend) -> None:
    before = gpu.live_bytes()
    gpu.free(DevicePtr.NULL)
    gpu.free_host_pinned(HostPtr(0), 0)
    gpu.free_host_pinned(HostPtr(0), 64)
    assert gpu.live_bytes() == before


@pytest.mark.parametrize("what", [0, 16, None, 1.0, "p"], ids=repr)
def test_free_takes_a_pointer(gpu: GpuBackend, what: Any) -> None:
    with refused(InvalidArgumentError, "pointer"):
        gpu.free(what)


def test_double_free(gpu: GpuBackend) -> None:
    ptr = gpu.alloc(64, "twice")
    gpu.free(ptr)
    with refused(DoubleFreeError, "second time", "'twice'", f"{ptr.address:#x}") as caught:
        gpu.free(ptr)
    assert caught.value.address == ptr.address


@pytest.mark.parametrize("step", [1, 255, 256, 1023])
def test_interior_free(gpu: GpuBackend, step: int) -> None:
    ptr = upload(gpu, bytes(range(256)) * 4, "body")
    with refused(DoubleFreeError, f"{step} bytes inside", "'body'"):
        gpu.free(ptr.offset(step))
    assert read(gpu, ptr, 1024) == bytes(range(256)) * 4
    gpu.free(ptr)


def test_one_past_the_end_is_not_inside(gpu: GpuBackend) -> None:
    ptr = gpu.alloc(256)
    with pytest.raises(UnknownPointerError):
        gpu.free(ptr.offset(256))


def test_foreign_free(gpu: GpuBackend) -> None:
    with second_backend(gpu) as other:
        theirs = upload(other, b"theirs!!")
        # The driver may have handed out the address twice, once to each backend in turn.
        with pytest.raises((UnknownPointerError, DoubleFreeError)):
            gpu.free(theirs)
        assert read(other, theirs, 8) == b"theirs!!"
        other.free(theirs)
    with refused(UnknownPointerError, "never handed out"):
        gpu.free(DevicePtr(2**63 + 16))


def test_freed_memory_is_refused_by_name(gpu: GpuBackend) -> None:
    line, ptr = _line(), gpu.alloc(64, "gone")
    gpu.free(ptr)
    with refused(FreedPointerError, "freed", "'gone'", f"test_memory.py:{line}"):
        gpu.memset(ptr.offset(8), 0, 8)


def test_free_waits_for_queued_work(gpu: GpuBackend, rng: np.random.Generator) -> None:
    work = Concat(gpu, rng, 1 << 20)
    stream = gpu.create_stream()
    for _ in range(20):
        work.launch(stream)
    gpu.free(work.a)
    gpu.free(work.b)
    # Were the inputs handed out again before the launches are done, this would change the result.
    for size in (work.n * 2, work.n * 2):
        gpu.memset(gpu.alloc(size), 0, size)
    assert work.result == work.expected
    gpu.destroy_stream(stream)


# ---------------------------------------------------------------- managed and pinned


def test_managed(gpu: GpuBackend, rng: np.random.Generator) -> None:
    data = rng.bytes(1000)
    before = gpu.live_bytes()
    ptr = gpu.alloc_managed(1000, "shared")
    assert gpu.live_bytes() - before == 1000
    gpu.copy_h2d(data, ptr)
    assert read(gpu, ptr, 1000) == data
    with refused(OutOfBoundsError, "'shared'"):
        gpu.memset(ptr, 0, 1001)
    gpu.free(ptr)
    with pytest.raises(DoubleFreeError):
        gpu.free(ptr)


def test_pinned_is_zeroed(gpu: GpuBackend) -> None:
    for _ in range(3):  # again, since memory comes back
        ptr = gpu.alloc_host_pinned(4096)
        view = gpu.pinned_view(ptr, 4096)
        assert not view.any()
        view[:] = 255
        gpu.free_host_pinned(ptr, 4096)


def test_pinned_is_not_device_memory(gpu: GpuBackend) -> None:
    before = gpu.live_bytes()
    ptr = gpu.alloc_host_pinned(64)
    assert gpu.live_bytes() == before
    with pytest.raises(UnknownPointerError):
        gpu.memset(DevicePtr(ptr), 0, 8)
    gpu.free_host_pinned(ptr, 64)


def test_pinned_free_is_checked(gpu: GpuBackend) -> None:
    ptr = gpu.alloc_host_pinned(64)
    with refused(InvalidArgumentError, "63", "64"):
        gpu.free_host_pinned(ptr, 63)
    with refused(DoubleFreeError, "inside"):
        gpu.free_host_pinned(HostPtr(ptr + 8), 56)
    gpu.pinned_view(ptr, 64)[:] = 1  # still there
    gpu.free_host_pinned(ptr, 64)
    with refused(DoubleFreeError, "second time"):
        gpu.free_host_pinned(ptr, 64)
    with pytest.raises(UnknownPointerError):
        gpu.free_host_pinned(HostPtr(4096), 64)
    with pytest.raises(InvalidPointerError):
        gpu.free_host_pinned(1.5, 64)  # type: ignore[arg-type]


def test_pinned_view_is_bounded(gpu: GpuBackend) -> None:
    ptr = gpu.alloc_host_pinned(64)
    view, tail = gpu.pinned_view(ptr, 64), gpu.pinned_view(HostPtr(ptr + 60), 4)
    tail[:] = 9
    assert list(view[58:]) == [0, 0, 9, 9, 9, 9]
    with refused(OutOfBoundsError, "1 past the end"):
        gpu.pinned_view(HostPtr(ptr + 60), 5)
    assert gpu.pinned_view(HostPtr(0), 0).size == 0
    gpu.free_host_pinned(ptr, 64)
    with pytest.raises(FreedPointerError):
        gpu.pinned_view(ptr, 1)


def test_kernels_reach_pinned_memory(gpu: GpuBackend, rng: np.random.Generator) -> None:
    work = Concat(gpu, rng, 256)
    host = gpu.alloc_host_pinned(2048)
    out = gpu.host_ptr_to_device(HostPtr(host + 1024))
    work.launch(args=[work.a, work.b, out, 256])
    gpu.synchronize(gpu.default_stream())
    assert gpu.pinned_view(HostPtr(host + 1024), 1024).tobytes() == work.expected
    assert not gpu.pinned_view(host, 1024).any()
    with refused(DoubleFreeError, "free_host_pinned"):
        gpu.free(gpu.host_ptr_to_device(host))
    gpu.free_host_pinned(host, 2048)
    with pytest.raises(FreedPointerError):
        gpu.copy_d2h(out, bytearray(8))


def test_host_ptr_to_device_of_other_memory(gpu: GpuBackend) -> None:
    array = np.zeros(64, np.uint8)
    with pytest.raises(UnknownPointerError):
        gpu.host_ptr_to_device(HostPtr(array.ctypes.data))


# ---------------------------------------------------------------- running out


@pytest.mark.parametrize("size", [2**50, 2**62, 2**63 - 1])
def test_out_of_memory(gpu: GpuBackend, size: int) -> None:
    before = gpu.live_bytes()
    with refused(OutOfDeviceMemoryError, str(size)) as caught:
        gpu.alloc(size, "everything")
    assert caught.value.requested == size
    assert caught.value.total > 0
    assert 0 <= caught.value.free <= caught.value.total
    assert isinstance(caught.value, MemoryError)
    assert gpu.live_bytes() == before
    gpu.free(gpu.alloc(1 << 20))  # no sticky failure


# ---------------------------------------------------------------- reports


def test_report(gpu: GpuBackend) -> None:
    small, large = [], []
    for _ in range(3):
        small.append(gpu.alloc(1_000_000))
        small_line = _line() - 1
    large.append(gpu.alloc(5_000_000))
    large_line = _line() - 1
    lines = gpu.alloc_report(10, 0.0).splitlines()
    assert "0.008 GB" in lines[0]
    assert f"test_memory.py:{large_line}" in lines[1]
    assert "5.000 MB" in lines[1]
    assert f"test_memory.py:{small_line}" in lines[2]
    assert "3 x" in lines[2]
    by_file = lines[lines.index("by file:") + 1 :]
    assert len(by_file) == 1
    assert "8.000 MB" in by_file[0]
    folded = gpu.alloc_report(1, 0.0)
    assert f"test_memory.py:{small_line}" not in folded
    assert "3.000 MB  in 1 further sites" in folded
    assert f"test_memory.py:{small_line}" not in gpu.alloc_report(10, 4.0)
    gpu.free(small.pop())
    assert "2 x" in gpu.alloc_report()


def test_sweep(gpu: GpuBackend, caplog: pytest.LogCaptureFixture) -> None:
    ptrs = [gpu.alloc(1000, "one"), gpu.alloc_managed(64)]
    pinned = gpu.alloc_host_pinned(64)
    with caplog.at_level(logging.WARNING, "spark_py.runtime"):
        assert gpu.sweep_unreleased() == 2
    assert "test_memory.py" in caplog.text
    assert gpu.live_bytes() == 0
    for ptr in ptrs:
        with pytest.raises(FreedPointerError):
            gpu.memset(ptr, 0, 1)
    caplog.clear()
    assert gpu.sweep_unreleased() == 0
    assert not caplog.text
    gpu.free_host_pinned(pinned, 64)


# ---------------------------------------------------------------- teardown


def test_leaks_are_logged_once(gpu: GpuBackend, caplog: pytest.LogCaptureFixture) -> None:
    other = second_backend(gpu)
    line, _ = _line(), other.alloc(1000, "left behind")
    other.alloc_host_pinned(64)
    with caplog.at_level(logging.WARNING, "spark_py.runtime"):
        other.close()
        other.close()
    assert len(caplog.records) == 1
    assert "'left behind'" in caplog.text
    assert f"test_memory.py:{line}" in caplog.text
    assert "1 device and 1 pinned" in caplog.text


def test_leaks_raise_where_asked(gpu: GpuBackend) -> None:
    other = second_backend(gpu, on_leak="raise")
    line, _ = _line(), other.alloc(1000, "left behind")
    with refused(LeakError, "'left behind'", f"test_memory.py:{line}"):
        other.close()
    assert other.closed


def test_no_leak_no_word(gpu: GpuBackend, caplog: pytest.LogCaptureFixture, rng: np.random.Generator) -> None:
    with caplog.at_level(logging.WARNING, "spark_py"), second_backend(gpu, on_leak="raise") as other:
        pinned = other.alloc_host_pinned(8)
        other.free(other.alloc(8))
        other.free_host_pinned(pinned, 8)
        array = rng.standard_normal(8)
        other.create_stream()
        other.create_event()
        del array
    assert not caplog.records


def test_a_leak_does_not_hide_the_error_that_caused_it(gpu: GpuBackend) -> None:
    with pytest.raises(ZeroDivisionError), second_backend(gpu, on_leak="raise") as other:  # noqa: PT012
        other.alloc(8)
        raise ZeroDivisionError


def test_closed(gpu: GpuBackend, rng: np.random.Generator) -> None:
    other = second_backend(gpu)
    work = Concat(other, rng)
    stream = other.default_stream()
    for ptr in (work.a, work.b, work.out):
        other.free(ptr)
    other.close()
    assert other.closed
    calls: dict[str, tuple[Any, ...]] = {
        "alloc": (8,),
        "free": (work.a,),
        "live_bytes": (),
        "copy_h2d": (b"x", work.a),
        "memset_async": (work.a, 0, 1, stream),
        "synchronize": (stream,),
        "create_event": (),
        "kernel": ("residual_add", "bf16_concat"),
        "begin_capture": (stream,),
        "view": (work.a, (1,), np.uint8),
        "trace": (),
        "launch_typed": (work.kernel, work.grid, work.BLOCK, 0, stream, work.args),
    }
    for name, args in calls.items():
        with refused(BackendClosedError, "closed"):
            getattr(other, name)(*args)


@pytest.mark.parametrize("on_leak", ["ignore", None, True], ids=repr)
def test_on_leak_values(gpu: GpuBackend, on_leak: Any) -> None:
    with refused(InvalidArgumentError, "on_leak"):
        second_backend(gpu, on_leak=on_leak)
