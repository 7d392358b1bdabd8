# SPDX-License-Identifier: AGPL-3.0-only
"""Kernel lookup and checked launches.

What a launch needs is resolved once per (kernel, geometry) into a plan; each call then checks and packs its
arguments in one pass, with the slow path only for what is unusual or wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..allocations import Allocation
from ..audit import KernelAudit
from ..callsite import call_site
from ..device import Dim3, Launcher, LoadedKernel, RawDevice
from ..errors import (
    ArgumentPointerError,
    BackendClosedError,
    ForeignHandleError,
    FunctionNotFoundError,
    GeometryError,
    IllegalDuringCaptureError,
    InvalidArgumentError,
    ModuleNotFoundInSetError,
    NullHandleError,
    ReleasedHandleError,
    SparkError,
)
from ..gpu import DevicePtr, FunctionAttributes, KernelAuditRow, KernelHandle, StreamLike
from ..launch import KernelArg, check_argument, check_arity
from ..signature import Kind, Signature
from .core import guarded
from .streams import StreamOps

Argument = KernelArg | DevicePtr | int | float | bytes
PlanKey = tuple[int, Sequence[int], Sequence[int], int, bool]
_INTEGERS = frozenset((Kind.U32, Kind.I32, Kind.U64, Kind.I64, Kind.W32))
_BITS = {Kind.U32: (0, 2**32 - 1), Kind.I32: (-(2**31), 2**31 - 1), Kind.U64: (0, 2**64 - 1)}
_BITS |= {Kind.I64: (-(2**63), 2**63 - 1), Kind.W32: (-(2**31), 2**32 - 1)}
# The kinds whose plain Python values the fast path takes, as (class, low, high).
_FAST: dict[Kind, tuple[type, float, float]] = {kind: (int, *_BITS[kind]) for kind in _INTEGERS}
_FAST |= {Kind.F32: (float, -3.4028234663852886e38, 3.4028234663852886e38), Kind.PTR: (DevicePtr, 0, 0)}
_SLOW = (type(None), 0, 0)


@dataclass(slots=True, eq=False)
class Plan:
    """A launch with everything settled but its arguments and stream."""

    kernel: LoadedKernel
    grid: Dim3
    block: Dim3
    shared: int
    cooperative: bool
    run: Launcher
    fast: tuple[tuple[Kind, type, float, float], ...]
    """Per parameter: kind, the class the fast path takes, and the range it takes."""


class KernelOps(StreamOps):
    """Everything of the trait's kernel group."""

    def __init__(self, device: RawDevice, audit: KernelAudit, on_leak: str, debug_sync_kernels: bool) -> None:
        super().__init__(device, audit, on_leak, debug_sync_kernels)
        self._plans: dict[PlanKey, Plan] = {}
        self._by_name: dict[tuple[str, str], KernelHandle] = {}

    # ------------------------------------------------------------ lookup

    @guarded
    def kernel(self, module: str, func_name: str) -> KernelHandle:
        return self._lookup(module, func_name)

    @guarded
    def try_kernel(self, module: str, func_name: str) -> KernelHandle:
        # A miss is an answer here, not an error that would end a capture.
        try:
            return self._lookup(module, func_name)
        except (ModuleNotFoundInSetError, FunctionNotFoundError):
            return KernelHandle(0, 0, f"{module}::{func_name}")

    def _lookup(self, module: str, func_name: str) -> KernelHandle:
        key = (module, func_name)
        known = self._by_name.get(key)
        if known is not None:
            self._audit.record(module, func_name, True, call_site())
            return known
        if self._captures and self._thread_capture() is not None and not self._device.is_loaded(*key):
            raise IllegalDuringCaptureError(
                f"lookup of {module}::{func_name}, which has to be loaded", "look kernels up before begin_capture"
            )
        site = call_site()
        try:
            loaded = self._device.load(module, func_name)
        except SparkError:
            self._audit.record(module, func_name, False, site)
            raise
        self._audit.record(module, func_name, True, site)
        with self._lock:
            if key in self._by_name:
                return self._by_name[key]
            handle = KernelHandle(next(self._handle_numbers), self._id, loaded.name)
            self._kernels[handle.value] = loaded
            self._by_name[key] = handle
        return handle

    @guarded
    def has_module(self, module: str) -> bool:
        return self._device.has_module(module)

    @guarded
    def kernel_audit(self) -> list[KernelAuditRow]:
        return self._audit.rows(self._device.known_kernels())

    def _loaded(self, kernel: KernelHandle) -> LoadedKernel:
        if not isinstance(kernel, KernelHandle):
            raise InvalidArgumentError("kernel", kernel, "a KernelHandle")
        if kernel.value == 0:
            name = f" ({kernel.name})" if kernel.name else ""
            raise NullHandleError(f"kernel handle is 0: an optional kernel{name} that this kernel set lacks")
        if kernel.owner != self._id:
            raise ForeignHandleError(
                f"kernel {kernel.name} was loaded by another backend than this one ({self.name}:{self.ordinal})"
            )
        found = self._kernels.get(kernel.value)
        if found is None:
            raise ReleasedHandleError(f"kernel handle {kernel.value} ({kernel.name}) was released")
        return found

    @guarded
    def signature(self, kernel: KernelHandle) -> Signature:
        return self._loaded(kernel).signature

    @guarded
    def function_attributes(self, kernel: KernelHandle) -> FunctionAttributes:
        return self._loaded(kernel).attributes

    @guarded
    def set_kernel_max_dynamic_smem(self, kernel: KernelHandle, nbytes: int) -> None:
        loaded, size = self._loaded(kernel), self._size("nbytes", nbytes)
        limit = self.limits.max_shared_optin - loaded.attributes.shared_static
        if size > limit:
            raise GeometryError(
                loaded.name,
                f"dynamic shared memory of {size} bytes: the device allows {self.limits.max_shared_optin} a block, "
                f"{loaded.attributes.shared_static} of them are static, {limit} are left",
            )
        self._device.set_max_dynamic(loaded, size)
        loaded.max_dynamic = size
        with self._lock:
            for key in [k for k in self._plans if k[0] == kernel.value]:
                del self._plans[key]

    # ------------------------------------------------------------ launches

    def launch_typed(
        self,
        func: KernelHandle,
        grid: Sequence[int],
        block: Sequence[int],
        shared_mem: int,
        stream: StreamLike,
        args: Sequence[Argument],
    ) -> None:
        self._launch(func, grid, block, shared_mem, stream, args, False)

    def launch_cooperative(
        self,
        func: KernelHandle,
        grid: Sequence[int],
        block: Sequence[int],
        shared_mem: int,
        stream: StreamLike,
        args: Sequence[Argument],
    ) -> None:
        self._launch(func, grid, block, shared_mem, stream, args, True)

    def _launch(
        self,
        func: KernelHandle,
        grid: Sequence[int],
        block: Sequence[int],
        shared_mem: int,
        stream: StreamLike,
        args: Sequence[Argument],
        cooperative: bool,
    ) -> None:
        if self._closed:
            raise BackendClosedError("launch on a backend that was closed")
        try:
            plan = self._plan(func, grid, block, shared_mem, cooperative)
            raw = self._stream(stream)
            values = self._values(plan, args)
            plan.run(raw, values)
        except SparkError as error:
            self._capture_failed(error)
            raise
        if self._captures or self._trace is not None or self._debug_sync:
            self._launched(plan, raw, values, func, args)

    def _launched(
        self, plan: Plan, stream: int, values: list[Any], handle: KernelHandle, args: Sequence[Argument]
    ) -> None:
        """What only captures, traces and debugging ask for."""
        if stream in self._captures:
            self._note_capture(stream, *self._pointed(plan, values))
        elif self._debug_sync:
            self._device.sync_stream(stream)
        if self._trace is not None:
            geometry = (plan.grid, plan.block, plan.shared, plan.cooperative)
            self._trace.record_launch(plan.kernel, handle, *geometry, values, args)

    def _pointed(self, plan: Plan, values: Sequence[Any]) -> list[Allocation]:
        with self._lock:
            pointers = [
                value
                for param, value in zip(plan.kernel.signature.params, values, strict=True)
                if param.kind in (Kind.PTR, Kind.W64)
            ]
            return [a for a in map(self._memory.find, pointers) if a is not None]

    def _plan(
        self, func: KernelHandle, grid: Sequence[int], block: Sequence[int], shared: int, cooperative: bool
    ) -> Plan:
        # Value, owner and geometry decide; bools in place of integers are caught when a plan is first built.
        try:
            plan = self._plans.get((func.value, tuple(grid), tuple(block), shared, cooperative))
            if plan is not None and func.owner == self._id:
                return plan
        except (AttributeError, TypeError):
            pass
        loaded = self._loaded(func)
        sizes = (self._dim3(loaded, "grid", grid), self._dim3(loaded, "block", block))
        self._check_geometry(loaded, *sizes, shared, cooperative)
        run = self._device.plan(loaded, *sizes, shared, cooperative)
        fast = tuple((p.kind, *_FAST.get(p.kind, _SLOW)) for p in loaded.signature.params)
        plan = Plan(loaded, *sizes, shared, cooperative, run, fast)
        with self._lock:
            self._plans[func.value, *sizes, shared, cooperative] = plan
        return plan

    def _dim3(self, kernel: LoadedKernel, what: str, xyz: Sequence[int]) -> Dim3:
        try:
            numbers = tuple(xyz)
        except TypeError:
            numbers = ()
        if len(numbers) != 3 or any(isinstance(n, bool) or not hasattr(n, "__index__") for n in numbers):
            raise GeometryError(kernel.name, f"{what} is {xyz!r}: three integers (x, y, z) are needed")
        return int(numbers[0]), int(numbers[1]), int(numbers[2])

    def _check_geometry(self, kernel: LoadedKernel, grid: Dim3, block: Dim3, shared: int, cooperative: bool) -> None:
        limits = self.limits
        for what, sizes, most in (("grid", grid, limits.max_grid), ("block", block, limits.max_block)):
            for axis, size, limit in zip("xyz", sizes, most, strict=True):
                if not 1 <= size <= limit:
                    raise GeometryError(kernel.name, f"{what} {sizes}: {axis} is {size}, limit is 1 .. {limit}")
        threads = block[0] * block[1] * block[2]
        most_threads = min(limits.max_threads_per_block, kernel.attributes.max_threads_per_block)
        if threads > most_threads:
            raise GeometryError(kernel.name, f"block {block} has {threads} threads, limit is {most_threads}")
        if isinstance(shared, bool) or not hasattr(shared, "__index__") or shared < 0:
            raise GeometryError(kernel.name, f"dynamic shared memory is {shared!r}: a number of bytes is needed")
        if shared > kernel.max_dynamic:
            raise GeometryError(
                kernel.name,
                f"dynamic shared memory of {shared} bytes is above the kernel's limit of {kernel.max_dynamic}; "
                f"set_kernel_max_dynamic_smem raises it to at most "
                f"{limits.max_shared_optin - kernel.attributes.shared_static}",
            )
        if cooperative:
            if not limits.cooperative_launch:
                raise GeometryError(kernel.name, "the device has no cooperative launch")
            most_blocks = self._device.max_cooperative_blocks(kernel, threads, shared)
            blocks = grid[0] * grid[1] * grid[2]
            if blocks > most_blocks:
                raise GeometryError(
                    kernel.name,
                    f"cooperative grid {grid} has {blocks} blocks, {most_blocks} fit together",
                )

    def _values(self, plan: Plan, args: Sequence[Argument]) -> list[Any]:
        """The values to pack, checked. One pass; what is not plain and right goes to `_slow_value`."""
        fast = plan.fast
        if len(args) != len(fast):
            check_arity(plan.kernel.name, plan.kernel.signature, len(args))
        resolved = self._memory.resolved
        values: list[Any] = []
        append = values.append
        index = 0
        for (kind, plain, low, high), value in zip(fast, args, strict=True):
            if value.__class__ is KernelArg and value.kind is kind:
                value = value.value
            if value.__class__ is plain:
                if plain is DevicePtr:
                    address = value.address  # type: ignore[union-attr]
                    if address in resolved:
                        append(address)
                        index += 1
                        continue
                elif low <= value <= high:  # type: ignore[operator]
                    append(value)
                    index += 1
                    continue
            append(self._slow_value(plan.kernel, index, args[index]))
            index += 1
        return values

    def _slow_value(self, kernel: LoadedKernel, index: int, argument: Argument) -> int | float | bytes:
        param = kernel.signature.params[index]
        value = check_argument(kernel.name, param, argument)
        inner = argument.value if isinstance(argument, KernelArg) else argument
        if isinstance(inner, DevicePtr):
            self._check_pointer(kernel, index, inner)
        elif param.kind is Kind.W64 and isinstance(value, int) and value < 0:
            value += 2**64
        elif param.kind is Kind.W32 and isinstance(value, int) and value < 0:
            value += 2**32
        return value

    def _check_pointer(self, kernel: LoadedKernel, index: int, ptr: DevicePtr) -> None:
        param = kernel.signature.params[index]
        if ptr.address == 0:
            if not kernel.nullable[index]:
                raise ArgumentPointerError(kernel.name, "NULL pointer; the kernel reads or writes it", param.name)
            return
        with self._lock:
            if self._memory.resolve(ptr.address) is None:
                raise ArgumentPointerError(kernel.name, self._memory.explain(ptr.address), param.name)
