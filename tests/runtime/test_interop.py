# SPDX-License-Identifier: AGPL-3.0-only
"""Arrays over device memory, and other libraries' arrays as device memory."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from spark_py.runtime import DevicePtr, GpuBackend
from spark_py.runtime.errors import (
    ArgumentPointerError,
    DoubleFreeError,
    FreedPointerError,
    IllegalDuringCaptureError,
    InvalidArgumentError,
    OutOfBoundsError,
    UnknownPointerError,
)

from .support import Concat, busy, poisoned, read, refused, upload


def numpy_of(array: Any) -> np.ndarray[Any, Any]:
    """The array's values on the host."""
    return array.get() if hasattr(array, "get") else np.asarray(array)


def device_array(gpu: GpuBackend, values: np.ndarray[Any, Any]) -> Any:
    """The values as an array of the library that the backend works with."""
    if gpu.name != "cuda":
        return values.copy()
    cupy = pytest.importorskip("cupy")
    return cupy.asarray(values)


# ---------------------------------------------------------------- view


@pytest.mark.parametrize(
    "dtype",
    ["u1", "i1", "u2", "i2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "?"],
)
def test_views_of_every_kind(gpu: GpuBackend, rng: np.random.Generator, dtype: str) -> None:
    values = rng.integers(0, 2, (3, 5)).astype(dtype)
    ptr = upload(gpu, values)
    view = gpu.view(ptr, (3, 5), dtype)
    assert (view.shape, view.dtype) == ((3, 5), np.dtype(dtype))
    assert (numpy_of(view) == values).all()


def test_views_of_bf16(gpu: GpuBackend, rng: np.random.Generator) -> None:
    values = rng.standard_normal((3, 5)).astype(ml_dtypes.bfloat16)
    view = gpu.view(upload(gpu, values), (3, 5), ml_dtypes.bfloat16)
    assert (view.shape, view.dtype) == ((3, 5), np.dtype(ml_dtypes.bfloat16))
    assert numpy_of(view).tobytes() == values.tobytes()


@pytest.mark.parametrize(
    "name",
    ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn", "float6_e2m3fn"],
)
def test_small_floats_come_as_bytes(gpu: GpuBackend, rng: np.random.Generator, name: str) -> None:
    data = rng.bytes(24)
    view = gpu.view(upload(gpu, data), (4, 6), getattr(ml_dtypes, name))
    assert (view.shape, view.dtype) == ((4, 6), np.dtype(np.uint8))
    assert numpy_of(view).tobytes() == data


def test_a_view_is_the_memory(gpu: GpuBackend) -> None:
    ptr = upload(gpu, np.arange(16, dtype=np.float32))
    view = gpu.view(ptr.offset(16), [4], np.float32)
    assert numpy_of(view).tolist() == [4, 5, 6, 7]
    view[1] = -1
    if gpu.name == "cuda":
        view.device.synchronize()
    assert np.frombuffer(read(gpu, ptr, 64), np.float32).tolist() == [0, 1, 2, 3, 4, -1, *range(6, 16)]


def test_view_refusals(gpu: GpuBackend) -> None:
    ptr = poisoned(gpu, 64, "viewed")
    with refused(OutOfBoundsError, "view", "'viewed'", "4 past the end"):
        gpu.view(ptr, (17,), np.float32)
    with refused(InvalidArgumentError, "multiple of the 4-byte element"):
        gpu.view(ptr.offset(2), (4,), np.float32)
    for shape in ((-1,), (2.0,), (True,)):
        with refused(InvalidArgumentError, "shape"):
            gpu.view(ptr, shape, np.uint8)
    for dtype in (object, "S0", "no such type", "O"):
        with refused(InvalidArgumentError, "dtype"):
            gpu.view(ptr, (1,), dtype)
    with refused(InvalidArgumentError, "DevicePtr"):
        gpu.view(ptr.address, (1,), np.uint8)  # type: ignore[arg-type]
    with pytest.raises(UnknownPointerError):
        gpu.view(DevicePtr.NULL, (1,), np.uint8)
    gpu.free(ptr)
    with refused(FreedPointerError, "view", "'viewed'"):
        gpu.view(ptr, (1,), np.uint8)


def test_views_of_nothing(gpu: GpuBackend) -> None:
    assert gpu.view(DevicePtr.NULL, (0, 4), np.float32).shape == (0, 4)
    assert gpu.view(poisoned(gpu, 4), (), np.float32).shape == ()


# ---------------------------------------------------------------- wrap


def test_wrap(gpu: GpuBackend, rng: np.random.Generator) -> None:
    work = Concat(gpu, rng)
    before = gpu.live_bytes()
    array = device_array(gpu, work.left.view(np.uint16))
    ptr = gpu.wrap(array)
    assert gpu.live_bytes() == before  # not ours
    work.launch(args=[ptr, work.b, work.out, work.n])
    assert work.result == work.expected
    with refused(OutOfBoundsError, "wrapped"):
        gpu.memset(ptr, 0, 2 * work.n + 1)
    with refused(DoubleFreeError, "unwrap"):
        gpu.free(ptr)
    with refused(InvalidArgumentError, "known already"):
        gpu.wrap(array)
    gpu.unwrap(ptr)
    with refused(ArgumentPointerError, "'a'", "freed"):
        work.launch(args=[ptr, work.b, work.out, work.n])
    with pytest.raises(UnknownPointerError):
        gpu.unwrap(ptr)
    gpu.unwrap(gpu.wrap(array))  # again


def test_wrapped_arrays_are_written(gpu: GpuBackend) -> None:
    array = device_array(gpu, np.zeros(16, np.uint8))
    ptr = gpu.wrap(array)
    gpu.copy_h2d(b"\7" * 8, ptr.offset(4))
    assert numpy_of(array).tolist() == [0] * 4 + [7] * 8 + [0] * 4
    gpu.unwrap(ptr)


def test_wrap_waits_for_the_producer(gpu: GpuBackend) -> None:
    """The backend's streams do not wait for the other library's, on which its last write may still be queued."""
    size = 1 << 26 if gpu.name == "cuda" else 16
    array = device_array(gpu, np.zeros(size, np.uint8))
    for _ in range(50):
        array += 1
    ptr = gpu.wrap(array)
    gpu.memset(ptr, 7, size)
    if gpu.name == "cuda":
        array.device.synchronize()
    assert set(numpy_of(array[:: size // 16]).tolist()) == {7}
    gpu.unwrap(ptr)


def test_wrap_in_a_capture(gpu: GpuBackend) -> None:
    """It waits, which a capture forbids."""
    stream, array = gpu.create_stream(), device_array(gpu, np.zeros(16, np.uint8))
    gpu.begin_capture(stream)
    with refused(IllegalDuringCaptureError, "wrap before begin_capture"):
        gpu.wrap(array)
    gpu.abort_capture_if_active(stream)
    gpu.unwrap(gpu.wrap(array))
    gpu.destroy_stream(stream)


def test_unwrap_waits(gpu: GpuBackend) -> None:
    stream = gpu.create_stream()
    array = device_array(gpu, np.zeros(16, np.uint8))
    ptr = gpu.wrap(array)
    busy(gpu, stream)
    gpu.memset_async(ptr, 5, 16, stream)
    gpu.unwrap(ptr)
    assert numpy_of(array).tolist() == [5] * 16
    gpu.destroy_stream(stream)


def test_overlapping_wraps(gpu: GpuBackend) -> None:
    array = device_array(gpu, np.zeros(64, np.uint8))
    inner = gpu.wrap(array[16:32])
    for other in (array, array[:17], array[31:], array[16:32], array[20:24]):
        with refused(InvalidArgumentError, "known already"):
            gpu.wrap(other)
    beside = [gpu.wrap(array[:16]), gpu.wrap(array[32:])]
    for ptr in (inner, *beside):
        gpu.unwrap(ptr)
    view = gpu.view(poisoned(gpu, 64), (64,), np.uint8)
    with refused(InvalidArgumentError, "known already"):
        gpu.wrap(view[8:])


def test_wrap_refusals(gpu: GpuBackend) -> None:
    grid = device_array(gpu, np.zeros((8, 8), np.uint8))
    with refused(InvalidArgumentError, "C-contiguous"):
        gpu.wrap(grid[:, :4])
    for wrong in (None, 5, "array", [1, 2], object()):
        with refused(InvalidArgumentError, "array"):
            gpu.wrap(wrong)
    assert gpu.wrap(device_array(gpu, np.zeros(0, np.uint8))) == DevicePtr.NULL
    gpu.unwrap(DevicePtr.NULL)
    with pytest.raises(UnknownPointerError):
        gpu.unwrap(poisoned(gpu, 8))


def test_a_graph_over_a_wrapped_array(gpu: GpuBackend) -> None:
    stream, array = gpu.create_stream(), device_array(gpu, np.zeros(16, np.uint8))
    ptr = gpu.wrap(array)
    gpu.begin_capture(stream)
    gpu.memset_async(ptr, 5, 16, stream)
    graph = gpu.end_capture(stream)
    gpu.launch_graph(graph, stream)
    gpu.unwrap(ptr)
    assert numpy_of(array).tolist() == [5] * 16
    with refused(FreedPointerError, "wrapped"):
        gpu.launch_graph(graph, stream)
    gpu.destroy_graph(graph)
    gpu.destroy_stream(stream)


@pytest.mark.host_only("NumPy arrays are device memory on the CPU backend alone")
def test_read_only_arrays(gpu: GpuBackend) -> None:
    """A kernel that wrote to a mapped file or to bytes would end the process or change a constant."""
    array = np.zeros(8, np.uint8)
    array.flags.writeable = False
    for wrong in (array, np.frombuffer(b"12345678", np.uint8)):
        with refused(InvalidArgumentError, "read-only"):
            gpu.wrap(wrong)


def test_torch(gpu: GpuBackend) -> None:
    torch = pytest.importorskip("torch")
    device = f"cuda:{gpu.ordinal}" if gpu.name == "cuda" else "cpu"
    tensor = torch.arange(16, dtype=torch.float32, device=device)
    ptr = gpu.wrap(tensor)
    assert ptr.address == tensor.data_ptr()
    if device != "cpu":
        torch.cuda.synchronize()
    assert np.frombuffer(read(gpu, ptr, 64), np.float32).tolist() == list(range(16))
    gpu.memset(ptr, 0, 32)
    assert tensor.tolist() == [0] * 8 + list(range(8, 16))
    gpu.unwrap(ptr)
    with refused(InvalidArgumentError, "C-contiguous"):
        gpu.wrap(tensor.reshape(4, 4).t())


@pytest.mark.gpu_only("torch streams are CUDA streams")
def test_torch_streams(gpu: GpuBackend, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    work, stream = Concat(gpu, rng), torch.cuda.Stream()

    class Wrapped:
        ptr = stream.cuda_stream

    work.launch(Wrapped())
    assert work.result == work.expected


@pytest.mark.gpu_only("CuPy streams are CUDA streams")
def test_cupy_streams(gpu: GpuBackend, rng: np.random.Generator) -> None:
    cupy = pytest.importorskip("cupy")
    work, stream = Concat(gpu, rng), cupy.cuda.Stream(non_blocking=True)
    work.launch(stream)
    gpu.synchronize(stream)
    assert work.result == work.expected
    work.reset()
    work.launch(cupy.cuda.Stream.null)  # the legacy stream, as an object that says so
    assert work.result == work.expected
    for _ in range(20):
        work.reset()
        work.launch(cupy.cuda.Stream(non_blocking=True))  # gone before we wait
        assert work.result == work.expected
