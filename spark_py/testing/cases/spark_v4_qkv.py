# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module spark_v4_qkv: the formula, rounded once, in queries and in slots of a pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ...catalog.spec import Call
from ..case import Argument, Case, Draw
from ..compare import Bound, Mismatch, f64, rounds
from ..inputs import BF16, Array, normal
from .spark_v4_rope import POSITIONS, turned

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
# (rows, heads, head_dim, rope_dim)
SHAPES = [(1, 64, 512, 64), (3, 9, 32, 8), (2, 8, 64, 64), (5, 3, 264, 10), (4, 1, 8, 2)]
# A mean of 512 squares, 16 and then 5 additions deep, its root and two products: at most 20 roundings of 2^-24 in n.
NORM = 20 * 2.0**-24


def heads(c: Call, x: Array, weight: Array | None) -> tuple[Array, Array]:
    """The heads of rows [rows, ..., head_dim] in FP64, and the error that is allowed."""
    values, start = f64(x), c.head_dim - c.rope_dim
    exact = values / np.sqrt((values * values).mean(-1, keepdims=True) + c.eps)
    if weight is not None:
        exact = exact * f64(weight)
    slack, tail = np.abs(exact) * NORM, exact[..., start:]
    size = np.repeat(np.abs(tail[..., 0::2]) + np.abs(tail[..., 1::2]), 2, axis=-1)
    exact[..., start:], lost = turned(tail.copy(), c.positions, c.theta)
    slack[..., start:] = lost + size * NORM
    return exact, slack


@dataclass(frozen=True, slots=True)
class _OfE4m3(Bound):
    """A bound on bytes that are E4M3 numbers."""

    def difference(self, actual: Array, expected: Array, call: Call) -> Mismatch | None:
        return Bound.difference(self, actual.view(E4M3), expected.view(E4M3), call)


def _pool(narrow: bool) -> Bound:
    """Written slots hold correct roundings, of E4M3 with `narrow`; the others what they held."""

    def exact(c: Call) -> Array:
        whole, kept = f64(c.pool.view(E4M3) if narrow else c.pool).copy(), c.slot_mapping >= 0
        rows = heads(c, c.kv, c.weight)[0][kept]
        whole[c.slot_mapping[kept]] = np.clip(rows, -448, 448) if narrow else rows
        return whole

    def slack(c: Call) -> Array:
        whole, kept = np.zeros(c.pool.shape), c.slot_mapping >= 0
        whole[c.slot_mapping[kept]] = heads(c, c.kv, c.weight)[1][kept]
        return whole

    return (_OfE4m3 if narrow else Bound)(exact=exact, slack=slack)


def draw_rows(rng: np.random.Generator, *shape: int) -> Array:
    """Heads [..., head_dim] that differ in magnitude, some so small that eps counts."""
    return (rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 7, (*shape[:-1], 1))).astype(BF16)


def draw_positions(rng: np.random.Generator, rows: int) -> Array:
    """Positions that do not ascend, near the named ones."""
    return (rng.choice(POSITIONS[1:], rows) - rng.integers(0, 3, rows)).astype(np.uint32)


def draw_slots(rng: np.random.Generator, rows: int, capacity: int) -> Array:
    """Different slots, the last one among them, and a negative one where there are several rows."""
    slots = np.concatenate([[capacity - 1], rng.permutation(capacity - 1)[: rows - 1]]).astype(np.int64)
    if rows > 2:
        slots[rng.integers(1, rows)] = rng.choice([-1, -(2**40)])
    return slots


def _queries(shape: tuple[int, ...]) -> Draw:
    rows, count, size, rope_dim = shape

    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        made: dict[str, Argument] = {"q": draw_rows(rng, rows, count, size), "positions": draw_positions(rng, rows)}
        made |= {"heads": count, "head_dim": size, "rope_dim": rope_dim, "eps": 1e-6}
        return made | {"theta": float(rng.choice([10000.0, 160000.0]))}

    return draw


def _rows(shape: tuple[int, ...], narrow: bool) -> Draw:
    rows, spare, size, rope_dim = shape

    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        capacity = rows + spare
        old = rng.integers(0, 127, (capacity, size), np.uint8) if narrow else normal(rng, capacity, size)
        weight = normal(rng, size, scale=300.0 if narrow else 1.0)
        made: dict[str, Argument] = {"kv": draw_rows(rng, rows, size), "weight": weight, "pool": old}
        made |= {"positions": draw_positions(rng, rows), "slot_mapping": draw_slots(rng, rows, capacity)}
        made |= {"head_dim": size, "rope_dim": rope_dim, "eps": 1e-6}
        return made | {"theta": float(rng.choice([10000.0, 160000.0]))}

    return draw


def _cases(narrow: bool) -> tuple[Case, ...]:
    return tuple(
        Case(str([shape[0], *shape[2:]]), _rows(shape, narrow), {"pool": _pool(narrow)}, (shape[0], 1, 1))
        for shape in SHAPES
    )


def _both(narrow: bool) -> tuple[Case, ...]:
    """Queries and a row of the same shape; the row's draw has what both read."""

    def draw(shape: tuple[int, ...]) -> Draw:
        return lambda rng: {**_queries(shape)(rng), **_rows(shape, narrow)(rng)}

    return tuple(
        Case(
            str(list(shape)),
            draw(shape),
            {
                "pool": _pool(narrow),
                "q": rounds(lambda c: heads(c, c.q, None)[0], slack=lambda c: heads(c, c.q, None)[1]),
            },
            (shape[0], 1, 1),
        )
        for shape in SHAPES
    )


CASES: Mapping[str, tuple[Case, ...]] = {
    "spark_v4_q_norm_rope": tuple(
        Case(
            str(list(shape)),
            _queries(shape),
            {"q": rounds(lambda c: heads(c, c.q, None)[0], slack=lambda c: heads(c, c.q, None)[1])},
            (shape[0], 1, 1),
        )
        for shape in SHAPES
    ),
    "spark_v4_kv_assemble": _cases(False),
    "spark_v4_kv_assemble_fp8": _cases(True),
    "spark_v4_q_and_kv": _both(False),
    "spark_v4_q_and_kv_fp8": _both(True),
}
