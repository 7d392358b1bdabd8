# SPDX-License-Identifier: AGPL-3.0-only
"""Module `moe_topk_sqrt`: DeepSeek-V4's learned router: scores sqrt(softplus(logit)), a bias in the choice alone."""

from __future__ import annotations

import numpy as np

from ._bf16 import WARP, Bf16Array, F32Array, U32Array, halving_sum, padded, to_f32
from .moe_topk import MAX_EXPERTS, MAX_TOP_K, largest_first

__all__ = ["MAX_EXPERTS", "MAX_TOP_K", "moe_topk_sqrtsoftplus", "sqrt_softplus", "sqrt_weights"]

SMALLEST_SUM = 1e-20


def sqrt_softplus(logits: F32Array) -> F32Array:
    """sqrt(log(1 + exp(l))) in FP32 as sqrt(max(l, 0) + log1p(exp(-|l|))), which never overflows. NaN gives NaN."""
    floor = np.where(logits > 0, logits, np.float32(0.0))
    return np.asarray(np.sqrt(floor + np.log1p(np.exp(-np.abs(logits)))), np.float32)


def sqrt_weights(scores: F32Array, normalize: bool, scaling_factor: float) -> F32Array:
    """Weights of the chosen scores FP32 [T, k]: with `normalize` divided by their sum unless it is at most 1e-20, then
    times scaling_factor. The sum is a tree over 32 slots. Where they are divided, a NaN makes all of its row NaN.
    """
    if normalize:
        total = halving_sum(padded(scores, WARP))[:, None]
        scores = np.where(total <= np.float32(SMALLEST_SUM), scores, scores / total)
    return scores * np.float32(scaling_factor)


def moe_topk_sqrtsoftplus(
    logits: Bf16Array, bias: F32Array, top_k: int, normalize: bool, scaling_factor: float
) -> tuple[U32Array, F32Array]:
    """(indices u32 [T, k], weights FP32 [T, k]) of router logits BF16 [T, E] and bias FP32 [E].

    The k largest of s + bias, s = sqrt(softplus(l)), largest first; equal ones: the lowest index first; NaN after -Inf.
    The weights are `sqrt_weights` of s alone.
    """
    with np.errstate(all="ignore"):
        scores = sqrt_softplus(to_f32(logits))
        indices = largest_first(scores + bias, top_k)
        chosen = np.take_along_axis(scores, indices.astype(np.intp), axis=1)
        return indices, sqrt_weights(chosen, normalize, scaling_factor)
