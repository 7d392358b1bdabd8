# SPDX-License-Identifier: AGPL-3.0-only
"""Kernel lookup: handles, signatures, attributes and the audit."""

from __future__ import annotations

import logging

from ... import catalog
from ..audit import KernelAudit
from ..callsite import call_site
from ..device import LoadedKernel, RawDevice
from ..errors import (
    ForeignHandleError,
    FunctionNotFoundError,
    HeaderNotFoundError,
    IllegalDuringCaptureError,
    InvalidArgumentError,
    ModuleNotFoundInSetError,
    NullHandleError,
    ReleasedHandleError,
    SparkError,
)
from ..gpu import FunctionAttributes, KernelAuditRow, KernelHandle
from ..signature import Kind, Signature
from .core import guarded
from .streams import StreamOps

log = logging.getLogger("spark_py.runtime")


def _alignments(kernel: LoadedKernel) -> tuple[int, ...]:
    """What the pointers must be multiples of: as the catalogue says of the kernel's wide loads, and as the PTX says."""
    params = kernel.signature.params
    spec = catalog.find(kernel.module, kernel.function)
    known = spec.params if spec is not None and len(spec.params) == len(params) else ()
    widths = [param.align for param in known] or [1] * len(params)
    return tuple(
        max(param.align, width, 1) if param.kind is Kind.PTR else 1 for param, width in zip(params, widths, strict=True)
    )


def _uses(kernel: LoadedKernel) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(parameters read before the kernel waits, parameters it may write): any where the catalogue does not know it."""
    params = kernel.signature.params
    spec = catalog.find(kernel.module, kernel.function)
    if spec is None or len(spec.params) != len(params):
        return (), tuple(i for i, param in enumerate(params) if param.kind in (Kind.PTR, Kind.W64))
    early = tuple(i for i, param in enumerate(spec.params) if param.early)
    return early, tuple(i for i, param in enumerate(spec.params) if param.is_pointer and param.access != "r")


class KernelOps(StreamOps):
    """The trait's kernel group up to the launch."""

    def __init__(self, device: RawDevice, audit: KernelAudit, on_leak: str, debug_sync_kernels: bool) -> None:
        super().__init__(device, audit, on_leak, debug_sync_kernels)
        self._by_name: dict[tuple[str, str], KernelHandle] = {}
        self._lacking: set[str] = set()

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
            pass
        except HeaderNotFoundError as error:
            if not error.package:
                raise
            if module not in self._lacking:
                self._lacking.add(module)
                log.warning("optional kernels of %s are left out: %s", module, str(error).partition("\n")[0])
        return KernelHandle(0, 0, f"{module}::{func_name}")

    def _lookup(self, module: str, func_name: str) -> KernelHandle:
        key = (module, func_name)
        known = self._by_name.get(key)
        if known is not None:
            self._audit.record(module, func_name, True, call_site())
            return known
        loads = self._device.has_module(module) and not self._device.is_loaded(module, func_name)
        if loads and self._thread_capture() is not None:
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
        loaded.alignments = _alignments(loaded)
        loaded.early, loaded.written = _uses(loaded)
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
