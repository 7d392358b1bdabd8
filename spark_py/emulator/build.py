# SPDX-License-Identifier: AGPL-3.0-only
"""From a kernel file to a shared library, by way of the cache.

A library's key holds everything that decides its content: source and own headers, shim and runtime, flags, compiler,
CUDA headers and the CPU. Libraries are made beside their place under a file lock and renamed, so processes that run
side by side share one cache, and a library that somebody has loaded is never written to.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..runtime.cubin_cache import default_cache
from ..runtime.errors import BackendUnavailableError, CompileError, HeaderNotFoundError
from ..runtime.includes import scan_includes
from ..runtime.manifest import ModuleSource
from ..runtime.signature import parse_source
from ..runtime.source_text import without_comments
from .compiler import Compiler, find_compiler, find_headers, machine_flags

__all__ = ["Built", "build_module", "build_runtime"]

_FORMAT = 1
_KEPT_SECONDS = 30 * 24 * 3600
_HERE = Path(__file__).parent
_SHIM, _RT = _HERE / "shim", _HERE / "rt"
_TARGET = "the CPU"
# No contraction: the GPU code is compiled with --fmad=false. Hidden and not unique: equal names in two libraries stay
# two objects. No strict aliasing: kernels read BF16 rows as uint4.
_KERNEL_FLAGS = (
    *("-std=c++17", "-fPIC", "-pthread", "-w", "-ffp-contract=off", "-fvisibility=hidden", "-fno-strict-aliasing"),
    *("-fsigned-char", "-fno-exceptions", "-fno-math-errno"),
)
_FAST_FLAGS = ("-O2",)
# -O1 and no store merging or if-conversion: an access is checked as the source has it.
_CHECKED_FLAGS = ("-O1", "-g1", "-fsanitize=thread,alignment,bounds")
_RUNTIME_FLAGS = (
    *("-std=c++17", "-O2", "-g1", "-fPIC", "-pthread", "-fvisibility=hidden", "-fno-exceptions", "-U_FORTIFY_SOURCE"),
    "-fno-stack-protector",
)
_ERROR = re.compile(r"^(?P<file>[^\n:]+):(?P<line>\d+)(?::\d+)?: (?:fatal )?error: (?P<text>.*)$", re.MULTILINE)
_NO_HEADER = re.compile(r"error: '?([^\s':]+)'?(?:: No such file or directory| file not found)")
_DYNAMIC = re.compile(r"\bextern\s+__shared__\b[^;]*?\b(\w+)\s*\[\s*\]\s*;")


@dataclass(frozen=True, slots=True)
class Built:
    """A library of kernels: its file, the runtime it is linked with, and the text its parameter names are read from."""

    library: Path
    runtime: Path
    text: str


@functools.cache
def _scratch() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="spark_py-emulated-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _place(kind: str, key: str) -> Path:
    """The folder of an entry: in the user's cache, or where that is off in a folder of this process."""
    cache = default_cache()
    return (cache.folder if cache.enabled else _scratch()) / "emulated" / f"{kind}-{key[:32]}"


def _key(*parts: object) -> str:
    return hashlib.sha256(json.dumps([_FORMAT, *parts], default=str).encode()).hexdigest()


@functools.cache
def _folder_digest(folder: Path) -> str:
    state = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        state.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return state.hexdigest()


def _entry(kind: str, key: str, make: Callable[[Path], None]) -> Path:
    """The folder of `key`, made by `make(folder)` where it is not there yet."""
    place = _place(kind, key)
    if place.is_dir():
        with contextlib.suppress(OSError):
            os.utime(place)
        return place
    with default_cache().locked(key):
        if place.is_dir():  # another process was quicker
            return place
        try:
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            new = Path(tempfile.mkdtemp(prefix=".", dir=place.parent))
        except OSError as error:
            raise BackendUnavailableError(
                f"no compiled kernels can be kept in {place.parent}: {error.strerror}; "
                "set SPARK_PY_CACHE_DIR to a folder that can be written"
            ) from error
        try:
            make(new)
            try:
                new.rename(place)
            except OSError:
                if not place.is_dir():  # where locks do not work, another process may have been here
                    raise
        finally:
            shutil.rmtree(new, ignore_errors=True)
        _forget(place.parent)
    return place


def _forget(folder: Path) -> None:
    """Remove entries that were not used for a month: edited kernels and precompiled headers (27 MB) pile up."""
    for entry in folder.iterdir():
        with contextlib.suppress(OSError):
            if entry.stat().st_mtime < time.time() - _KEPT_SECONDS:
                shutil.rmtree(entry, ignore_errors=True)


# ---------------------------------------------------------------- runtime


def build_runtime() -> Path:
    """The runtime library that all kernel libraries share."""
    compiler = find_compiler()
    flags = (*_RUNTIME_FLAGS, *machine_flags(compiler))
    key = _key("runtime", _folder_digest(_RT), flags, compiler.command, compiler.version)
    name = f"libspark_emu_{key[:16]}.so"

    def make(folder: Path) -> None:
        sources = sorted(str(path) for path in _RT.iterdir() if path.suffix in (".cpp", ".S"))
        outcome = compiler.run([*flags, "-shared", f"-Wl,-soname,{name}", "-o", str(folder / name), *sources, "-lrt"])
        if outcome.returncode:
            raise BackendUnavailableError(
                f"the CPU runtime of kernels does not compile with {compiler.version.partition(chr(10))[0]}:\n"
                f"{outcome.stderr}"
            )

    return _entry("runtime", key, make) / name


# ---------------------------------------------------------------- kernels


