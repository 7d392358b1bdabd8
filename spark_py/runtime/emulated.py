# SPDX-License-Identifier: AGPL-3.0-only
"""EmulatedBackend: the kernels' own .cu files on a CPU.

Memory, streams, captures and graphs are HostBackend's. A launch runs the kernel's source, compiled for the CPU, thread
by thread. The fast build finds writes beside a buffer, crashes and hangs; the checked build (`checked=True`, about 20
times slower) finds races, accesses outside of buffers, misaligned ones, reads of unwritten shared memory, and barriers
and warp operations that not all threads reach. Each is a KernelFaultError; the next launch works.

Kernels that the set marks `gpu_only` (tensor cores) run as their NumPy reference, as on HostBackend.
"""

from __future__ import annotations

import ctypes
import functools
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import catalog
from ..catalog.spec import KernelSpec
from ..emulator.build import Built, build_module, build_runtime
from ..emulator.compiler import find_compiler, find_headers
from ..emulator.faults import fault_error
from ..emulator.launch import EmulatedModule, Ranges, Schedule, run
from .audit import KernelAudit
from .device import Dim3, Launcher, LoadedKernel
from .errors import CompileError, FunctionNotFoundError, KernelBoundsError, ModuleNotFoundInSetError, UnsupportedError
from .gpu import FunctionAttributes
from .host import HostBackend, HostDevice
from .host_calls import HostCalls
from .host_kernels import HostKernels
from .manifest import KernelSet, ModuleSource
from .modules import function_not_found
from .plan import Layout
from .signature import Signature
from .source_text import without_comments

__all__ = ["EmulatedBackend", "EmulatedDevice", "Schedule"]

_MOST_COOPERATIVE = 64
"""Blocks of a cooperative launch: each has an OS thread of its own."""
_MOST_POISONED = 1 << 30
_MACRO_KERNEL = re.compile(r"#\s*define\b(?:[^\n]*\\\n)*[^\n]*__global__")


@functools.cache
def _loaded(built: Built) -> EmulatedModule:
    return EmulatedModule(built)


