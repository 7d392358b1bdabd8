# SPDX-License-Identifier: AGPL-3.0-only
"""WeightStore: the tensors of a checkpoint, in files and on the device.

Twin of spark-runtime's `WeightStore` and `SafetensorsLoader`. Unlike the Rust loader, which
uploads all that passes its filters, this one uploads what is asked for, by name, and converts nothing unasked.
"""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from .errors import InvalidArgumentError, MissingWeightError, WeightFileError, WeightNotLoadedError
from .gpu import GpuBackend, exact_int
from .weight_files import Catalog, read_catalog
from .weight_reader import TensorReader
from .weight_types import WeightDtype, WeightInfo, WeightTensor
from .weight_upload import CONVERSIONS, Progress, UploadJob, check_fits, free_all, upload

__all__ = ["WeightDtype", "WeightInfo", "WeightStore", "WeightTensor"]

log = logging.getLogger("spark_py.runtime.weights")

_NEAR_FOR = 16
_SPELLED = 2000  # names compared letter by letter for each missing one
_FP8 = frozenset({WeightDtype.F8_E4M3, WeightDtype.F8_E5M2})


class WeightStore:
    """Tensors by name: those of the files, and those on the device, which the store owns until `release`.

    `open` reads headers only. `load` uploads; `insert` adds a tensor made elsewhere. As a context manager, the store
    releases what it owns on exit. One backend a store; not for use by several threads at once.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._loaded: dict[str, WeightTensor] = {}
        self._asked: set[str] = set()
        self._verified: set[str] = set()
        self._gpu: GpuBackend | None = None

    @classmethod
    def open(cls, path: Path | str) -> WeightStore:
        """The store of a checkpoint folder or safetensors file; `read_catalog` says which files count.

        WeightFileError, WeightIndexError or DuplicateWeightError for what is damaged or contradicts itself.
        """
        return cls(read_catalog(path))

    @classmethod
    def from_map(cls, tensors: Mapping[str, WeightTensor]) -> WeightStore:
        """A store without files that owns `tensors`, which lie on one device."""
        store = cls(Catalog(Path("memory")))
        for name, tensor in tensors.items():
            store.insert(name, tensor)
        return store

    def __enter__(self) -> WeightStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._gpu is not None:
            self.release()

    # ------------------------------------------------------------ what there is

    @property
    def source(self) -> Path:
        """The folder or file that was opened; "memory" for a store without files."""
        return self._catalog.source

    def names(self) -> tuple[str, ...]:
        """Every name in the files or on the device, sorted."""
        return tuple(sorted(self._catalog.tensors.keys() | self._loaded.keys()))

    def contains(self, name: str) -> bool:
        """Whether a file or the device holds the tensor."""
        return name in self._catalog.tensors or name in self._loaded

    def __contains__(self, name: object) -> bool:
        return name in self._catalog.tensors or name in self._loaded

    def __len__(self) -> int:
        return len(self._catalog.tensors.keys() | self._loaded.keys())

    def is_loaded(self, name: str) -> bool:
        """Whether the tensor is on the device."""
        return name in self._loaded

    def info(self, name: str) -> WeightInfo:
        """Shape, dtype, file, offset and stored bytes of a tensor of the files. MissingWeightError otherwise."""
        return self._find([name])[0]

    def get(self, name: str) -> WeightTensor:
        """The tensor on the device. WeightNotLoadedError when only a file has it, MissingWeightError when none has."""
        tensor = self._loaded.get(name)
        if tensor is None:
            raise WeightNotLoadedError(name, self._find([name])[0].file)
        return tensor

    def total_bytes(self) -> int:
        """Bytes on the device; a buffer that several names share counts once."""
        return sum({tensor.ptr: tensor.byte_size for tensor in self._loaded.values()}.values())

    def has_fp8_weights(self) -> bool:
        """Whether a tensor, in the files or on the device, is F8_E4M3 or F8_E5M2 (scales in F8_E8M0 do not count)."""
        return any(tensor.dtype_name in _FP8 for tensor in self._catalog.tensors.values()) or any(
            tensor.dtype in _FP8 for tensor in self._loaded.values()
        )

    def unread(self) -> tuple[str, ...]:
        """Names in the files that neither `load` nor `read` was asked for, sorted: a scale that nobody applied, say."""
        return tuple(sorted(self._catalog.tensors.keys() - self._asked))

    def ignored_files(self) -> tuple[Path, ...]:
        """Safetensors files of the folder that belong to no name pattern and to no index, and were not opened."""
        return self._catalog.ignored

    # ------------------------------------------------------------ from the files

    def load(
        self,
        gpu: GpuBackend,
        names: Iterable[str] | Callable[[str], bool],
        progress: Progress | None = None,
        reserve_bytes: int = 0,
        convert: Mapping[WeightDtype | str, WeightDtype | str] | None = None,
    ) -> tuple[str, ...]:
        """Upload tensors by name, or those for whose name a predicate is true; gives the names that were uploaded.

        Names that are on the device already are left as they are. `reserve_bytes` must stay free besides.
        `convert` rounds, to nearest even: {"F32": "BF16", "F16": "BF16"} or one of the two; dtypes that it does not
        name keep theirs. `progress` is called after each piece.

        All is checked before the first allocation: MissingWeightError (one, for all names),
        UnsupportedWeightDtypeError, WeightFileError (a file that is gone or changed), DuplicateWeightError,
        OutOfDeviceMemoryError (weights plus reserve). An error after that frees what this call uploaded; the store is
        then as before.
        """
        reserve = exact_int(reserve_bytes, "reserve_bytes")
        if reserve < 0:
            raise InvalidArgumentError("reserve_bytes", reserve, "not below 0")
        if self._gpu is not None and self._gpu is not gpu:
            raise InvalidArgumentError("gpu", gpu, f"the store's tensors are on {self._gpu!r}: one backend a store")
        rules = _rules(convert)
        chosen = self._select(names)
        infos = self._find([name for name in chosen if name in self._catalog.tensors or name not in self._loaded])
        jobs = []
        for info in infos:
            job = UploadJob(info, rules.get(info.dtype, info.dtype))
            there = self._loaded.get(info.name)
            if there is None:
                jobs.append(job)
            elif there.dtype != job.dtype:
                raise InvalidArgumentError(
                    "convert", dict(rules), f"{info.name!r} is on the device as {there.dtype}, not {job.dtype}"
                )
        jobs.sort(key=lambda job: (job.info.file, job.info.offset, job.info.name))
        with TensorReader(self._catalog.stamps) as reader:
            self._verify([job.info for job in jobs], reader)
            check_fits(gpu, jobs, reserve)
            bases = upload(gpu, jobs, reader, progress) if jobs else []
        for job, base in zip(jobs, bases, strict=True):
            self._loaded[job.info.name] = WeightTensor(base, job.info.shape, job.dtype)
        if jobs:
            self._gpu = gpu
        self._asked.update(info.name for info in infos)
        log.debug(
            "%s: uploaded %d tensors, %d bytes", self._catalog.source, len(jobs), sum(j.device_bytes for j in jobs)
        )
        return tuple(job.info.name for job in jobs)

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """A tensor of the files as an array of its own on the host, of the ml_dtypes type where NumPy has none.

        F4 comes unpacked, a byte an element: the low half of a stored byte is the even element.
        """
        info = self.info(name)
        try:
            array = np.empty(info.shape, info.dtype.numpy)
        except ValueError as error:
            raise WeightFileError(
                info.file, f"NumPy has no array of shape {list(info.shape)}: {error}", name
            ) from error
        packed = info.dtype is WeightDtype.F4
        flat = np.empty(info.nbytes, np.uint8) if packed else array.reshape(-1).view(np.uint8)
        with TensorReader(self._catalog.stamps) as reader:
            self._verify([info], reader)
            reader.read(info, 0, flat)
        if packed:
            nibbles = array.reshape(-1).view(np.uint8)
            nibbles[0::2], nibbles[1::2] = flat & 15, flat >> 4
        self._asked.add(name)
        return array

    def _select(self, names: Iterable[str] | Callable[[str], bool]) -> list[str]:
        if callable(names):
            return [name for name in self._catalog.tensors if names(name)]
        if isinstance(names, (str, bytes)):
            raise InvalidArgumentError("names", names, "a collection of names or a predicate, not one string")
        chosen = list(dict.fromkeys(names))
        for name in chosen:
            if not isinstance(name, str):
                raise InvalidArgumentError("names", name, "every name must be a str")
        return chosen

    def _find(self, names: Collection[str]) -> list[WeightInfo]:
        missing = [name for name in names if name not in self._catalog.tensors]
        if missing:
            known = self.names()
            near = {name: _near(name, known) for name in missing[:_NEAR_FOR]}
            hint = ""
            if self._catalog.ignored:
                hint = f"files that were not looked into: {', '.join(file.name for file in self._catalog.ignored)}"
            raise MissingWeightError(missing, near, str(self._catalog.source), hint)
        return [self._catalog.tensors[name] for name in names]

    def _verify(self, infos: Iterable[WeightInfo], reader: TensorReader) -> None:
        """Every file is as its header said, and the copies of a tensor in other shards have its bytes."""
        checked: set[Path] = set()
        for info in infos:
            if info.file not in checked:
                checked.add(info.file)
                reader.check(info)
            if info.name not in self._verified:
                for other in self._catalog.copies.get(info.name, ()):
                    reader.check_same_bytes(info, other)
                self._verified.add(info.name)

    # ------------------------------------------------------------ on the device

    def insert(self, name: str, tensor: WeightTensor) -> WeightTensor | None:
        """Give the store a tensor; it frees the buffer in `release`. What had the name before is returned, and is
        then the caller's to free."""
        if not isinstance(name, str):
            raise InvalidArgumentError("name", name, "a str")
        if not isinstance(tensor, WeightTensor):
            raise InvalidArgumentError("tensor", tensor, "a WeightTensor")
        before = self._loaded.get(name)
        self._loaded[name] = tensor
        return before

    def remove(self, name: str) -> WeightTensor:
        """Take a tensor from the device side of the store; the caller frees it. Errors as `get`. A tensor that a file
        holds can be loaded again."""
        tensor = self.get(name)
        del self._loaded[name]
        return tensor

    def release(self, gpu: GpuBackend | None = None) -> None:
        """Free every buffer the store owns, once each; a second call does nothing. `gpu` is needed for a store that
        never loaded. After an error in between the rest is still freed, and the first error is raised."""
        device = gpu if gpu is not None else self._gpu
        if self._gpu is not None and device is not self._gpu:
            raise InvalidArgumentError("gpu", gpu, f"the store's tensors are on {self._gpu!r}")
        if not self._loaded:
            self._gpu = None
            return
        if device is None:
            raise InvalidArgumentError("gpu", gpu, "the backend of the inserted tensors: this store never loaded any")
        bases = list(dict.fromkeys(tensor.ptr for tensor in self._loaded.values()))
        self._loaded.clear()
        self._gpu = None
        if device.closed:
            return  # the backend freed all when it closed
        errors = free_all(device, bases)
        if errors:
            raise errors[0]


