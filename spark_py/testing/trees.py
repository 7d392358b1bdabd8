# SPDX-License-Identifier: AGPL-3.0-only
"""Foreign kernel sets: a folder or file as `KernelSet` reads it, or the engine's tree with its overlays.

The engine keeps kernels in `HARDWARE/common` and, over it, in `HARDWARE/MODEL/QUANT`: a file there takes the place of
the common file with its stem, whole. Flags and module names come from both folders' `KERNEL.toml`, common first;
`HARDWARE.toml` says the architecture and adds flags; `MODEL.toml` may borrow another model's folders.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..runtime.errors import InvalidArgumentError, ManifestError, UnsupportedError
from ..runtime.manifest import KernelSet, ModuleSource, nvrtc_flags

__all__ = ["ForeignSet", "open_sets", "write_manifest"]

_SUFFIXES = (".cu", ".ptx")
_COMMON, _MANIFEST = "common", "KERNEL.toml"


@dataclass(frozen=True, slots=True)
class ForeignSet:
    """The modules of one set. `label` tells the sets of a tree apart ("gb10/qwen3/nvfp4"); `arch` is what the tree says
    it is for, "" where nothing does. `absent` holds the reason why a (module, function) is meant to be missing."""

    label: str
    modules: tuple[ModuleSource, ...]
    arch: str = ""
    absent: Mapping[tuple[str, str], str] = field(default_factory=dict)


def open_sets(path: Path, module: str | None = None) -> list[ForeignSet]:
    """The sets at `path`: a file, a folder, `HARDWARE/MODEL/QUANT` with its overlay, or a whole tree.

    `module` keeps that module alone; for a single file it is the module that the file stands for. ManifestError names
    the file at fault, InvalidArgumentError a module that is not there.
    """
    path = path.absolute()
    if path.is_file():
        kernels = list(KernelSet.open(path).modules.values())
        if module is not None and len(kernels) == 1:
            only = kernels[0]
            kernels = [ModuleSource(module, only.path, only.functions, only.flags, only.min_arch, only.gpu_only)]
        return [ForeignSet("", tuple(kernels))]
    found = _tree_sets(path) or [ForeignSet("", tuple(KernelSet.open(path).modules.values()))]
    if module is None:
        return found
    kept = [
        ForeignSet(each.label, tuple(m for m in each.modules if m.name == module), each.arch, each.absent)
        for each in found
    ]
    kept = [each for each in kept if each.modules]
    if not kept:
        names = sorted({m.name for each in found for m in each.modules})
        raise InvalidArgumentError("module", module, f"{path} has {', '.join(names)}")
    return kept


def _folders(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _tree_sets(path: Path) -> list[ForeignSet]:
    """The sets of the engine's layout; none where `path` is not part of one."""
    if (path / _COMMON).is_dir():
        return _hardware_sets(path)
    if (path.parent.parent / _COMMON).is_dir() and path.name != _COMMON and _sources(path):
        return [_overlay(path.parent.parent, path.parent.name, path)]
    inside = [folder for folder in _folders(path) if (folder / _COMMON).is_dir()] if not _sources(path) else []
    return [each for folder in inside for each in _hardware_sets(folder)]


def _hardware_sets(hardware: Path) -> list[ForeignSet]:
    sets = [_overlay(hardware, "", None)]
    models = [(folder, _kernel_source(hardware, folder)) for folder in _folders(hardware) if folder.name != _COMMON]
    models.sort(key=lambda pair: pair[0] != pair[1])  # owners before those that borrow
    for model, source in models:
        sets += [_overlay(hardware, model.name, quant) for quant in _folders(source) if _sources(quant)]
    return sets


def _kernel_source(hardware: Path, model: Path) -> Path:
    """The model's own folder, or that of the model whose kernels it borrows; a chain is refused."""
    manifest = model / "MODEL.toml"
    borrowed = _table(manifest, "model").get("kernel_source")
    if borrowed is None:
        return model
    if not isinstance(borrowed, str) or not (hardware / borrowed).is_dir():
        raise ManifestError(manifest, f"model.kernel_source is {borrowed!r}: no such model in {hardware}")
    further = _table(hardware / borrowed / "MODEL.toml", "model").get("kernel_source")
    if further is not None:
        raise ManifestError(manifest, f"model.kernel_source is {borrowed!r}, which borrows from {further!r} itself")
    return hardware / borrowed


