# SPDX-License-Identifier: AGPL-3.0-only
"""Upload of tensors through two pinned buffers: while one is copied to the device, the file fills the other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from .errors import OutOfDeviceMemoryError, SparkError
from .gpu import DevicePtr, GpuBackend, HostPtr
from .weight_reader import Bytes, TensorReader
from .weight_types import WeightDtype, WeightInfo

__all__ = ["CONVERSIONS", "Progress", "UploadJob", "check_fits", "free_all", "upload"]

log = logging.getLogger("spark_py.runtime.weights")

Progress = Callable[[int, int, str], None]
"""Called with (bytes done, bytes of all, tensor name); bytes as stored in the files."""

CONVERSIONS = frozenset({(WeightDtype.F32, WeightDtype.BF16), (WeightDtype.F16, WeightDtype.BF16)})

_CHUNK_BYTES = 16 << 20
_SLOT_ALIGN = 64


@dataclass(frozen=True, slots=True)
class UploadJob:
    """A tensor to be uploaded and the dtype it takes on the device."""

    info: WeightInfo
    dtype: WeightDtype

    @property
    def device_bytes(self) -> int:
        """Bytes on the device, after conversion."""
        if self.dtype == self.info.dtype:
            return self.info.nbytes
        return self.info.nbytes * self.dtype.bits // self.info.dtype.bits


def check_fits(gpu: GpuBackend, jobs: Sequence[UploadJob], reserve_bytes: int) -> None:
    """OutOfDeviceMemoryError when weights and reserve together exceed the free memory. Nothing is allocated."""
    need, free = sum(job.device_bytes for job in jobs), gpu.free_memory()
    if need + reserve_bytes > free:
        raise OutOfDeviceMemoryError(
            need + reserve_bytes,
            free,
            gpu.total_memory(),
            gpu.device_name(),
            f"weights take {need} bytes, the reserve {reserve_bytes}; nothing was uploaded",
        )


def upload(
    gpu: GpuBackend, jobs: Sequence[UploadJob], reader: TensorReader, progress: Progress | None
) -> list[DevicePtr]:
    """Allocate and fill one device buffer a job, 256-byte aligned; a job without elements gives NULL.

    All copies are done on return. On any error, `progress` raising included, every buffer of this call is freed.
    """
    bases: list[DevicePtr] = []
    try:
        for job in jobs:
            bases.append(gpu.alloc(job.device_bytes, label=f"weight {job.info.name}"))
        _fill(gpu, list(zip(jobs, bases, strict=True)), reader, progress)
    except BaseException:
        for error in free_all(gpu, bases):
            log.warning("freeing after a failed upload: %s", error)
        raise
    return bases


def free_all(gpu: GpuBackend, bases: Sequence[DevicePtr]) -> list[SparkError]:
    """Free every base, in spite of errors on the way, which are returned."""
    errors = []
    for base in bases:
        try:
            gpu.free(base)
        except SparkError as error:
            errors.append(error)
    return errors


def _fill(
    gpu: GpuBackend, work: Sequence[tuple[UploadJob, DevicePtr]], reader: TensorReader, progress: Progress | None
) -> None:
    total = sum(job.info.nbytes for job, _ in work)
    room = sum(job.info.nbytes + _SLOT_ALIGN for job, _ in work)
    done = 0
    with _Staging(gpu, room) as staging:
        for job, base in work:
            info, written = job.info, 0
            for start in range(0, info.nbytes, _CHUNK_BYTES):
                data = staging.take(min(_CHUNK_BYTES, info.nbytes - start))
                reader.read(info, start, data)
                stored = data.nbytes
                if job.dtype != info.dtype:
                    data = _to_bf16_in_place(data, info.dtype)
                gpu.copy_h2d_async_retained(data, base.offset(written), staging.stream)
                written += data.nbytes
                done += stored
                if progress is not None:
                    progress(done, total, info.name)
            if progress is not None and info.nbytes == 0:
                progress(done, total, info.name)
        gpu.synchronize(staging.stream)


def _to_bf16_in_place(data: Bytes, dtype: WeightDtype) -> Bytes:
    """The BF16 bytes of F32 or F16 `data`, rounded to nearest even, in the front of the same memory."""
    with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaN are weights like any other
        rounded = data.view(dtype.numpy).astype(ml_dtypes.bfloat16).view(np.uint8)
    data[: rounded.nbytes] = rounded
    return data[: rounded.nbytes]


class _Staging:
    """A stream of its own and two pinned buffers that are filled in turn with many pieces each.

    `take` waits until the copies out of a buffer are done before it hands the buffer out again.
    """

    def __init__(self, gpu: GpuBackend, room: int) -> None:
        self._gpu = gpu
        self._size = min(_CHUNK_BYTES, room)
        self._buffers: list[Bytes] = []
        self._events: list[int] = []
        self._pending = [False, False]
        self._current = 0
        self._used = 0
        self._count = 1 if room <= self._size else 2
        self._cleanup = ExitStack()
        self.stream = 0

    def __enter__(self) -> _Staging:
        try:
            gpu = self._gpu
            self.stream = gpu.create_stream()
            self._cleanup.callback(self._quietly, gpu.destroy_stream, self.stream)
            for _ in range(self._count if self._size else 0):
                pinned = gpu.alloc_host_pinned(self._size)
                self._cleanup.callback(self._free_pinned, pinned)
                self._buffers.append(gpu.pinned_view(pinned, self._size))
                event = gpu.create_event()
                self._cleanup.callback(self._quietly, gpu.destroy_event, event)
                self._events.append(event)
        except BaseException:
            self._cleanup.close()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self._buffers.clear()
        self._cleanup.close()

    def _free_pinned(self, pinned: HostPtr) -> None:
        self._quietly(self._gpu.free_host_pinned, pinned, self._size)

    @staticmethod
    def _quietly(call: Callable[..., None], *args: Any) -> None:
        """Give a resource back; the error that brought us here, if any, matters more than one of this call."""
        try:
            call(*args)
        except SparkError as error:
            log.warning("after an upload: %s", error)

    def take(self, nbytes: int) -> Bytes:
        """`nbytes` (at most a chunk) of pinned memory, aligned for every dtype, that no copy reads."""
        if self._used + nbytes > self._size:
            self._gpu.record_event(self._events[self._current], self.stream)
            self._pending[self._current] = True
            self._current = (self._current + 1) % self._count
            if self._pending[self._current]:
                self._gpu.event_synchronize(self._events[self._current])
                self._pending[self._current] = False
            self._used = 0
        start = self._used
        self._used += -(-nbytes // _SLOT_ALIGN) * _SLOT_ALIGN
        return self._buffers[self._current][start : start + nbytes]
