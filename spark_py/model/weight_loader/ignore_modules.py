# SPDX-License-Identifier: AGPL-3.0-only
"""Whether a tensor belongs to a module that a checkpoint's configuration keeps out of quantisation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from ...runtime.errors import InvalidArgumentError

__all__ = ["covering"]

_REGEX = "re:"


def covering(tensor: str, ignore_modules: Iterable[str]) -> str | None:
    """The first entry of `ignore_modules` that covers a tensor, or None.

    An entry covers a module, or a tensor, and all below it: `mtp` covers `mtp.fc.weight`, and does not cover
    `mtp2.fc.weight`. `*`, `?` and `[...]` match as in file names, across dots too. `re:` begins a regular expression,
    which must match from the start of the name of the tensor or of a module that it is in.
    InvalidArgumentError for an entry that is no text, is empty, or is no regular expression; and for one string in
    place of the collection.
    """
    if isinstance(ignore_modules, (str, bytes)):
        raise InvalidArgumentError("ignore_modules", ignore_modules, "a collection of entries, not one string")
    parts = tensor.split(".")
    scopes = [".".join(parts[:i]) for i in range(1, len(parts) + 1)]
    # Every entry is looked at, so that a bad one is an error whatever the tensor.
    found = [entry for entry in ignore_modules if _covers(entry, scopes)]
    return found[0] if found else None


def _covers(entry: str, scopes: list[str]) -> bool:
    if not isinstance(entry, str) or not entry.removeprefix(_REGEX):
        raise InvalidArgumentError("ignore_modules", entry, "every entry must be text that is not empty")
    if entry.startswith(_REGEX):
        try:
            pattern = re.compile(entry.removeprefix(_REGEX))
        except re.error as error:
            raise InvalidArgumentError("ignore_modules", entry, f"no regular expression: {error}") from error
        return any(pattern.match(scope) for scope in scopes)
    return any(scope == entry or fnmatchcase(scope, entry) for scope in scopes)
