# SPDX-License-Identifier: AGPL-3.0-only
"""PTX files as they are: checked for what a driver would refuse with no more than a number."""

from __future__ import annotations

import re
from pathlib import Path

from .arch import parse_arch, preflight
from .compiled import CompiledModule
from .errors import ImageError, InvalidArgumentError
from .signature import parse_ptx

__all__ = ["load_ptx", "ptx_version_limit"]

_COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"[^"\n]*"', re.DOTALL)
_VERSION = re.compile(r"\.version\s+(\d+)\.(\d+)")
_TARGET = re.compile(r"\.target\s+(\w+)")
# PTX versions that a CUDA 12 release reads where they are not 8.minor (NVIDIA's PTX ISA manual, release notes).
_PTX_OF_12 = {6: 5, 7: 6, 8: 7, 9: 8}


def ptx_version_limit(driver_version: int) -> tuple[int, int] | None:
    """The newest PTX version that a driver of CUDA version `driver_version` (12090 = 12.9) reads; None if unknown."""
    major, minor = driver_version // 1000, driver_version % 1000 // 10
    if major == 11:
        return 7, minor
    if major == 12:
        return 8, _PTX_OF_12.get(minor, minor)
    return (9, minor) if major == 13 else None


def load_ptx(path: Path, arch: str, driver_version: int | None = None) -> CompiledModule:
    """The PTX file as an image for `arch`, without a trailing NUL.

    ImageError where it is empty, truncated or newer than the driver; ArchMismatchError where its `.target` does not run
    on `arch`.
    """
    try:
        text = path.read_bytes().rstrip(b"\0").decode("utf-8")
    except OSError as error:
        raise ImageError(path, arch, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ImageError(path, arch, f"is not text, so it is no PTX: {error}") from error
    if not text.strip():
        raise ImageError(path, arch, "the file is empty")
    if "\0" in text:
        raise ImageError(path, arch, "holds a NUL character, where the driver would stop reading")
    plain = _COMMENT_OR_STRING.sub(" ", text)
    version, target = _VERSION.search(plain), _TARGET.search(plain)
    if version is None:
        raise ImageError(path, arch, "has no .version directive, so it is no PTX")
    if target is None:
        raise ImageError(path, arch, "has no .target directive; the file is truncated")
    for opening, closing in ("{}", "()"):
        if plain.count(opening) != plain.count(closing):
            raise ImageError(
                path,
                arch,
                f"{plain.count(opening)} '{opening}' against {plain.count(closing)} '{closing}'; the file is truncated",
            )
    if not plain.rstrip().endswith(("}", ";")):
        raise ImageError(path, arch, "ends in the middle of a statement; the file is truncated")
    signatures = parse_ptx(text, path)
    if not signatures:
        raise ImageError(path, arch, "has no .entry, so there is nothing to launch")
    number = (int(version.group(1)), int(version.group(2)))
    limit = None if driver_version is None else ptx_version_limit(driver_version)
    if limit is not None and number > limit:
        raise ImageError(
            path,
            arch,
            f"is PTX {number[0]}.{number[1]}, and this driver reads up to {limit[0]}.{limit[1]}; update the driver or "
            "compile with an older toolkit",
        )
    try:
        compiled = parse_arch(target.group(1))
    except InvalidArgumentError as error:
        raise ImageError(path, arch, f".target: {error}") from error
    preflight(str(compiled), parse_arch(arch).capability)
    return CompiledModule(text.encode(), "ptx", arch, signatures, {})
