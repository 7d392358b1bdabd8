# SPDX-License-Identifier: AGPL-3.0-only
"""What the codes of E4M3, E8M0 and E2M1 stand for, as FP32, and FP32 rounded to BF16.

Written from the formats (OCP 8-bit floating point 1.0, OCP microscaling formats 1.0). FP32 holds every value of the
three exactly, subnormals included.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ...runtime.errors import InvalidArgumentError

__all__ = ["decode_e2m1", "decode_e4m3", "decode_e8m0", "round_to_bf16", "widen_scale"]

Array: TypeAlias = "np.ndarray[Any, Any]"
F32Array: TypeAlias = npt.NDArray[np.float32]

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
E2M1 = np.dtype(ml_dtypes.float4_e2m1fn)
BYTE = np.dtype(np.uint8)

_CHUNK = 1 << 20  # codes looked up at a time


def _e4m3_table() -> F32Array:
    code = np.arange(256)
    sign = np.where(code & 0x80, -1.0, 1.0)
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = np.where(
        exponent > 0, np.ldexp(1.0 + mantissa / 8.0, exponent - 7), np.ldexp(mantissa / 8.0, np.full(256, -6))
    )
    magnitude[code & 0x7F == 0x7F] = np.nan  # the one NaN of each sign; there is no infinity
    table: F32Array = np.copysign(magnitude, sign).astype(np.float32)
    return table


def _e8m0_table() -> F32Array:
    table = np.ldexp(1.0, np.arange(256) - 127)
    table[255] = np.nan
    return table.astype(np.float32)


def _e2m1_table() -> F32Array:
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    return np.array(magnitudes + [-m for m in magnitudes], np.float32)


_E4M3_VALUES = _e4m3_table()
_E8M0_VALUES = _e8m0_table()
_E2M1_VALUES = _e2m1_table()
_E2M1_PAIRS = np.stack([_E2M1_VALUES[np.arange(256) & 15], _E2M1_VALUES[np.arange(256) >> 4]], axis=1)


def decode_e4m3(codes: Array) -> F32Array:
    """FP32 of E4M3 codes (float8_e4m3fn or uint8), in their shape. 0x7F is NaN and 0xFF is -NaN, as quiet NaN."""
    return _looked_up(_E4M3_VALUES, _bytes_of("codes", codes, E4M3, BYTE))


def decode_e8m0(codes: Array) -> F32Array:
    """FP32 of E8M0 codes (float8_e8m0fnu or uint8), in their shape: 2^(code - 127), and NaN for 255."""
    return _looked_up(_E8M0_VALUES, _bytes_of("codes", codes, E8M0, BYTE))


def decode_e2m1(packed: Array) -> F32Array:
    """FP32 of E2M1 codes. uint8 or int8 [..., m] is packed and gives [..., 2m]: the low half of byte j is element 2j,
    the high half element 2j + 1. float4_e2m1fn, a byte an element as `WeightStore.read` has it, keeps its shape."""
    codes = _bytes_of("packed", packed, E2M1, BYTE, np.dtype(np.int8))
    if packed.dtype == E2M1:
        if codes.size and codes.max() > 15:
            raise InvalidArgumentError("packed", int(codes.max()), "a byte of float4_e2m1fn holds one code, 0 .. 15")
        return _looked_up(_E2M1_VALUES, codes)
    if codes.ndim == 0:
        raise InvalidArgumentError("packed", packed.shape, "packed codes have at least one dimension")
    return _looked_up(_E2M1_PAIRS, codes).reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def widen_scale(scale: Array) -> F32Array:
    """A scale in FP32, in its shape, exactly: FP32 as it is, BF16 widened, E4M3 and E8M0 decoded. InvalidArgumentError
    for every other type: an integer is no scale, and the number that a byte spells is not the one that it encodes."""
    if scale.dtype == np.float32:
        return scale
    if scale.dtype == BF16:
        widened: F32Array = scale.astype(np.float32)
        return widened
    if scale.dtype == E4M3:
        return decode_e4m3(scale)
    if scale.dtype == E8M0:
        return decode_e8m0(scale)
    raise InvalidArgumentError(
        "scale", scale.dtype, "its type must be float32, bfloat16, float8_e4m3fn or float8_e8m0fnu"
    )


def round_to_bf16(values: F32Array) -> Array:
    """BF16 of FP32, nearest, ties to even, in the same shape. Beyond the largest BF16 is infinity; NaN stays NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        rounded: Array = values.astype(BF16)
    return rounded


def _bytes_of(name: str, codes: Array, *offered: np.dtype[Any]) -> npt.NDArray[np.uint8]:
    if codes.dtype not in offered:
        raise InvalidArgumentError(
            name, codes.dtype, f"its type must be {' or '.join(str(dtype) for dtype in offered)}"
        )
    return codes.view(np.uint8)


def _looked_up(table: F32Array, codes: npt.NDArray[np.uint8]) -> F32Array:
    """`table[codes]`, without an index of 8 bytes for each code of a large weight at once."""
    out = np.empty(codes.shape + table.shape[1:], np.float32)
    flat, target = codes.reshape(-1), out.reshape(-1, *table.shape[1:])
    for i in range(0, flat.size, _CHUNK):
        target[i : i + _CHUNK] = table[flat[i : i + _CHUNK]]
    return out
