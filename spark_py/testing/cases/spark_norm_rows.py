# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module spark_norm_rows: rows of very different magnitude against FP64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...catalog.spec import Call
from ..case import Argument, Case, Draw
from ..compare import bits, f64, rounds
from ..inputs import Array, Normal
from .norm import EPS, FP32_BOUND, magnitudes

# (rows, elements of a row, weights used as 1 + w)
SHAPES = ((1, 2, True), (3, 130, False), (2, 1026, True), (1, 5120, True), (2, 8192, False))


def _normed(x: Array, weight: Array, c: Call) -> Array:
    values = f64(x)
    mean = (values * values).mean(axis=-1, keepdims=True)
    result: Array = values / np.sqrt(mean + c.eps) * ((1.0 if c.one_plus else 0.0) + f64(weight))
    return result


def _both(c: Call) -> Array:
    return np.concatenate([_normed(c.first, c.first_weight, c), _normed(c.second, c.second_weight, c)], axis=1)


def _after(c: Call) -> Array:
    added = (c.hidden.astype(np.float32) + c.src.astype(np.float32)).astype(c.hidden.dtype)
    return _normed(added, c.weight, c)


def _arguments(names: tuple[str, ...], weights: tuple[str, ...], size: int, one_plus: bool) -> Draw:
    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        made: dict[str, Argument] = {name: Normal() for name in weights}
        made.update((name, magnitudes) for name in names)
        return made | {"hidden_size": size, "one_plus": int(one_plus), "eps": EPS}

    return draw


def _cases(concat: bool) -> tuple[Case, ...]:
    made = []
    for rows, size, one_plus in SHAPES:
        name = f"{rows} rows of {size}, weights {'1 + w' if one_plus else 'w'}"
        if concat:
            draw = _arguments(("first", "second"), ("first_weight", "second_weight"), size, one_plus)
            made.append(Case(name, draw, {"out": rounds(_both, FP32_BOUND)}, (2, rows, 1)))
        else:
            draw = _arguments(("hidden", "src"), ("weight",), size, one_plus)
            bounds: dict[str, Any] = {"hidden": bits(), "output": rounds(_after, FP32_BOUND)}
            made.append(Case(name, draw, bounds, (rows, 1, 1)))
    return tuple(made)


CASES: Mapping[str, tuple[Case, ...]] = {"spark_norm_concat": _cases(True), "spark_add_then_norm": _cases(False)}
