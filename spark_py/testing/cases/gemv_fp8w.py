# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module gemv_fp8w: the quantiser bit for bit, products within what FP32 sums in any order allow, and the
order of our sum as a decision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...catalog.spec import Call
from ...reference._e4m3 import E4M3
from ..case import Argument, Case, Draw
from ..compare import bits, f64, rounds, within
from ..inputs import BF16, F32, Array, Normal, any_bits, normal
from .gemv import ORDER

NAN_CODES = (0x7F, 0xFF)
SHAPES = [(1, 16), (5, 64), (7, 272), (33, 528), (4, 1040), (9, 2064), (6, 4096), (131, 144)]
ORDERED = [(65, 64), (37, 1040), (30, 4112)]
SOME_ROWS = [(1, 5, 16), (2, 7, 272), (3, 9, 1040), (4, 1, 48), (5, 6, 80), (6, 3, 144), (7, 12, 2064), (8, 17, 1552)]


def codes(rng: np.random.Generator, *shape: int) -> Array:
    """E4M3 bytes, every one but NaN alike."""
    drawn: Array = rng.choice(np.delete(np.arange(256, dtype=np.uint8), NAN_CODES), shape)
    return drawn


def spread(rng: np.random.Generator, *shape: int) -> Array:
    """BF16 over 12 powers of two, so that the order of additions shows."""
    drawn: Array = (rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 6, shape)).astype(BF16)
    return drawn


def cancelling(rng: np.random.Generator, rows: tuple[int, ...], count: int, size: int) -> tuple[Array, Array]:
    """Activations and bytes whose sums cancel to what was rounded on the way, where a row has one scale.

    The second half of a row is the first, negated and in another order.
    """
    half, order = size // 2, rng.permutation(size // 2)
    x, weights = spread(rng, *rows, size), codes(rng, count, size)
    x[..., half:] = x[..., order]
    weights[:, half:] = weights[:, order] ^ 0x80
    return x, weights


def tied_rows(rng: np.random.Generator, rows: int, size: int) -> Array:
    """BF16 [rows, size] whose quotients by max / 448 lie between two E4M3 numbers, to a few ulps of FP32, where there
    are such BF16 numbers; E4M3's subnormals and zeros among them. The maximum stands anywhere."""
    numbers = np.arange(1, 0x7F80, dtype=np.uint16).view(BF16)
    values = np.empty((rows, size))
    for row in range(rows):
        most = float(rng.choice([rng.integers(128, 256), 7 * rng.integers(19, 37)]) * 2.0 ** rng.integers(-20, 20))
        near = numbers[(numbers <= most) & (numbers >= most * 2.0**-19)].astype(np.float64)
        quotient = near / most * 448
        steps = np.where(quotient < 2.0**-6, quotient * 2.0**10, np.frexp(quotient)[0] * 32)
        tied = near[np.abs(steps % 2 - 1) < 2.0**-17]
        values[row] = rng.choice(tied, size) if tied.size else most * rng.uniform(0, 1, size)
        other = rng.random(size) < 0.3
        values[row, other] = most * rng.uniform(0, 1, size)[other] * 2.0 ** -rng.integers(0, 20, size)[other]
        values[row, rng.random(size) < 0.05] = 0.0
        values[row, rng.integers(size)] = most
    signed: Array = (values * rng.choice([-1.0, 1.0], values.shape)).astype(BF16)
    return signed


def special_rows(rng: np.random.Generator, size: int) -> Array:
    """BF16 [6, size]: a NaN, NaN alone, an infinity, zeros of both signs, any bits, numbers without a reciprocal."""
    x = normal(rng, 6, size)
    place = rng.integers(size, size=6)
    x[0, place[0]] = np.nan
    x[1] = np.nan
    x[2, place[2]] = rng.choice([-np.inf, np.inf])
    x[3] = rng.choice(np.array([0.0, -0.0], BF16), size)
    x[4] = any_bits(rng, size)
    x[5] = (x[5].astype(np.float32) * np.float32(1e-37)).astype(BF16)
    return x


def row_scales(rng: np.random.Generator, count: int) -> Array:
    """FP32 [count] of a few powers of ten, with full mantissas."""
    drawn: Array = (10.0 ** rng.uniform(-4, 1, count)).astype(F32)
    return drawn


def nan_weights(rng: np.random.Generator, n: int, k: int) -> Array:
    """`codes` with a NaN code of either sign in about half of the rows."""
    weights = codes(rng, n, k)
    rows = np.flatnonzero(rng.random(n) < 0.5)
    weights[rows, rng.integers(k, size=rows.size)] = rng.choice(np.array(NAN_CODES, np.uint8), rows.size)
    weights[0, k - 1], weights[n - 1, 0] = NAN_CODES
    return weights


def subnormal(rng: np.random.Generator, n: int, k: int) -> Array:
    """Bytes of E4M3's subnormals and zeros of both signs."""
    signs: Array = rng.choice(np.array([0, 0x80], np.uint8), (n, k))
    return signs | rng.integers(0, 8, (n, k), dtype=np.uint8)


def weight_values(c: Call) -> Any:
    """What the weights of a launch stand for, FP64."""
    return f64(c.B.view(E4M3)) * f64(c.row_scale)[:, None]


def between_rows(c: Call, values: Any, gap: Any) -> Any:
    """[M, N] as the flat output of a kernel for M rows has it, with `gap` [flat] between the rows."""
    flat = f64(gap).copy()
    view = np.lib.stride_tricks.as_strided(flat, (c.M, c.N), (c.out_stride * flat.itemsize, flat.itemsize))
    view[...] = values
    return flat


