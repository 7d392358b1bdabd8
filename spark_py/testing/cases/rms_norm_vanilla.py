# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module rms_norm_vanilla: the norm with the weight as it is."""

from __future__ import annotations

from collections.abc import Mapping

from ..case import Case
from .norm import plain

CASES: Mapping[str, tuple[Case, ...]] = {"rms_norm_vanilla": plain(0.0)}
