# SPDX-License-Identifier: AGPL-3.0-only
"""Loading compiled kernels and running grids: the Python side of `rt/launch.h` and `rt/abi.h`."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..runtime.errors import FunctionNotFoundError, InvalidArgumentError, KernelSetError
from ..runtime.signature import Kind, Param, Signature, parse_source, reconcile
from .build import Built
from .symbols import shared_variables

__all__ = ["ORDERS", "EmulatedModule", "Fault", "Order", "Ranges", "Schedule", "run"]

_ABI = 2

Order = Literal["warp-first", "reverse", "priority"]
ORDERS: tuple[Order, ...] = ("warp-first", "reverse", "priority")

Dim3 = tuple[int, int, int]


class _Dim(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint)]

    def tuple(self) -> Dim3:
        return self.x, self.y, self.z


class _Param(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_uint32), ("size", ctypes.c_uint32), ("align", ctypes.c_uint32)]


class _Kernel(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("count", ctypes.c_uint32),
        ("params", ctypes.POINTER(_Param)),
        ("call", ctypes.c_void_p),
    ]


class _Module(ctypes.Structure):
    _fields_ = [
        ("abi", ctypes.c_uint32),
        ("checked", ctypes.c_uint32),
        ("anchor", ctypes.c_void_p),
        ("dynamic", ctypes.c_void_p),
        ("kernels", ctypes.POINTER(_Kernel)),
        ("count", ctypes.c_uint32),
    ]


class _Place(ctypes.Structure):
    _fields_ = [
        ("block", _Dim),
        ("thread", _Dim),
        ("access", ctypes.c_uint32),
        ("known", ctypes.c_uint32),
        ("pc", ctypes.c_uint64),
    ]


class Fault(ctypes.Structure):
    """The first fault of a launch, as the runtime wrote it down."""

    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("space", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("line", ctypes.c_uint32),
        ("here", _Place),
        ("other", _Place),
        ("address", ctypes.c_uint64),
        ("range", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("file", ctypes.c_char * 512),
        ("text", ctypes.c_char * 2048),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("module", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("args", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("ranges", ctypes.c_void_p),
        ("range_count", ctypes.c_uint64),
        ("grid", _Dim),
        ("block", _Dim),
        ("shared", ctypes.c_uint32),
        ("workers", ctypes.c_uint32),
        ("cooperative", ctypes.c_uint32),
        ("order", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("timeout", ctypes.c_double),
        ("fault", ctypes.POINTER(Fault)),
        ("early", ctypes.c_void_p),
        ("early_count", ctypes.c_uint32),
        ("dependent", ctypes.c_uint32),
    ]


_BYTES, _POINTER, _UNSIGNED, _SIGNED, _FLOAT = range(5)
_KINDS = {
    _POINTER: {8: Kind.PTR},
    _UNSIGNED: {1: Kind.U8, 2: Kind.U16, 4: Kind.U32, 8: Kind.U64},
    _SIGNED: {1: Kind.I8, 2: Kind.I16, 4: Kind.I32, 8: Kind.I64},
    _FLOAT: {4: Kind.F32, 8: Kind.F64},
}


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a grid is run.

    `workers`: OS threads that share the blocks (0: one a CPU; the checked build always takes one). `order`: which of a
    block's warps goes on: the one that runs, then the next ("warp-first"); the same from the last warp and lane down
    ("reverse"); or always the first in an order drawn from `seed` ("priority"). `timeout`: seconds of CPU time after
    which a launch is ended, None for never.
    """

    workers: int = 0
    order: Order = "warp-first"
    seed: int = 0
    timeout: float | None = 60.0

    def __post_init__(self) -> None:
        if isinstance(self.workers, bool) or not isinstance(self.workers, int) or not 0 <= self.workers <= 256:
            raise InvalidArgumentError("workers", self.workers, "0 .. 256 OS threads")
        if self.order not in ORDERS:
            raise InvalidArgumentError("order", self.order, f"one of {', '.join(ORDERS)}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**64:
            raise InvalidArgumentError("seed", self.seed, "0 .. 2**64-1")
        if self.timeout is not None and not 0 < self.timeout <= 1e9:
            raise InvalidArgumentError("timeout", self.timeout, "seconds above 0, or None")

    @property
    def threads(self) -> int:
        """OS threads, with 0 resolved."""
        return self.workers or len(os.sched_getaffinity(0))


_runtimes: dict[str, ctypes.CDLL] = {}
_runtimes_lock = threading.Lock()


def _runtime(path: Path) -> ctypes.CDLL:
    """The runtime of that file name, loaded once: kernel libraries are bound to the first of the name."""
    with _runtimes_lock:
        if path.name not in _runtimes:
            _runtimes[path.name] = _load_runtime(path)
        return _runtimes[path.name]


def _load_runtime(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelSetError(f"{path}: the CPU runtime of kernels cannot be loaded: {error}") from error
    library.spark_emu_abi.restype = ctypes.c_uint32
    library.spark_emu_launch.argtypes = [ctypes.POINTER(_Launch)]
    library.spark_emu_launch.restype = ctypes.c_uint32
    library.spark_emu_static_shared.argtypes = [ctypes.c_void_p]
    library.spark_emu_static_shared.restype = ctypes.c_uint64
    if library.spark_emu_abi() != _ABI:
        raise KernelSetError(f"{path}: runtime of ABI {library.spark_emu_abi()}, {_ABI} is needed")
    return library


class EmulatedModule:
    """A loaded library of kernels. It stays loaded until the process ends, as code of it may be on a stack."""

    def __init__(self, built: Built) -> None:
        self.built = built
        self.runtime = _runtime(built.runtime)
        try:
            self._library = ctypes.CDLL(str(built.library))
        except OSError as error:
            raise KernelSetError(f"{built.library}: compiled kernels cannot be loaded: {error}") from error
        self.address = ctypes.addressof(ctypes.c_char.in_dll(self._library, "spark_emu_module"))
        table = _Module.from_address(self.address)
        self.checked = bool(table.checked)
        self._kernels = {table.kernels[i].name.decode(): table.kernels[i] for i in range(table.count)}
        texts = parse_source(built.text)
        self.signatures = {
            name: reconcile(texts[name], compiled) if name in texts else compiled
            for name, compiled in ((n, self._compiled(n)) for n in self._kernels)
        }
        self.shared = shared_variables(built.library)
        self.static_shared = int(self.runtime.spark_emu_static_shared(self.address))
        """Static shared memory of all kernels of the file together, in bytes."""

    def _compiled(self, name: str) -> Signature:
        kernel = self._kernels[name]
        params: list[Param] = []
        for number in range(kernel.count):
            param = kernel.params[number]
            kind = _KINDS.get(param.kind, {}).get(param.size, Kind.BYTES)
            align = param.align if kind is Kind.BYTES else 0
            params.append(Param(f"param_{number}", kind, param.size, align=align))
        return Signature(name, tuple(params))

    def shared_name(self, offset: int) -> tuple[str, int] | None:
        """The static shared variable at or before a byte, and the byte's offset from its start."""
        before = [variable for variable in self.shared if variable.offset <= offset]
        if not before:
            return None
        return before[-1].name, offset - before[-1].offset

    def kernel(self, function: str) -> int:
        """Address of a kernel's descriptor."""
        found = self._kernels.get(function)
        if found is None:
            raise FunctionNotFoundError("", function, tuple(self._kernels), str(self.built.library))
        return ctypes.addressof(found)


class Ranges:
    """Live memory as the runtime takes it: (address, bytes) by address, each with the words that name it."""

    def __init__(self, ranges: Sequence[tuple[int, int, str]]) -> None:
        self.names = [name for _, _, name in ranges]
        self.table = (ctypes.c_uint64 * max(2 * len(ranges), 1))(*(number for each in ranges for number in each[:2]))


def run(
    module: EmulatedModule,
    kernel: int,
    geometry: tuple[Dim3, Dim3, int],
    args: bytes | bytearray,
    offsets: Any,
    ranges: Ranges,
    schedule: Schedule,
    cooperative: bool = False,
    dependent: bool = False,
    early: Sequence[int] = (),
) -> Fault | None:
    """Run a grid to its end; the fault that ended it, or None.

    `geometry` is (grid, block, dynamic shared bytes), `args` holds each argument at its entry of `offsets` (a ctypes
    array of uint32). A `dependent` kernel has to wait for the kernels before it; until then it may read the ranges that
    hold the addresses of `early` alone.
    """
    grid, block, shared = geometry
    buffer = (ctypes.c_char * max(len(args), 1)).from_buffer_copy(args or b"\0")
    fault = Fault()
    before = (ctypes.c_uint64 * max(len(early), 1))(*early)
    launch = _Launch(
        module.address,
        kernel,
        ctypes.addressof(buffer),
        ctypes.addressof(offsets),
        ctypes.addressof(ranges.table),
        len(ranges.names),
        _Dim(*grid),
        _Dim(*block),
        shared,
        schedule.threads,
        cooperative,
        ORDERS.index(schedule.order),
        schedule.seed,
        schedule.timeout or 0.0,
        ctypes.pointer(fault),
        ctypes.addressof(before),
        len(early),
        dependent,
    )
    return fault if module.runtime.spark_emu_launch(ctypes.byref(launch)) else None
