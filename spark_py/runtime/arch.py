# SPDX-License-Identifier: AGPL-3.0-only
"""Which compiled architecture runs on which device: the rules of the engine's arch preflight.

Plain `sm_XY` runs on compute capability X.Y and above; `sm_XYa` on exactly X.Y; `sm_XYf` on the same major from X.Y on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import ArchMismatchError, InvalidArgumentError

__all__ = ["ARCHS", "Arch", "arch_of", "parse_arch", "preflight", "runs_on"]

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120a", "sm_121a")
"""What kernels are compiled for: Ampere, Hopper, Blackwell of the data centre, of the desktop, and GB10."""

_NAME = re.compile(r"(?:sm|compute)_(\d{2,3})([af]?)")


@dataclass(frozen=True, slots=True)
class Arch:
    """`sm_121a` in parts: compute capability (12, 1) and suffix "a", "f" or ""."""

    major: int
    minor: int
    suffix: str = ""

    @property
    def capability(self) -> tuple[int, int]:
        """(major, minor)."""
        return self.major, self.minor

    @property
    def number(self) -> int:
        """121 of `sm_121a`, as compilers count."""
        return self.major * 10 + self.minor

    def __str__(self) -> str:
        return f"sm_{self.number}{self.suffix}"


def parse_arch(name: str) -> Arch:
    """`sm_90a` (or `compute_90a`) in parts; InvalidArgumentError for anything else."""
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise InvalidArgumentError("architecture", name, "a name like sm_80, sm_90a or sm_121f is needed")
    major, minor = divmod(int(match.group(1)), 10)
    arch = Arch(major, minor, match.group(2))
    if arch.suffix and arch.capability < (9, 0):
        raise InvalidArgumentError("architecture", name, "the suffixes a and f exist from sm_90 on")
    if arch.suffix == "f" and major < 10:
        raise InvalidArgumentError("architecture", name, "the suffix f exists from sm_100 on")
    return arch


def _capability(cc: tuple[int, int]) -> tuple[int, int]:
    try:
        major, minor = cc
    except (TypeError, ValueError):
        raise InvalidArgumentError("compute capability", cc, "a pair (major, minor) is needed") from None
    if not (isinstance(major, int) and isinstance(minor, int) and major > 0 and 0 <= minor <= 9):
        raise InvalidArgumentError("compute capability", cc, "major >= 1 and minor 0 .. 9 are needed")
    return major, minor


def runs_on(compiled: str, cc: tuple[int, int]) -> bool:
    """Whether code for `compiled` runs on a device of compute capability `cc`."""
    arch, device = parse_arch(compiled), _capability(cc)
    if arch.suffix == "a":
        return device == arch.capability
    if arch.suffix == "f":
        return device[0] == arch.major and device >= arch.capability
    return device >= arch.capability


def arch_of(cc: tuple[int, int]) -> str:
    """The architecture to compile for on a device: with the `a` suffix from 9.0 up, plain below."""
    major, minor = _capability(cc)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def preflight(compiled: str, cc: tuple[int, int]) -> None:
    """ArchMismatchError, with both sides and a way out, unless `compiled` runs on `cc`."""
    if runs_on(compiled, cc):
        return
    arch, device = parse_arch(compiled), _capability(cc)
    rule = {
        "a": f"{arch} runs on compute capability {arch.major}.{arch.minor} only",
        "f": f"{arch} runs on {arch.major}.x from {arch.major}.{arch.minor} on",
        "": f"{arch} runs from compute capability {arch.major}.{arch.minor} on",
    }[arch.suffix]
    own = arch_of(device)
    raise ArchMismatchError(
        str(arch),
        own,
        f"kernels compiled for {arch} do not run on a device of compute capability {device[0]}.{device[1]}: {rule}. "
        f"Compile for {own}, or open a kernel set that was built for it",
    )
