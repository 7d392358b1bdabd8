# SPDX-License-Identifier: AGPL-3.0-only
"""The peers of the launch benchmark do what they are measured for: each packs the ten values at each call."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from tools.bench_launch import ctypes_loops

KINDS = (*[ctypes.c_uint64] * 5, *[ctypes.c_uint32] * 3, ctypes.c_float, ctypes.c_uint64)


@pytest.mark.host_only("about Python alone")
def test_each_way_passes_the_same_values() -> None:
    seen: list[Any] = []

    def launch(handle: Any, *rest: Any) -> int:
        *geometry, shared, stream, table, extra = rest
        read = [ctypes.cast(table[i], ctypes.POINTER(kind)).contents.value for i, kind in enumerate(KINDS)]
        seen.append((handle.value, geometry, shared, stream.value, extra, read))
        return 0

    places = [[(buffer + 1) << 32 | at << 8 for at in range(64)] for buffer in range(5)]
    for name, loop in ctypes_loops(launch, 11, 12, places).items():
        seen.clear()
        loop(66)
        assert len(seen) == 66, name
        for i in (0, 1, 65):
            pointers = [buffer[i & 63] for buffer in places]
            assert seen[i] == (11, [1, 1, 1, 32, 1, 1], 0, 12, None, [*pointers, i, i + 1, i + 2, i * 0.5, i]), name


@pytest.mark.host_only("about Python alone")
def test_a_launch_that_fails_is_no_measurement() -> None:
    for loop in ctypes_loops(lambda *arguments: 700, 1, 0, [[256] * 64] * 5).values():
        with pytest.raises(RuntimeError, match="cuLaunchKernel failed"):
            loop(1)
