# SPDX-License-Identifier: AGPL-3.0-only
"""Copies and fills: bounds, types, overlap, and when the bytes are taken and given."""

from __future__ import annotations

import array
import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from spark_py.runtime import DevicePtr, GpuBackend
from spark_py.runtime.errors import (
    FreedPointerError,
    InvalidArgumentError,
    OutOfBoundsError,
    UnknownPointerError,
)

from .support import BF16, POISON, Concat, busy, is_poison, poisoned, read, refused, upload

SIZE = 1000
Move = Callable[[GpuBackend, DevicePtr, int], None]


def _to(nbytes: int) -> bytearray:
    return bytearray(nbytes)


# Each takes (gpu, device pointer, bytes) and touches exactly these bytes of the device.
WRITES: dict[str, Move] = {
    "copy_h2d": lambda gpu, ptr, n: gpu.copy_h2d(b"w" * n, ptr),
    "copy_h2d_async": lambda gpu, ptr, n: gpu.copy_h2d_async(b"w" * n, ptr, gpu.default_stream()),
    "copy_h2d_async_retained": lambda gpu, ptr, n: gpu.copy_h2d_async_retained(b"w" * n, ptr, gpu.default_stream()),
    "copy_d2d": lambda gpu, ptr, n: gpu.copy_d2d(upload(gpu, b"w" * 4096), ptr, n),
    "copy_d2d_async": lambda gpu, ptr, n: gpu.copy_d2d_async(upload(gpu, b"w" * 4096), ptr, n, gpu.default_stream()),
    "copy_d2d_2d_async": lambda gpu, ptr, n: gpu.copy_d2d_2d_async(
        upload(gpu, b"w" * 4096), n, ptr, n, n, 1, gpu.default_stream()
    ),
    "memset": lambda gpu, ptr, n: gpu.memset(ptr, ord("w"), n),
    "memset_async": lambda gpu, ptr, n: gpu.memset_async(ptr, ord("w"), n, gpu.default_stream()),
}
READS: dict[str, Move] = {
    "copy_d2h": lambda gpu, ptr, n: gpu.copy_d2h(ptr, _to(n)),
    "copy_d2h_on_stream": lambda gpu, ptr, n: gpu.copy_d2h_on_stream(ptr, _to(n), gpu.default_stream()),
    "copy_d2h_async": lambda gpu, ptr, n: gpu.copy_d2h_async(ptr, _to(n), gpu.default_stream()),
    "copy_d2d": lambda gpu, ptr, n: gpu.copy_d2d(ptr, gpu.alloc(4096), n),
    "copy_d2d_async": lambda gpu, ptr, n: gpu.copy_d2d_async(ptr, gpu.alloc(4096), n, gpu.default_stream()),
    "copy_d2d_2d_async": lambda gpu, ptr, n: gpu.copy_d2d_2d_async(
        ptr, n, gpu.alloc(4096), n, n, 1, gpu.default_stream()
    ),
}
ALL = [*(("write", name, move) for name, move in WRITES.items()), *(("read", n, m) for n, m in READS.items())]
each = pytest.mark.parametrize(("way", "name", "move"), ALL, ids=[f"{way}-{name}" for way, name, _ in ALL])


# ---------------------------------------------------------------- bounds


@each
@pytest.mark.parametrize(("at", "size"), [(0, SIZE), (1, SIZE - 1), (SIZE - 1, 1), (500, 3)])
def test_within(gpu: GpuBackend, way: str, name: str, move: Move, at: int, size: int) -> None:
    ptr = poisoned(gpu, SIZE)
    move(gpu, ptr.offset(at), size)
    gpu.synchronize(gpu.default_stream())
    body = b"w" * size if way == "write" else bytes([POISON]) * size
    want = bytes([POISON]) * at + body + bytes([POISON]) * (SIZE - at - size)
    assert read(gpu, ptr, SIZE) == want


@each
@pytest.mark.parametrize(("at", "size"), [(0, SIZE + 1), (1, SIZE), (SIZE - 1, 2)])
def test_past_the_end(gpu: GpuBackend, way: str, name: str, move: Move, at: int, size: int) -> None:
    ptr = poisoned(gpu, SIZE, "bounded")
    with refused(OutOfBoundsError, name, "1 past the end", "'bounded'") as caught:
        move(gpu, ptr.offset(at), size)
    error = caught.value
    assert (error.address, error.nbytes, error.base, error.size) == (ptr.address + at, size, ptr.address, SIZE)
    assert is_poison(gpu, ptr, SIZE)


