# SPDX-License-Identifier: AGPL-3.0-only
"""Which kernels the CPU backend can run: the catalogue's rows, narrowed by a kernel set when one is given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .. import catalog
from ..catalog.spec import KernelSpec
from .errors import FunctionNotFoundError, ModuleNotFoundInSetError, SignatureMismatchError
from .manifest import KernelSet
from .signature import Signature, compare, kernel_spec_signature, parse_ptx, parse_source, reconcile


class HostKernels:
    """Lookup of (module, function) for HostBackend.

    With a kernel folder, a module has to be in it, and the parameter list of its source has to be the catalogue's:
    the reference would otherwise run with another meaning of the arguments than the kernel has.
    """

    def __init__(self, folder: Path | str | None) -> None:
        self._set = KernelSet.open(folder) if folder is not None else None
        self._hidden: set[tuple[str, str | None]] = set()

    def hide(self, module: str, function: str | None) -> None:
        """Make a function, or a module, look absent."""
        self._hidden.add((module, function))

    def known(self) -> Sequence[tuple[str, str]]:
        """(module, function) of every kernel that a lookup would find."""
        return [key for key in catalog.CATALOG if self.has_module(key[0]) and key not in self._hidden]

    def has_module(self, module: str) -> bool:
        """Whether any function of the module can be looked up."""
        if (module, None) in self._hidden:
            return False
        in_catalog = any(key[0] == module for key in catalog.CATALOG)
        return in_catalog if self._set is None else module in self._set.modules

    def find(self, module: str, function: str) -> tuple[KernelSpec, Signature]:
        """The row and the parameter list that launches are checked against."""
        source = str(self._set.root) if self._set is not None else "the catalogue"
        if not self.has_module(module):
            raise ModuleNotFoundInSetError(module, sorted({key[0] for key in self.known()}), source)
        spec = catalog.find(module, function)
        if spec is None or (module, function) in self._hidden:
            present = [name for mod, name in self.known() if mod == module]
            hint = "the CPU backend runs catalogued kernels only"
            raise FunctionNotFoundError(module, function, present, source, hint)
        signature = kernel_spec_signature(spec)
        if self._set is not None:
            self._check_source(module, function, signature)
        return spec, signature

    def _check_source(self, module: str, function: str, signature: Signature) -> None:
        assert self._set is not None
        path = self._set.module(module).holding(function).path
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.suffix == ".ptx":
            entries = parse_ptx(text)
            if function in entries:
                reconcile(signature, entries[function])
                return
        else:
            entries = parse_source(text)
        if function in entries:
            difference = compare(signature, entries[function])
            if difference is not None:
                raise SignatureMismatchError(f"{path}: {module}::{function} differs from the catalogue: {difference}")
        elif path.suffix == ".ptx" or function not in text:
            raise FunctionNotFoundError(module, function, sorted(entries), str(path))
