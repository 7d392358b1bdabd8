# SPDX-License-Identifier: AGPL-3.0-only
"""Figures of one run of the process. Twin of the baseline in `run_metrics` of the Rust runtime."""

from __future__ import annotations

from .sizes import count

__all__ = ["baseline_free_bytes", "reset_for_new_run", "set_baseline_free_bytes"]

_baseline: list[int] = []


def set_baseline_free_bytes(nbytes: int) -> None:
    """Note the device's free memory before anything was loaded; 0 forgets it."""
    value = count("nbytes", nbytes, 0)
    _baseline[:] = [value] if value else []


def baseline_free_bytes() -> int | None:
    """Free bytes before anything was loaded, or None where nobody noted them."""
    return _baseline[0] if _baseline else None


def reset_for_new_run() -> None:
    """Forget the figures of the run before."""
    _baseline.clear()