@each
def test_where_nothing_lives(gpu: GpuBackend, way: str, name: str, move: Move) -> None:
    ptr = gpu.alloc(SIZE, "was here")
    with refused(UnknownPointerError, name):
        move(gpu, ptr.offset(SIZE), 1)
    with refused(UnknownPointerError, name):
        move(gpu, ptr.offset(-1), 2)
    with refused(UnknownPointerError, name):
        move(gpu, DevicePtr.NULL, 1)
    with refused(UnknownPointerError, name):
        move(gpu, DevicePtr(2**64 - 4), 8)
    gpu.free(ptr)
    with refused(FreedPointerError, name, "'was here'"):
        move(gpu, ptr.offset(10), 1)


@each
def test_zero_bytes_go_anywhere(gpu: GpuBackend, way: str, name: str, move: Move) -> None:
    ptr = poisoned(gpu, SIZE)
    for where in (ptr, ptr.offset(SIZE), DevicePtr.NULL):
        move(gpu, where, 0)
    assert is_poison(gpu, ptr, SIZE)


# ---------------------------------------------------------------- types


@each
@pytest.mark.parametrize("ptr", [None, 4096, 1.0, b"p"], ids=repr)
def test_pointers_of_another_type(gpu: GpuBackend, way: str, name: str, move: Move, ptr: Any) -> None:
    for size in (0, 8):
        with refused(InvalidArgumentError, "DevicePtr"):
            move(gpu, ptr, size)


@pytest.mark.parametrize("name", ["copy_d2d", "copy_d2d_async", "memset", "memset_async"])
@pytest.mark.parametrize("size", [-1, 2**63, 1.0, True, None, DevicePtr(8)], ids=repr)
def test_sizes_of_another_type(gpu: GpuBackend, name: str, size: Any) -> None:
    ptr = poisoned(gpu, SIZE)
    with refused(InvalidArgumentError, "nbytes"):
        WRITES[name](gpu, ptr, size)
    assert is_poison(gpu, ptr, SIZE)


@pytest.mark.parametrize("name", ["copy_h2d", "copy_h2d_async", "copy_h2d_async_retained"])
@pytest.mark.parametrize(
    "src", ["text", 8, None, [1, 2], object(), np.array([None, None])], ids=lambda s: type(s).__name__
)
def test_sources_of_another_type(gpu: GpuBackend, name: str, src: Any) -> None:
    ptr = poisoned(gpu, SIZE)
    more = () if name == "copy_h2d" else (gpu.default_stream(),)
    with refused(InvalidArgumentError, "host"):
        getattr(gpu, name)(src, ptr, *more)
    assert is_poison(gpu, ptr, SIZE)


@pytest.mark.parametrize("name", ["copy_d2h", "copy_d2h_on_stream", "copy_d2h_async"])
@pytest.mark.parametrize(
    "dst",
    [b"read-only", memoryview(b"read-only"), np.arange(16)[::2], np.broadcast_to(np.uint8(0), (8,)), "text", None],
)
def test_targets_that_cannot_be_filled(gpu: GpuBackend, name: str, dst: Any) -> None:
    ptr = poisoned(gpu, SIZE)
    more = () if name == "copy_d2h" else (gpu.default_stream(),)
    with refused(InvalidArgumentError, "host"):
        getattr(gpu, name)(ptr, dst, *more)


def test_strided_sources(gpu: GpuBackend) -> None:
    ptr = poisoned(gpu, SIZE)
    grid = np.arange(64, dtype=np.uint8).reshape(8, 8)
    for src in (grid[:, :4], grid.T, memoryview(grid)[::2]):
        with refused(InvalidArgumentError, "C-contiguous"):
            gpu.copy_h2d(src, ptr)
    assert is_poison(gpu, ptr, SIZE)


@pytest.mark.parametrize(
    "src",
    [
        b"\1\2\3\4\5\6\7\10",
        bytearray(range(8)),
        memoryview(b"abcdefgh"),
        np.arange(2, dtype=np.float32),
        np.arange(4).astype(BF16),
        np.float64(3.5).reshape(()),
        np.asfortranarray(np.ones((1, 8), np.uint8)),
        array.array("i", [1, 2]),
        (ctypes.c_int32 * 2)(7, 8),
    ],
    ids=lambda src: type(src).__name__,
)
def test_buffers_of_every_kind(gpu: GpuBackend, src: Any) -> None:
    ptr = gpu.alloc(8)
    for upload_ in (gpu.copy_h2d, lambda s, p: gpu.copy_h2d_async(s, p, gpu.default_stream())):
        gpu.memset(ptr, POISON, 8)
        upload_(src, ptr)
        assert read(gpu, ptr, 8) == (src.tobytes() if hasattr(src, "tobytes") else bytes(src))


def test_downloads_fill_arrays(gpu: GpuBackend, rng: np.random.Generator) -> None:
    data = rng.standard_normal((4, 8)).astype(BF16)
    ptr = upload(gpu, data)
    out = np.empty((4, 8), BF16)
    gpu.copy_d2h(ptr, out[1:3])
    assert out[1:3].tobytes() == data[:2].tobytes()
    gpu.copy_d2h_on_stream(ptr, memoryview(out.view(np.uint16)), gpu.default_stream())
    assert out.tobytes() == data.tobytes()


