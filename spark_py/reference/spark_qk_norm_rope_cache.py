# SPDX-License-Identifier: AGPL-3.0-only
"""Module `spark_qk_norm_rope_cache`: norms of heads, rotation and cache write, as the single kernels one after the
other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ._bf16 import Bf16Array, U32Array, to_f32
from ._e4m3 import U8Array, to_e4m3
from .norm import rms_norm
from .rms_norm_vanilla import rms_norm_vanilla
from .rope import rope_forward


def _headwise(
    x: Bf16Array, weight: Bf16Array | None, positions: U32Array, rotary_dim: int, eps: float, theta: float, plus: bool
) -> Bf16Array:
    """[T, heads, hd], normed head by head where there is a weight, and rotated."""
    if weight is not None:
        norm = rms_norm if plus else rms_norm_vanilla
        x = norm(x.reshape(-1, x.shape[2]), weight, eps).reshape(x.shape)
    turned: Bf16Array = rope_forward(x[None], positions[None], rotary_dim, theta)[0]
    return turned


def _prepare(
    query: Bf16Array,
    keys: Bf16Array,
    values: Bf16Array,
    weights: tuple[Bf16Array | None, Bf16Array | None],
    caches: tuple[npt.NDArray[Any], npt.NDArray[Any]],
    positions: U32Array,
    slots: npt.NDArray[np.int64],
    rotary_dim: int,
    block_size: int,
    cache_stride: int,
    eps: float,
    theta: float,
    one_plus: bool,
    stored: Callable[[Bf16Array, int], npt.NDArray[Any]],
) -> None:
    query[...] = _headwise(query, weights[0], positions, rotary_dim, eps, theta, one_plus)
    keys[...] = _headwise(keys, weights[1], positions, rotary_dim, eps, theta, one_plus)
    for side, rows in enumerate((keys, values)):
        made = stored(rows, side).reshape(len(rows), -1)
        for t, slot in enumerate(slots.tolist()):
            if slot >= 0:
                start = slot // block_size * cache_stride + slot % block_size * made.shape[1]
                caches[side][start : start + made.shape[1]] = made[t]


def spark_qk_norm_rope_cache(
    query: Bf16Array,
    keys: Bf16Array,
    values: Bf16Array,
    weights: tuple[Bf16Array | None, Bf16Array | None],
    caches: tuple[Bf16Array, Bf16Array],
    positions: U32Array,
    slots: npt.NDArray[np.int64],
    rotary_dim: int,
    block_size: int,
    cache_stride: int,
    eps: float,
    theta: float,
    one_plus: bool,
) -> None:
    """query BF16 [T, nq, hd] and keys BF16 [T, nkv, hd] = normed and rotated, in place; keys and values [T, nkv, hd] go
    to the cache.

    weights: of queries and keys, BF16 [hd], or None for no norm; used as 1 + w with `one_plus`. caches: K and V, BF16
    seen flat, blocks cache_stride apart. positions: u32 [T]; slots: int64 [T], a negative one skips the row.
    """
    _prepare(
        query, keys, values, weights, caches, positions, slots, rotary_dim, block_size, cache_stride, eps, theta,
        one_plus, lambda rows, side: rows,
    )  # fmt: skip


def spark_qk_norm_rope_cache_fp8(
    query: Bf16Array,
    keys: Bf16Array,
    values: Bf16Array,
    weights: tuple[Bf16Array | None, Bf16Array | None],
    caches: tuple[U8Array, U8Array],
    positions: U32Array,
    slots: npt.NDArray[np.int64],
    rotary_dim: int,
    block_size: int,
    cache_stride: int,
    eps: float,
    theta: float,
    one_plus: bool,
    scales: tuple[float, float],
) -> None:
    """As `spark_qk_norm_rope_cache` into E4M3 bytes: E4M3(x * (1 / scale)), scales being those of K and V."""

    def stored(rows: Bf16Array, side: int) -> npt.NDArray[Any]:
        with np.errstate(over="ignore", invalid="ignore"):
            return to_e4m3(to_f32(rows) * (np.float32(1.0) / np.float32(scales[side])))

    _prepare(
        query, keys, values, weights, caches, positions, slots, rotary_dim, block_size, cache_stride, eps, theta,
        one_plus, stored,
    )  # fmt: skip
