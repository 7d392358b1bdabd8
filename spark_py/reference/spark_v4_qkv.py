# SPDX-License-Identifier: AGPL-3.0-only
"""Module `spark_v4_qkv`: DeepSeek-V4's queries and cache rows, normalised, rotated and rounded once.

Formula: y = rotate(n) on the tail and n before it, n = (x * r) * w, r = 1 / sqrt(mean(x^2) + eps); w = 1 for queries.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ._bf16 import WARP, Bf16Array, F32Array, U32Array, halving_sum, padded, to_bf16, to_f32
from ._e4m3 import U8Array, to_e4m3
from .spark_v4_rope import rotate

WIDTH = 8


def _sum_of_squares(x: F32Array) -> F32Array:
    """Sum of x^2 over heads [..., head_dim] in the kernel's order: a lane's vectors of 8, then the tree of a warp."""
    squares = padded(x * x, -(-x.shape[-1] // (WIDTH * WARP)) * WIDTH * WARP)
    squares = squares.reshape(*x.shape[:-1], -1, WARP, WIDTH)
    lanes = np.zeros((*x.shape[:-1], WARP), np.float32)
    for vector in range(squares.shape[-3]):
        for element in range(WIDTH):
            lanes += squares[..., vector, :, element]
    return halving_sum(lanes)


def heads(
    x: Bf16Array, weight: Bf16Array | None, positions: U32Array, rope_dim: int, eps: float, theta: float
) -> F32Array:
    """The heads BF16 [rows, ..., head_dim] normalised and rotated, FP32; positions u32 [rows]."""
    start = x.shape[-1] - rope_dim
    with np.errstate(all="ignore"):
        values = to_f32(x)
        mean = _sum_of_squares(values) / np.float32(x.shape[-1]) + np.float32(eps)
        root = (1.0 / np.sqrt(mean.astype(np.float64))).astype(np.float32)[..., None]
        normed: F32Array = values * root
        if weight is not None:
            normed = normed * to_f32(weight)
    normed[..., start:] = rotate(normed[..., start:], positions, theta)
    return normed


def spark_v4_q_norm_rope(q: Bf16Array, positions: U32Array, rope_dim: int, eps: float, theta: float) -> Bf16Array:
    """bf16(`heads`) of queries BF16 [rows, heads, head_dim] without weights: BF16 of that shape."""
    return to_bf16(heads(q, None, positions, rope_dim, eps, theta))


def _write(pool: np.ndarray[Any, Any], rows: np.ndarray[Any, Any], slots: npt.NDArray[np.int64]) -> None:
    kept = slots >= 0
    pool[slots[kept]] = rows[kept]


def spark_v4_kv_assemble(
    kv: Bf16Array,
    weight: Bf16Array,
    positions: U32Array,
    pool: Bf16Array,
    slots: npt.NDArray[np.int64],
    rope_dim: int,
    eps: float,
    theta: float,
) -> None:
    """pool[slots[t]] = bf16(`heads` of row t), where slots[t] >= 0.

    kv: BF16 [rows, head_dim]; weight: BF16 [head_dim]; positions: u32 [rows]; pool: BF16 [slots, head_dim], written in
    place; slots: int64 [rows].
    """
    _write(pool, to_bf16(heads(kv, weight, positions, rope_dim, eps, theta)), slots)


def spark_v4_kv_assemble_fp8(
    kv: Bf16Array,
    weight: Bf16Array,
    positions: U32Array,
    pool: U8Array,
    slots: npt.NDArray[np.int64],
    rope_dim: int,
    eps: float,
    theta: float,
) -> None:
    """As `spark_v4_kv_assemble` into E4M3 bytes with a scale of 1: rounded once, saturating at 448."""
    _write(pool, to_e4m3(heads(kv, weight, positions, rope_dim, eps, theta)), slots)
