# SPDX-License-Identifier: AGPL-3.0-only
"""From the tensor names of checkpoints to the structs of `weight_map`. Twin of `weight_loader/`, one file a family."""

from __future__ import annotations

from .dequant_plan import HostWeight, WeightFormat, WeightPlan, check_scales_applied, plan_weight, read_weight
from .qwen3_next import load_mtp_weights, mtp_tensor_shapes

__all__ = [
    "HostWeight",
    "WeightFormat",
    "WeightPlan",
    "check_scales_applied",
    "load_mtp_weights",
    "mtp_tensor_shapes",
    "plan_weight",
    "read_weight",
]
