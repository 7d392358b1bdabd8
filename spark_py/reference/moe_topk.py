# SPDX-License-Identifier: AGPL-3.0-only
"""Module `moe_topk`: the experts of a token, largest router logit first, and their softmax weights."""

from __future__ import annotations

import numpy as np

from ._bf16 import WARP, Bf16Array, F32Array, U32Array, halving_sum, padded, to_f32

MAX_EXPERTS = 512
MAX_TOP_K = 32


def largest_first(logits: F32Array, top_k: int) -> U32Array:
    """The experts of the `top_k` largest logits of each row, largest first: FP32 [T, E] gives u32 [T, k].

    Equal logits: the lowest index first; +0 and -0 are equal. NaN comes after -Inf, so it is chosen only where a row
    has fewer than k numbers; the k indices of a row are distinct.
    """
    order = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]  # NumPy sorts NaN last
    return np.asarray(order, np.uint32)


def softmax_weights(values: F32Array, indices: U32Array, normalize: bool) -> F32Array:
    """The weights FP32 [T, k] of the experts `indices` [T, k], that of the largest logit first, among all logits FP32
    [T, E], as `moe_topk_softmax` has them."""
    best = np.take_along_axis(values, indices.astype(np.intp), axis=1)
    top = best[:, :1]
    terms = padded(np.exp(values - top), MAX_EXPERTS).reshape(len(values), -1, WARP)
    lanes = np.zeros((len(values), WARP), np.float32)
    for turn in range(terms.shape[1]):
        lanes = lanes + terms[:, turn]
    weights: F32Array = np.exp(best - top) / halving_sum(lanes)[:, None]
    if normalize:
        weights = weights / halving_sum(padded(weights, WARP))[:, None]
    return weights


def moe_topk_softmax(logits: Bf16Array, top_k: int, normalize: bool) -> tuple[U32Array, F32Array]:
    """(indices u32 [T, k], weights FP32 [T, k]) of router logits BF16 [T, E].

    Weight = exp(l - max) / (sum of exp(l - max) over all E experts), in FP32; with `normalize` divided by the sum of
    the row's k weights on top of that. The sum goes over experts e, e + 32, ... in ascending order, then over the 32 of
    them as a tree. A NaN, or an infinite maximum, makes every weight of its row NaN; the indices stay right.
    """
    with np.errstate(all="ignore"):
        values = to_f32(logits)
        indices = largest_first(values, top_k)
        weights = softmax_weights(values, indices, normalize)
    return indices, weights
