# SPDX-License-Identifier: AGPL-3.0-only
"""RawDevice: what a backend must bring. Everything above it (checks, capture rules, ledger) is shared.

Addresses, streams, events and graphs are plain integers here, and nothing is validated: `CheckedBackend` has done
that. An implementation raises OutOfDeviceMemoryError, CudaError or DeviceLostError, nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .allocations import AllocationMap
from .gpu import DeviceLimits, FunctionAttributes
from .signature import Signature

Dim3 = tuple[int, int, int]
Launcher = Callable[[int, Sequence[int], Sequence[Any]], None]
"""(stream, addresses, scalars) -> None; queues the launch of one plan. The addresses are those of the pointer
parameters, the scalars are the rest, each in parameter order. struct.error or OverflowError where a number does not
fit its parameter; nothing is queued then."""


@dataclass(slots=True)
class LoadedKernel:
    """A kernel function on a device. `raw` is the device's own object; `max_dynamic` the dynamic shared limit now."""

    module: str
    function: str
    signature: Signature
    raw: Any
    attributes: FunctionAttributes
    max_dynamic: int
    nullable: tuple[bool, ...] = field(default=())
    """Per parameter: whether a NULL pointer is allowed."""
    alignments: tuple[int, ...] = ()
    """Per parameter: what a pointer must be a multiple of (bytes), 1 where any will do; set by the owner."""
    dependent: bool = False
    """Whether the kernel waits by itself for those before it."""
    early: tuple[int, ...] = ()
    """Parameters that it reads before it waits; set by the owner."""
    written: tuple[int, ...] = ()
    """Parameters whose memory it may write; set by the owner."""

    @property
    def name(self) -> str:
        """ "module::function"."""
        return f"{self.module}::{self.function}"


class RawDevice(ABC):
    """A device without checks."""

    name: str
    ordinal: int
    limits: DeviceLimits
    ledger: AllocationMap
    """The owner's live allocations, set by it; a device that runs kernels itself checks their ranges here."""

    def activate(self) -> None:  # noqa: B027 - a device without contexts has nothing to do
        """Make the device current on the calling thread."""

    # memory; addresses and bytes
    @abstractmethod
    def alloc(self, nbytes: int) -> int: ...
    @abstractmethod
    def alloc_managed(self, nbytes: int) -> int: ...
    @abstractmethod
    def free(self, address: int) -> None: ...
    @abstractmethod
    def alloc_host(self, nbytes: int) -> int: ...
    @abstractmethod
    def free_host(self, address: int) -> None: ...
    @abstractmethod
    def host_to_device(self, address: int) -> int: ...

    # copies
    @abstractmethod
    def h2d(self, dst: int, src: int, nbytes: int, stream: int) -> None: ...
    @abstractmethod
    def h2d_staged(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """As `h2d`, but the source may change as soon as this returns."""

    @abstractmethod
    def d2h(self, dst: int, src: int, nbytes: int, stream: int) -> None: ...
    @abstractmethod
    def d2d(self, dst: int, src: int, nbytes: int, stream: int) -> None: ...
    @abstractmethod
    def d2d_2d(
        self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, height: int, stream: int
    ) -> None: ...
    @abstractmethod
    def memset(self, dst: int, value: int, nbytes: int, stream: int) -> None: ...

    # streams and events
    @abstractmethod
    def create_stream(self) -> int: ...
    @abstractmethod
    def destroy_stream(self, stream: int) -> None: ...
    @abstractmethod
    def sync_stream(self, stream: int) -> None: ...
    @abstractmethod
    def create_event(self, timing: bool) -> int: ...
    @abstractmethod
    def destroy_event(self, event: int) -> None: ...
    @abstractmethod
    def record_event(self, event: int, stream: int) -> None: ...
    @abstractmethod
    def wait_event(self, stream: int, event: int) -> None: ...
    @abstractmethod
    def sync_event(self, event: int) -> None: ...
    @abstractmethod
    def query_event(self, event: int) -> bool: ...
    @abstractmethod
    def elapsed_ms(self, start: int, end: int) -> float: ...

    # kernels
    @abstractmethod
    def has_module(self, module: str) -> bool: ...
    @abstractmethod
    def known_kernels(self) -> Sequence[tuple[str, str]]:
        """(module, function) of everything the kernel set declares, for the audit."""

    @abstractmethod
    def is_loaded(self, module: str, function: str) -> bool:
        """Whether `load` would neither compile nor load."""

    @abstractmethod
    def load(self, module: str, function: str) -> LoadedKernel: ...
    @abstractmethod
    def plan(self, kernel: LoadedKernel, grid: Dim3, block: Dim3, shared: int, cooperative: bool) -> Launcher: ...
    def plan_dependent(self, kernel: LoadedKernel, grid: Dim3, block: Dim3, shared: int) -> Launcher | None:
        """As `plan`, for captures: the kernel, which is `dependent`, may start while the one before it still runs. None
        where the device has no such launch."""
        return None

    @abstractmethod
    def set_max_dynamic(self, kernel: LoadedKernel, nbytes: int) -> None: ...
    @abstractmethod
    def max_cooperative_blocks(self, kernel: LoadedKernel, threads: int, shared: int) -> int: ...

    # graphs
    @abstractmethod
    def begin_capture(self, stream: int) -> None: ...
    @abstractmethod
    def end_capture(self, stream: int) -> int: ...
    @abstractmethod
    def is_capturing(self, stream: int) -> bool: ...
    @abstractmethod
    def abort_capture(self, stream: int) -> None: ...
    @abstractmethod
    def launch_graph(self, graph: int, stream: int) -> None: ...
    @abstractmethod
    def destroy_graph(self, graph: int) -> None: ...

    # information
    @abstractmethod
    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes as the driver tells."""

    @abstractmethod
    def integrated(self) -> bool: ...
    @abstractmethod
    def sm_count(self) -> int: ...
    @abstractmethod
    def compute_capability(self) -> tuple[int, int]: ...
    @abstractmethod
    def device_name(self) -> str: ...
    @abstractmethod
    def array(self, address: int, shape: tuple[int, ...], dtype: Any) -> Any: ...
    @abstractmethod
    def foreign_range(self, array: Any) -> tuple[int, int]:
        """(address, bytes) of another library's array on this device."""

    @abstractmethod
    def close(self) -> None:
        """Release streams and modules that the device itself holds."""
