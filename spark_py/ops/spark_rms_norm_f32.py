# SPDX-License-Identifier: AGPL-3.0-only
"""Launcher of module `spark_rms_norm_f32`: `norm.rms_norm` with that module's handle. The input is FP32, apart from the
output."""

from __future__ import annotations

from .norm import rms_norm

__all__ = ["rms_norm"]
