# SPDX-License-Identifier: AGPL-3.0-only
"""Conformance of kernels that somebody else wrote: compiling, parameter lists, values, races and bounds."""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..catalog import CATALOG, find
from ..catalog.spec import KernelSpec
from ..emulator.launch import Schedule
from ..runtime import open_backend
from ..runtime.arch import ARCHS, parse_arch
from ..runtime.errors import (
    ArchMismatchError,
    BackendUnavailableError,
    DeviceLostError,
    KernelCrashError,
    KernelDeadlockError,
    KernelFaultError,
    KernelSetError,
    KernelTimeoutError,
    SignatureMismatchError,
    SparkError,
    ToolkitMismatchError,
    UnsupportedError,
)
from ..runtime.gpu import GpuBackend
from ..runtime.includes import scan_includes
from ..runtime.manifest import ModuleSource
from ..runtime.signature import Signature, compare, kernel_spec_signature, parse_ptx, parse_source
from ..runtime.source_text import emulated_text, without_comments
from .case import Case, run_case
from .cases import cases_of
from .trees import ForeignSet, open_sets, write_manifest

__all__ = ["Backend", "Failure", "KernelReport", "conform"]

Backend = Literal["host", "emulated", "emulated-checked", "cuda"]

# What no CPU runs, where the build for the CPU has it: inline PTX, tensor cores, the tensor memory accelerator.
_CUDA_ONLY = (
    (re.compile(r"\basm\s*(?:volatile|__volatile__)?\s*\("), "inline PTX"),
    (re.compile(r"\bwmma\s*::|[<\"]mma\.h[>\"]"), "tensor cores (mma.h)"),
    (re.compile(r"[<\"](?:cute|cutlass)/"), "CuTe"),
    (re.compile(r"\bCUtensorMap\b|[<\"]cuda/ptx[>\"]"), "TMA"),
)
_SECONDS = 20.0
"""CPU time of a launch; the longest of our own takes a tenth of a second, checked."""
_HOPELESS = (KernelTimeoutError, KernelDeadlockError, KernelCrashError)
"""After one of these the remaining cases of a kernel would only wait or crash again."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One case that did not pass. `subject` says what a decision is about, "" elsewhere."""

    case: str
    tag: str
    subject: str
    message: str


@dataclass(slots=True)
class KernelReport:
    """What is known of one kernel.

    `compiles`: architecture -> whether, None where the kernel is not meant for it; empty without NVRTC. `abi`: "ok",
    how the parameter list differs from the catalogue's, or None where it could not be read. `passed` counts cases,
    `failures` are the others; `skipped` says why none was run. `faults` are races, accesses outside of buffers and
    their kin, None where the backend does not look for them.
    """

    set: str
    module: str
    function: str
    file: str
    compiles: dict[str, bool | None] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    abi: str | None = None
    passed: int = 0
    failures: list[Failure] = field(default_factory=list)
    skipped: str = ""
    faults: list[str] | None = None
    known: bool = True

    @property
    def differs(self) -> list[str]:
        """What the kernel decides otherwise than this project."""
        return list(dict.fromkeys(f.subject for f in self.failures if f.tag == "decision"))

    @property
    def status(self) -> str:
        """ "ok", "differs: ...", "cuda only: ...", "not run: ...", "unknown", or "failed: ..."."""
        if not self.known:
            return "unknown"
        wrong = [
            what
            for what, bad in (
                ("compiling", False in self.compiles.values()),
                ("parameters", self.abi not in ("ok", None)),
                ("not found", self.abi is None and True in self.compiles.values()),
                ("values", any(f.tag != "decision" for f in self.failures)),
                ("faults", bool(self.faults)),
            )
            if bad
        ]
        if wrong:
            return f"failed: {', '.join(wrong)}"
        if self.differs:
            return f"differs: {', '.join(self.differs)}"
        return self.skipped or "ok"

    def fails(self, strict: bool) -> bool:
        """Whether this kernel makes the run fail."""
        return self.status.startswith("failed") or (strict and bool(self.differs))

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "set": self.set,
            "module": self.module,
            "function": self.function,
            "file": self.file,
            "compiles": self.compiles,
            "abi": self.abi,
            "tests": {
                "passed": self.passed,
                "failed": [dataclasses.asdict(failure) for failure in self.failures],
            },
            "races": self.faults,
            "messages": self.messages,
            "status": self.status,
        }


