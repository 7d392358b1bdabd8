# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module residual_add: sums, a gate, and a copy of two halves."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...catalog.spec import Call
from ..case import Alias, Argument, Case
from ..compare import bits, f64, rounds
from ..inputs import BF16, AnyBits, Array, Distribution, Normal

SIZES = [1, 2, 31, 255, 256, 257, 5120]

# expf within a few ulp (also __expf over the range drawn here), an addition, a division and a product in FP32.
SIGMOID_BOUND = 2.0**-18
# expf(-g) overflows above 88.72: a sigmoid below 2**-127 is 0.
SIGMOID_FLOOR = 3e-39


def _ties(rng: np.random.Generator, n: int) -> Mapping[str, Argument]:
    """Sums half way between two BF16 numbers, to even in both directions."""
    left = (1.0 + rng.integers(0, 100, n) / 128.0).astype(BF16)
    return {"residual": left, "src": np.full(n, 2.0**-8).astype(BF16), "n": n}


def _gated(c: Call) -> Array:
    result: Array = f64(c.input) / (1.0 + np.exp(-f64(c.gate)))
    return result


_GATED = {
    name: rounds(_gated, SIGMOID_BOUND, lambda c: SIGMOID_FLOOR * np.abs(f64(c.input))) for name in ("output", "input")
}


def _gate(n: int, **more: Argument) -> Mapping[str, Argument]:
    return {"input": Normal(), "gate": Normal(6.0), "n": n, **more}


def _halves(n: int, draw: Distribution) -> Mapping[str, Argument]:
    return {"a": draw, "b": draw, "N": n}


CASES: Mapping[str, tuple[Case, ...]] = {
    "bf16_residual_add": (
        *(
            Case(f"{n} elements", lambda rng, n=n: {"residual": Normal(), "src": Normal(spread=8), "n": n})  # type: ignore[misc]
            for n in SIZES
        ),
        Case("sums between two numbers", lambda rng: _ties(rng, 700)),
        Case(
            "the guard behind the sum", lambda rng: {"residual": Normal(), "src": np.ones(65, BF16), "n": 63}, tag="abi"
        ),
    ),
    "sigmoid_gate_mul": (
        *(Case(f"{n} elements", lambda rng, n=n: _gate(n), {"output": _GATED["output"]}) for n in SIZES),  # type: ignore[misc]
        Case("in place", lambda rng: _gate(257, output=Alias("input")), {"input": _GATED["input"]}, tag="abi"),
    ),
    "bf16_concat": (
        *(Case(f"{n} elements", lambda rng, n=n: _halves(n, Normal()), {"out": bits()}) for n in SIZES),  # type: ignore[misc]
        Case(
            "every bit pattern",
            lambda rng: _halves(5120, AnyBits()),
            tag="decision",
            subject="NaN payloads",
        ),
    ),
}
