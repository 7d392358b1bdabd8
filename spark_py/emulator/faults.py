# SPDX-License-Identifier: AGPL-3.0-only
"""From the runtime's record of a fault to an exception that says who, where, and which buffer."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from ..runtime import errors
from ..runtime.errors import FaultAccess, KernelFaultError
from .launch import Fault

__all__ = ["fault_error"]

_KINDS: tuple[type[KernelFaultError], ...] = (
    KernelFaultError,
    errors.DataRaceError,
    errors.BlockOverlapError,
    errors.KernelBoundsError,
    errors.KernelAlignmentError,
    errors.UninitializedSharedError,
    errors.BarrierDivergenceError,
    errors.KernelDeadlockError,
    errors.WarpMaskError,
    errors.KernelTimeoutError,
    errors.KernelCrashError,
    errors.KernelCrashError,
    errors.KernelTrapError,
    errors.KernelResourceError,
    errors.DependenceError,
)
_ACCESS = ("", "reads", "writes", "updates")
_SPACES = ("", "", "dynamic shared memory", "static shared memory")


def _lines(library: Path, offsets: list[int]) -> list[str]:
    """ "file:line" of code addresses of a library, "" where there is no line table or nothing that reads it."""
    tool = shutil.which("addr2line")
    known = [offset for offset in offsets if offset]
    if tool is None or not known:
        return [""] * len(offsets)
    # A return address is that of the next instruction.
    command = [tool, "-e", str(library), *(hex(offset - 1) for offset in known)]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    found = dict(zip(known, (line.partition(" ")[0] for line in said), strict=False))
    lines = [found.get(offset, "") for offset in offsets]
    return ["" if line.startswith("?") or line.endswith((":0", ":?")) else line for line in lines]


def fault_error(
    kernel: str,
    library: Path,
    fault: Fault,
    describe: Callable[[int], str],
    shared_name: Callable[[int], tuple[str, int] | None],
) -> KernelFaultError:
    """The exception for `fault` of `kernel` ("module::function").

    `describe` names the allocation at a place of the launch's table; `shared_name` gives (variable, offset inside) of
    an offset into static shared memory.
    """
    kind: type[KernelFaultError] = _KINDS[fault.kind]
    here, there = fault.here, fault.other
    lines = _lines(library, [here.pc if here.known else 0, there.pc if there.known else 0])
    line = lines[0] or (f"{fault.file.decode(errors='replace')}:{fault.line}" if fault.line else "")
    first = FaultAccess(here.block.tuple(), here.thread.tuple(), _ACCESS[here.access], line) if here.known else None
    other = FaultAccess(there.block.tuple(), there.thread.tuple(), _ACCESS[there.access], lines[1])
    buffer, offset = "", int(fault.offset)
    if fault.range >= 0:
        buffer = describe(fault.range)
    elif fault.space:
        buffer = _SPACES[fault.space]
        named = shared_name(offset) if fault.space == 3 else None
        if named is not None:
            buffer, offset = f"shared '{named[0]}'", named[1]
    return kind(
        kernel,
        fault.text.decode(errors="replace"),
        access=first,
        other=other if there.known else None,
        buffer=buffer,
        offset=offset if buffer else None,
        nbytes=int(fault.size),
        address=int(fault.address),
    )
