# SPDX-License-Identifier: AGPL-3.0-only
"""The small models that verify drafts."""

from .base import Target, TargetRows, TargetState
from .decoder import DecoderTarget
from .deepseek_v4 import DeepseekV4Target
from .paged import BLOCK_SIZE, PagedTarget
from .weights import LayerWeights, TargetWeights, load_target_weights

__all__ = [
    "BLOCK_SIZE",
    "DecoderTarget",
    "DeepseekV4Target",
    "LayerWeights",
    "PagedTarget",
    "Target",
    "TargetRows",
    "TargetState",
    "TargetWeights",
    "load_target_weights",
]
