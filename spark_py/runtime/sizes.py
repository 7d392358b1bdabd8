# SPDX-License-Identifier: AGPL-3.0-only
"""Checked counts and rounding, for everything that adds up bytes."""

from __future__ import annotations

import operator

import numpy as np

from .errors import InvalidArgumentError
from .launch import div_ceil

__all__ = ["align_up", "count", "integer"]


def integer(name: str, value: object) -> int:
    """`value` as a Python int; InvalidArgumentError for bools and what is no integer."""
    if type(value) is int:
        return value
    if not isinstance(value, (bool, np.bool_)):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise InvalidArgumentError(name, value, "an integer is needed")


def count(name: str, value: object, least: int = 1) -> int:
    """`integer`, and at least `least`."""
    number = integer(name, value)
    if number < least:
        raise InvalidArgumentError(name, number, f"an integer of at least {least} is needed")
    return number


def align_up(value: int, step: int) -> int:
    """The least multiple of `step` that is not below `value`."""
    return div_ceil(value, step) * step
