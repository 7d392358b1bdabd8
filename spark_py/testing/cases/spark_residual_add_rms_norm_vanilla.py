# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module spark_residual_add_rms_norm_vanilla: those of norm::residual_add_rms_norm, plain weight."""

from __future__ import annotations

from collections.abc import Mapping

from ..case import Case
from .norm import adding

CASES: Mapping[str, tuple[Case, ...]] = {"spark_residual_add_rms_norm_vanilla": adding(0.0)}
