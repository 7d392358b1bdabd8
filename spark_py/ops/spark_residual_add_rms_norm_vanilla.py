# SPDX-License-Identifier: AGPL-3.0-only
"""Launcher of module `spark_residual_add_rms_norm_vanilla`: `norm.residual_add_rms_norm` with that module's handle."""

from __future__ import annotations

from .norm import residual_add_rms_norm

__all__ = ["residual_add_rms_norm"]
