# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module fused_k_norm_rope_cache: the formula rounded once, and far on the FP64 angle as a decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ...catalog.spec import Call
from ..case import Argument, Case, Draw
from ..compare import Bound, Mismatch, f64
from ..inputs import BF16, Array, normal

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)

# (rows, kv heads, head_dim, rotary_dim, block_size, blocks)
SHAPES = [
    (1, 1, 64, 64, 16, 2),
    (5, 2, 128, 64, 16, 2),
    (3, 4, 256, 64, 8, 3),
    (2, 1, 256, 256, 16, 1),
    (4, 3, 80, 10, 5, 2),
    (3, 2, 33, 6, 4, 2),
    (2, 2, 16, 2, 4, 2),
    (6, 1, 96, 96, 1, 9),
]
SHORT, LONG = [0, 1, 17, 90], [0, 1500, 30000, 131072]
# A mean of 256 squares as a tree, its root and two products: fewer than 16 roundings of 2^-24 in the norm. Then cosf
# and sinf within 2 ulp of a number up to 1, two products and a sum: 5 roundings.
NORM, TURN = 2.0**-20, 2.0**-22


def keys(
    k: Array, weight: Array, positions: Array, rotary: int, eps: float, theta: float, product: bool = False
) -> tuple[Array, Array]:
    """The keys [T, heads, head_dim] in FP64 and the error that is allowed, for positions [T, rotary / 2] of each pair.

    The angle is rounded to FP32 once. With `product` it may also be the product of two numbers rounded to FP32.
    """
    half = rotary // 2
    x, eps, theta = f64(k), float(np.float32(eps)), float(np.float32(theta))
    normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * (1 + f64(weight))
    angle = (positions.astype(np.float64) / theta ** (np.arange(half) / half))[:, None, :]
    rounded = f64(angle.astype(np.float32))
    first, second = normed[..., :half], normed[..., half:rotary]
    exact, slack = normed.copy(), np.abs(normed) * NORM
    exact[..., :half] = first * np.cos(rounded) - second * np.sin(rounded)
    exact[..., half:rotary] = second * np.cos(rounded) + first * np.sin(rounded)
    # Where the FP64 angle lies on a rounding boundary of FP32, another pow may round it to the other side.
    either = (angle * (1 - 2.0**-50)).astype(np.float32) != (angle * (1 + 2.0**-50)).astype(np.float32)
    off = np.where(either, angle * 2.0**-23, 0.0) + (angle * 2.0**-22 if product else 0.0)
    slack[..., :half] = slack[..., half:rotary] = (NORM + TURN + off) * (np.abs(first) + np.abs(second))
    return exact, slack


def pair_positions(c: Call) -> Array:
    """The position that turns each pair of each row: [T, rotary_dim / 2]."""
    half = c.rotary_dim // 2
    try:
        streams = np.stack([c.pos_t, c.pos_h, c.pos_w])
    except AttributeError:
        streams = np.stack([c.positions] * 3)
    pairs: Array = streams[np.arange(half) % 3].T
    return pairs


@dataclass(frozen=True, slots=True)
class _OfE4m3(Bound):
    """A bound on bytes that are E4M3 numbers."""

    def difference(self, actual: Array, expected: Array, call: Call) -> Mismatch | None:
        return Bound.difference(self, actual.view(E4M3), expected.view(E4M3), call)


def _rounded(product: bool, narrow: bool) -> Bound:
    """Written slots hold correct roundings, of E4M3 with `narrow`; the others what they held."""

    def rows(c: Call) -> tuple[Array, Array]:
        pairs = pair_positions(c)
        exact, slack = keys(c.k_in, c.k_norm_weight, pairs, c.rotary_dim, c.rms_eps, c.theta, product)
        if narrow:  # beyond 448 is 448
            exact, slack = np.clip(exact * c.inv_scale, -448, 448), slack * c.inv_scale
        return exact.reshape(len(exact), -1), slack.reshape(len(slack), -1)

    def exact(c: Call) -> Array:
        whole, kept = f64(c.k_cache_fp8.view(E4M3) if narrow else c.k_cache), c.slot_mapping >= 0
        whole[c.slot_mapping[kept]] = rows(c)[0][kept]
        return whole

    def slack(c: Call) -> Array:
        whole, kept = np.zeros((c.k_cache_fp8 if narrow else c.k_cache).shape), c.slot_mapping >= 0
        whole[c.slot_mapping[kept]] = rows(c)[1][kept]
        return whole

    return (_OfE4m3 if narrow else Bound)(exact=exact, slack=slack)


def _arguments(shape: tuple[int, ...], places: list[int], names: tuple[str, ...], narrow: float | None = None) -> Draw:
    rows, heads, size, rotary, block_size, blocks = shape
    capacity = block_size * blocks

    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        # The last slot is written, so that the catalogue's range is the whole cache.
        slots = np.concatenate([[capacity - 1], rng.permutation(capacity - 1)[: rows - 1]]).astype(np.int64)
        if rows > 2:
            slots[rng.integers(1, rows)] = rng.choice([-1, -(2**40)])
        spread = 2.0 ** rng.integers(-6, 7, (rows, heads, 1))
        made: dict[str, Argument] = {
            "k_in": (rng.standard_normal((rows, heads, size)) * spread).astype(BF16),
            "k_norm_weight": normal(rng, size, scale=0.5),
            "slot_mapping": slots,
            "num_kv_heads": heads,
            "head_dim": size,
            "rotary_dim": rotary,
            "block_size": block_size,
            "rms_eps": 1e-3,
            "theta": float(rng.choice([10000.0, 1e6, 1e7])),
        }
        for name in names:
            made[name] = (rng.choice(places, rows) + rng.integers(0, 3, rows)).astype(np.uint32)
        row = heads * size
        if narrow is None:
            made["k_cache"] = normal(rng, capacity, row)
        else:
            made |= {"inv_scale": narrow, "k_cache_fp8": rng.integers(0, 127, (capacity, row), np.uint8)}
        return made

    return draw


_SUBJECT = "angles of a fused key write in FP64, as in rope_forward"


def _cases(names: tuple[str, ...] = ("positions",), narrow: tuple[float, ...] = ()) -> tuple[Case, ...]:
    made: list[Case] = []
    cache = "k_cache_fp8" if narrow else "k_cache"
    for number, shape in enumerate(SHAPES):
        factor, grid = narrow[number % len(narrow)] if narrow else None, (shape[0], 1, 1)
        short, far = (_arguments(shape, places, names, factor) for places in (SHORT, LONG))
        made.append(Case(str(list(shape)), short, {cache: _rounded(True, bool(narrow))}, grid))
        name, bounds = f"far on, {list(shape)}", {cache: _rounded(False, bool(narrow))}
        made.append(Case(name, far, bounds, grid, "decision", _SUBJECT))
    return tuple(made)


CASES: Mapping[str, tuple[Case, ...]] = {
    "fused_k_norm_rope_cache_write_bf16": _cases(),
    "fused_k_norm_rope_mrope_cache_write_bf16": _cases(("pos_t", "pos_h", "pos_w")),
    "fused_k_norm_rope_cache_write_fp8": _cases(narrow=(1.0, 40.0, 2000.0, 0.02)),
}
