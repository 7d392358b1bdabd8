# SPDX-License-Identifier: AGPL-3.0-only
"""Comparisons that say how far off a result is: which element, what was expected, the bits, and the steps between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ..catalog.spec import Call
from .inputs import Array

__all__ = [
    "Bound",
    "Mismatch",
    "assert_rounds",
    "assert_same_bits",
    "assert_ulps",
    "bits",
    "difference",
    "f64",
    "ordered",
    "relative_l2",
    "rounds",
    "ulps",
    "within",
]

PerElement: TypeAlias = "Callable[[Call], Any]"


def f64(array: Array) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Values as FP64: exact for BF16 and FP32."""
    with np.errstate(invalid="ignore"):  # NumPy warns where a NaN is converted
        return array.astype(np.float64)


def ordered(array: Array) -> np.ndarray[Any, np.dtype[np.int64]]:
    """BF16 or FP32 as integers in order of value, neighbours 1 apart; +0 and -0 are both 0."""
    sign = 1 << (8 * array.itemsize - 1)
    raw = array.view(f"u{array.itemsize}").astype(np.int64)
    return np.where(raw & sign, -(raw & (sign - 1)), raw)


def ulps(actual: Array, expected: Array) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Steps of the type between two arrays; two NaN are equal, one NaN alone is as far off as the type has values."""
    distance = np.abs(ordered(actual) - ordered(expected))
    nan, other = np.isnan(f64(actual)), np.isnan(f64(expected))
    distance[nan & other] = 0
    distance[nan ^ other] = 1 << (8 * actual.itemsize)
    return distance


def relative_l2(actual: Array, expected: Array) -> float:
    """|actual - expected| / |expected| over finite entries, in FP64; infinite where only one of them has a NaN."""
    a, e = f64(actual), f64(expected)
    if (np.isnan(a) != np.isnan(e)).any():
        return float("inf")
    finite = np.isfinite(a) & np.isfinite(e)
    a, e = a[finite], e[finite]
    return float(np.linalg.norm(a - e) / max(float(np.linalg.norm(e)), 1e-300))


def _is_float(array: Array) -> bool:
    return array.dtype.kind not in "iub"


def _text(value: Any, dtype: np.dtype[Any]) -> str:
    raw = np.asarray(value, dtype).reshape(1).view(np.uint8)[::-1].tobytes().hex()
    return f"{value} (0x{raw})"


def _element(actual: Array, expected: Array, at: int) -> str:
    """One element in words: index, got, expected, bits and, for floats, ulps. `expected` may be FP64."""
    index = [int(i) for i in np.unravel_index(at, actual.shape)]
    got, want = actual.reshape(-1)[at], expected.reshape(-1)[at]
    said = f"{index}: got {_text(got, actual.dtype)}, "
    if expected.dtype != actual.dtype:
        with np.errstate(all="ignore"):
            nearest = np.asarray(want).astype(actual.dtype)
        said += f"expected {float(want)!r}, rounded {_text(nearest[()], actual.dtype)}"
    else:
        nearest = np.asarray(want)
        said += f"expected {_text(want, actual.dtype)}"
    if _is_float(actual):
        steps = int(ulps(np.asarray(got).reshape(1), nearest.reshape(1))[0])
        said += f", {steps} ulp"
    return said


def _bits_differ(actual: Array, expected: Array) -> np.ndarray[Any, np.dtype[np.bool_]]:
    a = np.ascontiguousarray(actual).reshape(-1).view(np.uint8).reshape(actual.size, -1)
    e = np.ascontiguousarray(expected).reshape(-1).view(np.uint8).reshape(expected.size, -1)
    differ: np.ndarray[Any, np.dtype[np.bool_]] = (a != e).any(axis=1)
    return differ


def _not_rounded(
    actual: Array, exact: Array, relative: float, absolute: Any
) -> tuple[np.ndarray[Any, np.dtype[np.bool_]], np.ndarray[Any, np.dtype[np.int64]]]:
    """Which elements are no rounding of a number that close to `exact`, and how many steps outside they are."""
    with np.errstate(all="ignore"):
        slack = np.abs(exact) * relative + absolute
        slack = np.where(np.isfinite(exact), slack, 0.0)
        low, high = ordered((exact - slack).astype(actual.dtype)), ordered((exact + slack).astype(actual.dtype))
    got, is_nan = ordered(actual), np.isnan(f64(actual))
    outside = np.maximum(low - got, got - high)
    outside = np.where(is_nan != np.isnan(exact), 1 << (8 * actual.itemsize), outside)
    outside = np.where(is_nan & np.isnan(exact), 0, outside)
    return outside > 0, outside


@dataclass(frozen=True, slots=True)
class Mismatch:
    """What is wrong with a buffer, in words, and its worst element as a flat index."""

    text: str
    at: int

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Bound:
    """How far an output may be from what is expected. Made by `bits`, `within` and `rounds`.

    With `exact` (FP64 values from the call's inputs) an element has to be a correct rounding of a number within
    `relative` x |exact| + `slack` of it. Without, the reference's value counts: at most `ulps` steps apart (or, where
    given, `slack` in value), and `l2` in relative L2 over the whole buffer. `ulps` None and no `exact`: equal bits.
    """

    ulps: int | None = None
    l2: float | None = None
    slack: PerElement | float = 0.0
    exact: PerElement | None = None
    relative: float = 0.0

    def difference(self, actual: Array, expected: Array, call: Call) -> Mismatch | None:
        """What is wrong with `actual`, or None. `call` has the inputs as they were before the launch."""
        slack = self.slack(call) if callable(self.slack) else self.slack
        if self.exact is not None:
            exact = np.asarray(self.exact(call), np.float64).reshape(actual.shape)
            return _no_rounding(actual, exact, self.relative, np.broadcast_to(slack, actual.shape))
        return difference(actual, expected, self.ulps, self.l2, slack)


def _no_rounding(actual: Array, exact: Array, relative: float, absolute: Any) -> Mismatch | None:
    wrong, outside = _not_rounded(actual, exact, relative, absolute)
    if not wrong.any():
        return None
    worst = int(np.argmax(outside))
    count = f"{int(wrong.sum())} of {wrong.size} are no rounding of the exact value"
    return Mismatch(f"{count}, worst at {_element(actual, exact, worst)}", worst)


def difference(
    actual: Array, expected: Array, most: int | None = None, l2: float | None = None, slack: Any = 0.0
) -> Mismatch | None:
    """How `actual` differs from `expected` beyond `most` ulps (None: in any bit) or `l2`, with the worst element."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return Mismatch(f"{actual.dtype} {actual.shape} against {expected.dtype} {expected.shape}", 0)
    if most is None:
        wrong = _bits_differ(actual, expected)
        distance = wrong.astype(np.int64)
        if _is_float(actual):
            distance += ulps(actual, expected).reshape(-1)
        limit = "the bits have to be equal"
    else:
        distance = ulps(actual, expected).reshape(-1)
        with np.errstate(all="ignore"):
            near = np.abs(f64(actual) - f64(expected)) <= slack
        wrong = (distance > most) & ~near.reshape(-1)
        limit = f"at most {most} ulp"
    if wrong.any():
        worst = int(np.argmax(np.where(wrong, distance, -1)))
        count = f"{int(wrong.sum())} of {wrong.size} differ ({limit})"
        return Mismatch(f"{count}, worst at {_element(actual, expected, worst)}", worst)
    if l2 is not None:
        error = relative_l2(actual, expected)
        if error > l2:
            worst = int(np.argmax(distance))
            text = f"relative L2 {error:.3g} > {l2:.3g}, worst at {_element(actual, expected, worst)}"
            return Mismatch(text, worst)
    return None


