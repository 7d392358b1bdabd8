# SPDX-License-Identifier: AGPL-3.0-only
"""Module `gemv`: y = x W^T for one row, with the summation order that all BF16 GEMVs of the kernel set share."""

from __future__ import annotations

import numpy as np

from ._bf16 import WARP, Bf16Array, F32Array, folded, to_bf16

LANES = 64
CHUNK = 8
_STRIPE = LANES * CHUNK
_TILE_ELEMENTS = 1 << 18


def _lanes_apart(values: Bf16Array) -> F32Array:
    """BF16 [n, turns * lanes * 8] as FP32 [turns * 8, n, lanes]: a lane adds along the first axis."""
    count, size = values.shape
    lanes = min(size // CHUNK, LANES)
    turns = size // (lanes * CHUNK)
    apart = values.view(np.uint16).reshape(count, turns, lanes, CHUNK).transpose(1, 3, 0, 2)
    bits = apart.astype(np.uint32, order="C")
    np.left_shift(bits, np.uint32(16), out=bits)
    return bits.view(np.float32).reshape(turns * CHUNK, count, lanes)


def dot_matrix(x: Bf16Array, weights: Bf16Array) -> F32Array:
    """x[m] . w[n]: BF16 [M, K] and BF16 [N, K] give FP32 [M, N], before the rounding to BF16. K % 8 == 0.

    Lane l of 64 adds the 8-element chunks l, l + 64, ... in ascending k, in FP32, where a product of two BF16 is exact
    unless it underflows; each half of the lanes adds up as the tree 16, 8, 4, 2, 1; then first half + second. The bits
    of an element depend on x[m] and w[n] alone.
    """
    count, size = weights.shape
    if size % CHUNK:
        raise ValueError(f"K is {size}: it must be a multiple of {CHUNK}")
    result = np.empty((len(x), count), np.float32)
    whole = size // _STRIPE * _STRIPE
    pieces = [piece for piece in (slice(0, whole), slice(whole, size)) if piece.start < piece.stop]
    factors = [_lanes_apart(x[:, piece]) for piece in pieces]
    rows = max(1, _TILE_ELEMENTS // max(size, 1))
    with np.errstate(all="ignore"):
        for start in range(0, count, rows):
            tile = weights[start : start + rows]
            parts = [_lanes_apart(tile[:, piece]) for piece in pieces]
            for m in range(len(x)):
                lanes = np.zeros((LANES, len(tile)), np.float32)
                for part, factor in zip(parts, factors, strict=True):
                    products = part * factor[:, m : m + 1]
                    # NumPy sums a first axis in order, like the loop below, but a single column in pairs.
                    if part is parts[0] and products[0].size > 1:
                        lanes[: part.shape[2]] = np.add.reduce(products, axis=0, initial=np.float32(0)).T
                    else:
                        for step in products:
                            lanes[: part.shape[2]] += step.T
                halves = folded(lanes[:WARP]), folded(lanes[WARP:])
                result[m, start : start + rows] = halves[0] + halves[1]
    return result


def dot_rows(x: Bf16Array, weights: Bf16Array) -> F32Array:
    """x . w of each row w: BF16 [K] and BF16 [N, K] give FP32 [N]; otherwise as `dot_matrix`."""
    row: F32Array = dot_matrix(x[None], weights)[0]
    return row


def dense_gemv_bf16(x: Bf16Array, weights: Bf16Array) -> Bf16Array:
    """bf16(x . w) of each row w of the weights: BF16 [K] and BF16 [N, K] give BF16 [N]. K % 8 == 0.

    Order of the FP32 sum as `dot_matrix`.
    """
    return to_bf16(dot_rows(x, weights))
