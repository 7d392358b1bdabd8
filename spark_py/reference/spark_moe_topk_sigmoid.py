# SPDX-License-Identifier: AGPL-3.0-only
"""Module `spark_moe_topk_sigmoid`: the router of DeepSeek-V3 and MiniMax-M2. Sigmoid scores, a bias that counts in the
choice alone, groups of experts."""

from __future__ import annotations

import numpy as np

from ._bf16 import WARP, Bf16Array, F32Array, U32Array, halving_sum, padded, to_f32
from .moe_topk import MAX_EXPERTS, MAX_TOP_K, largest_first

__all__ = ["MAX_EXPERTS", "MAX_GROUPS", "MAX_TOP_K", "spark_moe_topk_sigmoid"]

MAX_GROUPS = 32
SMALLEST = np.float32(1e-20)


def open_experts(biased: F32Array, n_group: int, topk_group: int) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Which experts may be chosen, [T, E], by biased scores FP32 [T, E]: those of the topk_group best of n_group runs.

    A run is worth the sum of its two largest biased scores, NaN coming after -Inf; equal runs: the first; a run worth
    NaN comes after all others.
    """
    tokens, experts = biased.shape
    runs = biased.reshape(tokens * n_group, -1)
    best = np.take_along_axis(runs, largest_first(runs, 2).astype(np.intp), axis=1)
    worth = (best[:, 0] + best[:, 1]).reshape(tokens, n_group)
    chosen = np.zeros((tokens, n_group), np.bool_)
    np.put_along_axis(chosen, largest_first(worth, topk_group).astype(np.intp), True, axis=1)
    return np.repeat(chosen, experts // n_group, axis=1)


def spark_moe_topk_sigmoid(
    logits: Bf16Array,
    bias: F32Array | None,
    top_k: int,
    n_group: int,
    topk_group: int,
    normalize: bool,
    scaling_factor: float,
) -> tuple[U32Array, F32Array]:
    """(indices u32 [T, k], weights FP32 [T, k]) of router logits BF16 [T, E] and bias FP32 [E], or None.

    s = 1 / (1 + exp(-l)) in FP32. The k largest of s + bias, largest first, with n_group > 1 among `open_experts`;
    equal ones: the lowest index first; NaN after -Inf. The weights are s alone, with `normalize` divided by their sum
    (a tree over 32 slots) + 1e-20, times scaling_factor.
    """
    with np.errstate(all="ignore"):
        scores = np.float32(1.0) / (np.float32(1.0) + np.exp(-to_f32(logits)))
        biased = scores if bias is None else scores + bias
        if n_group > 1:
            # Sorted apart: whatever an expert's score is, one that may be chosen comes before one that may not.
            open_ = open_experts(biased, n_group, topk_group)
            order = largest_first(biased, biased.shape[1]).astype(np.intp)
            shut = ~np.take_along_axis(open_, order, axis=1)
            order = np.take_along_axis(order, np.argsort(shut, axis=1, kind="stable"), axis=1)
            indices = np.asarray(order[:, :top_k], np.uint32)
        else:
            indices = largest_first(biased, top_k)
        weights = np.take_along_axis(scores, indices.astype(np.intp), axis=1)
        if normalize:
            weights = weights / (halving_sum(padded(weights, WARP))[:, None] + SMALLEST)
        return indices, np.asarray(weights * np.float32(scaling_factor), np.float32)