def _rules(convert: Mapping[WeightDtype | str, WeightDtype | str] | None) -> dict[WeightDtype, WeightDtype]:
    rules: dict[WeightDtype, WeightDtype] = {}
    for source, target in (convert or {}).items():
        if (source, target) not in CONVERSIONS:
            pairs = ", ".join(sorted(f"{a} -> {b}" for a, b in CONVERSIONS))
            raise InvalidArgumentError("convert", f"{source} -> {target}", f"one of {pairs}")
        rules[WeightDtype(source)] = WeightDtype(target)
    return rules


def _near(name: str, names: Iterable[str], count: int = 3) -> tuple[str, ...]:
    """Up to `count` names that a reader may have meant: those that share the longest dotted tail (a wrong prefix), then
    those of like spelling."""
    parts = name.split(".")

    def shared(other: str) -> int:
        tail = zip(reversed(parts), reversed(other.split(".")), strict=False)
        return next((i for i, (a, b) in enumerate(tail) if a != b), min(len(parts), other.count(".") + 1))

    candidates = list(names)
    tails = sorted((-shared(other), abs(len(other) - len(name)), other) for other in candidates if shared(other) > 1)
    found = [other for _, _, other in tails[:count]]
    window = max(4, math.ceil(len(name) / 3))
    alike = [other for other in candidates if abs(len(other) - len(name)) <= window and other not in found][:_SPELLED]
    return tuple((found + difflib.get_close_matches(name, alike, count, 0.75))[:count])
