# SPDX-License-Identifier: AGPL-3.0-only
"""Module `norm`: RMS norm with weight 1 + w, alone, with a copy of its input, and after a residual addition.

Formula: y = (x * r) * (1 + w), r = 1 / sqrt(mean(x^2) + eps), over each row of H elements.
"""

from __future__ import annotations

import numpy as np

from ._bf16 import WARP, Bf16Array, F32Array, halving_sum, padded, to_bf16, to_f32

MAX_BLOCK = 1024


def row_sum_of_squares(x: F32Array) -> F32Array:
    """Sum of x^2 over each row of x [T, H] in FP32, giving [T], in the kernels' order.

    Thread t of min(H, 1024) adds x0^2 + x1^2 of the pairs t, t + threads, ..., one term a pair; then the tree 16, 8, 4,
    2, 1 in each warp and again over the warps. The order depends on H alone, so a row's sum does not depend on T.
    """
    rows, size = x.shape
    threads = min(size, MAX_BLOCK)
    pairs = -(-size // 2)
    turns = -(-pairs // threads)
    squares = padded(x * x, 2 * pairs)
    terms = padded(squares[:, 0::2] + squares[:, 1::2], turns * threads).reshape(rows, turns, threads)
    shares = terms[:, 0].copy()
    for turn in range(1, turns):
        shares += terms[:, turn]
    warps = -(-threads // WARP)
    sums = halving_sum(padded(shares, warps * WARP).reshape(rows, warps, WARP))
    return halving_sum(padded(sums, WARP))


def inverse_rms(x: F32Array, eps: float) -> F32Array:
    """1 / sqrt(mean(x^2) + eps) of each row of x [T, H]: [T, 1]. The root is rounded once, from FP64."""
    mean = row_sum_of_squares(x) / np.float32(x.shape[1]) + np.float32(eps)
    return (1.0 / np.sqrt(mean.astype(np.float64))).astype(np.float32)[:, None]


def rms_norm(x: Bf16Array, weight: Bf16Array, eps: float) -> Bf16Array:
    """y = bf16((x * r) * (1 + w)), r = 1 / sqrt(mean(x^2) + eps).

    x: BF16 [T, H]; weight: BF16 [H]; result: BF16 [T, H]. eps is added to the mean, in FP32. A row with a NaN becomes
    NaN; one with an infinity becomes 0, and NaN where the infinity was.
    """
    with np.errstate(all="ignore"):
        values = to_f32(x)
        return to_bf16(values * inverse_rms(values, eps) * (np.float32(1.0) + to_f32(weight)))


def rms_norm_residual(x: Bf16Array, weight: Bf16Array, eps: float) -> tuple[Bf16Array, Bf16Array]:
    """(rms_norm(x), a bit copy of x), both BF16 [T, H]. Arguments as `rms_norm`."""
    return rms_norm(x, weight, eps), x.copy()


def residual_add_rms_norm(
    hidden: Bf16Array, src: Bf16Array, weight: Bf16Array, eps: float
) -> tuple[Bf16Array, Bf16Array]:
    """(bf16(s), output) for s = hidden + src in FP32.

    output = bf16((bf16(s) * r) * (1 + w)) with r = 1 / sqrt(mean(s^2) + eps) from the sums before rounding.
    hidden, src: BF16 [T, H]; weight: BF16 [H]; results: BF16 [T, H]. The kernel stores the first result twice.
    """
    with np.errstate(all="ignore"):
        sums = to_f32(hidden) + to_f32(src)
        rounded = to_bf16(sums)
        scaled = to_f32(rounded) * inverse_rms(sums, eps)
        return rounded, to_bf16(scaled * (np.float32(1.0) + to_f32(weight)))