Values = Callable[[Call], Any]


def close(weights: Values) -> dict[str, Any]:
    """The bound of one row of activations: no order of adding products 64 at a time or in a tree loses more, nor do a
    rounding of each weight and one of each product."""
    return {
        "C": rounds(
            lambda c: weights(c) @ f64(c.A),
            slack=lambda c: (c.K / 16 + 24) * 2.0**-24 * (np.abs(weights(c)) @ np.abs(f64(c.A))),
        )
    }


def close_rows(weights: Values) -> dict[str, Any]:
    """`close` for M rows; between rows of output stays what was there."""

    def lost(c: Call) -> Any:
        terms = np.abs(f64(c.A)) @ np.abs(weights(c)).T
        return between_rows(c, (c.K / 16 + 24) * 2.0**-24 * terms, np.zeros(c.C.shape))

    return {"C": rounds(lambda c: between_rows(c, f64(c.A) @ weights(c).T, c.C), slack=lost)}


Scales = Callable[[np.random.Generator, int, int], Mapping[str, Argument]]
"""The scales of a weight [n, k], by parameter."""


def one_row(scales: Scales, n: int, k: int, make: Callable[..., Array] = codes) -> Draw:
    """Arguments of a GEMV for one row."""
    return lambda rng: {"A": Normal(spread=4), "B": make(rng, n, k), **scales(rng, n, k), "N": n, "K": k}


def one_row_cancelling(scales: Scales, n: int, k: int) -> Draw:
    """As `one_row`, with `cancelling` numbers."""

    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        x, weights = cancelling(rng, (), n, k)
        return {"A": x, "B": weights, **scales(rng, n, k), "N": n, "K": k}

    return draw


def some_rows(scales: Scales, m: int, n: int, k: int, gap: int = 0) -> Draw:
    """Arguments of a GEMV for m rows."""
    sizes = {"M": m, "N": n, "K": k, "out_stride": n + gap}
    return lambda rng: {"A": Normal(spread=4), "B": codes(rng, n, k), **scales(rng, n, k), **sizes}


def some_rows_cancelling(scales: Scales, m: int, n: int, k: int) -> Draw:
    """As `some_rows`, with `cancelling` numbers."""

    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        x, weights = cancelling(rng, (m,), n, k)
        return {"A": x, "B": weights, **scales(rng, n, k), "M": m, "N": n, "K": k, "out_stride": n}

    return draw


def products_of_rows(scales: Scales, even: Scales, weights: Values) -> tuple[Case, ...]:
    """The cases of a GEMV for 1 to 8 rows. `even`: scales that are the same all over a row of weights."""
    bound = close_rows(weights)
    return (
        *(Case(f"M={m} N={n} K={k}", some_rows(scales, m, n, k), bound) for m, n, k in SOME_ROWS),
        Case("rows of output apart", some_rows(scales, 5, 7, 272, 3), bound, tag="abi"),
        *(
            Case(
                f"sums that cancel, M={m} N={n} K={k}",
                some_rows_cancelling(even, m, n, k),
                {"C": bits()},
                tag="decision",
                subject=ORDER,
            )
            for m, n, k in ((8, 37, 64), (5, 30, 2064), (3, 137, 272))
        ),
    )


def _row_scale(rng: np.random.Generator, n: int, k: int) -> Mapping[str, Argument]:
    return {"row_scale": row_scales(rng, n)}


def _with_nan(n: int, k: int) -> Draw:
    return lambda rng: {
        "A": np.ones(k, BF16), "B": nan_weights(rng, n, k), "row_scale": np.ones(n, F32), "N": n, "K": k,
    }  # fmt: skip


def _quantized(make: Callable[..., Array], n: int, k: int) -> Draw:
    return lambda rng: {"input": make(rng, n, k), "N": n, "K": k}


CASES: Mapping[str, tuple[Case, ...]] = {
    "quantize_bf16_to_fp8": (
        *(
            Case(f"N={n} K={k}", _quantized(normal, n, k))
            for n, k in ((1, 1), (5, 16), (3, 263), (2, 2048), (4, 4099), (129, 48))
        ),
        *(Case(f"ties, N={n} K={k}", _quantized(tied_rows, n, k)) for n, k in ((40, 256), (9, 2055))),
        Case("zeros", lambda rng: {"input": np.zeros((2, 40), BF16), "N": 2, "K": 40}),
        Case("off 8 bytes", _quantized(normal, 3, 77), tag="abi", shift=2),
        Case(
            "NaN stays NaN",
            lambda rng: {"input": special_rows(rng, 520), "N": 6, "K": 520},
            tag="decision",
            subject="NaN weights",
        ),
    ),
    "dense_gemv_fp8w": (
        *(Case(f"N={n} K={k}", one_row(_row_scale, n, k), close(weight_values)) for n, k in SHAPES),
        Case("subnormal codes", one_row(_row_scale, 9, 272, subnormal), close(weight_values)),
        Case("codes 0x7F and 0xFF", _with_nan(9, 272), {"C": within(1)}),
        *(
            Case(
                f"sums that cancel, N={n} K={k}",
                one_row_cancelling(_row_scale, n, k),
                {"C": bits()},
                tag="decision",
                subject=ORDER,
            )
            for n, k in ORDERED
        ),
    ),
    "spark_dense_gemv_fp8w_batchm": products_of_rows(_row_scale, _row_scale, weight_values),
}
