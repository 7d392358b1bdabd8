# SPDX-License-Identifier: AGPL-3.0-only
"""Module `gemv_fp8w`: E4M3 weights with one FP32 factor a row, and the order of summation that FP8 GEMVs share."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ._bf16 import WARP, Bf16Array, F32Array, folded, to_bf16, to_f32
from ._e4m3 import LARGEST, U8Array, from_e4m3, to_e4m3

LANES = 64
CHUNK = 16
_STRIPE = LANES * CHUNK
_TILE_ELEMENTS = 1 << 18


def tiles(weights: U8Array) -> Iterator[slice]:
    """Slices of the rows of weights [N, K]. ValueError unless K % 16 == 0."""
    count, size = weights.shape
    if size % CHUNK:
        raise ValueError(f"K is {size}: it must be a multiple of {CHUNK}")
    rows = max(1, _TILE_ELEMENTS // max(size, 1))
    return (slice(start, min(start + rows, count)) for start in range(0, count, rows))


def lane_shares(x: F32Array, weights: F32Array) -> F32Array:
    """What each of 64 lanes adds up of x . w: FP32 [K] and FP32 [n, K] give [64, n].

    Lane l adds the products of the 16-element chunks l, l + 64, ... in ascending k; product and sum round to FP32.
    """
    lanes = np.zeros((LANES, len(weights)), np.float32)
    whole = x.size // _STRIPE * _STRIPE
    for piece, width in ((slice(0, whole), LANES), (slice(whole, x.size), (x.size - whole) // CHUNK)):
        if width:
            products = (weights[:, piece] * x[piece]).reshape(len(weights), -1, width, CHUNK).transpose(1, 3, 2, 0)
            for step in np.ascontiguousarray(products).reshape(-1, width, len(weights)):
                lanes[:width] += step
    return lanes


def sum_of_lanes(shares: F32Array) -> F32Array:
    """FP32 [64, n] as [n]: each half as the tree 16, 8, 4, 2, 1, then first half + second."""
    return folded(shares[:WARP]) + folded(shares[WARP:])


def quantize_bf16_to_fp8(x: Bf16Array) -> tuple[U8Array, F32Array]:
    """BF16 [N, K] as E4M3 bytes u8 [N, K] and row scales FP32 [N].

    In FP32: scale = max |x| / 448 of the row (NaN passed over), 1 for a row of zeros; byte = E4M3(x * (1 / scale)),
    nearest, ties to even, saturating at 448, NaN as 0x7F. Infinity makes the scale infinite: what is finite becomes 0
    and infinity NaN. A row whose maximum is at most 448 * 2^-128 has no finite 1 / scale: what is not 0 saturates and
    0 becomes NaN.
    """
    values = to_f32(x)
    with np.errstate(all="ignore"):
        most: F32Array = np.where(np.isnan(values), np.float32(0), np.abs(values)).max(axis=1, initial=0)
        scales: F32Array = np.where(most > 0, most / LARGEST, np.float32(1))
        per_scale: F32Array = np.float32(1) / scales
        return to_e4m3(values * per_scale[:, None]), scales


def dense_gemv_fp8w_batchm(x: Bf16Array, weights: U8Array, row_scale: F32Array) -> Bf16Array:
    """bf16(x[m] . w[n] * row_scale[n]): BF16 [M, K], E4M3 bytes u8 [N, K] and FP32 [N] give BF16 [M, N]. K % 16 == 0.

    Order of the FP32 sum as `lane_shares`; the scale multiplies what each lane has, then `sum_of_lanes`. Bytes 0x7F and
    0xFF are NaN. The bits of an element depend on x[m], w[n] and row_scale[n] alone.
    """
    rows = to_f32(x)
    result = np.empty((len(x), len(weights)), x.dtype)
    with np.errstate(all="ignore"):
        for tile in tiles(weights):
            values = to_f32(from_e4m3(weights[tile]))
            for m, row in enumerate(rows):
                result[m, tile] = to_bf16(sum_of_lanes(lane_shares(row, values) * row_scale[tile]))
    return result


def dense_gemv_fp8w(x: Bf16Array, weights: U8Array, row_scale: F32Array) -> Bf16Array:
    """`dense_gemv_fp8w_batchm` of one row: BF16 [K], u8 [N, K] and FP32 [N] give BF16 [N]."""
    row: Bf16Array = dense_gemv_fp8w_batchm(x[None], weights, row_scale)[0]
    return row
