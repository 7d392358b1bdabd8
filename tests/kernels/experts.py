# SPDX-License-Identifier: AGPL-3.0-only
"""Drawn arguments of expert kernels on the device, tables of addresses among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.testing import Array, Table, upload
from spark_py.testing.case import Argument


def on_device(gpu: GpuBackend, drawn: Mapping[str, Argument]) -> dict[str, Any]:
    """Pointers for arrays and tables, NULL for None, numbers as they are."""
    placed: dict[str, Any] = {}
    for name, value in drawn.items():
        if value is None:
            placed[name] = DevicePtr.NULL
        elif isinstance(value, Table):
            placed[name] = table(gpu, [None if entry is None else upload(gpu, entry) for entry in value.entries])
        elif isinstance(value, np.ndarray):
            placed[name] = upload(gpu, value)
        else:
            placed[name] = value
    return placed


def table(gpu: GpuBackend, entries: list[DevicePtr | None]) -> DevicePtr:
    """A table of addresses; None is 0."""
    return upload(gpu, np.array([0 if entry is None else entry.address for entry in entries], np.uint64))


def row(drawn: Mapping[str, Argument], t: int, *by_row: str) -> dict[str, Argument]:
    """The arguments of row t alone; `by_row` have an axis of rows."""
    return {name: value[t] if name in by_row else value for name, value in drawn.items()}  # type: ignore[index]


def weights(drawn: Mapping[str, Argument], name: str) -> list[Array]:
    """The arrays of a table without holes."""
    entries = drawn[name]
    assert isinstance(entries, Table)
    return [entry for entry in entries.entries if entry is not None]
