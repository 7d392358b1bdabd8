# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module spark_moe_rows: those of the kernels for one row, with several."""

from __future__ import annotations

from collections.abc import Mapping

from ..case import Case
from .moe_shared_expert_fused_bf16 import down_cases, gate_up_cases
from .moe_weighted_sum_blend import blend_cases

CASES: Mapping[str, tuple[Case, ...]] = {
    "spark_moe_expert_gate_up_shared_bf16_rows": gate_up_cases((3,)),
    "spark_moe_expert_silu_down_shared_bf16_rows": down_cases((3,)),
    "spark_moe_weighted_sum_blend_rows": blend_cases((4,)),
}
