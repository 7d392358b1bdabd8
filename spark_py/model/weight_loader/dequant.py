# SPDX-License-Identifier: AGPL-3.0-only
"""Quantised weights as FP32, on the host: FP8 E4M3 with its scales, NVFP4 and MXFP4.

Weights are [N, K]. Each element is the decoded code times the decoded scale, in FP32: one product for FP8 and MXFP4,
(code * group scale) * factor for NVFP4, of which the first product is exact. NaN codes and scales give NaN; a product
beyond FP32 gives an infinity. `round_to_bf16` makes BF16 of the result, a second rounding.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np

from ...runtime.errors import InvalidArgumentError
from .dequant_codes import BF16, E2M1, E8M0, Array, F32Array, decode_e2m1, decode_e4m3, decode_e8m0, widen_scale

__all__ = [
    "FP8_BLOCK",
    "MXFP4_GROUP",
    "NVFP4_GROUP",
    "Fp8Scales",
    "dequant_fp8",
    "dequant_mxfp4",
    "dequant_nvfp4",
    "fp8_scale_shapes",
    "fp8_scales",
]

FP8_BLOCK = 128
"""Rows and columns that share a scale in block-scaled FP8; the last block of either may be smaller."""
NVFP4_GROUP = 16
MXFP4_GROUP = 32


class Fp8Scales(StrEnum):
    """How many elements of an FP8 weight share a scale."""

    TENSOR = "tensor"
    ROW = "row"
    BLOCK = "block"


def fp8_scale_shapes(n: int, k: int) -> dict[Fp8Scales, tuple[tuple[int, ...], ...]]:
    """The shapes that the scales of an FP8 weight [n, k] may have. Where one shape is several kinds (n = 1, or a weight
    of one block), they mean the same."""
    return {
        Fp8Scales.TENSOR: ((), (1,), (1, 1)),
        Fp8Scales.ROW: ((n,), (n, 1)),
        Fp8Scales.BLOCK: ((-(-n // FP8_BLOCK), -(-k // FP8_BLOCK)),),
    }


def fp8_scales(weight: tuple[int, ...], scale: tuple[int, ...]) -> Fp8Scales | None:
    """The kind of an FP8 weight's scales by the two shapes; None where they do not fit each other."""
    if len(weight) != 2:
        return None
    return next((kind for kind, shapes in fp8_scale_shapes(*weight).items() if scale in shapes), None)


def dequant_fp8(weight: Array, scale: Array) -> F32Array:
    """FP32 [N, K] of an E4M3 weight [N, K] (float8_e4m3fn or uint8) and its multipliers (FP32, BF16 or E8M0).

    The shape of `scale` says what it is: [], [1] or [1, 1] one for all; [N] or [N, 1] one a row;
    [ceil(N / 128), ceil(K / 128)] one a block. InvalidArgumentError for other shapes and types.
    """
    if scale.dtype not in (np.dtype(np.float32), BF16, E8M0):
        raise InvalidArgumentError("scale", scale.dtype, "its type must be float32, bfloat16 or float8_e8m0fnu")
    _check_matrix("weight", weight)
    kind = fp8_scales(weight.shape, scale.shape)
    if kind is None:
        shapes = [shape for shapes in fp8_scale_shapes(*weight.shape).values() for shape in shapes]
        raise InvalidArgumentError("scale", scale.shape, f"its shape must be one of {shapes} for {weight.shape}")
    values, factors = decode_e4m3(weight), widen_scale(scale)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if kind is Fp8Scales.BLOCK:
            columns = weight.shape[1]
            for i, row in enumerate(factors):
                values[i * FP8_BLOCK : (i + 1) * FP8_BLOCK] *= np.repeat(row, FP8_BLOCK)[:columns]
        else:
            values *= factors.reshape(-1, 1)
    return values


def dequant_nvfp4(packed: Array, scale: Array, factor: float | np.float32) -> F32Array:
    """FP32 [N, K] of an NVFP4 weight: (E2M1 * E4M3 of its group of 16 along K) * `factor`.

    `packed` uint8 or int8 [N, K / 2], low half first, or float4_e2m1fn [N, K]; `scale` float8_e4m3fn or uint8
    [N, K / 16], row-major, not swizzled; `factor` the multiplier of the whole tensor (modelopt's weight_scale_2; of
    compressed-tensors' divisor weight_global_scale the reciprocal, rounded to FP32). InvalidArgumentError for other
    shapes and types, and for K that is no multiple of 16.
    """
    _check_groups(packed, scale, NVFP4_GROUP)
    multiplier = np.float32(factor)
    values = _scaled_groups(decode_e2m1(packed), decode_e4m3(scale), NVFP4_GROUP)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        values *= multiplier
    return values


def dequant_mxfp4(packed: Array, scale: Array) -> F32Array:
    """FP32 [N, K] of an MXFP4 weight: E2M1 * 2^(byte - 127) of its group of 32 along K.

    `packed` as in `dequant_nvfp4`; `scale` float8_e8m0fnu or uint8 [N, K / 32]. InvalidArgumentError for other shapes
    and types, and for K that is no multiple of 32.
    """
    _check_groups(packed, scale, MXFP4_GROUP)
    return _scaled_groups(decode_e2m1(packed), decode_e8m0(scale), MXFP4_GROUP)


def _scaled_groups(values: F32Array, scales: F32Array, group: int) -> F32Array:
    n, k = values.shape
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        values.reshape(n, k // group, group)[...] *= scales[:, :, None]
    return values


def _check_groups(packed: Array, scale: Array, group: int) -> None:
    _check_matrix("packed", packed)
    k = packed.shape[1] * (1 if packed.dtype == E2M1 else 2)
    if k % group:
        raise InvalidArgumentError("packed", packed.shape, f"K must be a multiple of {group}, and is {k}")
    if scale.shape != (packed.shape[0], k // group):
        needed = (packed.shape[0], k // group)
        raise InvalidArgumentError(
            "scale", scale.shape, f"its shape must be {needed}, one for {group} elements of K {k}"
        )


def _check_matrix(name: str, array: Array) -> None:
    if array.ndim != 2 or 0 in array.shape:
        raise InvalidArgumentError(name, array.shape, "a matrix with at least one element is needed")
