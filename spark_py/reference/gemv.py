# SPDX-License-Identifier: AGPL-3.0-only
"""Module `gemv`: y = x W^T for one row, with the summation order that all BF16 GEMVs of the kernel set share."""

from __future__ import annotations

import numpy as np

from ._bf16 import WARP, Bf16Array, F32Array, halving_sum, to_bf16, to_f32

LANES = 64
CHUNK = 8
_STRIPE = LANES * CHUNK
_TILE_ELEMENTS = 1 << 17


def dot_rows(x: Bf16Array, weights: Bf16Array) -> F32Array:
    """x . w of each row w: BF16 [K] and BF16 [N, K] give FP32 [N], before the rounding to BF16. K % 8 == 0.

    Lane l of 64 adds the 8-element chunks l, l + 64, ... in ascending k, in FP32, where a product of two BF16 is exact
    unless it underflows; each half of the lanes adds up as the tree 16, 8, 4, 2, 1; then first half + second. A row's
    bits depend on that row alone.
    """
    count, size = weights.shape
    if size % CHUNK:
        raise ValueError(f"K is {size}: it must be a multiple of {CHUNK}")
    result = np.empty(count, np.float32)
    whole, rest = divmod(size, _STRIPE)
    factors = to_f32(x)
    rows = max(1, _TILE_ELEMENTS // max(size, 1))
    with np.errstate(all="ignore"):
        for start in range(0, count, rows):
            products = to_f32(weights[start : start + rows])
            products *= factors
            height = products.shape[0]
            lanes = np.zeros((height, LANES), np.float32)
            stripes = products[:, : whole * _STRIPE].reshape(height, whole, LANES, CHUNK)
            for stripe in range(whole):
                for k in range(CHUNK):
                    lanes += stripes[:, stripe, :, k]
            if rest:
                last = products[:, whole * _STRIPE :].reshape(height, rest // CHUNK, CHUNK)
                for k in range(CHUNK):
                    lanes[:, : rest // CHUNK] += last[:, :, k]
            warps = halving_sum(lanes.reshape(height, LANES // WARP, WARP))
            result[start : start + height] = warps[:, 0] + warps[:, 1]
    return result


def dense_gemv_bf16(x: Bf16Array, weights: Bf16Array) -> Bf16Array:
    """bf16(x . w) of each row w of the weights: BF16 [K] and BF16 [N, K] give BF16 [N]. K % 8 == 0.

    Order of the FP32 sum as `dot_rows`.
    """
    return to_bf16(dot_rows(x, weights))
