# SPDX-License-Identifier: AGPL-3.0-only
"""KernelSet: the modules of a kernel folder, from `kernels.toml`, the engine's `KERNEL.toml`, or the files alone.

`kernels.toml` is this project's form: `[modules.NAME]` with `source`, `functions`, `flags`, `min_arch`, `gpu_only` and
`dependent`.
A module may have further files, each compiled to an image of its own, as `[[modules.NAME.others]]` with the same keys;
all files of such a module list their functions.
`KERNEL.toml` is the engine's: `[build] extra_nvcc_flags` and `[modules] stem = "name"`; every .cu and .ptx of the
folder is a module, named by its stem unless renamed. A folder with neither is read as the latter without entries.
"""

from __future__ import annotations

import dataclasses
import logging
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .arch import parse_arch
from .errors import ImageError, InvalidArgumentError, ManifestError, ModuleNotFoundInSetError
from .signature import parse_ptx, parse_source

__all__ = ["KernelSet", "ModuleSource", "kernels_path", "nvrtc_flags"]

log = logging.getLogger("spark_py.runtime.manifest")

_OWN, _ENGINE = "kernels.toml", "KERNEL.toml"
_SUFFIXES = (".cu", ".ptx")
_MODULE_KEYS: Mapping[str, type] = {
    "source": str,
    "functions": list,
    "flags": list,
    "min_arch": str,
    "gpu_only": bool,
    "dependent": bool,
    "others": list,
}
# nvcc's options that NVRTC refuses and that mean nothing for it; the architecture is chosen at compile time.
_TAKES_VALUE = frozenset(
    {"--Werror", "-Werror", "-Xcompiler", "-arch", "--gpu-architecture", "-code", "--gpu-code", "-gencode"}
    | {"--generate-code", "--threads", "--optimize"}
)
_NVCC_ONLY = _TAKES_VALUE | {
    *("-O", "--ptx", "-ptx", "--cubin", "-cubin", "--fatbin", "-fatbin", "--expt-relaxed-constexpr"),
    *("-expt-relaxed-constexpr", "--extended-lambda", "-extended-lambda", "--expt-extended-lambda"),
}


@dataclass(frozen=True, slots=True)
class ModuleSource:
    """One file of a module, .cu or .ptx, and how to compile it. `functions` is empty where the set does not list them.

    `dependent`: every kernel of the file waits by itself for the kernels before it, so that in a graph it may start
    while they run (`spark_dependent.cuh`).
    Most modules have one file. `others` are the further ones of a module that has several, on its first file alone.
    """

    name: str
    path: Path
    functions: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    min_arch: str = "sm_80"
    gpu_only: bool = False
    dependent: bool = False
    others: tuple[ModuleSource, ...] = ()

    @property
    def files(self) -> tuple[ModuleSource, ...]:
        """The module's files, this one first."""
        return (self, *self.others)

    def holding(self, function: str) -> ModuleSource:
        """The file of the module that lists `function`; the first file where none does."""
        return next((file for file in self.files if function in file.functions), self)

    @property
    def is_ptx(self) -> bool:
        """Whether the file is PTX, which is loaded as it is."""
        return self.path.suffix == ".ptx"

    def declared(self) -> tuple[str, ...]:
        """The functions of this file that the manifest lists, else those that its text shows without compiling."""
        if self.functions:
            return self.functions
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
            return tuple(parse_ptx(text, self.path) if self.is_ptx else parse_source(text))
        except (OSError, ImageError):
            return ()  # compiling or loading it says what is wrong


