# SPDX-License-Identifier: AGPL-3.0-only
"""From a module's source to an image that a driver can load: NVRTC, its log, parameter lists and resources.

NVRTC is used through CuPy, with `--std=c++17 --fmad=false` and no fast-math unless the kernel set's own flags say
otherwise. Nothing here needs a GPU.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .arch import Arch, parse_arch, runs_on
from .compiled import CompiledModule, Resources
from .cubin_cache import CACHE_FORMAT, CubinCache, default_cache
from .errors import (
    ArchMismatchError,
    BackendUnavailableError,
    CompileError,
    FunctionNotFoundError,
    HeaderNotFoundError,
    InvalidArgumentError,
    UnsupportedError,
)
from .includes import IncludeScan, scan_includes
from .manifest import ModuleSource
from .ptx import load_ptx
from .signature import Signature, parse_ptx, parse_source, reconcile
from .toolkit import STUB_HEADERS, Toolkit, check_one_cupy, find_toolkit, install_line

__all__ = ["CompiledModule", "Resources", "compile_module", "function_not_found", "toolkit"]

_LINEINFO = "SPARK_PY_LINEINFO"
_CUTLASS = ("cute/", "cutlass/")
_ERROR = re.compile(
    r"^(?P<file>.+)\((?P<line>\d+)\): (?:catastrophic )?error(?: #[\w-]+)?: (?P<text>.*)$", re.MULTILINE
)
_NO_HEADER = re.compile(r"(?:cannot|could not) open source file \"([^\"]+)\"")
_ASSEMBLER = re.compile(r"^ptxas\b.*?(?:error|fatal)\s*:\s*(.*)$", re.MULTILINE)
_KERNEL = re.compile(r"Compiling entry function '([^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_INFINITY = re.compile(r"\bINFINITY\b")
_DEFINES_INFINITY = re.compile(r"#[ \t]*define[ \t]+INFINITY\b")


@functools.cache
def _nvrtc() -> Any:
    check_one_cupy()
    try:
        return importlib.import_module("cupy_backends.cuda.libs.nvrtc")
    except ImportError as error:
        raise BackendUnavailableError(
            f"NVRTC is needed to compile kernels and CuPy, which reaches it, cannot be imported ({error}); "
            f"run: {install_line('cuda12')} (or cuda13)"
        ) from error


@functools.cache
def toolkit() -> Toolkit:
    """The NVRTC in use and its headers; BackendUnavailableError or ToolkitMismatchError say what is wrong."""
    return find_toolkit(_nvrtc())


def function_not_found(module: ModuleSource, function: str, present: Sequence[str]) -> FunctionNotFoundError:
    """The error for a function that a module lacks, with a hint where only `extern "C"` is missing."""
    mangled = next((name for name in present if name.startswith("_Z") and f"{len(function)}{function}" in name), "")
    hint = f'{mangled} is there: put extern "C" before __global__ to keep the name' if mangled else ""
    return FunctionNotFoundError(module.name, function, present, str(module.path), hint)


def compile_module(
    source: ModuleSource,
    arch: str,
    cache: CubinCache | Literal["default"] | None = "default",
    *,
    driver_version: int | None = None,
) -> CompiledModule:
    """The image of `source` for `arch` ("sm_90a"), with the signature and resources of each of its kernels.

    A .cu is compiled, or taken from `cache` ("default": the user's; None: no cache) where source, own headers, flags,
    architecture and toolkit are the same. A .ptx is checked and passed on; `driver_version` (12090 for CUDA 12.9) then
    bounds the PTX version.

    Raises CompileError (file, line, log) or HeaderNotFoundError, ImageError for bad PTX, FunctionNotFoundError for a
    function that the manifest lists and the file lacks, SignatureMismatchError, ArchMismatchError below `min_arch`, and
    UnsupportedError for an architecture that this NVRTC does not know.
    """
    target = parse_arch(arch)
    if not runs_on(source.min_arch, target.capability):
        raise ArchMismatchError(
            source.min_arch, arch, f"module '{source.name}' ({source.path}) needs {source.min_arch}, asked for {arch}"
        )
    if source.is_ptx:
        module = load_ptx(source.path, arch, driver_version)
    else:
        module = _compile_cached(source, target, default_cache() if cache == "default" else cache)
    for function in source.functions:
        if function not in module.signatures:
            raise function_not_found(source, function, tuple(module.signatures))
    return module


def _read(path: Path, arch: str) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise CompileError(path, arch, "", summary=f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CompileError(path, arch, "", summary=f"is not UTF-8: {error}") from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise CompileError(path, arch, "", line, "holds a NUL character, where the compiler would stop reading")
    if not text.strip():
        raise CompileError(path, arch, "", summary="the file is empty")
    return text


def _lineinfo() -> bool:
    value = os.environ.get(_LINEINFO, "")
    if value not in ("", "0", "1"):
        raise InvalidArgumentError(_LINEINFO, value, "0 or 1 is needed")
    return value == "1"


@dataclass(frozen=True, slots=True)
class _Job:
    """Everything that decides what NVRTC makes of a source."""

    source: ModuleSource
    arch: Arch
    text: str
    scan: IncludeScan
    stubs: Mapping[str, str]
    options: tuple[str, ...]
    kit: Toolkit

    @property
    def folders(self) -> list[str]:
        """Where headers are searched, for messages."""
        named = [option[2:] for option in self.options if option.startswith("-I")]
        return list(dict.fromkeys([str(self.source.path.parent), *named]))

    def key(self) -> str:
        """The cache key. The path is in it, since line tables and asserts carry it into the image."""
        parts = [CACHE_FORMAT, str(self.source.path), self.scan.digest(), sorted(self.stubs.items()), self.options]
        parts += [self.kit.nvrtc, self.kit.headers, self.kit.fingerprint]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _prepare(source: ModuleSource, arch: Arch) -> _Job:
    text = _read(source.path, str(arch))
    kit = toolkit()
    if arch.number not in kit.archs:
        known = ", ".join(f"sm_{number}" for number in kit.archs)
        raise UnsupportedError(f"NVRTC {kit.nvrtc[0]}.{kit.nvrtc[1]} does not compile for {arch}; it knows {known}")
    folders = [Path(flag[2:]) for flag in source.flags if flag.startswith("-I")]
    scan = scan_includes(source.path, text, folders)
    # cstdint includes stdint.h, so a stub comes with all of them.
    stubs = STUB_HEADERS if scan.unresolved & STUB_HEADERS.keys() else {}
    options = [f"-arch={arch}"]
    for name, value in (("std", "c++17"), ("fmad", "false")):
        if not any(re.match(rf"--?{name}=", flag) for flag in source.flags):
            options.append(f"--{name}={value}")
    # NVRTC's own cache gives no assembler report, and with it no registers and spills.
    options += ["--ptxas-options=-v", "--no-cache", *source.flags]
    if _lineinfo() and "-lineinfo" not in source.flags:
        options.append("-lineinfo")
    if scan.mentions(_INFINITY) and not scan.mentions(_DEFINES_INFINITY) and "math.h" not in scan.unresolved:
        options.append("-DINFINITY=__int_as_float(0x7f800000)")
    options += [f"-I{folder}" for folder in kit.include]
    if kit.cutlass is not None and any(name.startswith(_CUTLASS) for name in scan.unresolved):
        options.append(f"-I{kit.cutlass}")
    return _Job(source, arch, text, scan, stubs, tuple(options), kit)


def _compile_cached(source: ModuleSource, arch: Arch, cache: CubinCache | None) -> CompiledModule:
    job = _prepare(source, arch)
    if cache is None or job.scan.computed:  # a header that a macro names is not in the key
        return _compile(job)
    key = job.key()
    found = cache.read(key)
    if found is not None:
        return found
    with cache.locked(key):
        found = cache.read(key)  # another process may have made it while this one waited
        if found is None:
            found = _compile(job)
            cache.write(key, found)
    return found


def _compile(job: _Job) -> CompiledModule:
    nvrtc = _nvrtc()
    headers = [text.encode() for text in job.stubs.values()]
    names = [name.encode() for name in job.stubs]
    # The program's name is the real path, so that quoted includes resolve and messages name the file.
    program = nvrtc.createProgram(job.text, str(job.source.path), headers, names)
    try:
        try:
            nvrtc.compileProgram(program, list(job.options))
        except nvrtc.NVRTCError as error:
            raise _compile_error(job, str(nvrtc.getProgramLog(program)).strip("\0\n ") or str(error)) from None
        log = str(nvrtc.getProgramLog(program)).strip("\0\n ")
        image = bytes(nvrtc.getCUBIN(program))
        ptx = bytes(nvrtc.getPTX(program)).rstrip(b"\0").decode()
    finally:
        nvrtc.destroyProgram(program)
    return CompiledModule(image, "cubin", str(job.arch), _signatures(job, ptx), _resources(log), log)


def _signatures(job: _Job, ptx: str) -> dict[str, Signature]:
    texts = parse_source("\n".join(job.scan.texts))
    return {
        name: reconcile(texts[name], signature) if name in texts else signature
        for name, signature in parse_ptx(ptx, job.source.path).items()
    }


def _resources(log: str) -> dict[str, Resources]:
    found: dict[str, Resources] = {}
    pieces = _KERNEL.split(log)[1:]
    for name, report in zip(pieces[::2], pieces[1::2], strict=True):
        registers, stack, shared = _REGISTERS.search(report), _STACK.search(report), _SHARED.search(report)
        if registers is None:
            continue
        frame = [int(number) for number in stack.groups()] if stack else [0, 0, 0]
        found[name] = Resources(int(registers.group(1)), int(shared.group(1)) if shared else 0, *frame)
    return found


def _compile_error(job: _Job, log: str) -> CompileError:
    first = _ERROR.search(log)
    missing = _NO_HEADER.search(log)
    path = Path(first["file"]) if first else job.source.path
    line = int(first["line"]) if first else 0
    versions = job.kit.versions()
    if missing:
        header, package = missing.group(1), ""
        if header.startswith("crt/") and job.kit.nvrtc[0] == 12:
            versions += "; crt/ comes with nvidia-cuda-nvcc-cu12"
        elif job.kit.cutlass is None and header.startswith(_CUTLASS):
            package = "nvidia-cutlass"
            versions += f"; it is in {package}, which is not installed; run: {install_line('cutlass')}"
        elif job.kit.headers is None:
            versions += f"; run: {job.kit.extra}"
        return HeaderNotFoundError(path, str(job.arch), log, line, header, job.folders, versions, package)
    assembler = _ASSEMBLER.search(log)
    summary = first["text"] if first else assembler.group(1) if assembler else log.partition("\n")[0]
    if job.kit.headers not in (None, job.kit.nvrtc):
        summary += f" ({versions}: not one toolkit; headers from {job.kit.include[0]}; run: {job.kit.extra})"
    return CompileError(path, str(job.arch), log, line, summary)
