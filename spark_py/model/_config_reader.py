# SPDX-License-Identifier: AGPL-3.0-only
"""ConfigReader: typed access to a parsed config.json that remembers which fields were read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..runtime.errors import ConfigError

__all__ = ["ConfigReader"]


class ConfigReader:
    """The fields of a text model: those of `text_config` where the file nests one, else the file's own.

    `outer=True` also looks beside text_config, after it. null counts as missing, as it does for Hugging Face.
    """

    def __init__(
        self, fields: Mapping[str, Any], outer: Mapping[str, Any], source: Path | str, model_type: str
    ) -> None:
        self._fields, self._outer, self._source = fields, outer, source
        self._read: set[str] = {"model_type"}
        self._read_outer: set[str] = {"model_type", "text_config"}
        self.model_type = model_type
        self.family = model_type

    @classmethod
    def of(cls, raw: object, source: Path | str, model_types: Mapping[str, str]) -> ConfigReader:
        """A reader of `raw`; ConfigError where it is no object or where its model_type is not among `model_types`."""
        if not isinstance(raw, Mapping):
            raise ConfigError(source, f"a JSON object is needed, not {type(raw).__name__}")
        kind = raw.get("model_type")
        if kind is None:
            raise ConfigError(source, "has no model_type", "model_type")
        if not isinstance(kind, str) or kind not in model_types:
            raise ConfigError(
                source, f"model_type {kind!r} is not offered; offered: {', '.join(model_types)}", "model_type", kind
            )
        inner = raw.get("text_config")
        if inner is None:
            reader = cls(raw, {}, source, kind)
        elif not isinstance(inner, Mapping):
            raise ConfigError(source, f"an object is needed, not {type(inner).__name__}", "text_config", inner)
        else:
            nested = inner.get("model_type", kind)
            if not isinstance(nested, str) or model_types.get(nested) != model_types[kind]:
                raise ConfigError(source, f"{nested!r} does not belong to {kind!r}", "text_config.model_type", nested)
            reader = cls(inner, raw, source, kind)
        reader.family = model_types[kind]
        return reader

    # ------------------------------------------------------------ errors

    def missing(self, *names: str) -> ConfigError:
        """The error for a needed field of which none of `names` is there."""
        return ConfigError(self._source, f"field {' or '.join(names)} is missing", names[0])

    def bad(self, name: str, value: object, limit: str) -> ConfigError:
        """The error for a value that is not usable."""
        return ConfigError(self._source, f"{name} is {value!r}: {limit}", name, value)

    # ------------------------------------------------------------ fields

    def _get(self, name: str, outer: bool = False) -> Any:
        self._read.add(name)
        value = self._fields.get(name)
        if outer:
            self._read_outer.add(name)
            value = self._outer.get(name) if value is None else value
        return value

    def positive(self, name: str, *default: int) -> int:
        """An integer of at least 1."""
        return self._integer(name, self._get(name), 1, default)

    def count(self, name: str, *default: int) -> int:
        """An integer of at least 0."""
        return self._integer(name, self._get(name), 0, default)

    def optional_count(self, name: str, outer: bool = False) -> int | None:
        """An integer of at least 0, or None."""
        value = self._get(name, outer)
        return None if value is None else self._integer(name, value, 0, ())

    def first_count(self, names: Sequence[str], default: int) -> int:
        """The first of `names` that is there."""
        found = [(name, value) for name in names if (value := self._get(name)) is not None]
        return self._integer(*found[0], 0, ()) if found else default

    def _integer(self, name: str, value: Any, least: int, default: Sequence[int]) -> int:
        if value is None:
            if not default:
                raise self.missing(name)
            return default[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.bad(name, value, f"an integer of at least {least} is needed")
        return value

    def number(
        self,
        name: str,
        *,
        least: float,
        nested: tuple[str, Mapping[str, Any]] | None = None,
        above: bool = False,
        default: float | None = None,
    ) -> float:
        """A finite number of at least `least` (greater with `above`), from the table `nested` or else from the file."""
        value, where = self._get(name), name
        if nested is not None and nested[1].get(name) is not None:
            inner = nested[1][name]
            if value is not None and value != inner:
                raise self.bad(name, value, f"{nested[0]}.{name} says {inner!r}")
            value, where = inner, f"{nested[0]}.{name}"
        if value is None:
            if default is not None:
                return default
            raise self.missing(*([f"{nested[0]}.{name}", name] if nested else [name]))
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.bad(where, value, "a finite number is needed")
        if value < least or (above and value == least):
            raise self.bad(where, value, f"a number {'above' if above else 'of at least'} {least:g} is needed")
        return float(value)

    def flag(self, name: str, default: bool, outer: bool = False) -> bool:
        """true or false."""
        value = self._get(name, outer)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.bad(name, value, "true or false is needed")
        return value

    def text(self, name: str, default: str) -> str:
        """A string."""
        return self.first_text((name,), default)

    def first_text(self, names: Sequence[str], default: str, outer: bool = False) -> str:
        """The first of `names` that is there, a string."""
        found = [(name, value) for name in names if (value := self._get(name, outer)) is not None]
        if not found:
            return default
        name, value = found[0]
        if not isinstance(value, str):
            raise self.bad(name, value, "a string is needed")
        return value

    def texts(self, name: str, default: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """A list of strings."""
        value = self._get(name)
        if value is None:
            return default
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.bad(name, value, "a list of strings is needed")
        return tuple(value)

    def integers(self, name: str, default: tuple[int, ...], outer: bool = False) -> tuple[int, ...]:
        """A list of integers of at least 0; one integer counts as a list of it."""
        value = self._get(name, outer)
        if value is None:
            return default
        items = value if isinstance(value, list) else [value]
        return tuple(self._integer(name, item, 0, ()) for item in items)

    def table(self, name: str, outer: bool = False) -> Mapping[str, Any] | None:
        """An object."""
        value = self._get(name, outer)
        if value is not None and not isinstance(value, Mapping):
            raise self.bad(name, value, "an object is needed")
        return value

    def rest(self) -> Mapping[str, Any]:
        """The fields that were not read, as ModelConfig.unknown has them."""
        inner = {name: value for name, value in self._fields.items() if name not in self._read}
        outer = {f"outer.{name}": value for name, value in self._outer.items() if name not in self._read_outer}
        return MappingProxyType(inner | outer)