def kernels_path() -> Path:
    """This project's own kernel folder: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "_cuda_src", package.parent / "cuda_src"):
        if (folder / _OWN).is_file():
            return folder
    raise ManifestError(package / "_cuda_src" / _OWN, "the package's own kernels are missing; install it again")


def nvrtc_flags(flags: Iterable[str], folder: Path) -> tuple[str, ...]:
    """nvcc flags as NVRTC takes them: without what only nvcc knows, duplicates dropped, `-I` made absolute."""
    kept: dict[str, None] = {}
    words = iter(flags)
    for word in words:
        stem = word.split("=", 1)[0]
        if stem in _NVCC_ONLY or (stem.startswith("-O") and stem[2:].isdigit()):
            if word in _TAKES_VALUE:
                next(words, None)
            continue
        if word in ("-I", "--include-path", "-D", "--define-macro"):
            value = next(words, "")
            word = f"-D{value}" if word in ("-D", "--define-macro") else f"-I{value}"
        if word.startswith("--include-path="):
            word = "-I" + word.partition("=")[2]
        if word.startswith("-I"):
            word = f"-I{folder / word[2:]}"
        kept[word] = None
    return tuple(kept)


class KernelSet:
    """The modules of one kernel folder. Immutable; nothing is compiled by opening it."""

    def __init__(self, root: Path, modules: Iterable[ModuleSource], manifest: Path | None = None) -> None:
        self.root, self.manifest = root, manifest
        self._modules = MappingProxyType({module.name: module for module in modules})

    def __repr__(self) -> str:
        return f"KernelSet({str(self.manifest or self.root)!r}, {len(self._modules)} modules)"

    @property
    def modules(self) -> Mapping[str, ModuleSource]:
        """Modules by name, in the manifest's order."""
        return self._modules

    def files(self) -> Iterator[ModuleSource]:
        """Every file of every module."""
        for module in self._modules.values():
            yield from module.files

    def module(self, name: str) -> ModuleSource:
        """The module of that name; ModuleNotFoundInSetError lists those present."""
        try:
            return self._modules[name]
        except KeyError:
            raise ModuleNotFoundInSetError(name, tuple(self._modules), str(self.manifest or self.root)) from None

    def known_kernels(self) -> tuple[tuple[str, str], ...]:
        """(module, function) of everything the set declares: the manifest's lists, and for modules without one what
        the file's text shows."""
        return tuple((file.name, name) for file in self.files() for name in file.declared())

    @classmethod
    def open(cls, path: Path | str | None = None) -> KernelSet:
        """The set at `path`: a folder, or one .cu or .ptx file. None opens this project's own kernels.

        A file inside a folder with a manifest keeps the names and flags that the manifest gives it. ManifestError
        names the file and the key at fault.
        """
        root = kernels_path() if path is None else Path(path).absolute()
        if root.is_file():
            return _open_file(root)
        if not root.is_dir():
            raise ManifestError(root, "no such kernel folder or file")
        manifests = [root / name for name in (_OWN, _ENGINE) if name in {entry.name for entry in root.iterdir()}]
        if len(manifests) > 1:
            raise ManifestError(root, f"holds both {_OWN} and {_ENGINE}; keep one")
        if not manifests:
            return cls(root, _loose(root, {}, ()))
        manifest = manifests[0]
        table = _read_toml(manifest)
        modules = _own_form(manifest, table) if manifest.name == _OWN else _engine_form(manifest, table)
        return cls(root, modules, manifest)


def _open_file(path: Path) -> KernelSet:
    if path.suffix not in _SUFFIXES:
        raise ManifestError(path, f"is neither a folder nor a {' or '.join(_SUFFIXES)} file")
    if any((path.parent / name).is_file() for name in (_OWN, _ENGINE)):
        whole = KernelSet.open(path.parent)
        mine = [dataclasses.replace(file, others=()) for file in whole.files() if file.path.samefile(path)]
        if mine:
            return KernelSet(path, mine, whole.manifest)
    return KernelSet(path, [ModuleSource(path.stem, path, flags=(f"-I{path.parent}",))])


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ManifestError(path, f"is not valid TOML: {error}") from error
    except OSError as error:
        raise ManifestError(path, f"cannot be read: {error.strerror}") from error


