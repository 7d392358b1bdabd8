# SPDX-License-Identifier: AGPL-3.0-only
"""What the CPU backend counts for tests of transfer shape: launches, copies by kind, syncs and streams.

Twin of the inspectors of `MockGpuBackend`, under the same names. Only operations that succeeded are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .checked import CheckedBackend
from .checked.launches import Argument
from .gpu import DevicePtr, HostPtr, KernelHandle, StreamLike
from .signature import Kind

Writable = bytearray | memoryview | np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class RecordedLaunch:
    """One launch: kernel, geometry, stream, and the arguments as they were passed."""

    func: KernelHandle
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_mem: int
    stream: int
    cooperative: bool
    args: tuple[Argument, ...]


class HostCounters(CheckedBackend):
    """Counting wrappers; they stand before CheckedBackend in the bases of HostBackend."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reset_counters()

    def reset_counters(self) -> None:
        """Start counting anew."""
        self.alloc_count = 0
        self.sync_count = 0
        self.h2d_blocking_count = 0
        self.h2d_async_count = 0
        self.d2h_blocking_count = 0
        self.d2h_async_count = 0
        self.d2d_count = 0
        self.d2d_2d_count = 0
        self.host_pinned_alloc_count = 0
        self.graph_launch_count = 0
        self.d2h_async_streams: list[int] = []
        self.d2d_async_streams: list[int] = []
        self.d2d_2d_async_streams: list[int] = []
        self.sync_d2h_async_counts: list[tuple[int, int]] = []
        """(stream, downloads queued so far) at each synchronize."""
        self.max_dynamic_smem_calls: list[tuple[KernelHandle, int]] = []
        self._launches: list[RecordedLaunch] = []
        self._lookups: list[tuple[str, str]] = []

    @property
    def launch_count(self) -> int:
        """Launches so far, cooperative ones included."""
        return len(self._launches)

    @property
    def cooperative_launch_count(self) -> int:
        """Cooperative launches so far."""
        return sum(launch.cooperative for launch in self._launches)

    def launches_snapshot(self) -> list[RecordedLaunch]:
        """Every launch so far, in order."""
        return list(self._launches)

    def kernel_lookups_snapshot(self) -> list[tuple[str, str]]:
        """(module, function) of every lookup so far, failed ones included."""
        return list(self._lookups)

    def read_alloc(self, base: DevicePtr) -> bytes:
        """The bytes of the allocation that starts at `base`."""
        allocation = self._memory.base_at(base.address)
        data = bytearray(allocation.size)
        self._device.d2h(np.frombuffer(data, np.uint8).ctypes.data, base.address, allocation.size, 0)
        return bytes(data)

    def alloc(self, nbytes: int, label: str = "") -> DevicePtr:
        ptr = super().alloc(nbytes, label)
        self.alloc_count += 1
        return ptr

    def alloc_managed(self, nbytes: int, label: str = "") -> DevicePtr:
        ptr = super().alloc_managed(nbytes, label)
        self.alloc_count += 1
        return ptr

    def alloc_host_pinned(self, nbytes: int) -> HostPtr:
        ptr = super().alloc_host_pinned(nbytes)
        self.host_pinned_alloc_count += 1
        return ptr

    def copy_h2d(self, src: Any, dst: DevicePtr) -> None:
        super().copy_h2d(src, dst)
        self.h2d_blocking_count += 1

    def copy_h2d_async(self, src: Any, dst: DevicePtr, stream: StreamLike) -> None:
        super().copy_h2d_async(src, dst, stream)
        self.h2d_async_count += 1

    def copy_h2d_async_retained(self, src: Any, dst: DevicePtr, stream: StreamLike) -> None:
        super().copy_h2d_async_retained(src, dst, stream)
        self.h2d_async_count += 1

    def copy_d2h(self, src: DevicePtr, dst: Writable) -> None:
        super().copy_d2h(src, dst)
        self.d2h_blocking_count += 1

    def copy_d2h_on_stream(self, src: DevicePtr, dst: Writable, stream: StreamLike) -> None:
        super().copy_d2h_on_stream(src, dst, stream)
        self.d2h_blocking_count += 1

    def copy_d2h_async(self, src: DevicePtr, dst: Writable, stream: StreamLike) -> None:
        super().copy_d2h_async(src, dst, stream)
        self.d2h_async_count += 1
        self.d2h_async_streams.append(self._stream(stream))

    def copy_d2d(self, src: DevicePtr, dst: DevicePtr, nbytes: int) -> None:
        super().copy_d2d(src, dst, nbytes)
        self.d2d_count += 1

    def copy_d2d_async(self, src: DevicePtr, dst: DevicePtr, nbytes: int, stream: StreamLike) -> None:
        super().copy_d2d_async(src, dst, nbytes, stream)
        self.d2d_count += 1
        self.d2d_async_streams.append(self._stream(stream))

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
        super().copy_d2d_2d_async(src, src_pitch, dst, dst_pitch, width_bytes, height, stream)
        self.d2d_2d_count += 1
        self.d2d_2d_async_streams.append(self._stream(stream))

    def synchronize(self, stream: StreamLike) -> None:
        super().synchronize(stream)
        self.sync_count += 1
        self.sync_d2h_async_counts.append((self._stream(stream), self.d2h_async_count))

    def kernel(self, module: str, func_name: str) -> KernelHandle:
        self._lookups.append((module, func_name))
        return super().kernel(module, func_name)

    def try_kernel(self, module: str, func_name: str) -> KernelHandle:
        self._lookups.append((module, func_name))
        return super().try_kernel(module, func_name)

    def set_kernel_max_dynamic_smem(self, kernel: KernelHandle, nbytes: int) -> None:
        super().set_kernel_max_dynamic_smem(kernel, nbytes)
        self.max_dynamic_smem_calls.append((kernel, nbytes))

    def launch_graph(self, graph: Any, stream: StreamLike) -> None:
        super().launch_graph(graph, stream)
        self.graph_launch_count += 1

    def launch_typed(
        self,
        func: KernelHandle,
        grid: Sequence[int],
        block: Sequence[int],
        shared_mem: int,
        stream: StreamLike,
        args: Sequence[Argument],
        kinds: Sequence[Kind] | None = None,
    ) -> None:
        self._launch(func, grid, block, shared_mem, stream, args, kinds, False)

    def _launch(
        self,
        func: KernelHandle,
        grid: Sequence[int],
        block: Sequence[int],
        shared_mem: int,
        stream: StreamLike,
        args: Sequence[Argument],
        kinds: Sequence[Kind] | None,
        cooperative: bool,
    ) -> None:
        super()._launch(func, grid, block, shared_mem, stream, args, kinds, cooperative)
        self._launches.append(
            RecordedLaunch(func, tuple(grid), tuple(block), shared_mem, self._stream(stream), cooperative, tuple(args))
        )
