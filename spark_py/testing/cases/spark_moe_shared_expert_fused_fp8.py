# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module spark_moe_shared_expert_fused_fp8: those of moe_shared_expert_fused, with E4M3 experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...catalog.spec import Call
from ...reference._e4m3 import from_e4m3
from ..case import Case, Table
from ..compare import f64
from ..inputs import Array
from .moe_shared_expert_fused import Arguments, Flavour, cases

_NAN = 0x7F


def _bytes(rng: np.random.Generator, n: int, k: int) -> Array:
    """Any E4M3 but NaN."""
    magnitudes: Array = rng.integers(0, _NAN, (n, k), dtype=np.uint8)
    signed: Array = magnitudes | rng.choice(np.array([0, 0x80], np.uint8), (n, k))
    return signed


def _scales(rng: np.random.Generator, n: int) -> Array:
    return rng.uniform(0.001, 0.1, n).astype(np.float32)


def _draw(rng: np.random.Generator, n: int, k: int) -> Any:
    return _bytes(rng, n, k), _scales(rng, n)


def _mirrored(rng: np.random.Generator, n: int, k: int, order: Array) -> Any:
    values = _bytes(rng, n, k)
    values[:, k // 2 :] = values[:, order] ^ 0x80
    return values, _scales(rng, n)


def _tables(prefix: str, experts: Sequence[Any]) -> Arguments:
    return {
        f"{prefix}weight_ptrs": Table([each and each[0] for each in experts]),
        f"{prefix}scale_ptrs": Table([each and each[1] for each in experts]),
    }


def _shared(prefix: str, weight: Any) -> Arguments:
    values, scale = weight or (None, None)
    return {f"{prefix}_weight": values, f"{prefix}_scale": scale}


def _matrix(values: Any, scale: Any) -> Any:
    return None if values is None else f64(from_e4m3(values)) * f64(scale)[:, None]


def _routed(c: Call, prefix: str, expert: int) -> Any:
    return _matrix(c.behind(f"{prefix}weight_ptrs", expert), c.behind(f"{prefix}scale_ptrs", expert))


def _alone(c: Call, prefix: str) -> Any:
    return _matrix(getattr(c, f"{prefix}_weight"), getattr(c, f"{prefix}_scale"))


FP8 = Flavour(_draw, _mirrored, _tables, _shared, _routed, _alone)

_ONE, _ROWS = cases(FP8, None), cases(FP8, 3)

CASES: Mapping[str, tuple[Case, ...]] = {
    "spark_moe_expert_gate_up_shared_fp8": _ONE[0],
    "spark_moe_expert_silu_down_shared_fp8": _ONE[1],
    "spark_moe_expert_gate_up_shared_fp8_rows": _ROWS[0],
    "spark_moe_expert_silu_down_shared_fp8_rows": _ROWS[1],
}