def _table(manifest: Path, owner: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = owner.get(key, {})
    if not isinstance(value, dict):
        raise ManifestError(manifest, f"{where} is {value!r}: a table is needed")
    return value


def _strings(manifest: Path, value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise ManifestError(manifest, f"{where} is {value!r}: a list of non-empty strings is needed")
    return tuple(value)


def _own_form(manifest: Path, table: Mapping[str, Any]) -> list[ModuleSource]:
    unknown = sorted(set(table) - {"modules"})
    if unknown:
        raise ManifestError(manifest, f"unknown key '{unknown[0]}'; known: modules")
    tables = _table(manifest, table, "modules", "modules")
    if not tables:
        raise ManifestError(manifest, "names no module: [modules.NAME] is needed")
    return [_own_module(manifest, name, _table(manifest, tables, name, f"modules.{name}")) for name in tables]


def _own_module(manifest: Path, name: str, entry: Mapping[str, Any]) -> ModuleSource:
    where = f"modules.{name}"
    first = _own_file(manifest, name, entry, where)
    others = entry.get("others", [])
    if not others:
        return first
    parts = {where: first}
    for number, other in enumerate(others):
        place = f"{where}.others[{number}]"
        if not isinstance(other, dict) or "others" in other:
            raise ManifestError(manifest, f"{place} is {other!r}: a table with the keys of a file is needed")
        parts[place] = _own_file(manifest, name, other, place)
    owner: dict[str, str] = {}
    for place, file in parts.items():
        if not file.functions:
            raise ManifestError(manifest, f"{place}.functions is missing: of several files, each lists its functions")
        for function in file.functions:
            if function in owner:
                raise ManifestError(manifest, f"{place}.functions names '{function}', which {owner[function]} has")
            owner[function] = place
    return dataclasses.replace(first, others=tuple(parts.values())[1:])


def _own_file(manifest: Path, name: str, entry: Mapping[str, Any], where: str) -> ModuleSource:
    for key, value in entry.items():
        if key not in _MODULE_KEYS:
            raise ManifestError(manifest, f"unknown key '{where}.{key}'; known: {', '.join(_MODULE_KEYS)}")
        if not isinstance(value, _MODULE_KEYS[key]):
            raise ManifestError(manifest, f"{where}.{key} is {value!r}: a {_MODULE_KEYS[key].__name__} is needed")
    if not entry.get("source"):
        raise ManifestError(manifest, f"{where}.source is missing")
    folder = manifest.parent
    path = folder / entry["source"]
    if not name:
        raise ManifestError(manifest, "a module's name is empty")
    if path.suffix not in _SUFFIXES:
        raise ManifestError(manifest, f"{where}.source is {entry['source']!r}: a .cu or .ptx file is needed")
    if not path.is_file():
        raise ManifestError(manifest, f"{where}.source is {entry['source']!r}: no such file in {folder}")
    functions = _strings(manifest, entry.get("functions", []), f"{where}.functions")
    twice = next((item for item in functions if functions.count(item) > 1), None)
    if twice is not None:
        raise ManifestError(manifest, f"{where}.functions names '{twice}' twice")
    min_arch = entry.get("min_arch", "sm_80")
    try:
        parse_arch(min_arch)
    except InvalidArgumentError as error:
        raise ManifestError(manifest, f"{where}.min_arch: {error}") from error
    flags = nvrtc_flags((*_strings(manifest, entry.get("flags", []), f"{where}.flags"), f"-I{path.parent}"), folder)
    gpu_only, dependent = entry.get("gpu_only", False), entry.get("dependent", False)
    return ModuleSource(name, path, functions, flags, min_arch, gpu_only, dependent)


def _engine_form(manifest: Path, table: Mapping[str, Any]) -> list[ModuleSource]:
    # Other tables ([shadow_exempt]) and other vendors' build keys belong to the engine's own build.
    build = _table(manifest, table, "build", "build")
    flags = _strings(manifest, build.get("extra_nvcc_flags", []), "build.extra_nvcc_flags")
    names = _table(manifest, table, "modules", "modules")
    for stem, name in names.items():
        if not isinstance(name, str) or not name:
            raise ManifestError(manifest, f"modules.{stem} is {name!r}: a module name is needed")
    return _loose(manifest.parent, names, flags, manifest)


def _loose(
    root: Path, names: Mapping[str, str], flags: Iterable[str], manifest: Path | None = None
) -> list[ModuleSource]:
    files = sorted(path for path in root.iterdir() if path.suffix in _SUFFIXES and path.is_file())
    if not files:
        raise ManifestError(manifest or root, f"{root} holds no .cu or .ptx file")
    options = nvrtc_flags((*flags, f"-I{root}"), root)
    modules: dict[str, ModuleSource] = {}
    for path in files:
        name = names.get(path.stem, path.stem)
        if name in modules:
            raise ManifestError(
                manifest or root, f"module '{name}' comes from both {modules[name].path.name} and {path.name}"
            )
        modules[name] = ModuleSource(name, path, flags=options)
    for stem in sorted(set(names) - {path.stem for path in files}):
        # One map often serves several folders of a tree, so a stem without a file is no fault.
        log.debug("%s: modules.%s names no file of this folder", manifest, stem)
    return list(modules.values())
