# SPDX-License-Identifier: AGPL-3.0-only
"""DevicePtr, handles and GpuBackend: the one interface between host code and a device.

Twin of `crates/spark-runtime/src/gpu.rs`. Method names, parameter order and meaning are the Rust trait's; what the
trait leaves undefined is written here and holds on every backend. Streams and events are plain integers, as in Rust.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NewType, Protocol, TypeAlias

import numpy as np

from .errors import InvalidPointerError

if TYPE_CHECKING:
    from types import TracebackType

    from .launch import KernelArg
    from .op_cache import OpCache
    from .signature import Kind, Signature
    from .trace import LaunchTrace

__all__ = [
    "Buffer",
    "DeviceLimits",
    "DevicePtr",
    "FunctionAttributes",
    "GpuBackend",
    "GraphHandle",
    "HostPtr",
    "KernelHandle",
    "StreamLike",
]

U64_MAX = 2**64 - 1

HostPtr = NewType("HostPtr", int)
"""Address of pinned host memory, as `alloc_host_pinned` returns it."""

Buffer: TypeAlias = "bytes | bytearray | memoryview | np.ndarray[Any, Any]"
"""Host bytes: anything with the buffer protocol; sizes count bytes. Arrays must be C-contiguous."""


class _HasPtr(Protocol):
    @property
    def ptr(self) -> int: ...


class _HasCudaStream(Protocol):
    def __cuda_stream__(self) -> tuple[int, int]: ...


StreamLike: TypeAlias = "int | _HasPtr | _HasCudaStream"
"""A stream: our integer, or another library's object with `__cuda_stream__` or `.ptr`."""


def exact_int(value: object, what: str) -> int:
    """`value` as a Python int; bool, float, None and everything without `__index__` raise InvalidPointerError.

    Goes through Python integers, so that NumPy's fixed-width arithmetic (int32 + pointer) never takes part.
    """
    if isinstance(value, (bool, np.bool_)):
        raise InvalidPointerError(f"{what} is {value!r}: an integer is needed, not a bool")
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidPointerError(f"{what} is {value!r} ({type(value).__name__}): an integer is needed") from None


class DevicePtr:
    """An immutable unsigned 64-bit device address; arithmetic counts bytes.

    Twin of `DevicePtr(u64)`. Unlike Rust's, an offset from NULL, or one that leaves 0 .. 2**64-1, raises
    InvalidPointerError.
    """

    __slots__ = ("address",)
    NULL: ClassVar[DevicePtr]
    address: int

    def __init__(self, address: object) -> None:
        number = exact_int(address, "device address")
        if not 0 <= number <= U64_MAX:
            raise InvalidPointerError(f"device address is {number:#x}: limit is 0 .. 2**64-1")
        object.__setattr__(self, "address", number)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("DevicePtr is immutable")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("DevicePtr is immutable")

    def offset(self, nbytes: object) -> DevicePtr:
        """The address `nbytes` further on (negative moves back). Bytes, not elements."""
        if isinstance(nbytes, DevicePtr):
            raise InvalidPointerError(f"offset is {nbytes!r}: a number of bytes is needed, not an address")
        step = exact_int(nbytes, "offset")
        if self.address == 0:
            raise InvalidPointerError(f"offset of {step} bytes on DevicePtr.NULL")
        moved = self.address + step
        if not 0 < moved <= U64_MAX:
            raise InvalidPointerError(f"{self!r} offset by {step} is {moved:#x}: limit is 1 .. 2**64-1")
        return DevicePtr(moved)

    @property
    def is_null(self) -> bool:
        """True for address 0."""
        return self.address == 0

    def __index__(self) -> int:
        return self.address

    def __int__(self) -> int:
        return self.address

    def __bool__(self) -> bool:
        return self.address != 0

    def __eq__(self, other: object) -> bool:
        return self.address == other.address if isinstance(other, DevicePtr) else NotImplemented

    def __lt__(self, other: DevicePtr) -> bool:
        return self.address < other.address if isinstance(other, DevicePtr) else NotImplemented

    def __le__(self, other: DevicePtr) -> bool:
        return self.address <= other.address if isinstance(other, DevicePtr) else NotImplemented

    def __gt__(self, other: DevicePtr) -> bool:
        return self.address > other.address if isinstance(other, DevicePtr) else NotImplemented

    def __ge__(self, other: DevicePtr) -> bool:
        return self.address >= other.address if isinstance(other, DevicePtr) else NotImplemented

    def __hash__(self) -> int:
        return hash((DevicePtr, self.address))

    def __repr__(self) -> str:
        return f"DevicePtr({self.address:#x})"

    def __format__(self, spec: str) -> str:
        return format(self.address, spec) if spec else repr(self)

    def __reduce__(self) -> tuple[type[DevicePtr], tuple[int]]:
        return DevicePtr, (self.address,)


