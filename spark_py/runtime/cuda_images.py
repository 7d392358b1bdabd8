# SPDX-License-Identifier: AGPL-3.0-only
"""Modules loaded on CUDA devices: one load for each (device, image), however many backends use it."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["Image", "load_image", "module_load_count"]


class Image:
    """A loaded module; CuPy's own class takes no weak references."""

    __slots__ = ("__weakref__", "module")

    def __init__(self, module: Any) -> None:
        self.module = module


# By (device, digest of the image); an entry goes with its last user.
_images: weakref.WeakValueDictionary[tuple[int, bytes], Image] = weakref.WeakValueDictionary()
_lock = threading.Lock()
_loads: dict[int, int] = {}


def module_load_count(ordinal: int) -> int:
    """How many modules this process has loaded on a device."""
    return _loads.get(ordinal, 0)


def load_image(ordinal: int, image: bytes, load: Callable[[bytes], Any]) -> Image:
    """The module of `image` on a device: the one that is there, or what `load` makes of the bytes."""
    key = (ordinal, hashlib.sha256(image).digest())
    with _lock:
        found = _images.get(key)
        if found is None:
            found = Image(load(image))
            _loads[ordinal] = module_load_count(ordinal) + 1
            _images[key] = found
        return found
