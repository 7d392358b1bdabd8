# SPDX-License-Identifier: AGPL-3.0-only
"""HostBackend: the whole runtime on a CPU, with the catalogue's NumPy references as kernels.

Twin of `MockGpuBackend`, and stricter: kernels really run, streams are eager and in order, captures record and
replay. Each allocation has red zones; fresh and freed memory is poisoned with 0xFF, which is NaN in BF16 and E4M3.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..catalog.spec import KernelSpec
from .audit import KernelAudit
from .checked import CheckedBackend
from .device import Dim3, Launcher, LoadedKernel, RawDevice
from .errors import (
    InvalidArgumentError,
    OutOfDeviceMemoryError,
    RedZoneError,
)
from .gpu import DeviceLimits, FunctionAttributes
from .host_calls import HostCalls
from .host_counters import HostCounters
from .host_kernels import HostKernels
from .host_memory import Block, array_at, fill, move
from .plan import Layout

__all__ = ["HostBackend", "HostDevice"]

_POISON = 0xFF
_QUARANTINE_BYTES = 64 << 20
# Handles are unique in the process, so that another backend's stream or event is told apart from one's own.
_handles = itertools.count(0x1000, 0x10)


class HostDevice(RawDevice):
    """Host memory and eager streams."""

    name = "host"

    def __init__(self, ordinal: int, kernels: HostKernels, poison: bool) -> None:
        if isinstance(ordinal, bool) or not isinstance(ordinal, int) or ordinal < 0:
            raise InvalidArgumentError("ordinal", ordinal, "a device number, 0 or more")
        self.ordinal = ordinal
        self.limits = DeviceLimits()
        self.kernels = kernels
        self.max_allocation: int | None = None
        self._poison = _POISON if poison else None
        self._blocks: dict[int, Block] = {}
        self._pinned: dict[int, Block] = {}
        self._quarantine: deque[Block] = deque()
        self._quarantined = 0
        self._event_times: dict[int, float] = {}
        # One operation at a time, whichever thread queues it: who waits or frees finds earlier work done.
        self._running = threading.RLock()
        self._touched: set[str] = set()
        self._recording: dict[int, list[Callable[[], None]]] = {}
        self._captured_events: dict[int, list[Callable[[], None]]] = {}
        self._graphs: dict[int, list[Callable[[], None]]] = {}

    # ------------------------------------------------------------ memory

    def _new_block(self, nbytes: int, fill: int | None) -> Block:
        if self.max_allocation is not None and nbytes > self.max_allocation:
            free, total = self.memory_info()
            raise OutOfDeviceMemoryError(
                nbytes, free, total, "host", f"exceeds the injected limit of {self.max_allocation} bytes"
            )
        # The system may promise more than there is; filling it would end the process.
        if fill is None or nbytes <= self.memory_info()[1]:
            try:
                return Block(nbytes, fill)
            except (MemoryError, ValueError):
                pass
        raise OutOfDeviceMemoryError(nbytes, *self.memory_info(), "host")

    def alloc(self, nbytes: int) -> int:
        block = self._new_block(nbytes, self._poison)
        self._blocks[block.base] = block
        return block.base

    alloc_managed = alloc

    def free(self, address: int) -> None:
        damage = self._retire(self._blocks.pop(address))
        if damage is not None:
            raise RedZoneError(f"memory was written {damage} of an allocation:", address)

    def _retire(self, block: Block) -> str | None:
        """Poison a block and keep it for a while, so that a stale pointer meets NaN instead of somebody's new data;
        gives what its red zones tell."""
        with self._running:
            damage = block.damage()
            if block.body.size <= _QUARANTINE_BYTES:
                if self._poison is not None:
                    block.body[:] = self._poison
                self._quarantine.append(block)
                self._quarantined += block.body.size
                while self._quarantined > _QUARANTINE_BYTES:
                    self._quarantined -= self._quarantine.popleft().body.size
            return damage

    def alloc_host(self, nbytes: int) -> int:
        block = self._new_block(nbytes, 0)
        self._pinned[block.base] = block
        return block.base

    def free_host(self, address: int) -> None:
        damage = self._retire(self._pinned.pop(address))
        if damage is not None:
            raise RedZoneError(f"memory was written {damage} of a pinned allocation at {address:#x}", address)

    def host_to_device(self, address: int) -> int:
        return address

    def check_red_zones(self) -> None:
        """RedZoneError for the first live allocation whose surroundings were overwritten."""
        for base, block in (*self._blocks.items(), *self._pinned.items()):
            damage = block.damage()
            if damage is not None:
                raise RedZoneError(f"memory was written {damage} of {self.ledger.find(base)}", base)

    # ------------------------------------------------------------ streams: eager, or recorded by a capture

    def _queue(self, stream: int, operation: Callable[[], None]) -> None:
        recording = self._recording.get(stream)
        if recording is not None:
            recording.append(operation)
            return
        with self._running:
            operation()

    def h2d(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self._queue(stream, lambda: move(dst, src, nbytes))

    h2d_staged = h2d

    def d2h(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self._queue(stream, lambda: move(dst, src, nbytes))

    def d2d(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self._queue(stream, lambda: move(dst, src, nbytes))

    def d2d_2d(self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, height: int, stream: int) -> None:
        def rows() -> None:
            for row in range(height):
                move(dst + row * dst_pitch, src + row * src_pitch, width)

        self._queue(stream, rows)

    def memset(self, dst: int, value: int, nbytes: int, stream: int) -> None:
        self._queue(stream, lambda: fill(dst, value, nbytes))

    def create_stream(self) -> int:
        return next(_handles)

    def destroy_stream(self, stream: int) -> None:
        self._recording.pop(stream, None)

    def sync_stream(self, stream: int) -> None:
        with self._running:
            pass

    def create_event(self, timing: bool) -> int:
        return next(_handles)

    def destroy_event(self, event: int) -> None:
        self._event_times.pop(event, None)
        self._captured_events.pop(event, None)

    def record_event(self, event: int, stream: int) -> None:
        recording = self._recording.get(stream)
        if recording is None:
            self._event_times[event] = time.perf_counter()
            self._captured_events.pop(event, None)
        else:
            self._captured_events[event] = recording

    def wait_event(self, stream: int, event: int) -> None:
        recording = self._captured_events.get(event)
        if recording is not None and any(r is recording for r in self._recording.values()):
            self._recording[stream] = recording

    def sync_event(self, event: int) -> None:
        self.sync_stream(event)

    def query_event(self, event: int) -> bool:
        return True

    def elapsed_ms(self, start: int, end: int) -> float:
        return (self._event_times[end] - self._event_times[start]) * 1e3

    # ------------------------------------------------------------ kernels

    def has_module(self, module: str) -> bool:
        return self.kernels.has_module(module)

    def known_kernels(self) -> Sequence[tuple[str, str]]:
        return self.kernels.known()

    def is_loaded(self, module: str, function: str) -> bool:
        return module in self._touched

    def load(self, module: str, function: str) -> LoadedKernel:
        # A GPU loads modules whole, whether or not the function is there.
        if self.kernels.has_module(module):
            self._touched.add(module)
        spec, signature = self.kernels.find(module, function)
        attributes = FunctionAttributes(
            -1, spec.shared_bytes, self.limits.max_shared_default - spec.shared_bytes, 0, 1024
        )
        nullable = tuple(p.optional for p in spec.params)
        return LoadedKernel(module, function, signature, spec, attributes, attributes.shared_dynamic_max, nullable)

    def plan(self, kernel: LoadedKernel, grid: Dim3, block: Dim3, shared: int, cooperative: bool) -> Launcher:
        spec: KernelSpec = kernel.raw
        layout = Layout(kernel.signature)
        calls = HostCalls(self.ledger, spec, kernel.name, (grid, block, shared))

        def launch(stream: int, pointers: Sequence[int], scalars: Sequence[Any]) -> None:
            packed = layout.packed.pack(*pointers, *scalars)  # raises where a number does not fit, as for a GPU
            values = layout.merge(pointers, scalars)
            self._queue(stream, lambda: spec.run(calls.find(packed, values)))

        return launch

    def set_max_dynamic(self, kernel: LoadedKernel, nbytes: int) -> None:
        pass

    def max_cooperative_blocks(self, kernel: LoadedKernel, threads: int, shared: int) -> int:
        return 2048 // threads * self.sm_count()

    # ------------------------------------------------------------ graphs

    def begin_capture(self, stream: int) -> None:
        self._recording[stream] = []

    def _stop_recording(self, stream: int) -> list[Callable[[], None]]:
        recording = self._recording[stream]
        for each in [s for s, r in self._recording.items() if r is recording]:
            del self._recording[each]
        return recording

    def end_capture(self, stream: int) -> int:
        graph = next(_handles)
        self._graphs[graph] = self._stop_recording(stream)
        return graph

    def is_capturing(self, stream: int) -> bool:
        return stream in self._recording

    def abort_capture(self, stream: int) -> None:
        self._stop_recording(stream)

    def launch_graph(self, graph: int, stream: int) -> None:
        with self._running:
            for operation in self._graphs[graph]:
                operation()

    def destroy_graph(self, graph: int) -> None:
        del self._graphs[graph]

    # ------------------------------------------------------------ information

    def memory_info(self) -> tuple[int, int]:
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page

    def integrated(self) -> bool:
        return True

    def sm_count(self) -> int:
        return os.cpu_count() or 1

    def compute_capability(self) -> tuple[int, int]:
        return 0, 0

    def device_name(self) -> str:
        return "CPU (NumPy references)"

    def array(self, address: int, shape: tuple[int, ...], dtype: Any) -> Any:
        if address == 0:
            return np.empty(shape, dtype)
        allocation = self.ledger.find(address)
        block = self._blocks.get(allocation.base) if allocation is not None else None
        if block is None:
            return array_at(address, shape, np.dtype(dtype))
        # A slice of the owner keeps the memory alive for as long as the view is.
        at = address - block.base
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        return block.body[at : at + nbytes].view(dtype).reshape(shape)

    def foreign_range(self, array: Any) -> tuple[int, int]:
        if not hasattr(array, "__array_interface__"):
            if not hasattr(array, "__dlpack__"):
                raise InvalidArgumentError("array", type(array).__name__, "a NumPy array or a CPU array with DLPack")
            try:
                array = np.from_dlpack(array)
            except (BufferError, RuntimeError, TypeError) as error:  # BF16, for one
                raise InvalidArgumentError("array", type(array).__name__, f"{error}; view it as uint8") from None
        elif array.__array_interface__["data"][1]:
            raise InvalidArgumentError("array", "read-only", "kernels may write to wrapped memory")
        view = np.asarray(array)
        if not view.flags.c_contiguous:
            raise InvalidArgumentError("array", f"strides {view.strides}", "must be C-contiguous")
        return int(view.__array_interface__["data"][0]), view.nbytes

    def close(self) -> None:
        self._quarantine.clear()


class HostBackend(HostCounters, CheckedBackend):
    """The CPU backend. `poison=False` leaves fresh memory untouched, so that huge allocations stay sparse."""

    _device: HostDevice

    def __init__(
        self,
        ordinal: int = 0,
        kernels: Path | str | None = None,
        on_leak: str = "warn",
        debug_sync_kernels: bool = False,
        poison: bool = True,
    ) -> None:
        device = HostDevice(ordinal, HostKernels(kernels), poison)
        super().__init__(device, KernelAudit(), on_leak, debug_sync_kernels)

    def check_red_zones(self) -> None:
        """RedZoneError when memory beside a live allocation was overwritten."""
        self._device.check_red_zones()

    def set_max_allocation_bytes(self, nbytes: int | None) -> None:
        """Make larger single requests fail with OutOfDeviceMemoryError; None lifts the limit."""
        self._device.max_allocation = None if nbytes is None else self._size("nbytes", nbytes)

    def fail_lookup(self, module: str, function: str | None = None) -> None:
        """Make lookups of a function, or of a whole module, fail as if the kernel set lacked it."""
        self._device.kernels.hide(module, function)
