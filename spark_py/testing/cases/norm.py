# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...catalog.spec import Call
from ..case import Alias, Argument, Case, Draw
from ..compare import Bound, bits, f64, rounds
from ..inputs import AnyBits, Array, Normal, normal

EPS = 1e-6
# FP32 in any order of a few dozen dependent additions, rsqrtf within 2 ulp, a division and three products.
FP32_BOUND = 2.0**-17

SHAPES = [(4, 3), (3, 31), (2, 130), (5, 128), (3, 1023), (2, 1026), (1, 2049), (2, 5120)]


def magnitudes(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Rows of very different magnitude, some near sqrt(eps), where eps counts."""
    return (rng.standard_normal(shape) * 10.0 ** rng.uniform(-4, 3, (shape[0], 1))).astype(dtype)


def oracle(plus: float) -> Callable[[Call], Array]:
    """x / sqrt(mean(x^2) + eps) * (plus + weight), in FP64."""

    def exact(c: Call) -> Array:
        values = f64(c.input)
        mean = (values * values).mean(axis=-1, keepdims=True)
        result: Array = values / np.sqrt(mean + c.eps) * (plus + f64(c.weight))
        return result

    return exact


def close(plus: float) -> Bound:
    """The bound of a normalised row."""
    return rounds(oracle(plus), FP32_BOUND)


def arguments(size: int, **more: Argument) -> Draw:
    """Rows of `size` elements and a weight."""
    return lambda rng: {"input": magnitudes, "weight": Normal(), "hidden_size": size, "eps": EPS, **more}


def plain(plus: float) -> tuple[Case, ...]:
    """Cases of a norm of `input` into `output`."""
    bounds = {"output": close(plus)}
    return (
        *(Case(f"{rows} rows of {size}", arguments(size), bounds, (rows, 1, 1)) for rows, size in SHAPES),
        Case("in place", arguments(1026, output=Alias("input")), bounds, (2, 1, 1), "abi"),
        Case("eps of 0.1", arguments(96, eps=0.1), bounds, (3, 1, 1), "abi"),
        Case("buffers 2 bytes off", arguments(130), bounds, (3, 1, 1), "decision", "buffers off a 16-byte address", 2),
    )


def _added(plus: float) -> Callable[[Call], Array]:
    """The rounded sums over the root mean square of the sums that were not rounded, in FP64."""

    def exact(c: Call) -> Array:
        sums = f64((c.hidden.astype(np.float32) + c.src.astype(np.float32)).astype(np.float32))
        rounded = f64(sums.astype(c.hidden.dtype))
        mean = (sums * sums).mean(axis=-1, keepdims=True)
        result: Array = rounded / np.sqrt(mean + c.eps) * (plus + f64(c.weight))
        return result

    return exact


def _lost(rng: np.random.Generator, rows: int, size: int) -> dict[str, Argument]:
    """Sums that all round down by almost half a step, so that rounded and unrounded mean squares differ by 0.4 %."""
    hidden = (1.0 + rng.integers(0, 8, (rows, size)) / 128.0).astype(normal(rng, 1).dtype)
    return {"hidden": hidden, "src": np.full((rows, size), 0.00375).astype(hidden.dtype)}


def _adding(size: int, rows: int, aliased: bool, lost: bool) -> Draw:
    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        common: dict[str, Argument] = {"hidden": magnitudes, "src": magnitudes, "weight": Normal()}
        common |= {"hidden_size": size, "eps": EPS}
        if lost:
            common |= _lost(rng, rows, size)
        return common | ({"output": Alias("src")} if aliased else {})

    return draw


def adding(plus: float) -> tuple[Case, ...]:
    """Cases of a norm of hidden + src."""
    bound = rounds(_added(plus), FP32_BOUND)
    # Where the two are one buffer, that buffer goes by the name of what it held first.
    apart, in_src = {"output": bound}, {"src": bound}
    return (
        *(
            Case(f"{rows} rows of {size}", _adding(size, rows, False, False), apart, (rows, 1, 1))
            for rows, size in SHAPES
        ),
        *(
            Case(
                f"{rows} rows of {size}, sums that lose in rounding",
                _adding(size, rows, False, True),
                apart,
                (rows, 1, 1),
            )
            for rows, size in ((2, 130), (2, 1026))
        ),
        Case("output is src", _adding(1026, 2, True, False), in_src, (2, 1, 1), "abi"),
        Case("output is src, odd rows", _adding(1023, 3, True, False), in_src, (3, 1, 1), "abi"),
    )


CASES: Mapping[str, tuple[Case, ...]] = {
    "rms_norm": plain(1.0),
    "rms_norm_residual": (
        *(
            Case(f"{rows} rows of {size}", arguments(size), {"output": close(1.0)}, (rows, 1, 1))
            for rows, size in SHAPES
        ),
        Case("in place", arguments(1026, output=Alias("input")), {"input": close(1.0)}, (2, 1, 1), "abi"),
        Case(
            "every bit pattern",
            arguments(1000, input=AnyBits()),
            {"output": rounds(oracle(1.0), 1.0), "residual": bits()},
            (2, 1, 1),
            "decision",
            "NaN payloads",
        ),
    ),
    "residual_add_rms_norm": adding(1.0),
}
