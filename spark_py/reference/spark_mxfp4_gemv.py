# SPDX-License-Identifier: AGPL-3.0-only
"""Module `spark_mxfp4_gemv`: y = x W^T with MXFP4 weights.

A weight [N, K] is `packed` uint8 [N, K / 2] (E2M1 codes, the low nibble first) and `scales` uint8 [N, K / 32] (E8M0,
one for each chunk of 32 values); w = code * 2^(scale - 127). K % 32 == 0.
"""

from __future__ import annotations

import numpy as np

from ._bf16 import WARP, Bf16Array, F32Array, halving_sum, to_bf16, to_f32
from .quantize_nvfp4 import U8Array
from .w4a16_gemv import codes, fma

LANES = 64
CHUNK = 32
_HALF = CHUNK // 2
_TILE_ELEMENTS = 1 << 18


def decode_e8m0(scales: U8Array) -> F32Array:
    """E8M0 bytes as FP32, exact: 2^(byte - 127), NaN for 0xFF. 2^-127 is a subnormal."""
    bits = np.where(scales == 0, np.uint32(1 << 22), scales.astype(np.uint32) << np.uint32(23))
    return np.where(scales == 0xFF, np.float32(np.nan), bits.view(np.float32))


def mxfp4_values(packed: U8Array, scales: U8Array) -> F32Array:
    """The weights: FP32 [N, K], infinite where they are not below 2^128."""
    with np.errstate(all="ignore"):
        values: F32Array = codes(packed) * np.repeat(decode_e8m0(scales), CHUNK, axis=1)
    return values


def mxfp4_products(x: F32Array, packed: U8Array, scales: U8Array) -> F32Array:
    """x[m] . w[n]: FP32 [M, K] gives FP32 [M, N], in the order of every MXFP4 kernel.

    Lane l of 64 has two accumulators; number p adds half p of the chunks l, l + 64, ... ascending. A half is one chain
    of 16 fused multiply-adds over x * code; its scale enters by a fused multiply-add with the accumulator. The lane's
    value is accumulator 0 + accumulator 1; each 32 lanes add up as the tree 16, 8, 4, 2, 1, then first + second. The
    bits of an element depend on x[m] and w[n] alone.
    """
    count, size = x.shape
    if size % CHUNK or packed.shape[1] * 2 != size:
        raise ValueError(f"K is {size}: it must be a multiple of {CHUNK}, and packed {packed.shape} half as wide")
    result = np.empty((count, len(packed)), np.float32)
    apart = x.reshape(count, -1, 2, _HALF)
    rows = max(1, _TILE_ELEMENTS // max(size, 1))
    for start in range(0, len(packed), rows):
        tile = slice(start, start + rows)
        factor = decode_e8m0(scales[tile])[..., None]
        outputs, chunks = factor.shape[:2]
        values = np.ascontiguousarray(codes(packed[tile]).reshape(outputs, chunks, 2, _HALF).transpose(3, 0, 1, 2))
        for m in range(count):
            part = np.zeros((outputs, chunks, 2), np.float32)
            for k in range(_HALF):
                part = fma(apart[m, :, :, k], values[k], part)
            sums = np.zeros((outputs, LANES, 2), np.float32)
            for first in range(0, chunks, LANES):
                turn = slice(first, min(first + LANES, chunks))
                live = slice(0, turn.stop - first)
                sums[:, live] = fma(factor[:, turn], part[:, turn], sums[:, live])
            halves = halving_sum((sums[..., 0] + sums[..., 1]).reshape(outputs, 2, WARP))
            result[m, tile] = halves[:, 0] + halves[:, 1]
    return result


def spark_mxfp4_gemv(x: Bf16Array, packed: U8Array, scales: U8Array) -> Bf16Array:
    """bf16(x . w[n]): BF16 [K] gives BF16 [N]. Order as `mxfp4_products`."""
    row: Bf16Array = spark_mxfp4_gemv_batchm(x[None], packed, scales)[0]
    return row


def spark_mxfp4_gemv_batchm(x: Bf16Array, packed: U8Array, scales: U8Array) -> Bf16Array:
    """bf16(x[m] . w[n]): BF16 [M, K] gives BF16 [M, N], each row with the bits of `spark_mxfp4_gemv`."""
    with np.errstate(all="ignore"):
        return to_bf16(mxfp4_products(to_f32(x), packed, scales))
