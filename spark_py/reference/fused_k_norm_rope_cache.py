# SPDX-License-Identifier: AGPL-3.0-only
"""Module `fused_k_norm_rope_cache`: key rows normalised, rotated and put into a cache, rounded once at the store."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ._bf16 import WARP, Bf16Array, F32Array, U32Array, halving_sum, padded, to_bf16, to_f32
from ._e4m3 import U8Array, to_e4m3
from .rope import angles

STREAMS = 3


def _sum_of_squares(x: F32Array) -> F32Array:
    """Sum of x^2 over heads [..., head_dim] in the kernels' order: the tree of a warp, then the same over the warps."""
    squares = padded(x * x, -(-x.shape[-1] // WARP) * WARP)
    warps = halving_sum(squares.reshape(*x.shape[:-1], -1, WARP))
    return halving_sum(padded(warps, WARP))


def keys(k: Bf16Array, weight: Bf16Array, turned: F32Array, rotary_dim: int, eps: float) -> F32Array:
    """The keys in FP32: BF16 k [T, heads, head_dim] and angles FP32 [T, rotary_dim / 2] give FP32 of k's shape.

    n = (x * r) * (1 + w) with r = 1 / sqrt(mean(x^2) + eps) of each head; then y[i] = n[i] c - n[i + half] s and
    y[i + half] = n[i + half] c + n[i] s for i < half = rotary_dim / 2, and y = n beyond. Nothing is rounded to BF16.
    """
    half = rotary_dim // 2
    cosine = np.cos(turned.astype(np.float64)).astype(np.float32)[:, None, :]
    sine = np.sin(turned.astype(np.float64)).astype(np.float32)[:, None, :]
    with np.errstate(all="ignore"):
        x = to_f32(k)
        mean = _sum_of_squares(x) / np.float32(k.shape[-1]) + np.float32(eps)
        root = (1.0 / np.sqrt(mean.astype(np.float64))).astype(np.float32)[..., None]
        normed: F32Array = x * root * (np.float32(1.0) + to_f32(weight))
        result = normed.copy()
        first, second = normed[..., :half], normed[..., half:rotary_dim]
        result[..., :half] = first * cosine - second * sine
        result[..., half:rotary_dim] = second * cosine + first * sine
    return result


def _write(cache: np.ndarray[Any, Any], rows: np.ndarray[Any, Any], slots: npt.NDArray[np.int64]) -> None:
    kept = slots >= 0
    cache[slots[kept]] = rows[kept].reshape(int(kept.sum()), cache.shape[1])


def fused_k_norm_rope_cache_write_bf16(
    k: Bf16Array,
    weight: Bf16Array,
    positions: U32Array,
    cache: Bf16Array,
    slots: npt.NDArray[np.int64],
    rotary_dim: int,
    eps: float,
    theta: float,
) -> None:
    """cache[slots[t]] = bf16(keys of row t), where slots[t] >= 0.

    k: BF16 [T, heads, head_dim]; weight: BF16 [head_dim]; positions: u32 [T]; cache: BF16 [S, heads * head_dim],
    written in place; slots: int64 [T].
    """
    turned = angles(positions, rotary_dim, theta)
    _write(cache, to_bf16(keys(k, weight, turned, rotary_dim, eps)), slots)


def fused_k_norm_rope_mrope_cache_write_bf16(
    k: Bf16Array,
    weight: Bf16Array,
    positions: U32Array,
    cache: Bf16Array,
    slots: npt.NDArray[np.int64],
    rotary_dim: int,
    eps: float,
    theta: float,
) -> None:
    """The same with three positions a token: positions u32 [3, T], pair i turned by row i % 3."""
    streams = angles(positions, rotary_dim, theta)
    pair = np.arange(rotary_dim // 2)
    turned = streams[pair % STREAMS, :, pair].T
    _write(cache, to_bf16(keys(k, weight, turned, rotary_dim, eps)), slots)


def fused_k_norm_rope_cache_write_fp8(
    k: Bf16Array,
    weight: Bf16Array,
    positions: U32Array,
    cache: U8Array,
    slots: npt.NDArray[np.int64],
    rotary_dim: int,
    eps: float,
    theta: float,
    inv_scale: float,
) -> None:
    """As `fused_k_norm_rope_cache_write_bf16` into E4M3 bytes: E4M3(y * inv_scale), the product rounded to FP32."""
    y = keys(k, weight, angles(positions, rotary_dim, theta), rotary_dim, eps)
    with np.errstate(over="ignore", invalid="ignore"):
        _write(cache, to_e4m3(y * np.float32(inv_scale)), slots)