def bits() -> Bound:
    """Equal bits: for copies, quantisers and indices."""
    return Bound()


def within(ulps: int, l2: float | None = None, slack: PerElement | float = 0.0) -> Bound:
    """At most `ulps` steps from the reference, or `slack` in value, and `l2` in relative L2."""
    return Bound(ulps, l2, slack)


def rounds(exact: PerElement, relative: float = 0.0, slack: PerElement | float = 0.0) -> Bound:
    """A correct rounding of a number within `relative` and `slack` of `exact(call)`, FP64. Sharper than a whole ulp:
    only values that close to a rounding boundary may fall on either side, so a rounding in the wrong place shows."""
    return Bound(exact=exact, relative=relative, slack=slack)


def assert_same_bits(actual: Array, expected: Array, what: str = "") -> None:
    """Equal bytes: for copies and indices."""
    wrong = difference(actual, expected)
    assert wrong is None, f"{what}: {wrong}"


def assert_ulps(actual: Array, expected: Array, most: int, l2: float, what: str = "") -> None:
    """Arrays at most `most` steps apart anywhere and `l2` in relative L2."""
    wrong = difference(actual, expected, most, l2)
    assert wrong is None, f"{what}: {wrong}"


def assert_rounds(actual: Array, exact: Array, relative: float, absolute: Array | float = 0.0, what: str = "") -> None:
    """`actual` is a correct rounding of a number within `relative` (and `absolute`) of `exact` FP64; see `rounds`.

    NaN must stand where `exact` has NaN.
    """
    wrong = _no_rounding(actual, exact, relative, absolute)
    assert wrong is None, f"{what}: {wrong}"
