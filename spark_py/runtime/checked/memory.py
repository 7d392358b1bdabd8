# SPDX-License-Identifier: AGPL-3.0-only
"""Allocations, copies and fills: the ledger and the bounds of every byte moved."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from ..allocations import Allocation
from ..callsite import call_site
from ..errors import (
    DoubleFreeError,
    IllegalDuringCaptureError,
    InvalidArgumentError,
    RedZoneError,
    SparkError,
)
from ..gpu import Buffer, DevicePtr, HostPtr, StreamLike, exact_int
from .buffers import address_of, host_bytes
from .core import Core, guarded, is_integer, queued

log = logging.getLogger("spark_py.runtime")
Writable = bytearray | memoryview | np.ndarray[Any, Any]
_LARGE = 32 << 20
_ALLOC_BEFORE = "allocate before begin_capture"
_FREE_AFTER = "free after end_capture"
_ASYNC_INSTEAD = "use the async form on the capturing stream, or copy before begin_capture"


class MemoryOps(Core):
    """Everything of the trait's memory and copy groups."""

    # ------------------------------------------------------------ allocations

    @guarded
    def alloc(self, nbytes: int, label: str = "") -> DevicePtr:
        return self._alloc(nbytes, label, managed=False)

    @guarded
    def alloc_managed(self, nbytes: int, label: str = "") -> DevicePtr:
        return self._alloc(nbytes, label, managed=True)

    def _alloc(self, nbytes: int, label: str, managed: bool) -> DevicePtr:
        size = self._size("nbytes", nbytes)
        operation = "alloc_managed" if managed else "alloc"
        self._refuse_in_capture(operation, _ALLOC_BEFORE)
        if size == 0:
            return DevicePtr.NULL
        base = self._device.alloc_managed(size) if managed else self._device.alloc(size)
        with self._lock:
            self._memory.add(base, size, label, call_site(), "managed" if managed else "device")
            total = self._memory.live_bytes
        if size >= _LARGE:
            log.debug("%s of %.1f MB '%s', %.1f MB live", operation, size / 1e6, label, total / 1e6)
        return DevicePtr(base)

    @guarded
    def free(self, ptr: DevicePtr) -> None:
        address = self._address(ptr)
        if address == 0:
            return
        self._refuse_in_capture("free", _FREE_AFTER)
        with self._lock:
            allocation = self._memory.base_at(address)
            if allocation.origin == "wrapped":
                raise DoubleFreeError(f"free of {ptr!r}, which was wrapped: use unwrap", address)
            if allocation.origin == "pinned":
                raise DoubleFreeError(f"free of {ptr!r}, which is pinned host memory: use free_host_pinned", address)
        self._drain()
        with self._lock:
            self._memory.remove(address)
        self._release(allocation)

    def _release(self, allocation: Allocation) -> None:
        try:
            self._device.free(allocation.base)
        except RedZoneError as error:
            raise RedZoneError(f"{error} {allocation}", allocation.base) from None

    @guarded
    def live_bytes(self) -> int:
        return self._memory.live_bytes

    @guarded
    def alloc_report(self, top_n: int = 10, min_mb: float = 0.0) -> str:
        with self._lock:
            return self._memory.report(top_n, min_mb)

    @guarded
    def sweep_unreleased(self) -> int:
        self._refuse_in_capture("sweep_unreleased", _FREE_AFTER)
        self._op_cache.release(self)
        with self._lock:
            left = [a for a in self._memory.all() if a.origin in ("device", "managed")]
            report = self._memory.report(5, 0.0) if left else ""
        if not left:
            return 0
        log.warning("%d allocations were not freed:\n%s", len(left), report)
        self._drain()
        for allocation in left:
            with self._lock:
                self._memory.remove(allocation.base)
            try:
                self._release(allocation)
            except SparkError as error:
                log.warning("freeing %s: %s", allocation, error)
        return len(left)

    # ------------------------------------------------------------ pinned host memory

    @guarded
    def alloc_host_pinned(self, nbytes: int) -> HostPtr:
        size = self._size("nbytes", nbytes)
        self._refuse_in_capture("alloc_host_pinned", _ALLOC_BEFORE)
        if size == 0:
            return HostPtr(0)
        base = self._device.alloc_host(size)
        with self._lock:
            self._pinned.add(base, size, "", call_site(), "pinned")
        return HostPtr(base)

    @guarded
    def free_host_pinned(self, ptr: HostPtr, nbytes: int) -> None:
        address, size = exact_int(ptr, "host pointer"), self._size("nbytes", nbytes)
        if address == 0:
            return
        self._refuse_in_capture("free_host_pinned", _FREE_AFTER)
        with self._lock:
            allocation = self._pinned.base_at(address)
        if allocation.size != size:
            raise InvalidArgumentError("nbytes", size, f"{allocation.size} were allocated at {address:#x}")
        self._drain()
        with self._lock:
            self._pinned.remove(address)
            device = self._device.host_to_device(address)
            mapped = self._memory.find(device)
            if mapped is not None and mapped.base == device:
                self._memory.remove(device)
        self._device.free_host(address)

    @guarded
    def host_ptr_to_device(self, ptr: HostPtr) -> DevicePtr:
        address = exact_int(ptr, "host pointer")
        with self._lock:
            pinned = self._pinned.check_range(address, 1, "host_ptr_to_device")
            base = self._device.host_to_device(pinned.base)
            if self._memory.find(base) is None:
                self._memory.add(base, pinned.size, "pinned host memory", pinned.site, "pinned")
        return DevicePtr(base + address - pinned.base)

    @guarded
    def pinned_view(self, ptr: HostPtr, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        import ctypes

        address, size = exact_int(ptr, "host pointer"), self._size("nbytes", nbytes)
        if size == 0:
            return np.empty(0, np.uint8)
        with self._lock:
            self._pinned.check_range(address, size, "pinned_view")
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))

    # ------------------------------------------------------------ copies

    def _address(self, ptr: object) -> int:
        if not isinstance(ptr, DevicePtr):
            raise InvalidArgumentError("pointer", ptr, "a DevicePtr")
        return ptr.address

    def _range(self, ptr: DevicePtr, nbytes: int, what: str) -> Allocation | None:
        """The allocation that holds the range; None for 0 bytes, where any pointer will do."""
        address = self._address(ptr)
        return self._memory.check_range(address, nbytes, what) if nbytes else None

    def _pinned_for_graph(self, host: int, nbytes: int, stream: int, operation: str) -> None:
        """While `stream` captures, host memory must be this backend's pinned memory, which the graph then watches."""
        if stream not in self._captures:
            return
        with self._lock:
            pinned = self._pinned.find(host)
        if pinned is None or host + nbytes > pinned.base + pinned.size:
            raise IllegalDuringCaptureError(
                f"{operation} with pageable host memory",
                "a graph keeps the host address and uses it at each replay; use memory of alloc_host_pinned",
            )
        self._queued(stream, pinned)

    @guarded
    def copy_h2d(self, src: Buffer, dst: DevicePtr) -> None:
        data = host_bytes(src, writable=False)
        self._refuse_in_capture("copy_h2d", _ASYNC_INSTEAD)
        if self._range(dst, data.nbytes, "copy_h2d: destination") is None:
            return
        self._drain()
        self._device.h2d(dst.address, address_of(data), data.nbytes, self._copy_stream)
        self._device.sync_stream(self._copy_stream)
        self._record("copy_h2d", data, dst=dst)

    @guarded
    def copy_d2h(self, src: DevicePtr, dst: Writable) -> None:
        data = host_bytes(dst, writable=True)
        self._refuse_in_capture("copy_d2h", _ASYNC_INSTEAD)
        if self._range(src, data.nbytes, "copy_d2h: source") is None:
            return
        self._drain()
        self._device.d2h(address_of(data), src.address, data.nbytes, self._copy_stream)
        self._device.sync_stream(self._copy_stream)
        self._record("copy_d2h", src=src, nbytes=data.nbytes)

    @guarded
    def copy_d2h_on_stream(self, src: DevicePtr, dst: Writable, stream: StreamLike) -> None:
        raw = self._stream(stream)
        data = host_bytes(dst, writable=True)
        self._refuse_in_capture("copy_d2h_on_stream", _ASYNC_INSTEAD)
        self._refuse_capturing(raw, "copy_d2h_on_stream")
        if self._range(src, data.nbytes, "copy_d2h_on_stream: source") is None:
            return
        self._device.d2h(address_of(data), src.address, data.nbytes, raw)
        self._device.sync_stream(raw)
        self._record("copy_d2h_on_stream", src=src, nbytes=data.nbytes)

    @guarded
    def copy_d2d(self, src: DevicePtr, dst: DevicePtr, nbytes: int) -> None:
        size = self._size("nbytes", nbytes)
        self._refuse_in_capture("copy_d2d", _ASYNC_INSTEAD)
        if self._both_ranges(src, dst, size, size, "copy_d2d") is None:
            return
        self._drain()
        self._device.d2d(dst.address, src.address, size, self._copy_stream)
        self._device.sync_stream(self._copy_stream)
        self._record("copy_d2d", src=src, dst=dst, nbytes=size)

    @queued
    def copy_h2d_async(self, src: Buffer, dst: DevicePtr, stream: StreamLike) -> None:
        raw = self._stream(stream)
        data = host_bytes(src, writable=False)
        if raw in self._captures:
            raise IllegalDuringCaptureError(
                "copy_h2d_async",
                "a graph would keep the address of a buffer that is gone at replay; upload before begin_capture, "
                "or use copy_h2d_async_retained from memory of alloc_host_pinned",
            )
        if self._range(dst, data.nbytes, "copy_h2d_async: destination") is None:
            return
        self._device.h2d_staged(dst.address, address_of(data), data.nbytes, raw)
        self._queued(raw)
        self._record("copy_h2d_async", data, dst=dst)

    @queued
    def copy_h2d_async_retained(self, src: Buffer, dst: DevicePtr, stream: StreamLike) -> None:
        raw = self._stream(stream)
        data = host_bytes(src, writable=False)
        allocation = self._range(dst, data.nbytes, "copy_h2d_async_retained: destination")
        if allocation is None:
            return
        host = address_of(data)
        self._pinned_for_graph(host, data.nbytes, raw, "copy_h2d_async_retained")
        self._device.h2d(dst.address, host, data.nbytes, raw)
        self._written(raw, allocation)
        self._retain(raw, src)
        self._record("copy_h2d_async_retained", data, dst=dst)

    @queued
    def copy_d2h_async(self, src: DevicePtr, dst: Writable, stream: StreamLike) -> None:
        raw = self._stream(stream)
        data = host_bytes(dst, writable=True)
        allocation = self._range(src, data.nbytes, "copy_d2h_async: source")
        if allocation is None:
            return
        host = address_of(data)
        self._pinned_for_graph(host, data.nbytes, raw, "copy_d2h_async")
        self._device.d2h(host, src.address, data.nbytes, raw)
        self._queued(raw, allocation)
        self._retain(raw, dst)
        self._record("copy_d2h_async", src=src, nbytes=data.nbytes)

    @queued
    def copy_d2d_async(self, src: DevicePtr, dst: DevicePtr, nbytes: int, stream: StreamLike) -> None:
        raw, size = self._stream(stream), self._size("nbytes", nbytes)
        both = self._both_ranges(src, dst, size, size, "copy_d2d_async")
        if both is None:
            return
        self._device.d2d(dst.address, src.address, size, raw)
        self._written(raw, both[1], both[0])
        self._record("copy_d2d_async", src=src, dst=dst, nbytes=size)

    @queued
    def copy_d2d_2d_async(
        self,
        src: DevicePtr,
        src_pitch: int,
        dst: DevicePtr,
        dst_pitch: int,
        width_bytes: int,
        height: int,
        stream: StreamLike,
    ) -> None:
        raw = self._stream(stream)
        width, rows = self._size("width_bytes", width_bytes), self._size("height", height)
        pitches = {"src_pitch": self._size("src_pitch", src_pitch), "dst_pitch": self._size("dst_pitch", dst_pitch)}
        if width == 0 or rows == 0:
            self._address(src), self._address(dst)
            return
        for name, pitch in pitches.items():
            if pitch < width:
                raise InvalidArgumentError(name, pitch, f"at least width_bytes, {width}")
        spans = [(rows - 1) * pitch + width for pitch in pitches.values()]
        both = self._both_ranges(src, dst, spans[0], spans[1], "copy_d2d_2d_async")
        if both is None:
            return
        self._device.d2d_2d(dst.address, pitches["dst_pitch"], src.address, pitches["src_pitch"], width, rows, raw)
        self._written(raw, both[1], both[0])
        self._record("copy_d2d_2d_async", None, src=src, dst=dst, **pitches, width=width, height=rows)

    def _both_ranges(
        self, src: DevicePtr, dst: DevicePtr, src_bytes: int, dst_bytes: int, what: str
    ) -> tuple[Allocation, Allocation] | None:
        source = self._range(src, src_bytes, f"{what}: source")
        target = self._range(dst, dst_bytes, f"{what}: destination")
        if source is None or target is None:
            return None
        if src.address < dst.address + dst_bytes and dst.address < src.address + src_bytes:
            raise InvalidArgumentError(f"{what}: ranges", (src, dst, src_bytes), "source and destination overlap")
        return source, target

    @guarded
    def memset(self, ptr: DevicePtr, value: int, nbytes: int) -> None:
        size, byte = self._size("nbytes", nbytes), self._byte(value)
        self._refuse_in_capture("memset", "use memset_async on the capturing stream")
        if self._range(ptr, size, "memset") is None:
            return
        self._drain()
        self._device.memset(ptr.address, byte, size, self._copy_stream)
        self._device.sync_stream(self._copy_stream)
        self._record("memset", ptr=ptr, value=byte, nbytes=size)

    @queued
    def memset_async(self, ptr: DevicePtr, value: int, nbytes: int, stream: StreamLike) -> None:
        raw, size, byte = self._stream(stream), self._size("nbytes", nbytes), self._byte(value)
        allocation = self._range(ptr, size, "memset_async")
        if allocation is None:
            return
        self._device.memset(ptr.address, byte, size, raw)
        self._written(raw, allocation)
        self._record("memset_async", ptr=ptr, value=byte, nbytes=size)

    def _byte(self, value: object) -> int:
        if not is_integer(value) or not 0 <= int(value) <= 255:
            raise InvalidArgumentError("value", value, "a byte, 0 .. 255")
        return int(value)

    def _retain(self, stream: int, buffer: object) -> None:
        """Hold a copy's host memory until somebody waits for the stream; a buffer used again and again counts once."""
        if stream not in self._captures:
            with self._lock:
                self._keep_alive.setdefault(stream, {})[id(buffer)] = buffer

    def _refuse_capturing(self, stream: int, operation: str) -> None:
        if stream in self._captures:
            raise IllegalDuringCaptureError(operation, "the stream is capturing; do this after end_capture")

    def _record(self, operation: str, payload: np.ndarray[Any, Any] | None = None, **words: DevicePtr | int) -> None:
        if self._trace is not None:
            numbers = tuple((name, int(word)) for name, word in words.items())
            self._trace.record_operation(operation, numbers, None if payload is None else payload.tobytes())
