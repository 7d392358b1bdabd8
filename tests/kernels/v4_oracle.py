# SPDX-License-Identifier: AGPL-3.0-only
"""DeepSeek-V4's attention without a compressor in FP64, step by step over contiguous rows, as the model defines it.

Nothing here knows of pages, warps or the order of a sum. `*_slack` say what FP32 may lose beside it.
"""

from __future__ import annotations

import numpy as np

from spark_py.testing import Array, f64


def rope(x: Array, positions: Array, theta: float, rope_dim: int, inverse: bool = False) -> Array:
    """Heads [rows, ..., head_dim] with neighbours (2i, 2i + 1) of the last rope_dim elements turned, FP64.

    The angle is rounded to FP32, which the kernels promise: an FP32 cosine of a longer one has no meaning.
    """
    result = x.copy()
    start = x.shape[-1] - rope_dim
    for row, position in enumerate(positions.tolist()):
        for pair in range(rope_dim // 2):
            angle = float(np.float32(position / float(np.float32(theta)) ** (2 * pair / rope_dim)))
            cosine, sine = np.cos(angle), np.sin(-angle if inverse else angle)
            a, b = x[row, ..., start + 2 * pair], x[row, ..., start + 2 * pair + 1]
            result[row, ..., start + 2 * pair] = a * cosine - b * sine
            result[row, ..., start + 2 * pair + 1] = a * sine + b * cosine
    return result


def rope_slack(x: Array, positions: Array, theta: float, rope_dim: int) -> Array:
    """What a rotation in FP32 may lose: five roundings of a pair. Where the FP64 angle lies on a rounding boundary of
    FP32, another pow may round it to the other side."""
    start = x.shape[-1] - rope_dim
    angle = positions[:, None] / float(np.float32(theta)) ** (np.arange(0, rope_dim, 2) / rope_dim)
    tied = (angle * (1 - 2.0**-50)).astype(np.float32) != (angle * (1 + 2.0**-50)).astype(np.float32)
    lost = (2.0**-22 + tied * angle * 2.0**-23).reshape(len(positions), *(1,) * (x.ndim - 2), -1)
    slack = np.zeros(x.shape)
    slack[..., start:] = np.repeat((np.abs(x[..., start::2]) + np.abs(x[..., start + 1 :: 2])) * lost, 2, axis=-1)
    return slack


def rms(x: Array, eps: float, weight: Array | None = None) -> Array:
    """x / sqrt(mean(x^2) + eps), times the weight as it is."""
    normed = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + float(np.float32(eps)))
    return normed if weight is None else normed * weight


def visible(length: int, window: int) -> range:
    """The positions that the last of `length` sees: itself and the window - 1 before it."""
    return range(max(0, length - window), length)


def attention(query: Array, rows: Array, sinks: Array, window: int, scale: float | None = None) -> Array:
    """Heads [heads, d] of the last position over rows [n, d] that are keys and values both: FP64 [heads, d].

    The scale is 1 / sqrt(d). A head's sink is a score that has no value: it is in the denominator alone.
    """
    seen = f64(rows)[list(visible(len(rows), window))]
    scores = f64(query) @ seen.T * (1.0 / np.sqrt(rows.shape[1]) if scale is None else scale)
    sinks = f64(sinks)[:, None]
    top = np.maximum(scores.max(axis=1, keepdims=True), sinks)
    weights = np.exp(scores - top)
    return weights @ seen / (weights.sum(axis=1, keepdims=True) + np.exp(sinks - top))


def grouped(output: Array, weights: Array, groups: int) -> Array:
    """Group g of the concatenated heads [groups * k] through rows of its own of weights [groups * n, k]."""
    parts = output.reshape(groups, -1)
    blocks = weights.reshape(groups, -1, parts.shape[1])
    return np.concatenate([block @ part for block, part in zip(blocks, parts, strict=True)])
