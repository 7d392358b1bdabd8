# SPDX-License-Identifier: AGPL-3.0-only
"""What the runtime tests share: a kernel that every backend has, its buffers, and a stream that is busy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from spark_py.runtime import DevicePtr, GpuBackend, GraphHandle, KernelHandle, open_backend
from spark_py.runtime.errors import SparkError

BF16 = np.dtype(ml_dtypes.bfloat16)
POISON = 0xA5
Array = np.ndarray[Any, Any]


def upload(gpu: GpuBackend, array: Array | bytes, label: str = "") -> DevicePtr:
    """A copy of host bytes on the device."""
    data = np.frombuffer(array, np.uint8) if isinstance(array, bytes) else array.reshape(-1).view(np.uint8)
    ptr = gpu.alloc(data.nbytes, label)
    gpu.copy_h2d(data, ptr)
    return ptr


def read(gpu: GpuBackend, ptr: DevicePtr, nbytes: int) -> bytes:
    """Bytes of the device."""
    data = bytearray(nbytes)
    gpu.copy_d2h(ptr, data)
    return bytes(data)


def poisoned(gpu: GpuBackend, nbytes: int, label: str = "") -> DevicePtr:
    """Device memory full of POISON."""
    ptr = gpu.alloc(nbytes, label)
    gpu.memset(ptr, POISON, nbytes)
    return ptr


def is_poison(gpu: GpuBackend, ptr: DevicePtr, nbytes: int) -> bool:
    """Whether nothing was written."""
    return read(gpu, ptr, nbytes) == bytes([POISON]) * nbytes


class Concat:
    """`residual_add::bf16_concat(a, b, out, N)`: two copies, so that results are exact. N elements of BF16 a half."""

    BLOCK = (256, 1, 1)

    def __init__(self, gpu: GpuBackend, rng: np.random.Generator, n: int = 300) -> None:
        self.gpu, self.n = gpu, n
        self.grid = (-(-n // 256), 1, 1)
        self.kernel: KernelHandle = gpu.kernel("residual_add", "bf16_concat")
        self.left, self.right = (rng.standard_normal(n).astype(BF16) for _ in range(2))
        self.a, self.b = upload(gpu, self.left, "a"), upload(gpu, self.right, "b")
        self.out = poisoned(gpu, 4 * n, "out")

    @property
    def args(self) -> list[Any]:
        return [self.a, self.b, self.out, self.n]

    def launch(self, stream: Any = None, args: list[Any] | None = None, **changes: Any) -> None:
        given = {"func": self.kernel, "grid": self.grid, "block": self.BLOCK, "shared_mem": 0} | changes
        at = self.gpu.default_stream() if stream is None else stream
        self.gpu.launch_typed(**given, stream=at, args=self.args if args is None else args)

    @property
    def expected(self) -> bytes:
        return self.left.tobytes() + self.right.tobytes()

    @property
    def result(self) -> bytes:
        return read(self.gpu, self.out, 4 * self.n)

    def reset(self) -> None:
        self.gpu.memset(self.out, POISON, 4 * self.n)

    @property
    def untouched(self) -> bool:
        return is_poison(self.gpu, self.out, 4 * self.n)


def busy(gpu: GpuBackend, stream: int, nbytes: int = 256 << 20, times: int = 200) -> None:
    """Give a GPU's stream tens of milliseconds of work; the CPU backend is eager, so there it does next to nothing."""
    if gpu.name != "cuda":
        nbytes, times = 4096, 1
    scratch = gpu.alloc(nbytes, "busy")
    for value in range(times):
        gpu.memset_async(scratch, value % 256, nbytes, stream)


@contextmanager
def refused(kind: type[SparkError], *parts: str) -> Iterator[Any]:
    """The error `kind` with each of `parts` in its message."""
    with pytest.raises(kind) as caught:
        yield caught
    for part in parts:
        assert part in str(caught.value), f"'{part}' is not in: {caught.value}"


def second_backend(gpu: GpuBackend, **options: Any) -> GpuBackend:
    """Another backend of the same kind, on the same device."""
    return open_backend(gpu.name, gpu.ordinal, **options)  # type: ignore[arg-type]


def capture(gpu: GpuBackend, stream: int, body: Callable[[], object]) -> GraphHandle:
    """The graph of what `body` queues."""
    gpu.begin_capture(stream)
    body()
    return gpu.end_capture(stream)


def in_thread(body: Callable[[], object]) -> BaseException | None:
    """Run `body` on a thread of its own; what it raised, if anything."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            body()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None
