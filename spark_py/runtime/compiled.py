# SPDX-License-Identifier: AGPL-3.0-only
"""CompiledModule: an image that a driver can load, with what is known of its kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from .signature import Kind, Param, Signature

__all__ = ["CompiledModule", "Resources"]


@dataclass(frozen=True, slots=True)
class Resources:
    """What the assembler reports of one kernel: registers a thread, and bytes: static shared memory a block, stack
    and spills a thread."""

    registers: int
    shared: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0


@dataclass(frozen=True, slots=True)
class CompiledModule:
    """A loadable image. `signatures` has every entry; `resources` is empty for PTX, which the driver assembles."""

    image: bytes = field(repr=False)
    kind: Literal["cubin", "ptx"]
    arch: str
    signatures: Mapping[str, Signature]
    resources: Mapping[str, Resources]
    log: str = field(default="", repr=False)
    from_cache: bool = False

    def header(self) -> dict[str, Any]:
        """Everything but the image, as JSON takes it."""
        return {
            "kind": self.kind,
            "arch": self.arch,
            "signatures": {
                name: [[p.name, p.kind.name, p.size, p.ctype, p.align] for p in signature.params]
                for name, signature in self.signatures.items()
            },
            "resources": {name: asdict(resources) for name, resources in self.resources.items()},
            "log": self.log,
        }

    @classmethod
    def from_header(cls, header: Mapping[str, Any], image: bytes) -> CompiledModule:
        """The module that `header()` described; KeyError, TypeError or ValueError where it is no such thing."""
        signatures = {
            name: Signature(
                name, tuple(Param(n, Kind[kind], size, ctype, align) for n, kind, size, ctype, align in rows)
            )
            for name, rows in header["signatures"].items()
        }
        resources = {name: Resources(**fields) for name, fields in header["resources"].items()}
        return cls(image, header["kind"], header["arch"], signatures, resources, header["log"], from_cache=True)
