# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module spark_mxfp4_gemv: values within what FP32 sums in any order allow, and our order as a decision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...catalog.spec import Call
from ...reference.spark_mxfp4_gemv import decode_e8m0
from ...reference.w4a16_gemv import codes
from ..case import Argument, Case, Draw
from ..compare import bits, f64
from ..inputs import BF16, Array, Normal
from .gemv import ORDER
from .gemv_fp8w import close, close_rows

SHAPES = [(1, 32), (5, 96), (127, 64), (129, 32), (7, 2080), (3, 8224)]
SOME_ROWS = [(1, 5, 32), (2, 7, 288), (3, 9, 1056), (4, 1, 96), (5, 6, 64), (6, 3, 160), (7, 12, 2080), (8, 17, 1568)]
ORDERED = [(37, 64), (66, 2080), (9, 8256)]


def mxfp4(rng: np.random.Generator, count: int, size: int, low: int = 110, high: int = 135) -> tuple[Array, Array]:
    """Any codes [N, K / 2], and scales [N, K / 32] from byte `low` to below `high`."""
    packed = rng.integers(0, 256, (count, size // 2), dtype=np.uint8)
    return packed, rng.integers(low, high, (count, size // 32), dtype=np.uint8)


def mirrored_codes(rng: np.random.Generator, count: int, size: int, order: Array) -> tuple[Array, Array]:
    """Codes whose second half is the first, in another order and negated, under one scale a row."""
    nibbles = rng.integers(0, 16, (count, size), dtype=np.uint8)
    nibbles[:, size // 2 :] = nibbles[:, order] ^ 8
    scales = np.repeat(rng.integers(110, 135, (count, 1), dtype=np.uint8), size // 32, axis=1)
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4), scales


def cancelling(rng: np.random.Generator, rows: tuple[int, ...], count: int, size: int) -> tuple[Array, Array, Array]:
    """Activations over many magnitudes, codes and scales with sums that cancel to what was rounded on the way."""
    half, order = size // 2, rng.permutation(size // 2)
    x = (rng.standard_normal((*rows, size)) * 2.0 ** rng.integers(-10, 10, (*rows, size))).astype(BF16)
    x[..., half:] = x[..., order]
    return x, *mirrored_codes(rng, count, size, order)


def weights(packed: Array, scales: Array) -> Any:
    """The weights [N, K] in FP64."""
    return f64(codes(packed)) * np.repeat(f64(decode_e8m0(scales)), 32, axis=1)


def _values(c: Call) -> Any:
    return weights(c.B_packed, c.B_scale)


def _sizes(m: int | None, n: int, k: int) -> Mapping[str, Argument]:
    # Now and then a gap between two rows of output.
    return {"N": n, "K": k} | ({} if m is None else {"M": m, "out_stride": n + (m + n) % 3})


def _random(m: int | None, n: int, k: int, low: int = 110, high: int = 135) -> Draw:
    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        packed, scales = mxfp4(rng, n, k, low, high)
        return {"A": Normal(spread=4), "B_packed": packed, "B_scale": scales, **_sizes(m, n, k)}

    return draw


def _with_nan(n: int, k: int) -> Draw:
    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        packed, scales = mxfp4(rng, n, k)
        scales[rng.random(scales.shape) < 0.2] = 0xFF
        return {"A": Normal(), "B_packed": packed, "B_scale": scales, **_sizes(None, n, k)}

    return draw


def _ordered(m: int | None, n: int, k: int) -> Draw:
    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        x, packed, scales = cancelling(rng, () if m is None else (m,), n, k)
        return {"A": x, "B_packed": packed, "B_scale": scales, **_sizes(m, n, k)}

    return draw


def _decided(m: int | None, n: int, k: int) -> Case:
    name = "sums that cancel, " + ("" if m is None else f"M={m} ") + f"N={n} K={k}"
    return Case(name, _ordered(m, n, k), {"C": bits()}, tag="decision", subject=ORDER)


CASES: Mapping[str, tuple[Case, ...]] = {
    "spark_mxfp4_gemv": (
        *(Case(f"N={n} K={k}", _random(None, n, k), close(_values)) for n, k in SHAPES),
        Case("scales from 2^-127 to 2^80", _random(None, 21, 1056, 0, 208), close(_values)),
        Case("the least scales, from 2^-127", _random(None, 9, 96, 0, 3), close(_values)),
        Case("NaN among the scales", _with_nan(40, 96), close(_values)),
        *(_decided(None, n, k) for n, k in ORDERED),
    ),
    "spark_mxfp4_gemv_batchm": (
        *(Case(f"M={m} N={n} K={k}", _random(m, n, k), close_rows(_values)) for m, n, k in SOME_ROWS),
        *(_decided(m, n, k) for m, n, k in ((3, 37, 64), (8, 9, 2080))),
    ),
}
