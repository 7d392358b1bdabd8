# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module spark_mxfp4_experts: those of spark_moe_expert_mxfp4 for rows whose order of sums is free."""

from __future__ import annotations

from collections.abc import Mapping

from ..case import Case
from .spark_moe_expert_mxfp4 import CASES as ORDERED


def _free(function: str) -> tuple[Case, ...]:
    return tuple(case for case in ORDERED[function] if case.tag == "numeric")


CASES: Mapping[str, tuple[Case, ...]] = {
    "spark_mxfp4_experts_gate_up": _free("spark_moe_expert_gate_up_mxfp4_rows"),
    "spark_mxfp4_experts_silu_down": _free("spark_moe_expert_silu_down_clamped_mxfp4_rows"),
}
