# SPDX-License-Identifier: AGPL-3.0-only
"""Exact byte ranges of checkpoint files, read straight into memory that the caller owns."""

from __future__ import annotations

import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from .errors import DuplicateWeightError, WeightFileError
from .safetensors_header import FileStamp
from .weight_types import WeightInfo

__all__ = ["TensorReader"]

_COMPARED = 4 << 20
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class TensorReader:
    """Reads tensors in any order, one file open at a time; best in file order. A context manager.

    A file whose size or time of change is no longer that of its header raises WeightFileError: the offsets may be
    stale.
    """

    def __init__(self, stamps: Mapping[Path, FileStamp]) -> None:
        self._stamps = stamps
        self._file: FileIO | None = None
        self._path: Path | None = None

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file that is open."""
        if self._file is not None:
            self._file.close()
        self._file = self._path = None

    def _open(self, info: WeightInfo) -> FileIO:
        if self._file is None or self._path != info.file:
            self.close()
            self._file, self._path = FileIO(info.file, "rb"), info.file
            now, then = FileStamp.of(os.fstat(self._file.fileno())), self._stamps[info.file]
            if now != then:
                what = f"{then.size} bytes, now {now.size}" if now.size != then.size else "same size, written since"
                raise WeightFileError(info.file, f"changed since its header was read: {what}", info.name)
        return self._file

    def check(self, info: WeightInfo) -> None:
        """WeightFileError when the tensor's file is gone, unreadable or changed."""
        self.read(info, 0, np.empty(0, np.uint8))

    def read(self, info: WeightInfo, start: int, into: Bytes) -> None:
        """Fill `into` with the tensor's bytes from `start` on."""
        view = into.data
        done = 0
        try:
            file = self._open(info)
            file.seek(info.offset + start)
            while done < len(view):
                count = file.readinto(view[done:])
                if not count:
                    raise WeightFileError(
                        info.file, f"ends after {done} of {len(view)} bytes from {info.offset + start} on", info.name
                    )
                done += count
        except OSError as error:
            raise WeightFileError(
                info.file, f"reading {len(view)} bytes from {info.offset + start} on: {error}", info.name
            ) from error

    def check_same_bytes(self, info: WeightInfo, other: WeightInfo) -> None:
        """DuplicateWeightError, with the first byte that differs, when two places of one tensor disagree."""
        with TensorReader(self._stamps) as second:
            for start in range(0, info.nbytes, _COMPARED):
                size = min(_COMPARED, info.nbytes - start)
                ours, theirs = np.empty(size, np.uint8), np.empty(size, np.uint8)
                self.read(info, start, ours)
                second.read(other, start, theirs)
                if (differing := np.flatnonzero(ours != theirs)).size:
                    at = int(differing[0])
                    raise DuplicateWeightError(
                        info.file,
                        other.file,
                        info.name,
                        f"byte {start + at} is {ours[at]:#04x} here and {theirs[at]:#04x} in {other.file}: remove the "
                        "file that is stale",
                    )
