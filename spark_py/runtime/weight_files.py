# SPDX-License-Identifier: AGPL-3.0-only
"""Which files a checkpoint consists of, and which tensors they hold together.

Twin of the discovery of spark-runtime's `SafetensorsLoader`. The headers are the truth; an index file may lack tensors
that a header has, but may not contradict one.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import DuplicateWeightError, WeightFileError, WeightIndexError
from .safetensors_header import FileStamp, read_header
from .weight_types import WeightInfo

__all__ = ["Catalog", "read_catalog"]

log = logging.getLogger("spark_py.runtime.weights")

_FAMILIES = ("model", "consolidated")
_DRAFTER = "mtp.safetensors"
_EXTRA = "extra_weights.safetensors"
_NUMBERED = re.compile(r"(?P<head>.*)-(?P<number>\d+)-of-(?P<count>\d+)(?P<tail>\D*)", re.ASCII | re.DOTALL)
_MAX_INDEX_BYTES = 256 << 20
_SHOWN = 8


@dataclass(slots=True)
class Catalog:
    """The tensors of a checkpoint by name, without their bytes.

    `copies` holds, for a name that several shards have, the places that `tensors` does not name; dtype and shape of
    all are equal, the bytes are yet to be compared. `ignored` are safetensors files of the folder that were not read.
    """

    source: Path
    tensors: dict[str, WeightInfo] = field(default_factory=dict)
    copies: dict[str, list[WeightInfo]] = field(default_factory=dict)
    stamps: dict[Path, FileStamp] = field(default_factory=dict)
    ignored: tuple[Path, ...] = ()


def read_catalog(path: Path | str) -> Catalog:
    """The catalog of a safetensors file (any name) or of a checkpoint folder. Reads headers and index, no tensor.

    In a folder: `model.safetensors.index.json` and the shards it names, `model.safetensors`, `model-*.safetensors`,
    `model.safetensors-*`; where there is none of these, the same with `consolidated`; then `mtp.safetensors`; last
    `extra_weights.safetensors`, whose tensors replace those of the same name. WeightFileError, WeightIndexError and
    DuplicateWeightError name the file, the tensor and both values.
    """
    source = Path(path)
    try:
        if not source.is_dir():
            if not source.exists():
                raise WeightFileError(source, "does not exist")
            catalog = Catalog(source)
            _add(catalog, source, {})
            return catalog
        with os.scandir(source) as entries:
            present = {entry.name for entry in entries if entry.is_file()}
    except (OSError, ValueError) as error:
        raise WeightFileError(source, f"cannot be read: {error}") from error
    return _read_folder(source, present)


def _read_folder(folder: Path, present: set[str]) -> Catalog:
    family, shards, index = _choose(present)
    index_path = folder / index
    weight_map = _read_index(index_path) if index in present else {}
    named = set(weight_map.values())
    if lost := sorted(named - present):
        holders = [name for name, shard in weight_map.items() if shard == lost[0]]
        raise WeightIndexError(
            index_path,
            f"names {_some(lost)}, of which the folder has none; {lost[0]!r} holds {len(holders)} tensors, "
            f"{holders[0]!r} among them",
        )
    if not weight_map:
        _check_complete(folder, shards)
    files = sorted((shards | named | ({_DRAFTER} & present)) - {_EXTRA})
    has_extra = _EXTRA in present
    if not files and not has_extra:
        looked = ", ".join(f"{f}.safetensors, {f}-*.safetensors" for f in _FAMILIES)
        raise WeightFileError(folder, f"has no weights: looked for {looked}, {_DRAFTER}, {_EXTRA}")

    catalog = Catalog(folder)
    for file in files:
        _add(catalog, folder / file, weight_map)
    extra = {tensor.name: tensor for tensor in _read(catalog, folder / _EXTRA)} if has_extra else {}
    _check_index(catalog, index_path, weight_map, extra)
    for name in extra:
        catalog.copies.pop(name, None)
    catalog.tensors.update(extra)
    read = {*files, _EXTRA}
    catalog.ignored = tuple(folder / f for f in sorted(present - read) if f.endswith(".safetensors"))
    log.debug(
        "%s: family %s, %d files, %d tensors, %d of them not in the index, %d replaced by %s; not read: %s",
        folder, family, len(catalog.stamps), len(catalog.tensors), len(catalog.tensors.keys() - weight_map.keys()),
        len(extra), _EXTRA, ", ".join(f.name for f in catalog.ignored) or "none",
    )  # fmt: skip
    return catalog


def _choose(present: set[str]) -> tuple[str, set[str], str]:
    """(family, its shards in the folder, name of its index): the first family of which the folder has something."""
    for family in _FAMILIES:
        pattern = re.compile(
            rf"{family}(-.+)?\.safetensors|{family}\.safetensors-(.+\.safetensors|\d+-of-\d+)", re.ASCII | re.DOTALL
        )
        shards = {file for file in present if pattern.fullmatch(file)}
        index = f"{family}.safetensors.index.json"
        if shards or index in present:
            return family, shards, index
    return "none", set(), f"{_FAMILIES[0]}.safetensors.index.json"


def _check_complete(folder: Path, shards: set[str]) -> None:
    """Without an index, the numbers in the names tell whether a shard is missing."""
    groups: dict[tuple[str, int, str], dict[int, str]] = defaultdict(dict)
    for shard in sorted(shards):
        if match := _NUMBERED.fullmatch(shard):
            groups[match["head"], int(match["count"]), match["tail"]][int(match["number"])] = shard
    for (_, count, _), numbers in groups.items():
        first = 0 if 0 in numbers else 1
        have = sum(first <= number < first + count for number in numbers)
        if have < count:
            lost = next(number for number in range(first, first + count) if number not in numbers)
            some = next(iter(numbers.values()))
            raise WeightFileError(folder, f"shard {lost} is missing: {some!r} is one of {count}, the folder has {have}")


def _read_index(path: Path) -> dict[str, str]:
    """The index's map from tensor to file name. The names must be plain, so that no index leads out of the folder."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for key, value in pairs:
            if key in entries and entries[key] != value:
                raise WeightIndexError(path, f"has {key!r} twice, as {_short(entries[key])} and as {_short(value)}")
            entries[key] = value
        return entries

    try:
        size = path.stat().st_size
        if size > _MAX_INDEX_BYTES:
            raise WeightIndexError(path, f"is {size} bytes long: limit {_MAX_INDEX_BYTES}")
        index = json.loads(path.read_bytes(), object_pairs_hook=unique)
    except (OSError, ValueError, RecursionError) as error:
        raise WeightIndexError(path, f"is no readable JSON: {error}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise WeightIndexError(path, 'has no "weight_map" object')
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or file in ("", ".", "..") or re.search(r"[/\\\0]", file):
            raise WeightIndexError(path, f"gives {_short(file)} as the file: a plain file name is needed", tensor)
    return weight_map


def _read(catalog: Catalog, file: Path) -> tuple[WeightInfo, ...]:
    header = read_header(file)
    catalog.stamps[file] = header.stamp
    return header.tensors


def _add(catalog: Catalog, file: Path, weight_map: dict[str, str]) -> None:
    """Add a shard. Of several holders of a name the one that the index names counts, else the first."""
    for tensor in _read(catalog, file):
        known = catalog.tensors.setdefault(tensor.name, tensor)
        if known is tensor:
            continue
        if (known.dtype_name, known.shape) != (tensor.dtype_name, tensor.shape):
            raise DuplicateWeightError(
                known.file,
                file,
                tensor.name,
                f"is {known.dtype_name} {list(known.shape)} here, {tensor.dtype_name} {list(tensor.shape)} in {file}",
            )
        if weight_map.get(tensor.name) == file.name:
            catalog.tensors[tensor.name], tensor = tensor, known
        catalog.copies.setdefault(tensor.name, []).append(tensor)


def _check_index(catalog: Catalog, path: Path, weight_map: dict[str, str], extra: dict[str, WeightInfo]) -> None:
    """WeightIndexError where the index places a tensor in a shard whose header lacks it."""
    wrong = []
    for name, shard in weight_map.items():
        holder = extra.get(name) if shard == _EXTRA else catalog.tensors.get(name)
        if holder is None or holder.file.name != shard:
            wrong.append((name, shard, holder or extra.get(name)))
    if wrong:
        name, shard, holder = wrong[0]
        found = f"{holder.file.name!r} has it" if holder else "no file has it"
        more = f" (and {len(wrong) - 1} more such tensors: {_some([w[0] for w in wrong[1:]])})" if wrong[1:] else ""
        raise WeightIndexError(path, f"says {shard!r}, whose header lacks it; {found}{more}", name)


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    rest = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(map(repr, listed[:_SHOWN])) + rest


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