@pytest.mark.parametrize("name", ["memset", "memset_async"])
@pytest.mark.parametrize("value", [-1, 256, 1.0, True, None, np.True_, b"x"], ids=repr)
def test_fills_take_a_byte(gpu: GpuBackend, name: str, value: Any) -> None:
    ptr = poisoned(gpu, 8)
    more = () if name == "memset" else (gpu.default_stream(),)
    with refused(InvalidArgumentError, "value"):
        getattr(gpu, name)(ptr, value, 8, *more)
    assert is_poison(gpu, ptr, 8)


# ---------------------------------------------------------------- on the device


@pytest.mark.parametrize("name", ["copy_d2d", "copy_d2d_async"])
@pytest.mark.parametrize("shift", [-63, -1, 0, 1, 63])
def test_overlap(gpu: GpuBackend, name: str, shift: int) -> None:
    ptr = upload(gpu, bytes(range(256)))
    more = () if name == "copy_d2d" else (gpu.default_stream(),)
    with refused(InvalidArgumentError, "overlap"):
        getattr(gpu, name)(ptr.offset(100), ptr.offset(100 + shift), 64, *more)
    assert read(gpu, ptr, 256) == bytes(range(256))
    for beside in (-64, 64):
        getattr(gpu, name)(ptr.offset(100), ptr.offset(100 + beside), 64, *more)
    gpu.synchronize(gpu.default_stream())
    middle = bytes(range(100, 164))
    assert read(gpu, ptr, 256) == bytes(range(36)) + middle * 3 + bytes(range(228, 256))


def _rows(gpu: GpuBackend, src: DevicePtr, sp: Any, dst: DevicePtr, dp: Any, width: Any, height: Any) -> None:
    gpu.copy_d2d_2d_async(src, sp, dst, dp, width, height, gpu.default_stream())


def test_2d(gpu: GpuBackend, rng: np.random.Generator) -> None:
    source = rng.integers(0, 256, (5, 32), np.uint8)
    src, dst = upload(gpu, source), poisoned(gpu, 5 * 20)
    # The last row needs its width only, on either side.
    _rows(gpu, src.offset(18), 32, dst.offset(6), 20, 14, 5)
    want = np.full((5, 20), POISON, np.uint8)
    want[:, 6:] = source[:, 18:]
    assert read(gpu, dst, 100) == want.tobytes()


@pytest.mark.parametrize(("width", "height"), [(0, 5), (14, 0), (0, 0)])
def test_2d_of_nothing(gpu: GpuBackend, width: int, height: int) -> None:
    dst = poisoned(gpu, 100)
    _rows(gpu, upload(gpu, bytes(100)), 20, dst, 20, width, height)
    assert is_poison(gpu, dst, 100)


def test_2d_refusals(gpu: GpuBackend) -> None:
    src, dst = upload(gpu, bytes(160), "src"), poisoned(gpu, 100, "dst")
    with refused(InvalidArgumentError, "src_pitch", "13", "14"):
        _rows(gpu, src, 13, dst, 20, 14, 5)
    with refused(InvalidArgumentError, "dst_pitch", "13", "14"):
        _rows(gpu, src, 32, dst, 13, 14, 5)
    with refused(OutOfBoundsError, "source", "'src'"):
        _rows(gpu, src.offset(19), 32, dst, 20, 14, 5)
    with refused(OutOfBoundsError, "destination", "'dst'"):
        _rows(gpu, src, 32, dst.offset(7), 20, 14, 5)
    with refused(InvalidArgumentError, "overlap"):
        _rows(gpu, src, 32, src.offset(16), 32, 16, 5)
    for bad in (-1, 1.0, True, None):
        with refused(InvalidArgumentError, "height"):
            _rows(gpu, src, 32, dst, 20, 14, bad)
        with refused(InvalidArgumentError, "src_pitch"):
            _rows(gpu, src, bad, dst, 20, 14, 5)
    assert is_poison(gpu, dst, 100)


# ---------------------------------------------------------------- when


@pytest.mark.parametrize("size", [4, 4097, 5 << 20])
def test_async_upload_takes_the_bytes_at_the_call(gpu: GpuBackend, rng: np.random.Generator, size: int) -> None:
    stream = gpu.create_stream()
    ptr = poisoned(gpu, size)
    data = rng.integers(0, 256, size, np.uint8)
    want = data.tobytes()
    busy(gpu, stream)
    gpu.copy_h2d_async(data, ptr, stream)
    data[:] = POISON
    del data
    others = [np.full(size, POISON, np.uint8) for _ in range(4)]  # may stand where the source stood
    gpu.synchronize(stream)
    assert read(gpu, ptr, size) == want
    del others
    gpu.destroy_stream(stream)


