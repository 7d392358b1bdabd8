# SPDX-License-Identifier: AGPL-3.0-only
"""Module `w4a16_gemv`: y = x W^T with NVFP4 weights, in the two orders of arithmetic that the kernels have.

A weight [N, K] is `packed` uint8 [N, K / 2] (E2M1 codes, the low nibble first), `scales` uint8 [N, K / 16] (E4M3, one
for each chunk of 16 values) and the FP32 factor `scale2` of the whole tensor. K % 16 == 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ._bf16 import WARP, Bf16Array, F32Array, halving_sum, to_bf16, to_f32
from .quantize_nvfp4 import E2M1_VALUES, U8Array, decode_e4m3

LANES = 64
CHUNK = 16
E4M3: F32Array = decode_e4m3(np.arange(256, dtype=np.uint8))
_TILE_ELEMENTS = 1 << 18

F64Array = npt.NDArray[np.float64]


def fma(a: F32Array, b: F32Array, c: F32Array) -> F32Array:
    """a * b + c, rounded to FP32 once.

    The product is exact in FP64. Their sum is rounded to odd, which keeps what the rounding to FP32 needs to know.
    """
    product, addend = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    # One step towards what was lost, where the last bit is even; NaN and infinity have lost nothing.
    step = np.where((error > 0) == (total > 0), 1, -1)
    bits += np.where(np.isfinite(total) & (error != 0) & (bits & 1 == 0), step, 0)
    return total.astype(np.float32)


def codes(packed: U8Array) -> F32Array:
    """The E2M1 values of packed uint8 [N, K / 2]: FP32 [N, K]."""
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1)
    return E2M1_VALUES[nibbles.reshape(len(packed), -1)]


def factors(scales: U8Array, scale2: float) -> F32Array:
    """scale * scale2 of each chunk, rounded to FP32."""
    product: F32Array = E4M3[scales] * np.float32(scale2)
    return product


def _tiles(packed: U8Array, columns: int) -> Iterator[slice]:
    """Slices of the outputs; K is `columns`."""
    if columns % CHUNK or packed.shape[1] * 2 != columns:
        raise ValueError(f"K is {columns}: it must be a multiple of {CHUNK}, and packed {packed.shape} half as wide")
    rows = max(1, _TILE_ELEMENTS // max(columns, 1))
    return (slice(start, start + rows) for start in range(0, len(packed), rows))


def _over_lanes(lanes: F32Array) -> F32Array:
    """FP32 [..., 64] to [...]: the tree of each warp, then first + second."""
    total: F32Array = halving_sum(lanes[..., :WARP]) + halving_sum(lanes[..., WARP:])
    return total


def _chain(x: F64Array, values: F64Array) -> F32Array:
    """Chunks of x [16, C] with those of codes [16, n, C]: FP32 [n, C], fused products added from 0 in ascending k.

    FP64 holds a product exactly and rounds the sum of two FP32 to 53 bits, after which rounding to 24 is the same as
    rounding once: 53 >= 2 * 24 + 2.
    """
    part = np.zeros(values.shape[1:], np.float32)
    for step, value in zip(x, values, strict=True):
        part = (step * value + part).astype(np.float32)
    return part


def scaled_by_chunk(x: Bf16Array, packed: U8Array, scales: U8Array, scale2: float) -> F32Array:
    """x[m] . w[n]: BF16 [M, K] gives FP32 [M, N], the order of all kernels but `w4a16_gemv_qg` and `_logits`.

    Lane l of 64 has two accumulators; number p adds the chunks 2 l + p + 128 j, j ascending. A chunk is one chain of
    16 fused multiply-adds over x * code; its factor enters by a fused multiply-add with the accumulator. The lane's
    value is accumulator 0 + accumulator 1. The bits of an element depend on x[m] and w[n] alone.
    """
    count, size = x.shape
    result = np.empty((count, len(packed)), np.float32)
    apart = to_f32(x).astype(np.float64).reshape(count, -1, CHUNK).transpose(0, 2, 1)
    with np.errstate(all="ignore"):
        for tile in _tiles(packed, size):
            factor = factors(scales[tile], scale2)
            outputs, chunks = factor.shape
            values = codes(packed[tile]).astype(np.float64).reshape(outputs, chunks, CHUNK).transpose(2, 0, 1)
            values = np.ascontiguousarray(values)
            for m in range(count):
                parts = _chain(apart[m], values)
                sums = np.zeros((outputs, 2 * LANES), np.float32)
                for first in range(0, chunks, 2 * LANES):
                    turn = slice(first, min(first + 2 * LANES, chunks))
                    live = slice(0, turn.stop - first)
                    sums[:, live] = fma(factor[:, turn], parts[:, turn], sums[:, live])
                result[m, tile] = _over_lanes(sums[:, 0::2] + sums[:, 1::2])
    return result


def scaled_by_weight(x: Bf16Array, packed: U8Array, scales: U8Array, scale2: float) -> F32Array:
    """x . w[n]: BF16 [K] gives FP32 [N], the order of `w4a16_gemv_qg` and `w4a16_gemv_logits`.

    Lane l of 64 adds the 8-element chunks l, l + 64, ... in ascending k; code * factor, its product with x and the sum
    each round to FP32.
    """
    result = np.empty(len(packed), np.float32)
    width = CHUNK // 2
    with np.errstate(all="ignore"):
        for tile in _tiles(packed, len(x)):
            weights = codes(packed[tile]) * np.repeat(factors(scales[tile], scale2), CHUNK, axis=1)
            products = (to_f32(x) * weights).reshape(len(weights), -1, width)
            lanes = np.zeros((len(weights), LANES), np.float32)
            for first in range(0, products.shape[1], LANES):
                turn = products[:, first : first + LANES]
                for step in range(width):
                    lanes[:, : turn.shape[1]] += turn[:, :, step]
            result[tile] = _over_lanes(lanes)
    return result


def w4a16_gemv(x: Bf16Array, packed: U8Array, scales: U8Array, scale2: float) -> Bf16Array:
    """bf16(x . w[n]): BF16 [K] gives BF16 [N]; also what `w4a16_gemv_sw` computes. Order as `scaled_by_chunk`."""
    row: Bf16Array = to_bf16(scaled_by_chunk(x[None], packed, scales, scale2)[0])
    return row


def w4a16_gemv_batch(x: Bf16Array, packed: U8Array, scales: U8Array, scale2: float) -> Bf16Array:
    """bf16(x[m] . w[n]): BF16 [M, K] gives BF16 [M, N], each row with the bits of `w4a16_gemv`."""
    return to_bf16(scaled_by_chunk(x, packed, scales, scale2))


def w4a16_gemv_qg(
    x: Bf16Array, packed: U8Array, scales: U8Array, scale2: float, num_heads: int, head_dim: int
) -> Bf16Array:
    """bf16(x . w[n]) with queries and gates apart: BF16 [K] gives BF16 [2, num_heads, head_dim], flat.

    Weights are [num_heads, 2, head_dim, K]: each head's query, then its gate. Order as `scaled_by_weight`.
    """
    heads: np.ndarray[Any, Any] = to_bf16(scaled_by_weight(x, packed, scales, scale2)).reshape(num_heads, 2, head_dim)
    return heads.transpose(1, 0, 2).reshape(-1)


def w4a16_gemv_logits(x: Bf16Array, packed: U8Array, scales: U8Array, scale2: float) -> F32Array:
    """x . w[n] in FP32: BF16 [K] gives FP32 [N]. Order as `scaled_by_weight`."""
    return scaled_by_weight(x, packed, scales, scale2)
