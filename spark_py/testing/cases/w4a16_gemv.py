# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module w4a16_gemv: the values within what FP32 sums in any order allow, and our two orders as a decision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...catalog.spec import Call
from ...catalog.w4a16_gemv import TIERS
from ...reference.w4a16_gemv import E4M3, codes
from ..case import Argument, Case, Draw
from ..compare import Bound, bits, f64, rounds
from ..inputs import BF16, Array, Normal
from .gemv import ORDER

SCALE2 = 0.0123
"""A factor that is no power of two, so that the place of its rounding shows."""


def nvfp4(rng: np.random.Generator, count: int, size: int, low: int = 0x28, high: int = 0x58) -> tuple[Array, Array]:
    """Any codes [N, K / 2], and scales [N, K / 16] of either sign and a magnitude from code `low` to below `high`."""
    packed = rng.integers(0, 256, (count, size // 2), dtype=np.uint8)
    scales = rng.integers(low, high, (count, size // 16), dtype=np.uint8)
    return packed, scales | rng.choice(np.array([0, 0x80], np.uint8), scales.shape)


def cancelling(rng: np.random.Generator, rows: tuple[int, ...], count: int, size: int) -> tuple[Array, Array, Array]:
    """Activations over many magnitudes, codes and scales with sums that cancel to what was rounded on the way.

    The second half of a row is the first, negated and in another order; each row has one scale. K % 32 == 0.
    """
    half, order = size // 2, rng.permutation(size // 2)
    x = (rng.standard_normal((*rows, size)) * 2.0 ** rng.integers(-10, 10, (*rows, size))).astype(BF16)
    x[..., half:] = x[..., order]
    nibbles = rng.integers(0, 16, (count, size), dtype=np.uint8)
    nibbles[:, half:] = nibbles[:, order] ^ 8
    scales = np.repeat(rng.integers(0x28, 0x58, (count, 1), dtype=np.uint8), size // 16, axis=1)
    return x, nibbles[:, 0::2] | (nibbles[:, 1::2] << 4), scales


def weights(packed: Array, scales: Array, scale2: float) -> Any:
    """The weights [N, K] in FP64."""
    return f64(codes(packed)) * np.repeat(f64(E4M3[scales]) * scale2, 16, axis=1)


def _exact(c: Call) -> Any:
    return f64(c.A) @ weights(c.B_packed, c.B_scale, c.scale2).T


def _lost(c: Call) -> Any:
    """No order of adding the products 64 at a time or in a tree loses more, nor do up to three roundings of each."""
    return (c.K / 16 + 24) * 2.0**-24 * (np.abs(f64(c.A)) @ np.abs(weights(c.B_packed, c.B_scale, c.scale2)).T)


def _apart(c: Call, values: Any) -> Any:
    return values.reshape(c.num_heads, 2, c.head_dim).transpose(1, 0, 2).reshape(-1)


CLOSE = rounds(_exact, slack=_lost)
_CLOSE_HEADS = rounds(lambda c: _apart(c, _exact(c)), slack=lambda c: _apart(c, _lost(c)))


def _random(sizes: Mapping[str, int], low: int = 0x28, high: int = 0x58) -> Draw:
    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        packed, scales = nvfp4(rng, sizes["N"], sizes["K"], low, high)
        return {"A": Normal(spread=4), "B_packed": packed, "B_scale": scales, "scale2": SCALE2, **sizes}

    return draw


def _ordered(sizes: Mapping[str, int], rows: tuple[int, ...]) -> Draw:
    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        x, packed, scales = cancelling(rng, rows, sizes["N"], sizes["K"])
        return {"A": x, "B_packed": packed, "B_scale": scales, "scale2": SCALE2, **sizes}

    return draw


def _name(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in sizes.items())


def _close(bound: Bound, *shapes: Mapping[str, int]) -> tuple[Case, ...]:
    return tuple(Case(_name(sizes), _random(sizes), {"C": bound}) for sizes in shapes)


def _decided(rows: tuple[int, ...], *shapes: Mapping[str, int]) -> tuple[Case, ...]:
    return tuple(
        Case(
            f"sums that cancel, {_name(sizes)}",
            _ordered(sizes, rows),
            {"C": bits()},
            tag="decision",
            subject=ORDER,
        )
        for sizes in shapes
    )


def _one_row() -> tuple[Case, ...]:
    shapes = [{"N": n, "K": k} for n, k in ((1, 16), (5, 48), (127, 80), (129, 32), (7, 2064), (6, 4112))]
    ordered = [{"N": n, "K": k} for n, k in ((37, 64), (66, 2080), (30, 4128))]
    every = Case("any scale but NaN", _random({"N": 21, "K": 1040}, 0, 0x7F), {"C": CLOSE})
    small = Case("subnormal scales", _random({"N": 9, "K": 80}, 0, 8), {"C": CLOSE})
    last = Case("NaN among the scales", _random({"N": 40, "K": 48}, 0x70, 0x80), {"C": CLOSE})
    return (*_close(CLOSE, *shapes), every, small, last, *_decided((), *ordered))


def _heads(heads: int, size: int, k: int) -> Mapping[str, int]:
    return {"N": 2 * heads * size, "K": k, "num_heads": heads, "head_dim": size}


def _batch(rows: int, *, told: bool) -> tuple[Case, ...]:
    def sizes(m: int, n: int, k: int) -> Mapping[str, int]:
        return {"M": m, "N": n, "K": k} if told else {"N": n, "K": k}

    fewer = sorted({1, rows // 2, rows - 1}) if told else []
    close = [sizes(rows, 5, 80), sizes(rows, 1, 16), sizes(rows, 11, 2064)]
    close += [sizes(m, 6 + number, 48) for number, m in enumerate(fewer)]
    return (*_close(CLOSE, *close), *_decided((rows,), sizes(rows, 37, 64), sizes(rows, 9, 2080)))


CASES: Mapping[str, tuple[Case, ...]] = {
    "w4a16_gemv": _one_row(),
    "w4a16_gemv_sw": _one_row(),
    "w4a16_gemv_logits": _one_row(),
    "w4a16_gemv_qg": (
        *_close(_CLOSE_HEADS, _heads(1, 1, 16), _heads(3, 5, 48), _heads(2, 16, 2064)),
        *_decided((), _heads(5, 7, 64), _heads(2, 9, 2080)),
    ),
    "w4a16_gemv_batch2": _batch(2, told=False),
    "w4a16_gemv_batch3": _batch(3, told=False),
    **{f"w4a16_gemv_batch{rows}": _batch(rows, told=True) for rows in TIERS},
    "w4a16_gemv_batch8_rt2": _batch(8, told=True),
}
