# SPDX-License-Identifier: AGPL-3.0-only
"""How the engine reads its environment variables: one function a rule. Each takes the text, None where it is not set.

The rules differ from name to name, and a switch that is off by presence stays off with "0": see `levers`.
"""

from __future__ import annotations

import math
import re

__all__ = ["is_one", "parse_f32", "parse_isize", "parse_usize", "present"]

_F32 = re.compile(r"[+-]?(inf|infinity|nan|(\d+\.?\d*|\.\d+)(e[+-]?\d+)?)", re.ASCII | re.IGNORECASE)
_ISIZE = re.compile(r"[+-]?\d+", re.ASCII)
_USIZE = re.compile(r"\+?\d+", re.ASCII)
_USIZE_MAX, _ISIZE_MIN, _ISIZE_MAX = 2**64 - 1, -(2**63), 2**63 - 1


def present(text: str | None) -> bool:
    """Whether the variable is set, whatever to: "0" and the empty text count."""
    return text is not None


def is_one(text: str | None) -> bool:
    """Whether the text is "1" and nothing else: no blanks, not "true"."""
    return text == "1"


def parse_usize(text: str | None) -> int | None:
    """As Rust's `str::parse::<usize>`: ASCII digits, at most one plus sign before them, no blanks, below 2^64."""
    if not _USIZE.fullmatch(text or ""):
        return None
    number = int(text or "")
    return number if number <= _USIZE_MAX else None


def parse_isize(text: str | None) -> int | None:
    """As Rust's `str::parse::<isize>`: ASCII digits, at most one sign before them, no blanks, 64 bits."""
    if not _ISIZE.fullmatch(text or ""):
        return None
    number = int(text or "")
    return number if _ISIZE_MIN <= number <= _ISIZE_MAX else None


def parse_f32(text: str | None) -> float | None:
    """As Rust's `str::parse::<f32>`, which knows neither blanks nor underscores; None for NaN too, which no rule of
    the engine has a use for."""
    if not _F32.fullmatch(text or ""):
        return None
    value = float(text or "")
    return None if math.isnan(value) else value