def test_async_uploads_of_temporaries(gpu: GpuBackend) -> None:
    stream = gpu.create_stream()
    ptr = poisoned(gpu, 4 * 500)
    busy(gpu, stream)
    for token in range(500):
        gpu.copy_h2d_async(token.to_bytes(4, "little"), ptr.offset(4 * token), stream)
    gpu.synchronize(stream)
    assert read(gpu, ptr, 2000) == np.arange(500, dtype="<u4").tobytes()
    gpu.destroy_stream(stream)


def test_async_upload_from_pinned_memory_takes_the_bytes_too(gpu: GpuBackend) -> None:
    stream, ptr = gpu.create_stream(), poisoned(gpu, 64)
    host = gpu.alloc_host_pinned(64)
    view = gpu.pinned_view(host, 64)
    view[:] = 7
    busy(gpu, stream)
    gpu.copy_h2d_async(view, ptr, stream)
    view[:] = 8
    gpu.synchronize(stream)
    assert read(gpu, ptr, 64) == b"\7" * 64
    gpu.free_host_pinned(host, 64)
    gpu.destroy_stream(stream)


def test_retained_upload_and_async_download(gpu: GpuBackend, rng: np.random.Generator) -> None:
    stream, ptr = gpu.create_stream(), poisoned(gpu, 1 << 16)
    data = rng.integers(0, 256, 1 << 16, np.uint8)
    out = np.zeros(1 << 16, np.uint8)
    busy(gpu, stream)
    gpu.copy_h2d_async_retained(data, ptr, stream)
    gpu.copy_d2h_async(ptr, out, stream)
    gpu.synchronize(stream)
    assert out.tobytes() == data.tobytes()
    gpu.destroy_stream(stream)


def test_async_download_holds_its_target(gpu: GpuBackend) -> None:
    stream, ptr = gpu.create_stream(), upload(gpu, bytes(4096))
    host = gpu.alloc_host_pinned(4096)

    out = gpu.pinned_view(host, 4096)
    gone = weakref.ref(out)
    busy(gpu, stream)
    gpu.copy_d2h_async(ptr, out, stream)
    del out
    assert gone() is not None
    gpu.synchronize(stream)
    assert gone() is None
    gpu.free_host_pinned(host, 4096)
    gpu.destroy_stream(stream)


SYNCHRONOUS: dict[str, Callable[[GpuBackend, DevicePtr, DevicePtr], bytes]] = {
    "copy_d2h": lambda gpu, ptr, other: read(gpu, ptr, 64),
    "copy_d2d": lambda gpu, ptr, other: (gpu.copy_d2d(ptr, other, 64), read(gpu, other, 64))[1],
}


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_synchronous_copies_see_work_of_every_stream(gpu: GpuBackend, name: str) -> None:
    streams = [gpu.create_stream() for _ in range(3)]
    ptr, other = poisoned(gpu, 64), poisoned(gpu, 64)
    for value, stream in enumerate(streams):
        busy(gpu, stream)
        gpu.memset_async(ptr, value, 64, stream)
        assert SYNCHRONOUS[name](gpu, ptr, other) == bytes([value]) * 64
    for stream in streams:
        gpu.destroy_stream(stream)


@pytest.mark.parametrize("name", ["copy_h2d", "memset"])
def test_synchronous_writes_come_after_work_of_every_stream(gpu: GpuBackend, name: str) -> None:
    stream, ptr = gpu.create_stream(), poisoned(gpu, 64)
    busy(gpu, stream)
    gpu.memset_async(ptr, 1, 64, stream)
    WRITES[name](gpu, ptr, 64)
    gpu.synchronize(stream)
    assert read(gpu, ptr, 64) == b"w" * 64
    gpu.destroy_stream(stream)


def test_synchronous_writes_are_seen_by_every_stream(gpu: GpuBackend, rng: np.random.Generator) -> None:
    work, stream = Concat(gpu, rng), gpu.create_stream()
    fresh = rng.standard_normal(work.n).astype(BF16)
    gpu.copy_h2d(fresh, work.a)
    work.launch(stream)
    gpu.synchronize(stream)
    assert work.result == fresh.tobytes() + work.right.tobytes()
    gpu.destroy_stream(stream)


def test_download_on_a_stream(gpu: GpuBackend) -> None:
    stream, ptr = gpu.create_stream(), poisoned(gpu, 64)
    out = bytearray(64)
    busy(gpu, stream)
    gpu.memset_async(ptr, 3, 64, stream)
    gpu.copy_d2h_on_stream(ptr, out, stream)
    assert out == b"\3" * 64
    gpu.destroy_stream(stream)