class EmulatedDevice(HostDevice):
    """HostDevice with compiled kernels."""

    name = "emulated"

    def __init__(
        self, ordinal: int, kernels: Path | str | None, poison: bool, checked: bool, schedule: Schedule
    ) -> None:
        super().__init__(ordinal, HostKernels(None), poison)
        self.checked, self.schedule = checked, schedule
        find_compiler()
        find_headers()
        self._set = KernelSet.open(kernels)
        # The catalogue describes this project's own kernels; another set may ask for another geometry.
        self._own_set = kernels is None
        self._hidden: set[tuple[str, str | None]] = set()
        self._modules: dict[Path, EmulatedModule] = {}
        self._load_lock = threading.Lock()
        self._ranges: tuple[tuple[int, ...], Ranges] | None = None
        build_runtime()

    def alloc(self, nbytes: int) -> int:
        """As HostDevice's, but beyond 1 GiB fresh memory is not poisoned, so that huge allocations stay sparse."""
        block = self._new_block(nbytes, self._poison if nbytes <= _MOST_POISONED else None)
        self._blocks[block.base] = block
        return block.base

    alloc_managed = alloc

    # ------------------------------------------------------------ kernels

    def hide(self, module: str, function: str | None) -> None:
        """Make a function, or a module, look absent."""
        self._hidden.add((module, function))

    def has_module(self, module: str) -> bool:
        return module in self._set.modules and (module, None) not in self._hidden

    def known_kernels(self) -> Sequence[tuple[str, str]]:
        return [key for key in self._set.known_kernels() if self.has_module(key[0]) and key not in self._hidden]

    def is_loaded(self, module: str, function: str) -> bool:
        source = self._set.module(module).holding(function)
        loaded = self._modules.get(source.path)
        if source.gpu_only or (loaded is not None and function in loaded.signatures):
            return True
        return self._is_missing(source, function)

    @staticmethod
    def _is_missing(source: ModuleSource, function: str) -> bool:
        """Whether manifest and text alone say that the file has no such kernel; nothing has to be compiled then."""
        if not source.functions or function in source.functions:
            return False
        text = without_comments(source.path.read_text(encoding="utf-8", errors="replace"))
        return not _MACRO_KERNEL.search(text) and not re.search(rf"\b{re.escape(function)}\b", text)

    def load(self, module: str, function: str) -> LoadedKernel:
        present = [name for mod, name in self.known_kernels() if mod == module]
        if not self.has_module(module):
            raise ModuleNotFoundInSetError(module, tuple(self._set.modules), str(self._set.root))
        source = self._set.module(module).holding(function)
        if (module, function) in self._hidden:
            raise FunctionNotFoundError(module, function, present, str(source.path))
        spec = catalog.find(module, function)
        if source.gpu_only or (spec is not None and spec.gpu_only):
            if spec is None:
                raise UnsupportedError(f"{module}::{function} ({source.path}) is marked gpu_only and has no reference")
            return super().load(module, function)
        if source.is_ptx:
            raise UnsupportedError(f"module '{module}' is PTX ({source.path}): the CPU runs CUDA sources alone")
        if self._is_missing(source, function):
            raise function_not_found(source, function, present)
        with self._load_lock:
            compiled = self._compiled(source, function, present)
        signature = compiled.signatures[function]
        static = spec.shared_bytes if spec else compiled.static_shared if len(compiled.signatures) == 1 else 0
        dynamic = max(self.limits.max_shared_default - static, 0)
        attributes = FunctionAttributes(-1, static, dynamic, 0, self.limits.max_threads_per_block)
        raw = (compiled, compiled.kernel(function))
        nullable = _nullable(spec, signature)
        return LoadedKernel(module, function, signature, raw, attributes, dynamic, nullable, dependent=source.dependent)

    def _compiled(self, source: ModuleSource, function: str, present: Sequence[str]) -> EmulatedModule:
        """The library of a file with `function` in it; `present` are the module's kernels, for messages."""
        known = self._modules.get(source.path)
        if known is None:
            plain = without_comments(source.path.read_text(encoding="utf-8", errors="replace"))
            missing = [name for name in source.functions if not re.search(rf"\b{re.escape(name)}\b", plain)]
            if missing and not _MACRO_KERNEL.search(plain):
                raise function_not_found(source, missing[0], [name for name in present if name not in missing])
            known = self._modules[source.path] = _loaded(build_module(source, self.checked))
        if function in known.signatures:
            return known
        # A macro may make a kernel that the text does not show.
        if not _MACRO_KERNEL.search(known.built.text):
            raise function_not_found(source, function, present)
        try:
            more = _loaded(build_module(source, self.checked, (*known.signatures, function)))
        except CompileError as error:
            raise function_not_found(source, function, present) from error
        self._modules[source.path] = more
        return more

    def plan(self, kernel: LoadedKernel, grid: Dim3, block: Dim3, shared: int, cooperative: bool) -> Launcher:
        if isinstance(kernel.raw, KernelSpec):
            return super().plan(kernel, grid, block, shared, cooperative)
        layout = Layout(kernel.signature)
        offsets = (ctypes.c_uint32 * max(len(layout.starts), 1))(*(start for _, start in layout.starts))
        geometry = (grid, block, shared)
        spec = catalog.find(kernel.module, kernel.function) if self._own_set else None
        calls = HostCalls(self.ledger, spec, kernel.name, geometry) if spec is not None else None

        def launch(stream: int, pointers: Sequence[int], scalars: Sequence[Any]) -> None:
            args = layout.packed.pack(*pointers, *scalars)
            values = layout.merge(pointers, scalars)

            def operation() -> None:
                if calls is not None:
                    calls.find(args, values)  # every range is right
                weights = tuple(values[index] for index in kernel.early)
                self._run_compiled(kernel, geometry, args, offsets, cooperative, weights)
                self._check_neighbours(kernel.name, pointers)

            self._queue(stream, operation)

        return launch

    def _run_compiled(
        self,
        kernel: LoadedKernel,
        geometry: tuple[Dim3, Dim3, int],
        args: bytes,
        offsets: Any,
        cooperative: bool,
        early: Sequence[int],
    ) -> None:
        module, address = kernel.raw
        ranges = self._live_ranges()
        extras = (self.schedule, cooperative, kernel.dependent, early)
        fault = run(module, address, geometry, args, offsets, ranges, *extras)
        if fault is not None:
            raise fault_error(kernel.name, module.built.library, fault, ranges.names.__getitem__, module.shared_name)

    def _live_ranges(self) -> Ranges:
        """Live allocations by address, pinned ones among them; made anew when one came or went."""
        state = (len(self.ledger), self.ledger.removals, *self._pinned)
        if self._ranges is None or self._ranges[0] != state:
            ranges = [(a.base, a.size, str(a)) for a in self.ledger.all()]
            ranges += [
                (base, block.body.size, f"pinned memory [{base:#x}, +{block.body.size} bytes]")
                for base, block in self._pinned.items()
            ]
            self._ranges = state, Ranges(sorted(ranges))
        return self._ranges[1]

    def _check_neighbours(self, name: str, pointers: Sequence[int]) -> None:
        """KernelBoundsError where the launch wrote beside an allocation that it was given."""
        found = []
        for pointer in pointers:
            allocation = self.ledger.find(pointer)
            block = self._blocks.get(allocation.base) if allocation is not None else None
            damage = block.damage() if block is not None else None
            if block is not None and damage is not None:
                block.mend()
                found.append(f"{damage} of {allocation}")
        if found:  # all of them are mended, so that freeing them later is no second error
            raise KernelBoundsError(
                name, f"the launch wrote {' and '.join(found)}; a checked backend says which thread did"
            )

    def max_cooperative_blocks(self, kernel: LoadedKernel, threads: int, shared: int) -> int:
        return _MOST_COOPERATIVE

    # ------------------------------------------------------------ information

    def device_name(self) -> str:
        build = ", checked" if self.checked else ""
        return f"CPU (CUDA sources compiled by {find_compiler().version.partition(chr(10))[0]}{build})"


def _nullable(spec: KernelSpec | None, signature: Signature) -> tuple[bool, ...]:
    """Which pointers may be NULL: as the catalogue says, and any where it does not know the kernel."""
    if spec is None or len(spec.params) != len(signature.params):
        return (True,) * len(signature.params)
    return tuple(param.optional for param in spec.params)


class EmulatedBackend(HostBackend):
    """The CPU backend that runs .cu files. `checked` and `schedule` say how; see the module and `Schedule`.

    BackendUnavailableError, with the cure, where no C++ compiler or no CUDA headers are found.
    """

    _device: EmulatedDevice

    def __init__(
        self,
        ordinal: int = 0,
        kernels: Path | str | None = None,
        on_leak: str = "warn",
        debug_sync_kernels: bool = False,
        poison: bool = True,
        checked: bool = False,
        schedule: Schedule | None = None,
    ) -> None:
        device = EmulatedDevice(ordinal, kernels, poison, checked, schedule or Schedule())
        super(HostBackend, self).__init__(device, KernelAudit(), on_leak, debug_sync_kernels)

    @property
    def checked(self) -> bool:
        """Whether kernels run in the checked build."""
        return self._device.checked

    def fail_lookup(self, module: str, function: str | None = None) -> None:
        self._device.hide(module, function)