def _sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES and path.is_file())


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ManifestError(path, f"is not valid TOML: {error}") from error


def _table(path: Path, key: str) -> Mapping[str, Any]:
    value = _read(path).get(key, {})
    if not isinstance(value, dict):
        raise ManifestError(path, f"{key} is {value!r}: a table is needed")
    return value


def _flags(path: Path) -> list[str]:
    value = _table(path, "build").get("extra_nvcc_flags", [])
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise ManifestError(path, f"build.extra_nvcc_flags is {value!r}: a list of non-empty strings is needed")
    return value


def _architecture(hardware: Path) -> str:
    manifest = hardware / "HARDWARE.toml"
    if not manifest.is_file():
        return ""
    table = _table(manifest, "hardware")
    for key in ("arch", "vendor"):
        if not isinstance(table.get(key), str):
            raise ManifestError(manifest, f"hardware.{key} is {table.get(key)!r}: a string is needed")
    if table["vendor"].lower() != "nvidia":
        raise UnsupportedError(f"{manifest}: hardware.vendor is {table['vendor']!r}: CUDA kernels are NVIDIA's alone")
    arch: str = table["arch"]
    return arch


def _absent(model: Path) -> dict[tuple[str, str], str]:
    manifest = model / "MODEL.toml"
    found: dict[tuple[str, str], str] = {}
    for module, functions in _table(manifest, "expected_absent").items():
        if not isinstance(functions, dict):
            raise ManifestError(manifest, f"expected_absent.{module} is {functions!r}: a table is needed")
        found |= {(module, function): str(reason) for function, reason in functions.items()}
    return found


def _overlay(hardware: Path, model: str, quant: Path | None) -> ForeignSet:
    """`common`, with the files of `quant` in the place of those with the same stem."""
    common = hardware / _COMMON
    layers = [common] if quant is None else [common, quant]
    arch = _architecture(hardware)
    flags = _flags(hardware / "HARDWARE.toml")
    names: dict[str, str] = {}
    files: dict[str, Path] = {}
    for layer in layers:
        manifest = layer / _MANIFEST
        flags += _flags(manifest)
        for stem, name in _table(manifest, "modules").items():
            if not isinstance(name, str) or not name:
                raise ManifestError(manifest, f"modules.{stem} is {name!r}: a module name is needed")
            names[stem] = name
        files |= {path.stem: path for path in _sources(layer)}
    modules: dict[str, ModuleSource] = {}
    for stem, path in sorted(files.items()):
        name = names.get(stem, stem)
        if name in modules:
            raise ManifestError(hardware, f"module '{name}' comes from both {modules[name].path} and {path}")
        # Only the file's own folder: a file of a model does not see the common headers.
        modules[name] = ModuleSource(name, path, flags=nvrtc_flags((*flags, f"-I{path.parent}"), path.parent))
    parts = [hardware.name, model, quant.name] if quant is not None else [hardware.name, _COMMON]
    absent = _absent(hardware / model) if model else {}
    return ForeignSet("/".join(parts), tuple(modules.values()), arch, absent)


def write_manifest(folder: Path, modules: Iterable[tuple[str, Sequence[ModuleSource]]]) -> None:
    """A `kernels.toml` in `folder` that names files wherever they lie: (module, its files) each."""
    lines: list[str] = []
    for name, files in modules:
        key = json.dumps(name, ensure_ascii=False)
        for number, file in enumerate(files):
            lines.append(f"[modules.{key}]" if number == 0 else f"[[modules.{key}.others]]")
            values = {"source": str(file.path), "flags": list(file.flags), "min_arch": file.min_arch}
            if file.functions:
                values["functions"] = list(file.functions)
            lines += [f"{field} = {json.dumps(value, ensure_ascii=False)}" for field, value in values.items()]
    (folder / "kernels.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
