# SPDX-License-Identifier: AGPL-3.0-only
"""The small models that verify drafts."""

from .base import Target, TargetRows, TargetState
from .deepseek_v4 import DeepseekV4Target
from .paged import BLOCK_SIZE, PagedTarget
from .qwen3_next import Qwen3NextTarget
from .weights import LayerWeights, TargetWeights, load_target_weights

__all__ = [
    "BLOCK_SIZE",
    "DeepseekV4Target",
    "LayerWeights",
    "PagedTarget",
    "Qwen3NextTarget",
    "Target",
    "TargetRows",
    "TargetState",
    "TargetWeights",
    "load_target_weights",
]
