# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module quantize_nvfp4, bit for bit: scales on every tie and in every band of E4M3, values on every threshold
of E2M1, in both signs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...reference.quantize_nvfp4 import GROUP
from ..case import Argument, Case, Draw
from ..inputs import BF16, F32, AnyBits, Array, Distribution, Large, Normal, Subnormal, WithNan, any_bits, normal

# Edges of E4M3 that BF16 / 6 reaches: below 2^-9, halves of subnormal steps, below 2^-6, the largest and beyond.
_BANDS = np.array([0.25, 0.5, 0.75, 0.96875, 1, 1.5, 2.5, 3.5, 6.5, 7.25, 7.5, 7.75, 7.96875, 8, 8.5]) / 512
_TOP = np.array([432, 440, 447, 448, 449, 456, 464, 480, 1000])
_THRESHOLDS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])

# Factors under which the order of m * (1 / scale2) / 6 decides what becomes of its ties.
SENSITIVE = tuple(float(np.float32(g / (96 * odd))) for g, odd in ((253, 17), (223, 19), (191, 21)))


def tied_maxima(scale2: float) -> Array:
    """The BF16 numbers whose quotient by 6 * scale2 lies between two normal E4M3 numbers, to a few ulps of FP32."""
    values = np.arange(1, 0x7F80, dtype=np.uint16).view(BF16)
    quotients = values.astype(np.float64) / (6 * float(np.float32(scale2)))
    steps = np.frexp(quotients)[0] * 32
    tied: Array = values[(np.abs(steps % 2 - 1) < 2.0**-17) & (quotients > 2.0**-6) & (quotients < 448)]
    return tied


def edges(rng: np.random.Generator, rows: int, groups: int, scale2: float) -> Array:
    """BF16 [rows, groups * 16] in groups whose maxima are ties or edges of E4M3 under `scale2`, and whose other values
    are thresholds of E2M1 for the scale that comes out, next to them, signed zeros and tiny numbers."""
    count = rows * groups
    ties = tied_maxima(scale2)
    marks = (np.concatenate([_BANDS, _TOP]) * 6 * scale2).astype(BF16)
    maxima = np.where(
        rng.random(count) < 0.5, rng.choice(ties if ties.size else marks, count), rng.choice(marks, count)
    )
    whole = maxima.astype(np.float64)
    values = whole[:, None] * rng.uniform(0, 1, (count, GROUP))
    exact = rng.random(count) < 0.5  # a power of two as the scale: thresholds are met exactly
    whole[exact] = 6 * scale2 * 2.0 ** rng.integers(-6, 8, int(exact.sum()))
    values[exact] = whole[exact, None] / 6 * rng.choice(_THRESHOLDS, (int(exact.sum()), GROUP))
    near = rng.choice([1, 1 + 2.0**-7, 1 - 2.0**-8], values.shape)
    values *= np.where(rng.random(values.shape) < 0.5, near, 1)
    values[rng.random(values.shape) < 0.1] = 0.0
    tiny = rng.random(values.shape) < 0.1
    values[tiny] = whole[:, None].repeat(GROUP, 1)[tiny] * 2.0**-20
    values = np.minimum(values, whole[:, None])
    values[np.arange(count), rng.integers(GROUP, size=count)] = whole
    signed: Array = (values * rng.choice([-1.0, 1.0], values.shape)).astype(BF16)
    return signed.reshape(rows, groups * GROUP)


def specials(rng: np.random.Generator, rows: int, groups: int) -> Array:
    """BF16 [rows, groups * 16]: groups with a NaN, of NaN alone, with an infinity, of zeros, and of any bits."""
    count = rows * groups
    values = normal(rng, count, GROUP)
    column = rng.integers(GROUP, size=count)
    kind = rng.permutation(np.arange(count) % 6)
    values[np.arange(count), column] = np.where(kind == 0, np.nan, values[np.arange(count), column])
    values[kind == 1] = np.nan
    infinite = np.flatnonzero(kind == 2)
    values[infinite, column[infinite]] = rng.choice([-np.inf, np.inf], infinite.size)
    values[kind == 3] = rng.choice(np.array([0.0, -0.0], BF16), (int((kind == 3).sum()), GROUP))
    values[kind == 4] = any_bits(rng, int((kind == 4).sum()), GROUP)
    return values.reshape(rows, groups * GROUP)


def _at_edges(rows: int, groups: int, scale2: float) -> Draw:
    return lambda rng: {"input": edges(rng, rows, groups, scale2), "scale2": scale2, "N": rows, "K": groups * GROUP}


def _special(rows: int, groups: int, scale2: float) -> Draw:
    return lambda rng: {"input": specials(rng, rows, groups), "scale2": scale2, "N": rows, "K": groups * GROUP}


def _plain(rows: int, groups: int) -> Draw:
    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        x = normal(rng, rows, groups * GROUP)
        scale2 = np.abs(x.astype(np.float32)).max() / np.float32(6 * 448)
        return {"input": x, "scale2": float(scale2), "N": rows, "K": groups * GROUP}

    return draw


def _largest(total: int, values: Distribution, before: float = 0.0) -> Draw:
    return lambda rng: {"input": values, "global_max": np.array([before], F32), "total_elements": total}


def _at(total: int, place: int, *values: float) -> Draw:
    """The largest magnitude is among `values`, from `place` on."""

    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        x = normal(rng, total)
        x[place : place + len(values)] = values
        return {"input": x, "global_max": np.zeros(1, F32), "total_elements": total}

    return draw


CASES: Mapping[str, tuple[Case, ...]] = {
    "nvfp4_global_absmax": (
        *(Case(f"{total} elements", _largest(total, Normal(spread=8))) for total in (1, 7, 255, 256, 777, 5000)),
        *(
            Case(f"{value} at {place} of {total}", _at(total, place, value))
            for total, place, value in ((600, 0, -99.0), (777, 776, -98.0), (1031, 600, 97.0), (2048, 2040, -96.0))
        ),
        Case("NaN after the largest", _at(2048, 777, -96.0, np.nan)),
        Case("more elements than threads", _at((1 << 18) * 8 + 8 * 256 + 3, (1 << 18) * 8 + 5, -50.0)),
        Case("a larger maximum stands", _largest(300, Normal(), 1000.0)),
        Case("subnormals", _largest(513, Subnormal())),
        Case("large", _largest(513, Large())),
        Case("NaN is passed over", _largest(900, WithNan(share=0.5))),
        Case("every bit pattern", _largest(70000, AnyBits())),
        Case("off 16 bytes", _largest(777, Normal()), tag="abi", shift=2),
    ),
    "quantize_bf16_to_nvfp4": (
        *(Case(f"N={n} K={16 * g}", _plain(n, g)) for n, g in ((1, 1), (5, 3), (3, 257), (127, 5), (129, 1))),
        *(
            Case(f"ties and edges, scale2={scale2}", _at_edges(9, 67, scale2))
            for scale2 in (1.0, 2.0**-12, 3.0, 5.0, 0.0123, *SENSITIVE)
        ),
        *(Case(f"NaN and infinity, scale2={scale2}", _special(6, 20, scale2)) for scale2 in (1.0, 0.002, np.inf)),
        Case("a factor without a reciprocal", _special(3, 20, 2.0**-140)),
        Case("off 8 bytes", _plain(3, 33), tag="abi", shift=2),
        Case("off 4 bytes, ties", _at_edges(3, 33, 3.0), tag="abi", shift=6),
    ),
}