DevicePtr.NULL = DevicePtr(0)


@dataclass(frozen=True, slots=True)
class KernelHandle:
    """A loaded kernel function. `value` 0 is an optional kernel that the set lacks (Rust: `KernelHandle(0)`).

    `value` is a number that the owning backend hands out once; `owner` identifies that backend, so that use on
    another device raises ForeignHandleError. `name` is "module::function".
    """

    value: int
    owner: int = 0
    name: str = ""

    @property
    def is_null(self) -> bool:
        """True for an unresolved optional kernel."""
        return self.value == 0

    def __bool__(self) -> bool:
        return self.value != 0


@dataclass(frozen=True, slots=True)
class GraphHandle:
    """An instantiated graph; `value` 0 is none. `owner` as in KernelHandle."""

    value: int
    owner: int = 0

    @property
    def is_null(self) -> bool:
        """True when no graph is held."""
        return self.value == 0

    def __bool__(self) -> bool:
        return self.value != 0


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What a launch may ask for on a device. Shared memory in bytes; grid and block as (x, y, z)."""

    max_grid: tuple[int, int, int] = (2**31 - 1, 65535, 65535)
    max_block: tuple[int, int, int] = (1024, 1024, 64)
    max_threads_per_block: int = 1024
    max_shared_default: int = 48 * 1024
    max_shared_optin: int = 227 * 1024
    warp_size: int = 32
    cooperative_launch: bool = True


@dataclass(frozen=True, slots=True)
class FunctionAttributes:
    """Resources of a compiled kernel. Bytes for memory; `registers` per thread; -1 where the backend has none."""

    registers: int
    shared_static: int
    shared_dynamic_max: int
    local_per_thread: int
    max_threads_per_block: int
    constant: int = 0
    ptx_version: int = 0
    binary_version: int = 0


class GpuBackend(ABC):
    """A device: memory, copies, streams, kernels, graphs, information.

    Use as a context manager; leaving it frees everything and reports what was left. All methods may be called from
    any thread. Illegal use raises a typed error from `spark_py.runtime.errors` before the device sees it.

    The trait's `launch`, which takes raw argument words, has no twin: such words cannot be held against the kernel's
    parameters.
    """

    # ------------------------------------------------------------ identity

    @property
    @abstractmethod
    def name(self) -> str:
        """ "cuda", "host" or "emulated"."""

    @property
    @abstractmethod
    def ordinal(self) -> int:
        """Device number."""

    @property
    @abstractmethod
    def limits(self) -> DeviceLimits:
        """What a launch may ask for."""

    # ------------------------------------------------------------ memory

    @abstractmethod
    def alloc(self, nbytes: int, label: str = "") -> DevicePtr:
        """`nbytes` of device memory, 256-byte aligned, not zeroed; 0 gives NULL. `label` names it in errors and
        reports. OutOfDeviceMemoryError on failure."""

    @abstractmethod
    def alloc_managed(self, nbytes: int, label: str = "") -> DevicePtr:
        """As `alloc`, in memory that host and device share and that may exceed the device's."""

    @abstractmethod
    def free(self, ptr: DevicePtr) -> None:
        """Return an allocation. NULL does nothing. Work queued on any stream of this backend is finished first.
        DoubleFreeError for a freed or interior address, UnknownPointerError for one never handed out."""

    @abstractmethod
    def live_bytes(self) -> int:
        """Sum of the sizes of live allocations (bytes)."""

    @abstractmethod
    def alloc_report(self, top_n: int = 10, min_mb: float = 0.0) -> str:
        """Live memory by call site, largest first, then by file; sites below `min_mb` (1e6 bytes) are folded."""

    @abstractmethod
    def sweep_unreleased(self) -> int:
        """Free every live allocation, warn with the five largest call sites, and give how many there were."""

    @abstractmethod
    def alloc_host_pinned(self, nbytes: int) -> HostPtr:
        """`nbytes` of page-locked host memory, always zeroed."""

    @abstractmethod
    def free_host_pinned(self, ptr: HostPtr, nbytes: int) -> None:
        """Return pinned memory; 0 does nothing. `nbytes` must be what was asked for."""

    @abstractmethod
    def host_ptr_to_device(self, ptr: HostPtr) -> DevicePtr:
        """The device address under which kernels reach pinned host memory."""

    @abstractmethod
    def pinned_view(self, ptr: HostPtr, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """A uint8 array over pinned memory; `ptr` may lie inside an allocation."""

    # ------------------------------------------------------------ copies and fills

    @abstractmethod
    def check_ranges(self, pointers: Sequence[DevicePtr], nbytes: int, what: str) -> None:
        """The PointerError of a copy of `nbytes` from any of `pointers`, and no copy: for addresses that a kernel takes
        out of memory. `what` names the pointer. (Rust has no such call.)"""

    @abstractmethod
    def copy_h2d(self, src: Buffer, dst: DevicePtr) -> None:
        """Copy all of `src` to `dst`; finished, with respect to every stream of the backend, on return."""

    @abstractmethod
    def copy_d2h(self, src: DevicePtr, dst: bytearray | memoryview | np.ndarray[Any, Any]) -> None:
        """Fill all of `dst` from `src`; ordered after all work queued on every stream of the backend."""

    @abstractmethod
    def copy_d2h_on_stream(
        self, src: DevicePtr, dst: bytearray | memoryview | np.ndarray[Any, Any], stream: StreamLike
    ) -> None:
        """Fill `dst` after the work queued on `stream`, and wait for it."""

    @abstractmethod
    def copy_d2d(self, src: DevicePtr, dst: DevicePtr, nbytes: int) -> None:
        """Copy on the device; finished on return. Overlapping ranges raise."""

    @abstractmethod
    def copy_h2d_async(self, src: Buffer, dst: DevicePtr, stream: StreamLike) -> None:
        """Queue a copy of the bytes that `src` holds now; the caller may change or drop it at once.
        Refused while `stream` captures: a graph would keep the staging buffer's address."""

    @abstractmethod
    def copy_h2d_async_retained(self, src: Buffer, dst: DevicePtr, stream: StreamLike) -> None:
        """Queue a zero-copy upload: the caller keeps `src` alive and unchanged until the next sync of `stream`."""

    @abstractmethod
    def copy_d2h_async(
        self, src: DevicePtr, dst: bytearray | memoryview | np.ndarray[Any, Any], stream: StreamLike
    ) -> None:
        """Queue a download; `dst` is kept alive by the backend and must not be read before a sync of `stream`."""

    @abstractmethod
    def copy_d2d_async(self, src: DevicePtr, dst: DevicePtr, nbytes: int, stream: StreamLike) -> None:
        """Queue a device copy. Overlapping ranges raise."""

    @abstractmethod
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
        """Queue a copy of `height` rows of `width_bytes`; pitches in bytes, neither below the width."""

    @abstractmethod
    def memset(self, ptr: DevicePtr, value: int, nbytes: int) -> None:
        """Fill with a byte (0..255); finished on return."""

    @abstractmethod
    def memset_async(self, ptr: DevicePtr, value: int, nbytes: int, stream: StreamLike) -> None:
        """Queue a fill."""

    # ------------------------------------------------------------ streams and events

    @abstractmethod
    def default_stream(self) -> int:
        """The backend's own stream (not the legacy stream)."""

    @abstractmethod
    def create_stream(self) -> int:
        """A new non-blocking stream."""

    @abstractmethod
    def destroy_stream(self, stream: int) -> None:
        """Wait for a stream and destroy it; the default stream is refused. (Rust has no such call.)"""

    @abstractmethod
    def synchronize(self, stream: StreamLike) -> None:
        """Wait until everything queued on `stream` is done; faults of its kernels surface here."""

    @abstractmethod
    def create_event(self, timing: bool = False) -> int:
        """A new event; `timing` lets `event_elapsed_ms` read it."""

    @abstractmethod
    def record_event(self, event: int, stream: StreamLike) -> None:
        """Mark the point reached by `stream`."""

    @abstractmethod
    def stream_wait_event(self, stream: StreamLike, event: int) -> None:
        """Later work on `stream` waits for `event`. (Argument order differs from `record_event`, as in Rust.)"""

    @abstractmethod
    def event_synchronize(self, event: int) -> None:
        """Wait for an event on the host."""

    @abstractmethod
    def event_query(self, event: int) -> bool:
        """True when everything before the event is done. (Rust has no such call.)"""

    @abstractmethod
    def event_elapsed_ms(self, start: int, end: int) -> float:
        """Milliseconds between two recorded timing events. (Rust has no such call.)"""

    @abstractmethod
    def destroy_event(self, event: int) -> None:
        """Destroy an event; 0 does nothing."""

    @abstractmethod
    def bind_to_thread(self) -> None:
        """Make the device current on the calling thread (every method does it by itself; kept for the port)."""

    # ------------------------------------------------------------ kernels

    @abstractmethod
    def kernel(self, module: str, func_name: str) -> KernelHandle:
        """Load a required kernel; ModuleNotFoundInSetError or FunctionNotFoundError name what is present."""

    @abstractmethod
    def try_kernel(self, module: str, func_name: str) -> KernelHandle:
        """As `kernel`, but a missing module or function gives handle 0. A source that does not compile raises; where it
        needs the headers of an optional package that is not installed, it counts as missing, and a warning says so."""

    @abstractmethod
    def has_module(self, module: str) -> bool:
        """Whether the kernel set has the module."""

    @abstractmethod
    def signature(self, kernel: KernelHandle) -> Signature:
        """The parameter list that launches of this kernel are checked against."""

    @abstractmethod
    def launch_typed(
        self,
        func: KernelHandle,
        grid: Sequence[int],
        block: Sequence[int],
        shared_mem: int,
        stream: StreamLike,
        args: Sequence[KernelArg | DevicePtr | int | float | bytes],
        kinds: Sequence[Kind] | None = None,
    ) -> None:
        """Queue a launch. Plain values take the parameter's type; a KernelArg, or `kinds` with one type an argument,
        must have it. `shared_mem` in bytes, dynamic. Every mistake raises a LaunchError and nothing runs."""

    @abstractmethod
    def launch_cooperative(
        self,
        func: KernelHandle,
        grid: Sequence[int],
        block: Sequence[int],
        shared_mem: int,
        stream: StreamLike,
        args: Sequence[KernelArg | DevicePtr | int | float | bytes],
        kinds: Sequence[Kind] | None = None,
    ) -> None:
        """As `launch_typed`, with all blocks resident together; a grid larger than fits raises GeometryError."""

    def launch_cooperative_typed(
        self,
        func: KernelHandle,
        grid: Sequence[int],
        block: Sequence[int],
        shared_mem: int,
        stream: StreamLike,
        args: Sequence[KernelArg | DevicePtr | int | float | bytes],
    ) -> None:
        """`launch_cooperative` by the name that Rust gives to its typed form."""
        self.launch_cooperative(func, grid, block, shared_mem, stream, args)

    @abstractmethod
    def set_kernel_max_dynamic_smem(self, kernel: KernelHandle, nbytes: int) -> None:
        """Raise the kernel's limit of dynamic shared memory (bytes), up to the device's opt-in limit."""

    @abstractmethod
    def op_cache(self) -> OpCache:
        """Handles, scratch memory and marks that launchers keep for as long as the backend lives."""

    @abstractmethod
    def debug_sync_kernels(self) -> bool:
        """Whether every launch is waited for, so that a fault surfaces at the kernel that made it."""

    @abstractmethod
    def function_attributes(self, kernel: KernelHandle) -> FunctionAttributes:
        """Registers, shared and local memory of a kernel. (Rust has no such call.)"""

    @abstractmethod
    def kernel_audit(self) -> list[KernelAuditRow]:
        """Which kernels were looked up, which lookups failed, which of the set were never asked for."""

    # ------------------------------------------------------------ graphs

    @abstractmethod
    def begin_capture(self, stream: int) -> None:
        """Start recording what is queued on `stream`. Stream 0 (legacy) and a capturing stream are refused."""

    @abstractmethod
    def end_capture(self, stream: int) -> GraphHandle:
        """Stop recording and instantiate. After an error inside the capture, which ended it, a CaptureStateError
        with the first such error as its cause."""

    @abstractmethod
    def abort_capture_if_active(self, stream: int) -> None:
        """Drop a capture in progress; does nothing when none is."""

    @abstractmethod
    def stream_is_capturing(self, stream: int) -> bool:
        """Whether `stream` records."""

    @abstractmethod
    def launch_graph(self, graph: GraphHandle, stream: StreamLike) -> None:
        """Queue a replay. Memory that the graph uses and that was freed since raises FreedPointerError."""

    @abstractmethod
    def destroy_graph(self, graph: GraphHandle) -> None:
        """Destroy a graph; handle 0 does nothing, a second time raises ReleasedHandleError."""

    # ------------------------------------------------------------ information

    @abstractmethod
    def total_memory(self) -> int:
        """Bytes on the device."""

    @abstractmethod
    def free_memory(self) -> int:
        """Free bytes; on an integrated GPU the larger of the driver's figure and MemAvailable."""

    @abstractmethod
    def sm_count(self) -> int:
        """Streaming multiprocessors."""

    @abstractmethod
    def compute_capability(self) -> tuple[int, int]:
        """(major, minor)."""

    @abstractmethod
    def device_name(self) -> str:
        """What the device calls itself."""

    # ------------------------------------------------------------ interop and life

    @abstractmethod
    def view(self, ptr: DevicePtr, shape: Sequence[int], dtype: Any) -> Any:
        """An array over device memory: CuPy on cuda, NumPy elsewhere. 8-bit and 4-bit floats come as uint8."""

    @abstractmethod
    def wrap(self, array: Any) -> DevicePtr:
        """Register another library's device array (`__cuda_array_interface__`, DLPack, or a NumPy array on the CPU
        backends) as usable memory, once the work that fills it is done; `unwrap` it before the array dies.
        Refused during a capture."""

    @abstractmethod
    def unwrap(self, ptr: DevicePtr) -> None:
        """Forget an array registered with `wrap`."""

    @abstractmethod
    def trace(self) -> LaunchTrace:
        """A recorder of launches, copies and fills of this backend: steps, diff, replay."""

    @abstractmethod
    def close(self) -> None:
        """Wait, free everything, report leaks. A second call does nothing."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """True after `close`."""

    def __enter__(self) -> GpuBackend:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class KernelAuditRow:
    """One (module, function) of the audit. `status` is "used", "missing" or "unused"; `sites` are
    "file:line" of lookups."""

    module: str
    function: str
    status: str
    sites: tuple[str, ...] = ()
