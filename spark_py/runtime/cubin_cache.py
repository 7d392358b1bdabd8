# SPDX-License-Identifier: AGPL-3.0-only
"""CubinCache: compiled modules in the user's cache folder, safe for processes that run side by side.

An entry is one file: magic, digest and length of a JSON header, the header (parameter lists, resources, log, digest of
the image), the image. It is written beside its place and renamed under a file lock, and checked whenever it is read; a
damaged entry is removed and compiled again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock
import platformdirs

from .compiled import CompiledModule
from .errors import InvalidArgumentError

__all__ = ["CACHE_FORMAT", "CubinCache", "default_cache"]

log = logging.getLogger("spark_py.runtime.cubin_cache")

CACHE_FORMAT = 1
"""Part of every key; raised when entries or compile rules change."""

_MAGIC = b"SPKCUB01"
_ENVIRONMENT = "SPARK_PY_CACHE_DIR"


class CubinCache:
    """Compiled modules by key, in `folder` (default: `SPARK_PY_CACHE_DIR`, else the user's cache folder).

    The folder is made with mode 0700. One that belongs to another user, or that everybody may write, is refused with
    InvalidArgumentError: its images would run on the GPU in this user's name. One that cannot be written leaves the
    cache off, with one warning.
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = Path(folder).absolute() if folder is not None else _default_folder()
        self.enabled = self._warned = False
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.folder.stat()
        except OSError as error:
            self._turn_off(error)
            return
        if status.st_uid != os.getuid():
            raise InvalidArgumentError(
                "cache folder",
                str(self.folder),
                f"belongs to user {status.st_uid}, not to {os.getuid()}; set {_ENVIRONMENT} to a folder of your own",
            )
        if status.st_mode & stat.S_IWOTH:
            raise InvalidArgumentError(
                "cache folder", str(self.folder), f"everybody may write it; chmod 700, or set {_ENVIRONMENT}"
            )
        if os.access(self.folder, os.W_OK | os.X_OK):
            self.enabled = True
        else:
            self._turn_off(PermissionError(13, "not writable"))

    def _turn_off(self, error: OSError) -> None:
        if not self._warned:
            log.warning("compiled kernels are not cached: %s: %s", self.folder, error.strerror or error)
        self._warned = True
        self.enabled = False

    def path(self, key: str) -> Path:
        """Where the entry of `key` (hexadecimal) lies."""
        return self.folder / key[:2] / f"{key}.bin"

    @contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """Hold the lock that guards `key`, so that one process compiles and the others wait for its entry."""
        if not self.enabled:
            yield
            return
        lock = filelock.FileLock(self.folder / f"{key[:2]}.lock", mode=0o600)
        try:
            lock.acquire()
        except (OSError, NotImplementedError) as error:
            self._turn_off(error if isinstance(error, OSError) else OSError(str(error)))
            yield
            return
        try:
            yield
        finally:
            lock.release()

    def read(self, key: str) -> CompiledModule | None:
        """The entry of `key`, or None where there is none or it was damaged."""
        if not self.enabled:
            return None
        path = self.path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("cannot read cached kernel %s: %s", path, error)
            return None
        try:
            return _decode(data)
        except (ValueError, KeyError, TypeError) as error:
            log.warning("cached kernel %s is damaged (%s); compiling again", path, error)
            path.unlink(missing_ok=True)
            return None

    def write(self, key: str, module: CompiledModule) -> None:
        """Put an entry in place of whatever was there. A full or read-only disk turns the cache off, with a warning."""
        if not self.enabled:
            return
        path = self.path(key)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_encode(module))
                Path(temporary).replace(path)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
        except OSError as error:
            self._turn_off(error)


@functools.cache
def _opened(folder: str) -> CubinCache:
    return CubinCache(folder)


def default_cache() -> CubinCache:
    """The cache at `SPARK_PY_CACHE_DIR` or in the user's cache folder, opened once a process."""
    return _opened(str(_default_folder()))


def _default_folder() -> Path:
    named = os.environ.get(_ENVIRONMENT)
    return Path(named or platformdirs.user_cache_dir("spark_py", appauthor=False)).expanduser().absolute()


def _encode(module: CompiledModule) -> bytes:
    header = module.header() | {"sha256": hashlib.sha256(module.image).hexdigest(), "size": len(module.image)}
    text = json.dumps(header, sort_keys=False).encode()
    return _MAGIC + hashlib.sha256(text).digest() + len(text).to_bytes(8, "little") + text + module.image


def _decode(data: bytes) -> CompiledModule:
    start = len(_MAGIC) + 32 + 8
    if len(data) < start or not data.startswith(_MAGIC):
        raise ValueError("no entry of this format")
    size = int.from_bytes(data[start - 8 : start], "little")
    text, image = data[start : start + size], data[start + size :]
    if hashlib.sha256(text).digest() != data[len(_MAGIC) : start - 8]:
        raise ValueError("header digest differs")
    header = json.loads(text)
    if hashlib.sha256(image).hexdigest() != header["sha256"]:
        raise ValueError("image digest differs")
    return CompiledModule.from_header(header, image)
