# SPDX-License-Identifier: AGPL-3.0-only
"""Launcher of module `rms_norm_vanilla`: the same call as `norm.rms_norm`, with that module's handle."""

from __future__ import annotations

from .norm import rms_norm

__all__ = ["rms_norm"]
