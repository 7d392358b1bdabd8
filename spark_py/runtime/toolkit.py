# SPDX-License-Identifier: AGPL-3.0-only
"""The CUDA toolkit in use: NVRTC's version, and headers that belong to it.

The folder beside the NVRTC library that was loaded comes first, then what cuda-pathfinder finds (wheels, conda,
CUDA_PATH, system), and the first whose version is NVRTC's wins. So neither a wrong CUDA_PATH nor another toolkit's
wheels in the same environment get in.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from .errors import BackendUnavailableError, ToolkitMismatchError

__all__ = ["STUB_HEADERS", "Toolkit", "check_one_cupy", "find_cutlass", "find_toolkit", "header_version"]

log = logging.getLogger("spark_py.runtime.toolkit")

Version = tuple[int, int]

_CUPY_NAMES = ("cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy")
_VERSION_FILES = (("cuda.h", "CUDA_VERSION"), ("cuda_runtime_api.h", "CUDART_VERSION"))

# The types are those of CCCL's cuda/std/cstdint, which declares the same names.
_STDINT = "".join(
    f"typedef {sign} {word} {prefix}int{bits}_t;\n"
    for bits, word in ((8, "char"), (16, "short"), (32, "int"), (64, "long long"))
    for sign, prefix in (("signed", ""), ("unsigned", "u"))
)
_STDINT += "typedef int64_t intptr_t;\ntypedef uint64_t uintptr_t;\n"
_STDINT += "".join(
    f"#ifndef {name}\n#define {name} {value}\n#endif\n"
    for name, value in (
        ("INT32_MAX", "2147483647"),
        ("INT32_MIN", "(-2147483647 - 1)"),
        ("UINT32_MAX", "4294967295U"),
        ("INT64_MAX", "9223372036854775807LL"),
        ("UINT64_MAX", "18446744073709551615ULL"),
    )
)
_MATH = "".join(
    f"#ifndef {name}\n#define {name} {value}\n#endif\n"
    for name, value in (
        ("INFINITY", "__int_as_float(0x7f800000)"),
        ("NAN", "__int_as_float(0x7fffffff)"),
        ("M_PI", "3.14159265358979323846"),
    )
)
STUB_HEADERS: dict[str, str] = {
    # NVRTC has the functions of these headers built in, and none of the files.
    "math.h": "#pragma once\n" + _MATH,
    "assert.h": "#pragma once\n",
    "stdint.h": "#pragma once\n" + _STDINT,
    "cstdint": "#pragma once\n#include <stdint.h>\nnamespace std {\n"
    + "".join(f"using ::{p}int{b}_t;\n" for b in (8, 16, 32, 64) for p in ("", "u"))
    + "using ::intptr_t;\nusing ::uintptr_t;\n}\n",
}


def install_line(extra: str) -> str:
    """The command that installs an extra of this package, which lives in its source folder and not on an index."""
    return f"pip install -e '.[{extra}]' in spark_py's source folder"


@dataclass(frozen=True, slots=True)
class Toolkit:
    """NVRTC and its headers. `archs` are the architecture numbers NVRTC knows (90 for sm_90); `headers` is None and
    `include` empty where no headers were found; `cutlass` is the folder of `cute/` and `cutlass/`, if installed.
    `fingerprint` changes when any of them is replaced."""

    nvrtc: Version
    headers: Version | None
    include: tuple[Path, ...]
    archs: tuple[int, ...]
    library: Path | None
    cutlass: Path | None
    fingerprint: str

    @property
    def extra(self) -> str:
        """The pip line that installs a matching set."""
        return install_line(f"cuda{self.nvrtc[0]}")

    def versions(self) -> str:
        """ "NVRTC 12.9, headers 12.9", for messages."""
        headers = "none" if self.headers is None else "{}.{}".format(*self.headers)
        return f"NVRTC {self.nvrtc[0]}.{self.nvrtc[1]}, headers {headers}"


def _installed_cupy() -> list[str]:
    """ "cupy-cuda12x 14.2.0" of every CuPy distribution in this environment."""
    present = []
    for name in _CUPY_NAMES:
        try:
            present.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return present


def check_one_cupy() -> None:
    """BackendUnavailableError where several CuPy distributions share this environment: their files overwrite each
    other, and which one answers is chance."""
    present = _installed_cupy()
    if len(present) > 1:
        names = " ".join(entry.split()[0] for entry in present)
        raise BackendUnavailableError(
            f"several CuPy distributions are installed ({', '.join(present)}) and overwrite each other; "
            f"run: pip uninstall -y {names}, then {install_line('cuda12')} or {install_line('cuda13')}, one of them"
        )


def header_version(folder: Path) -> Version | None:
    """(major, minor) that the headers in `folder` state, or None where they are not CUDA's."""
    for name, macro in _VERSION_FILES:
        try:
            text = (folder / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        match = re.search(rf"^[ \t]*#[ \t]*define[ \t]+{macro}[ \t]+(\d+)", text, re.MULTILINE)
        if match:
            number = int(match.group(1))
            return number // 1000, number % 1000 // 10
    return None


def _loaded_library() -> Path | None:
    """The libnvrtc file that this process has mapped (Linux), else None."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    match = re.search(r"^(?:\S+\s+){5}(/.*/libnvrtc\.so[^/\n]*)$", maps, re.MULTILINE)
    return Path(match.group(1)) if match else None


def _pathfinder(name: str) -> Path | None:
    pathfinder = importlib.import_module("cuda.pathfinder")
    try:
        found = pathfinder.find_nvidia_header_directory(name)
    except RuntimeError:  # a name that this release of cuda-pathfinder does not know
        return None
    return Path(found) if found else None


def _beside(library: Path | None) -> list[Path]:
    """Header folders of the toolkit that a libnvrtc belongs to: its own tree, or the sibling wheel's."""
    if library is None:
        return []
    # An installer may link the library to its own store: both ends of the link are looked at.
    roots = dict.fromkeys(path.parent.parent for path in (library, library.resolve()))
    return [folder for root in roots for folder in (root / "include", root.parent / "cuda_runtime" / "include")]


def _choose(candidates: Iterable[Path], nvrtc: Version) -> tuple[Path | None, Version | None]:
    versions: dict[Path, Version] = {}
    for folder in candidates:
        version = header_version(folder)
        if version is not None:
            versions.setdefault(folder, version)
    for folder, version in versions.items():
        if version == nvrtc:
            return folder, version
    for folder, version in versions.items():
        if version[0] == nvrtc[0]:
            # Releases of one major are made to work together; where they do not, the compile error says both versions.
            log.warning("CUDA headers %d.%d in %s with NVRTC %d.%d", *version, folder, *nvrtc)
            return folder, version
    if versions:
        folder, version = next(iter(versions.items()))
        searched = ", ".join(f"{path} ({v[0]}.{v[1]})" for path, v in versions.items())
        raise ToolkitMismatchError(
            f"NVRTC is {nvrtc[0]}.{nvrtc[1]}, but the CUDA headers found are of another major version: {searched}; "
            f"run: {install_line(f'cuda{nvrtc[0]}')}",
            nvrtc,
            version,
        )
    return None, None


def _first_with(folders: Iterable[Path | None], inside: str) -> Path | None:
    return next((folder for folder in folders if folder is not None and (folder / inside).exists()), None)


def find_cutlass(find: Callable[[str], Path | None] = _pathfinder) -> Path | None:
    """The folder of `cute/` and `cutlass/`, or None."""
    return _first_with((find("cutlass"), _cutlass_wheel()), "cutlass/version.h")


def _cutlass_wheel() -> Path | None:
    """The headers of nvidia-cutlass where it is importable without being in a site-packages folder (pip --target)."""
    spec = importlib.util.find_spec("cutlass_library")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "source" / "include"


def _stamp(path: Path | None) -> str:
    if path is None or not path.exists():
        return "-"
    status = path.stat()
    return f"{path}:{status.st_size}:{status.st_mtime_ns}"


def find_toolkit(nvrtc: Any, find: Callable[[str], Path | None] = _pathfinder) -> Toolkit:
    """The toolkit of `nvrtc`, CuPy's NVRTC module. `find` locates a header folder by cuda-pathfinder's name.

    BackendUnavailableError without an NVRTC library, ToolkitMismatchError where only headers of another major version
    are there. Another minor version is taken, with a warning.
    """
    try:
        major, minor = nvrtc.getVersion()
        archs = tuple(int(number) for number in nvrtc.getSupportedArchs())
    except Exception as error:
        # CuPy raises what its loader raised: RuntimeError, OSError or its own type, by release.
        raise BackendUnavailableError(
            f"NVRTC cannot be loaded ({error}); run: {install_line('cuda12')} or {install_line('cuda13')}"
        ) from error
    version = (int(major), int(minor))
    library = _loaded_library()
    for name in _installed_cupy():
        built = re.match(r"cupy-cuda(\d+)x", name)
        if built and int(built.group(1)) != version[0]:
            # CuPy loads the NVRTC that it finds first. Its headers are found all the same; an older driver may refuse
            # what it makes.
            log.warning(
                "%s uses NVRTC %d.%d of another toolkit (%s): a CUDA %s driver may refuse its images; "
                "install one toolkit only: pip install -e '.[cuda%d]' in a fresh environment",
                *(name, *version, library, built.group(1), version[0]),
            )
    found = find("cudart")
    main, headers = _choose([*_beside(library), *([found] if found else [])], version)
    include = [main] if main else []
    if main is not None:
        wheels = main.parent.parent
        cccl = _first_with((main / "cccl", wheels / "cuda_cccl" / "include", find("cccl")), "cuda/std")
        crt = _first_with((main, wheels / "cuda_nvcc" / "include"), "crt/mma.h")
        # CuTe of CUDA 13 names CCCL's headers by the folder: cccl/cuda/std/...
        beside = cccl.parent if cccl is not None and cccl.name == "cccl" else None
        include += [folder for folder in (cccl, crt, beside) if folder is not None and folder != main]
    cutlass = find_cutlass(find)
    stamps = [_stamp(library), *(_stamp(folder / "cuda.h") for folder in include[:1])]
    stamps += [_stamp(folder) for folder in include[1:]]
    stamps.append(_stamp(cutlass / "cutlass" / "version.h") if cutlass else "-")
    return Toolkit(version, headers, tuple(include), archs, library, cutlass, "|".join(stamps))
