# SPDX-License-Identifier: AGPL-3.0-only
"""Checked launches.

What a launch needs is resolved once per (kernel, geometry) into a plan. A call whose arguments are plain and right is
checked in a handful of steps that run in C; everything else takes the long way, which finds the fault and names it.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..allocations import Allocation
from ..audit import KernelAudit
from ..capture import Capture
from ..device import Dim3, Launcher, LoadedKernel, RawDevice
from ..errors import ArgumentPointerError, BackendClosedError, GeometryError, InvalidArgumentError
from ..gpu import DevicePtr, KernelHandle, StreamLike
from ..launch import KernelArg, check_argument, check_arity
from ..plan import Plan
from ..signature import Kind
from .core import guarded, is_integer
from .kernels import KernelOps

Argument = KernelArg | DevicePtr | int | float | bytes
PlanKey = tuple[int, tuple[int, ...], tuple[int, ...], int, bool]
_MOST_PLANS = 4096
_INTEGERS = {int}
_address = operator.attrgetter("address")


class LaunchOps(KernelOps):
    """`launch_typed` and `launch_cooperative`."""

    def __init__(self, device: RawDevice, audit: KernelAudit, on_leak: str, debug_sync_kernels: bool) -> None:
        super().__init__(device, audit, on_leak, debug_sync_kernels)
        self._plans: dict[PlanKey, Plan] = {}

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
        # The short way: a known plan, plain arguments, pointers seen before, and nobody who follows launches. Each step
        # is one that `_launch` takes too; whatever is not so goes there. Types are compared since 1.0 and True find the
        # plan of 1.
        if not (self._captures or self._watching or self._closed):
            run = None
            try:
                plan = self._plans.get((func.value, tuple(grid), tuple(block), shared_mem, False))
                if (
                    plan is not None
                    and func.owner == self._id
                    and stream in self._streams
                    and [*map(type, (stream, shared_mem, *grid, *block, *args))] == plan.call_classes
                    and (kinds is None or kinds == plan.kinds)
                ):
                    addresses = tuple(map(_address, plan.pick_pointers(args)))
                    state, seen = plan.seen
                    if state is self._memory.resolved and addresses in seen:
                        run, scalars = plan.run, plan.pick_scalars(args)
            except (AttributeError, TypeError):
                pass
            if run is not None:
                try:
                    run(stream, addresses, scalars)  # type: ignore[arg-type]
                    return
                except (struct.error, OverflowError):
                    pass
        self._launch(func, grid, block, shared_mem, stream, args, kinds, False)

    def launch_cooperative(
        self,
        func: KernelHandle,
        grid: Sequence[int],
        block: Sequence[int],
        shared_mem: int,
        stream: StreamLike,
        args: Sequence[Argument],
        kinds: Sequence[Kind] | None = None,
    ) -> None:
        self._launch(func, grid, block, shared_mem, stream, args, kinds, True)

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
        loaded.attributes = replace(loaded.attributes, shared_dynamic_max=size)
        with self._lock:
            for key in [k for k in self._plans if k[0] == kernel.value]:
                del self._plans[key]

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
        if self._closed:
            raise BackendClosedError("launch on a backend that was closed")
        try:
            plan = None
            try:
                if func.owner == self._id and {*map(type, (shared_mem, *grid, *block))} == _INTEGERS:
                    plan = self._plans.get((func.value, tuple(grid), tuple(block), shared_mem, cooperative))
            except (AttributeError, TypeError):
                pass  # the checks of a new plan say what it is
            if plan is None:
                plan = self._checked_plan(func, grid, block, shared_mem, cooperative)
            raw = self._stream(stream)
            scalars: Sequence[Any]
            pointers, scalars = self._plain(plan, args, kinds)
            run = self._run_in(self._captures[raw], plan, pointers) if raw in self._captures else plan.run
            try:
                run(raw, pointers, scalars)
            except (struct.error, OverflowError):
                pointers, scalars = self._checked(plan, args, kinds)
                run(raw, pointers, scalars)
        except Exception as error:
            self._capture_failed(error, stream)
            raise
        if self._captures or self._watching:
            self._launched(plan, raw, plan.layout.merge(pointers, scalars), func, args)

    def _plain(
        self, plan: Plan, args: Sequence[Argument], kinds: Sequence[Kind] | None
    ) -> tuple[Sequence[int], Sequence[Any]]:
        """(addresses, scalars) of plain arguments, or of any others by way of `_checked`."""
        if (
            isinstance(args, (list, tuple))
            and tuple(map(type, args)) == plan.classes
            and (kinds is None or kinds == plan.kinds)
        ):
            addresses = tuple(map(_address, plan.pick_pointers(args)))
            resolved = self._memory.resolved  # one state of the ledger: a free by another thread makes a new one
            if all(map(resolved.__contains__, addresses)) and not any(map(operator.and_, addresses, plan.masks)):
                plan.saw(addresses, resolved)
                return addresses, plan.pick_scalars(args)
        return self._checked(plan, args, kinds)

    def _checked(
        self, plan: Plan, args: Sequence[Argument], kinds: Sequence[Kind] | None
    ) -> tuple[Sequence[int], Sequence[Any]]:
        """(addresses, scalars), each argument checked by itself; a LaunchError names the first that is wrong."""
        kernel = plan.kernel
        if not isinstance(args, Sequence):
            raise InvalidArgumentError("args", args, f"a sequence of arguments for {kernel.name}")
        check_arity(kernel.name, kernel.signature, len(args))
        if kinds is not None:
            if len(kinds) != len(args):
                raise InvalidArgumentError("kinds", kinds, f"one for each of the {len(args)} arguments")
            args = [KernelArg(kind, value) for kind, value in zip(kinds, args, strict=True)]  # type: ignore[arg-type]
        values = [self._value(kernel, index, argument) for index, argument in enumerate(args)]
        return plan.pick_pointers(values), plan.pick_scalars(values)

    def _value(self, kernel: LoadedKernel, index: int, argument: Argument) -> int | float | bytes:
        param = kernel.signature.params[index]
        value = check_argument(kernel.name, param, argument)
        inner = argument.value if isinstance(argument, KernelArg) else argument
        if isinstance(inner, DevicePtr):
            self._check_pointer(kernel, index, inner)
        elif param.kind in (Kind.W8, Kind.W16, Kind.W32, Kind.W64) and isinstance(value, int) and value < 0:
            value += 1 << 8 * param.size  # packed as unsigned: the same bits
        return value

    def _check_pointer(self, kernel: LoadedKernel, index: int, ptr: DevicePtr) -> None:
        name = kernel.signature.params[index].name
        if ptr.address == 0:
            if not kernel.nullable[index]:
                raise ArgumentPointerError(kernel.name, "NULL pointer; the kernel reads or writes it", name)
            return
        with self._lock:
            if self._memory.resolve(ptr.address) is None:
                raise ArgumentPointerError(kernel.name, self._memory.explain(ptr.address), name)
        width = kernel.alignments[index]
        if ptr.address % width:
            raise ArgumentPointerError(
                kernel.name, f"{ptr!r} is no multiple of {width} bytes, which the kernel's loads need", name
            )

    def _run_in(self, capture: Capture, plan: Plan, pointers: Sequence[int]) -> Launcher:
        """What queues a launch in `capture`. A kernel that waits by itself for the one before it may start beside it,
        unless what it reads before that was written in this very capture."""
        kernel = plan.kernel
        if plan.dependent is None:
            start = None
            if kernel.dependent and not plan.cooperative:
                start = self._device.plan_dependent(kernel, plan.grid, plan.block, plan.shared)
            plan.dependent = start or plan.run
        order = plan.layout.pointer_at
        early = self._allocations(pointers[order.index(i)] for i in kernel.early)
        return plan.dependent if capture.written.isdisjoint(early) else plan.run

    def _launched(
        self, plan: Plan, stream: int, values: Sequence[Any], handle: KernelHandle, args: Sequence[Argument]
    ) -> None:
        """What only captures, traces, debugging and streams of other libraries ask for."""
        if stream in self._captures:
            self._captures[stream].written.update(self._allocations(values[i] for i in plan.kernel.written))
            self._queued(stream, *self._pointed(plan, values))
        else:
            self._queued(stream)
            if self._debug_sync:
                self._device.sync_stream(stream)
        if self._trace is not None:
            geometry = (plan.grid, plan.block, plan.shared, plan.cooperative)
            self._trace.record_launch(plan.kernel, handle, *geometry, values, args)

    def _pointed(self, plan: Plan, values: Sequence[Any]) -> list[Allocation]:
        return self._allocations(v for kind, v in zip(plan.kinds, values, strict=True) if kind in (Kind.PTR, Kind.W64))

    def _allocations(self, addresses: Iterable[int]) -> list[Allocation]:
        with self._lock:
            return [a for a in map(self._memory.find, addresses) if a is not None]

    # ------------------------------------------------------------ plans

    def _checked_plan(
        self, func: KernelHandle, grid: Sequence[int], block: Sequence[int], shared_mem: int, cooperative: bool
    ) -> Plan:
        """The plan of a geometry of any type, made where there is none; a LaunchError says what is wrong."""
        loaded = self._loaded(func)
        self._device.activate()
        sizes = (self._dim3(loaded, "grid", grid), self._dim3(loaded, "block", block))
        if not is_integer(shared_mem) or shared_mem < 0:
            raise GeometryError(loaded.name, f"dynamic shared memory is {shared_mem!r}: a number of bytes is needed")
        shared = int(shared_mem)
        key = (func.value, *sizes, shared, cooperative)
        known = self._plans.get(key)
        if known is not None:  # numbers of NumPy
            return known
        self._check_geometry(loaded, *sizes, shared, cooperative)
        run = self._device.plan(loaded, *sizes, shared, cooperative)
        plan = Plan(loaded, *sizes, shared, cooperative, run)
        with self._lock:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan

    def _dim3(self, kernel: LoadedKernel, what: str, xyz: Sequence[int]) -> Dim3:
        try:
            numbers = tuple(xyz)
        except TypeError:
            numbers = ()
        if len(numbers) != 3 or not all(map(is_integer, numbers)):
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
        if shared > kernel.max_dynamic:
            raise GeometryError(
                kernel.name,
                f"dynamic shared memory of {shared} bytes is above the kernel's limit of {kernel.max_dynamic}; "
                f"set_kernel_max_dynamic_smem raises it to at most "
                f"{limits.max_shared_optin - kernel.attributes.shared_static}",
            )
        if not cooperative:
            return
        if not limits.cooperative_launch:
            raise GeometryError(kernel.name, "the device has no cooperative launch")
        most_blocks = self._device.max_cooperative_blocks(kernel, threads, shared)
        blocks = grid[0] * grid[1] * grid[2]
        if blocks > most_blocks:
            raise GeometryError(
                kernel.name, f"cooperative grid {grid} has {blocks} blocks, {most_blocks} fit on the device together"
            )
