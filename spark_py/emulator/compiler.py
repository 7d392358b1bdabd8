# SPDX-License-Identifier: AGPL-3.0-only
"""What building for the CPU needs: a C++17 compiler and the CUDA headers.

GCC 12 or newer, Clang 14 or newer, or Clang as the `ziglang` wheel brings it; `SPARK_PY_CXX` names another one. The
headers are those of the toolkit that NVRTC uses, so a kernel sees one and the same on GPU and CPU.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..runtime.errors import BackendUnavailableError
from ..runtime.toolkit import header_version

__all__ = ["Compiler", "Headers", "find_compiler", "find_headers"]

ENVIRONMENT = "SPARK_PY_CXX"
_NAMES = ("g++", "g++-14", "g++-13", "g++-12", "clang++", "c++")
_LEAST = {"gcc": 12, "clang": 14}
_CURE = "install g++ 12 or newer (apt install g++), or run: pip install ziglang"
# What x86-64-v3 adds to the base architecture, in the words of /proc/cpuinfo.
_V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler. `version` is all that it says of itself; it is part of every cache key."""

    command: tuple[str, ...]
    kind: Literal["gcc", "clang"]
    version: str

    @property
    def is_zig(self) -> bool:
        """Whether this is Zig's driver of Clang."""
        return any("zig" in Path(word).name for word in self.command)

    def run(self, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        """Run it; messages come in English, whatever the user's language."""
        environment = os.environ | {"LC_ALL": "C"}
        return subprocess.run([*self.command, *arguments], capture_output=True, text=True, env=environment, check=False)


@dataclass(frozen=True, slots=True)
class Headers:
    """The toolkit's header folder, its version, and a text that changes when it is replaced."""

    folder: Path
    version: tuple[int, int]
    fingerprint: str


def _commands() -> Iterator[tuple[str, ...]]:
    named = os.environ.get(ENVIRONMENT, "")
    if named:
        yield tuple(shlex.split(named))
        return
    for name in _NAMES:
        if shutil.which(name):
            yield (name,)
    if importlib.util.find_spec("ziglang") is not None:
        yield (sys.executable, "-m", "ziglang", "c++")


def _probe(command: tuple[str, ...]) -> Compiler | str:
    """The compiler, or why it will not do."""
    try:
        said = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError as error:
        return f"{shlex.join(command)}: {error.strerror}"
    first = said.partition("\n")[0]
    kind: Literal["gcc", "clang"] = "clang" if "clang" in said else "gcc"
    number = re.search(r"(\d+)\.\d+\.\d+", first)
    if number is None:
        return f"{shlex.join(command)}: no version in {first!r}"
    if int(number.group(1)) < _LEAST[kind]:
        return f"{shlex.join(command)} is {kind} {number.group()}, {_LEAST[kind]} or newer is needed"
    return Compiler(command, kind, said.strip())


@functools.lru_cache(maxsize=8)
def _find(named: str) -> Compiler:
    refused: list[str] = []
    for command in _commands():
        found = _probe(command)
        if isinstance(found, Compiler):
            return found
        refused.append(found)
    reason = "; ".join(refused) or "none is on the path"
    raise BackendUnavailableError(f"running kernels on the CPU needs a C++ compiler: {reason}; {_CURE}")


def find_compiler() -> Compiler:
    """The compiler that `SPARK_PY_CXX` names, or the first that is new enough; BackendUnavailableError has the cure."""
    return _find(os.environ.get(ENVIRONMENT, ""))


@functools.cache
def find_headers() -> Headers:
    """The CUDA headers of the NVRTC in use, or where there is no NVRTC those that cuda-pathfinder finds."""
    from ..runtime.modules import toolkit

    folder: Path | None = None
    try:
        kit = toolkit()
        folder = kit.include[0] if kit.include else None
    except BackendUnavailableError:
        from cuda.pathfinder import find_nvidia_header_directory

        found = find_nvidia_header_directory("cudart")
        folder = Path(found) if found else None
    version = header_version(folder) if folder is not None else None
    if folder is None or version is None or not (folder / "cuda_bf16.h").is_file():
        raise BackendUnavailableError(
            "running kernels on the CPU needs the CUDA headers (cuda_bf16.h), and none were found; "
            "run: pip install 'spark-py[cuda12]' (or 'spark-py[cuda13]'); no GPU is needed"
        )
    marks = [folder / name for name in ("cuda.h", "cuda_bf16.hpp", "cuda_fp16.hpp", "cuda_fp8.hpp", "cuda_fp4.hpp")]
    stamps = [f"{m.name}:{m.stat().st_size}:{m.stat().st_mtime_ns}" for m in marks if m.is_file()]
    return Headers(folder, version, f"{folder}|" + "|".join(stamps))


def machine_flags(compiler: Compiler) -> tuple[str, ...]:
    """Flags for this machine's CPU. They are part of the cache key, so a cache folder may serve several machines."""
    machine = platform.machine()
    if machine not in ("x86_64", "aarch64"):
        raise BackendUnavailableError(f"running kernels on the CPU needs x86-64 or AArch64, this machine is {machine}")
    if sys.platform != "linux":
        raise BackendUnavailableError(f"running kernels on the CPU needs Linux, this is {sys.platform}")
    if not compiler.is_zig:
        return ("-march=x86-64-v3",) if _has_v3() else ()
    # Zig spells architectures its own way, takes the machine's CPU unless told, and sanitizes unless told.
    level = "-march=x86_64_v3" if _has_v3() else "-march=x86_64" if machine == "x86_64" else "-mcpu=generic"
    return (level, "-fno-sanitize=all")


@functools.cache
def _has_v3() -> bool:
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return False
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return platform.machine() == "x86_64" and flags is not None and set(flags.group(1).split()) >= _V3