def _flags(checked: bool, compiler: Compiler) -> list[str]:
    flags = [*_KERNEL_FLAGS, *machine_flags(compiler), *(_CHECKED_FLAGS if checked else _FAST_FLAGS)]
    flags += [f"-DSPARK_EMU_IS_CHECKED={int(checked)}", f"-I{_SHIM}", f"-I{find_headers().folder}"]
    if compiler.kind == "gcc":
        flags += ["-fno-gnu-unique", "-fno-extern-tls-init"]
        if checked:
            flags += ["--param=tsan-instrument-func-entry-exit=0", "--param=tsan-distinguish-volatile=1"]
            flags += ["-fno-if-conversion", "-fno-if-conversion2", "-fno-ssa-phiopt"]
    elif checked:
        flags += ["-mllvm", "-tsan-instrument-func-entry-exit=0", "-mllvm", "-tsan-distinguish-volatile=1"]
    return flags


def _prefix(checked: bool, compiler: Compiler, flags: Sequence[str], key: str) -> list[str]:
    """Flags that read the shim before a source: precompiled for GCC, as text for Clang."""
    if compiler.kind != "gcc":
        return ["-include", str(_SHIM / "spark_emu.h")]

    def make(folder: Path) -> None:
        header = folder / "prefix.h"
        header.write_text(f'#include "{_SHIM / "spark_emu.h"}"\n')
        outcome = compiler.run([*flags, "-x", "c++-header", str(header), "-o", f"{header}.gch"])
        if outcome.returncode:
            raise BackendUnavailableError(
                f"the CUDA headers in {find_headers().folder} do not compile with "
                f"{compiler.version.partition(chr(10))[0]}:\n{outcome.stderr}"
            )

    return ["-include", str(_entry("prefix", key, make) / "prefix.h")]


def _kernel_names(source: ModuleSource, text: str, extra: Sequence[str]) -> tuple[str, ...]:
    names = dict.fromkeys((*(source.functions or parse_source(text)), *extra))
    return tuple(names)


def _unit(source: ModuleSource, text: str, everything: str, names: Sequence[str]) -> str:
    """The source, and after it what tells the runtime of its kernels."""
    labels = dict.fromkeys(_DYNAMIC.findall(without_comments(everything)))
    dynamic = " ".join(f"SPARK_EMU_LABEL({name})" for name in labels)
    return (
        f"#line 1 {json.dumps(str(source.path))}\n{text}\n"
        '#line 1 "spark_emu: kernels"\n'
        + (f"SPARK_EMU_DYNAMIC({dynamic})\n" if labels else "SPARK_EMU_NO_DYNAMIC()\n")
        + f"SPARK_EMU_MODULE({' '.join(f'SPARK_EMU_KERNEL({name})' for name in names)})\n"
    )


def build_module(source: ModuleSource, checked: bool, extra: Sequence[str] = ()) -> Built:
    """The library of a .cu file's kernels. `extra` names kernels that a macro makes, which the text does not show.

    CompileError (file, line, log) or HeaderNotFoundError where the file does not compile.
    """
    compiler = find_compiler()
    runtime = build_runtime()
    headers = find_headers()
    try:
        text = source.path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CompileError(source.path, _TARGET, "", summary=f"cannot be read: {error}") from error
    folders = [Path(flag[2:]) for flag in source.flags if flag.startswith("-I")]
    scan = scan_includes(source.path, text, folders)
    everything = "\n".join(scan.texts)
    flags = _flags(checked, compiler)
    base: list[object] = [_folder_digest(_SHIM), _folder_digest(_RT), flags, compiler.command, compiler.version]
    base += [headers.fingerprint, headers.version]
    own = [flag for flag in source.flags if flag.startswith(("-I", "-D"))]
    names = _kernel_names(source, everything, extra)
    key = _key("kernels", base, str(source.path), own, scan.digest(), names, runtime.name)

    # Before the entry's own lock is held: two locks at once could wait for each other.
    prefix = [] if _place("kernels", key).is_dir() else _prefix(checked, compiler, flags, _key("prefix", base))

    def make(folder: Path) -> None:
        unit = folder / "unit.cpp"
        unit.write_text(_unit(source, text, everything, names), encoding="utf-8")
        arguments = [*flags, *prefix, *own, "-iquote", str(source.path.parent), "-c", str(unit)]
        _run(compiler, source, [*arguments, "-o", str(folder / "unit.o")], folders)
        link = ["-shared", "-Wl,-z,defs", "-Wl,-Bsymbolic", f"-Wl,-rpath,{runtime.parent}", "-pthread"]
        link += ["-o", str(folder / "kernels.so"), str(folder / "unit.o"), str(runtime), "-lm"]
        _run(compiler, source, link, folders)
        (folder / "unit.o").unlink()

    library = _entry("kernels", key, make) / "kernels.so"
    return Built(library, runtime, everything)


def _run(compiler: Compiler, source: ModuleSource, arguments: list[str], folders: Sequence[Path]) -> None:
    outcome = compiler.run(arguments)
    if outcome.returncode == 0:
        return
    found = _ERROR.search(outcome.stderr)
    path, line = (Path(found["file"]), int(found["line"])) if found else (source.path, 0)
    missing = _NO_HEADER.search(outcome.stderr)
    if missing:
        searched = [str(folder) for folder in (source.path.parent, *folders, find_headers().folder)]
        versions = "headers {}.{}".format(*find_headers().version)
        raise HeaderNotFoundError(path, _TARGET, outcome.stderr, line, missing.group(1), searched, versions)
    summary = found["text"] if found else outcome.stderr.strip().rpartition("\n")[2]
    raise CompileError(path, _TARGET, outcome.stderr, line, summary)
