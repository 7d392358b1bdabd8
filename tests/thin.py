# SPDX-License-Identifier: AGPL-3.0-only
"""Parameters of which some are deep: make test runs a few of them, make deep the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

__all__ = ["thinned"]


def thinned(params: Iterable[Any], keep: Sequence[int], ids: Sequence[str] | None = None) -> list[Any]:
    """`params` with all marked deep but those at the indices `keep`."""
    rows = []
    for i, param in enumerate(params):
        values = param if isinstance(param, tuple) else (param,)
        marks = () if i in keep else (pytest.mark.deep,)
        rows.append(pytest.param(*values, marks=marks, id=None if ids is None else ids[i]))
    return rows
