# SPDX-License-Identifier: AGPL-3.0-only
"""Module `quantize_nvfp4`: BF16 weights to NVFP4 with the engine's software rounding.

A weight is E2M1 value * E4M3 scale of its group of 16 along K * `scale2`. Neither encoder rounds as hardware does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ._bf16 import Bf16Array, F32Array, to_f32

GROUP = 16
E2M1_VALUES: F32Array = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E4M3_MAX_CODE = 0x7E

_E2M1_UP_TO: F32Array = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
_E4M3_MAX = np.float32(448)
_LEAST_NORMAL = np.float32(2.0**-6)
_LEAST_SUBNORMAL = np.float32(2.0**-9)
_BIAS = np.uint32((127 - 7) << 3)

U8Array = npt.NDArray[np.uint8]


def encode_e4m3(magnitudes: F32Array) -> U8Array:
    """FP32 of at least 0, or NaN, as E4M3 codes of 0 to 0x7E.

    Normals round half up, with a carry into the exponent. From 2^-9 to below 2^-6: floor(a * 512 + 0.5), at most 7.
    Below 2^-9: 0. Above 448, and NaN: 448.
    """
    normal = ((magnitudes.view(np.uint32) + np.uint32(1 << 19)) >> np.uint32(20)) - _BIAS
    subnormal = np.where(magnitudes < _LEAST_NORMAL, magnitudes, np.float32(0)) * np.float32(512) + np.float32(0.5)
    codes = np.where(magnitudes >= _LEAST_NORMAL, normal, np.minimum(subnormal.astype(np.uint32), 7))
    codes = np.where(magnitudes < _LEAST_SUBNORMAL, 0, codes)
    return np.where(magnitudes <= _E4M3_MAX, codes, E4M3_MAX_CODE).astype(np.uint8)


def decode_e4m3(codes: U8Array) -> F32Array:
    """E4M3 codes as FP32: sign, 4 bits of exponent with bias 7, 3 of mantissa; 0x7F and 0xFF are NaN."""
    magnitude = (codes & np.uint8(0x7F)).astype(np.uint32)
    normal = ((magnitude + _BIAS) << np.uint32(20)).view(np.float32)
    values = np.where(magnitude < 8, magnitude.astype(np.float32) * _LEAST_SUBNORMAL, normal)
    values = np.where(magnitude == 0x7F, np.float32(np.nan), values)
    return np.copysign(values, np.where(codes & 0x80, np.float32(-1), np.float32(1)))


def encode_e2m1(values: F32Array) -> U8Array:
    """FP32 as the nearest E2M1 code, a tie to the smaller magnitude, beyond 5 to 6.

    Bit 3 is set for numbers below 0, those that round to 0 too, and not for -0.0. NaN gives +6.
    """
    codes = np.searchsorted(_E2M1_UP_TO, np.abs(values), side="left")  # NaN sorts last
    return (codes + np.where(values < 0, 8, 0)).astype(np.uint8)


def _without_nan(values: F32Array) -> F32Array:
    return np.where(np.isnan(values), np.float32(0), np.abs(values))


def nvfp4_global_absmax(x: Bf16Array) -> np.float32:
    """max |x| over BF16 values of any shape, as FP32. NaN is passed over, infinity is not; 0 where nothing is left."""
    return np.float32(_without_nan(to_f32(x)).max(initial=0))


def quantize_bf16_to_nvfp4(x: Bf16Array, scale2: float) -> tuple[U8Array, U8Array]:
    """BF16 [N, K] as packed codes u8 [N, K / 2] (the even k in the low nibble) and scales u8 [N, K / 16]. K % 16 == 0.

    In FP32, for each group with largest magnitude m (NaN passed over): scale = E4M3(m * (1 / scale2) / 6), 0 where m is
    0; step = scale * scale2; each code = E2M1(x * (1 / step)), or E2M1(x * 0) where step is not above 0.
    """
    rows, size = x.shape
    if size % GROUP:
        raise ValueError(f"K is {size}: it must be a multiple of {GROUP}")
    values, factor = to_f32(x).reshape(rows, size // GROUP, GROUP), np.float32(scale2)
    with np.errstate(all="ignore"):
        most = _without_nan(values).max(axis=-1)
        per_factor = np.float32(1) / factor
        scales = np.where(most > 0, encode_e4m3(most * per_factor / np.float32(6)), np.uint8(0))
        step = decode_e4m3(scales) * factor
        per_step = np.where(step > 0, np.float32(1) / step, np.float32(0))
        codes = encode_e2m1(values * per_step[..., None]).reshape(rows, size // 2, 2)
    packed: U8Array = codes[..., 0] | (codes[..., 1] << np.uint8(4))
    return packed, scales


def dequantize_nvfp4(packed: U8Array, scales: U8Array, scale2: float) -> F32Array:
    """What the codes stand for, value * scale * scale2 in FP32 from left to right: u8 [N, K / 2], u8 [N, K / 16] give
    FP32 [N, K]."""
    codes = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1).reshape(len(packed), -1)
    result: F32Array = E2M1_VALUES[codes] * decode_e4m3(scales).repeat(GROUP, axis=1) * np.float32(scale2)
    return result
