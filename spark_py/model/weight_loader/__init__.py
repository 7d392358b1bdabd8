# SPDX-License-Identifier: AGPL-3.0-only
"""From the tensor names of checkpoints to the structs of `weight_map`. Twin of `weight_loader/`, one file a family."""

from __future__ import annotations

from .deepseek_v4 import has_v4_mtp, load_v4_mtp_weights, load_v4_target_weights
from .dequant_plan import HostWeight, WeightFormat, WeightPlan, check_scales_applied, plan_weight, read_weight
from .mtp_modules import free_copied_modules, load_mtp_modules, modules_present
from .mtp_names import mtp_tensor_shapes
from .quantization import forced_quantization
from .qwen3_next import free_copied, has_dense_ffn, load_mtp_weights
from .upload import in_store, plan_for_device, upload_weights

__all__ = [
    "HostWeight",
    "WeightFormat",
    "WeightPlan",
    "check_scales_applied",
    "forced_quantization",
    "free_copied",
    "free_copied_modules",
    "has_dense_ffn",
    "has_v4_mtp",
    "in_store",
    "load_mtp_modules",
    "load_mtp_weights",
    "load_v4_mtp_weights",
    "load_v4_target_weights",
    "modules_present",
    "mtp_tensor_shapes",
    "plan_for_device",
    "plan_weight",
    "read_weight",
    "upload_weights",
]
