# SPDX-License-Identifier: AGPL-3.0-only
"""The cases of every catalogued kernel: what a kernel of that name has to do, whoever wrote it.

One file a module, each with `CASES`: function -> cases. A case is tagged `abi` (strides, aliases, addresses),
`numeric`, or `decision` where this project chose what the engine leaves open or does otherwise.
"""

from __future__ import annotations

from importlib import import_module

from ...catalog.spec import KernelSpec
from ..case import Case

__all__ = ["cases_of"]


def cases_of(spec: KernelSpec) -> tuple[Case, ...]:
    """The cases of a catalogue row, in the order in which they are run; empty where there is no file of its module."""
    try:
        module = import_module(f"{__name__}.{spec.module}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{spec.module}":
            raise
        return ()
    found: tuple[Case, ...] = module.CASES.get(spec.function, ())
    return found