def conform(
    path: Path,
    module: str | None = None,
    backend: Backend = "emulated-checked",
    archs: Sequence[str] | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> list[KernelReport]:
    """Hold the kernels at `path` (see `trees.open_sets`) against the catalogue.

    `archs` are compiled for; None takes what the tree says it is for, else every architecture of `spark-py check`.
    `backend` runs the cases; "host" runs none, since it has references and no kernels. Errors of manifests are raised,
    and BackendUnavailableError where the backend cannot be had; what is wrong with a kernel is in its report.
    """
    _known_archs(archs or ())
    reports: list[KernelReport] = []
    seen: set[tuple[object, ...]] = set()
    for each in open_sets(path, module):
        fresh = []
        for source in each.modules:
            key = (source.name, source.path, source.flags)
            if key not in seen:  # a common file that an overlay leaves alone was looked at before
                seen.add(key)
                fresh.append(source)
        if fresh:
            narrowed = dataclasses.replace(each, modules=tuple(fresh))
            reports += _Set(narrowed, backend, archs, seed, progress).reports()
    return reports


def _known_archs(archs: Sequence[str]) -> None:
    """UnsupportedError for an architecture that the compiler does not know; without one, nothing is compiled."""
    from ..runtime.modules import toolkit

    numbers = [(arch, parse_arch(arch).number) for arch in archs]
    try:
        known = toolkit().archs if numbers else ()
    except (BackendUnavailableError, ToolkitMismatchError):
        return
    for arch, number in numbers:
        if number not in known:
            names = ", ".join(f"sm_{each}" for each in known)
            raise UnsupportedError(f"{arch} is not known to this compiler; it knows {names}")


@dataclass(slots=True)
class _File:
    """A file of a module: what compiling it said, and what can be known without."""

    source: ModuleSource
    signatures: dict[str, Signature] = field(default_factory=dict)
    compiles: dict[str, bool | None] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    cuda_only: str = ""

    @property
    def functions(self) -> list[str]:
        return list(dict.fromkeys((*self.signatures, *self.source.functions)))


class _Set:
    """One set under examination."""

    def __init__(
        self,
        kernels: ForeignSet,
        backend: Backend,
        archs: Sequence[str] | None,
        seed: int,
        progress: Callable[[str], None],
    ) -> None:
        self._set, self._backend, self._seed, self._progress = kernels, backend, seed, progress
        self._archs = tuple(archs) if archs is not None else (kernels.arch,) if kernels.arch else ARCHS

    def reports(self) -> list[KernelReport]:
        """Every kernel of the set."""
        modules = [(m.name, [_File(file) for file in m.files]) for m in self._set.modules]
        files = [file for _, group in modules for file in group]
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # NVRTC works outside the interpreter's lock
            list(pool.map(self._examine, files))
        made = [(file, report) for file in files for report in self._reports_of(file)]
        self._run(modules, [(file, report) for file, report in made if self._to_run(file, report)])
        return [report for _, report in made]

    # ------------------------------------------------------------ without running

    def _examine(self, file: _File) -> None:
        """Compile for each architecture, and read what the text tells."""
        self._progress(f"compiling {file.source.name}")
        source = dataclasses.replace(file.source, functions=(), others=())
        try:
            text = source.path.read_text(encoding="utf-8-sig", errors="replace")
        except OSError as error:
            file.messages.append(f"{source.path} cannot be read: {error.strerror}")
            file.compiles = dict.fromkeys(self._archs, False)
            return
        if source.is_ptx:
            file.cuda_only = "PTX"
        else:
            folders = [Path(flag[2:]) for flag in source.flags if flag.startswith("-I")]
            texts = scan_includes(source.path, text, folders).texts
            plain = [emulated_text(without_comments(each)) for each in texts]
            file.cuda_only = next((why for p, why in _CUDA_ONLY if any(map(p.search, plain))), "")
        if _catalogued(source.name):  # of what the catalogue does not know, only the names are wanted
            self._compile(file, source)
        if not file.signatures:
            try:
                found = parse_ptx(text, source.path) if source.is_ptx else parse_source("\n".join(texts))
            except SparkError as error:
                file.messages.append(str(error))
                return
            file.signatures = dict(found)

    def _compile(self, file: _File, source: ModuleSource) -> None:
        from ..runtime.modules import compile_module

        for arch in self._archs:
            try:
                compiled = compile_module(source, arch)
            except (BackendUnavailableError, ToolkitMismatchError) as error:
                file.messages.append(f"not compiled: {error}")
                return
            except ArchMismatchError:
                file.compiles[arch] = None
            except SignatureMismatchError as error:
                file.messages.append(str(error))
                file.compiles[arch] = False
            except SparkError as error:
                file.compiles[arch] = False
                first = str(error).partition("\n")[0]
                if first not in file.messages:
                    file.messages.append(first)
            else:
                file.compiles[arch] = True if compiled.signatures else None
                file.signatures |= compiled.signatures

    def _reports_of(self, file: _File) -> Iterator[KernelReport]:
        """One report a function; one without a name for a file that hides which it has."""
        source = file.source
        for function in file.functions or [""]:
            report = KernelReport(
                self._set.label, source.name, function, str(source.path), dict(file.compiles), list(file.messages)
            )
            signature, spec = file.signatures.get(function), find(source.name, function)
            wanted = _mangled(source.name, function)
            if spec is not None and signature is not None:
                report.abi = compare(signature, kernel_spec_signature(spec)) or "ok"
            elif wanted:
                report.function = wanted
                report.abi = f'{function} has a C++ name: put extern "C" before __global__'
            elif spec is not None:
                report.messages.append(f"{source.path} has no kernel '{function}'")
            else:
                report.known = not function and _catalogued(source.name) and False in file.compiles.values()
                if other := next((key for key in CATALOG if key[1] == function), None):
                    report.messages.append(f"{other[0]}::{function} is known: is this file module '{other[0]}'?")
                if not function and report.known:
                    report.abi = "ok"  # that it does not compile is all that can be said
            if spec is not None and (source.name, function) in self._set.absent:
                report.messages.append(f"said to be absent: {self._set.absent[source.name, function]}")
            yield report

    def _to_run(self, file: _File, report: KernelReport) -> bool:
        spec = find(report.module, report.function)
        if not report.known or spec is None or False in report.compiles.values():
            return False
        if report.abi is None and not report.compiles:
            report.skipped = "not run: without NVRTC its parameters cannot be read"
        if report.abi != "ok":
            return False
        if not cases_of(spec):
            report.skipped = "not run: it has no cases"
            return False
        if self._backend == "host":
            report.skipped = "not run: the host has references and no kernels"
            return False
        if self._backend != "cuda" and (file.cuda_only or file.source.gpu_only):
            report.skipped = f"cuda only: {file.cuda_only or 'marked gpu_only'}"
            return False
        return True

    # ------------------------------------------------------------ running

    def _run(self, modules: list[tuple[str, list[_File]]], wanted: list[tuple[_File, KernelReport]]) -> None:
        if not wanted:
            return
        with tempfile.TemporaryDirectory(prefix="spark_py-conform-") as folder:
            groups = []
            names = {report.module for _, report in wanted}
            for name, files in modules:
                if name not in names:
                    continue
                several = len(files) > 1
                sources = [
                    dataclasses.replace(f.source, functions=tuple(f.signatures) if several else (), others=())
                    for f in files
                    if f.signatures or not several
                ]
                groups.append((name, sources))
            write_manifest(Path(folder), groups)
            gpu = self._open(folder)
            try:
                for _, report in wanted:
                    spec = find(report.module, report.function)
                    assert spec is not None
                    self._progress(f"running {report.module}::{report.function}")
                    if not self._run_cases(gpu, spec, report):
                        gpu.close()
                        gpu = self._open(folder)
            finally:
                gpu.close()

    def _open(self, folder: str) -> GpuBackend:
        name: Any = self._backend.removesuffix("-checked")
        checked = self._backend.endswith("-checked")
        schedule = None if name == "cuda" else Schedule(timeout=_SECONDS)
        return open_backend(name, kernels=folder, checked=checked, schedule=schedule)

    def _run_cases(self, gpu: GpuBackend, spec: KernelSpec, report: KernelReport) -> bool:
        """Run every case of a kernel; False where the backend is of no use any more."""
        faults: dict[tuple[object, ...], str] = {}  # the first of each kind at each line
        alive = True
        for number, case in enumerate(cases_of(spec)):
            try:
                wrong = run_case(gpu, spec, case, np.random.default_rng([self._seed, number]))
                found = [f"{each.parameter}: {each.text}" for each in wrong]
            except DeviceLostError as error:
                faults[(type(error),)] = f"case '{case.name}': {error}"
                alive = False
                break
            except KernelFaultError as error:
                if case.tag == "decision":  # say an address or a size that is more than the engine promises
                    found = [f"{type(error).__name__}: {error}"]
                else:
                    at = (type(error), error.access.line if error.access else "")
                    faults.setdefault(at, f"{type(error).__name__} in case '{case.name}': {error}")
                    if isinstance(error, _HOPELESS):
                        break
                    continue
            except KernelSetError as error:  # NVRTC took it, so this says more about the emulation than the kernel
                report.messages.append(str(error).partition("\n")[0])
                if not report.compiles:
                    report.compiles["cpu"] = False
                report.skipped = "not run: it does not compile for the CPU"
                break
            except SparkError as error:
                found = [f"{type(error).__name__}: {error}"]
            report.failures += [_failure(case, message) for message in found]
            report.passed += not found
        if faults or self._backend == "emulated-checked":
            report.faults = list(faults.values())
        return alive


def _catalogued(module: str) -> bool:
    return any(key[0] == module for key in CATALOG)


def _failure(case: Case, message: str) -> Failure:
    return Failure(case.name, case.tag, case.subject, message)


def _mangled(module: str, function: str) -> str:
    """The catalogued name that a C++ name stands for, "" where it is none."""
    if not function.startswith("_Z"):
        return ""
    names = (key[1] for key in CATALOG if key[0] == module)
    return next((name for name in names if function.startswith(f"_Z{len(name)}{name}")), "")
