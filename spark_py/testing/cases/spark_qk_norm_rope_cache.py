# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module spark_qk_norm_rope_cache: rows into scattered slots, everything apart from everything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...catalog.spec import Call
from ..case import Argument, Case, Draw
from ..compare import bits, within
from ..inputs import Array, normal

# (rows, q heads, kv heads, head_dim, rotary_dim, block_size, gap)
Shape = tuple[int, int, int, int, int, int, int]
SHAPES: tuple[Shape, ...] = (
    (1, 4, 1, 64, 16, 16, 0),
    (3, 2, 2, 32, 32, 4, 1),
    (5, 6, 1, 256, 64, 16, 3),
    (2, 3, 3, 96, 48, 5, 8),
)


def _arguments(shape: Shape, fp8: bool, norm: bool, one_plus: bool, still: bool) -> Draw:
    rows, heads, kv_heads, size, rotary, block_size, gap = shape
    row, blocks = kv_heads * size, 4
    stride = block_size * row + gap

    def apart(values: Array) -> Array:
        """Values `gap` + 1 elements apart; what lies between is no position and no slot."""
        made = np.full((rows, 1 + gap), 1 << 30, values.dtype)
        made[:, 0] = values
        return made.reshape(-1)[: made.size - gap]

    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        query = np.full((rows, heads * size + gap), np.nan, normal(rng, 1).dtype)
        query[:, : heads * size] = normal(rng, rows, heads * size, scale=3)
        slots = rng.permutation(blocks * block_size)[:rows].astype(np.int64)
        slots[1:2] = -1
        made: dict[str, Argument] = {"Q": query.reshape(-1)[: query.size - gap], "K": normal(rng, rows, row, scale=3)}
        made |= {"V": normal(rng, rows, row, scale=3), "slots": apart(slots), "cache_stride": stride}
        positions = np.zeros(rows, np.uint32) if still else rng.integers(0, 5000, rows).astype(np.uint32)
        made |= {"positions": apart(positions), "position_stride": 1 + gap, "slot_stride": 1 + gap}
        for name in ("q_weight", "k_weight"):
            made[name] = normal(rng, size, scale=0.3) if norm else None
        made |= {"num_q_heads": heads, "num_kv_heads": kv_heads, "head_dim": size, "rotary_dim": rotary}
        made |= {"block_size": block_size, "q_stride": heads * size + gap, "one_plus": int(one_plus)}
        made |= {"eps": 1e-6, "theta": 10000.0}
        return made | ({"k_scale": 0.03, "v_scale": 0.5} if fp8 else {})

    return draw


def _slack(name: str) -> Any:
    """What the last bit of a cosine or sine is worth, of pairs that nearly cancel."""

    def slack(c: Call) -> float:
        values = np.abs(np.nan_to_num(getattr(c, name).astype(np.float64)))
        return float(values.max()) * 8.0 * 2.0**-22

    return slack


def _case(shape: Shape, fp8: bool = False, norm: bool = True, one_plus: bool = True, still: bool = False) -> Case:
    rows, heads, kv_heads, size, rotary, block_size, gap = shape
    name = f"{rows} rows, {heads}/{kv_heads} heads of {size}, {rotary} rotated, blocks of {block_size}, {gap} apart"
    name += (
        ("" if norm else ", not normed") + ("" if one_plus else ", plain weights") + (", position 0" if still else "")
    )
    turned = bits() if still else within(1, slack=_slack("Q"))
    keys = bits() if still or fp8 else within(1, slack=_slack("K"))
    bounds = {"Q": turned, "K": bits() if still else within(1, slack=_slack("K")), "k_cache": keys, "v_cache": bits()}
    return Case(name, _arguments(shape, fp8, norm, one_plus, still), bounds, (heads + 2 * kv_heads, rows, 1))


CASES: Mapping[str, tuple[Case, ...]] = {
    "spark_qk_norm_rope_cache": (
        *map(_case, SHAPES),
        _case(SHAPES[0], norm=False),
        _case(SHAPES[2], one_plus=False),
        _case(SHAPES[3], still=True),
    ),
    # At position 0 a rotation changes nothing, so that no last bit of a cosine can become another code.
    "spark_qk_norm_rope_cache_fp8": (
        *(_case(shape, fp8=True, still=True) for shape in SHAPES),
        _case(SHAPES[1], fp8=True, norm=False, still=True),
    ),
}
