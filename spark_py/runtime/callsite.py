# SPDX-License-Identifier: AGPL-3.0-only
"""Where in the caller's code an allocation, a lookup or a launch was asked for."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

__all__ = ["call_site"]

_PACKAGE = Path(__file__).parent.parent
# The runtime and the launchers act for someone: a report must name that caller.
_INTERIOR = (f"{_PACKAGE / 'runtime'}/", f"{_PACKAGE / 'ops'}/")


def call_site() -> str:
    """ "file:line" of the innermost frame outside `spark_py/runtime` and `spark_py/ops`; "unknown:0" without one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_INTERIOR) and not name.startswith("<frozen"):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown:0"
