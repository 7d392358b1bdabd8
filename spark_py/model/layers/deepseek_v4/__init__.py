# SPDX-License-Identifier: AGPL-3.0-only
"""DeepSeek-V4's decoder layer without a compressor, on this project's kernels: layers 0, 1 and the body of the MTP."""

from __future__ import annotations

from .attention import V4Attention, V4AttentionShape, V4AttentionWeights
from .ffn import V4Ffn
from .hyper import V4HyperConnections, V4HyperShape, V4HyperWeights, V4Norm
from .layer import FeedForward, V4Layer, V4LayerWeights
from .projection import V4GroupedProjection, V4Projection, V4Weight
from .weights import (
    V4BlockWeights,
    V4ExpertWeights,
    V4FfnShape,
    V4FfnWeights,
    V4MtpWeights,
    V4RouterWeights,
    V4Shapes,
    V4TargetWeights,
)

__all__ = [
    "FeedForward",
    "V4Attention",
    "V4AttentionShape",
    "V4AttentionWeights",
    "V4BlockWeights",
    "V4ExpertWeights",
    "V4Ffn",
    "V4FfnShape",
    "V4FfnWeights",
    "V4GroupedProjection",
    "V4HyperConnections",
    "V4HyperShape",
    "V4HyperWeights",
    "V4Layer",
    "V4LayerWeights",
    "V4MtpWeights",
    "V4Norm",
    "V4Projection",
    "V4RouterWeights",
    "V4Shapes",
    "V4TargetWeights",
    "V4Weight",
]
