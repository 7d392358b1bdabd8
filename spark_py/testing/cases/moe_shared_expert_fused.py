# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module moe_shared_expert_fused, for NVFP4 and any other format of the experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...catalog.spec import Call
from ..case import Argument, Case, Draw, Poisoned, Table
from ..compare import Bound, bits, f64, rounds
from ..inputs import BF16, F32, U32, Array, Normal, normal
from .gemv import ORDER
from .moe_silu_mul import SILU_BOUND, SILU_FLOOR
from .w4a16_gemv import SCALE2, nvfp4, weights

CLAMP = "SwiGLU clamp"

Arguments = Mapping[str, Argument]


@dataclass(frozen=True, slots=True)
class Flavour:
    """How experts of one format are drawn, passed, and read back in FP64.

    `draw(rng, n, k)` is any weight, `mirrored(rng, n, k, order)` one whose second half is the first, in another order
    and negated. `tables(prefix, experts)` and `shared(prefix, weight)` are arguments; `routed(call, prefix, expert)`
    and `alone(call, prefix)` the weights [N, K], None where there are none.
    """

    draw: Callable[[np.random.Generator, int, int], Any]
    mirrored: Callable[[np.random.Generator, int, int, Array], Any]
    tables: Callable[[str, Sequence[Any]], Arguments]
    shared: Callable[[str, Any], Arguments]
    routed: Callable[[Call, str, int], Any]
    alone: Callable[[Call, str], Any]


# ------------------------------------------------------------ NVFP4


def _draw(rng: np.random.Generator, n: int, k: int) -> Any:
    return (*nvfp4(rng, n, k), float(np.float32(SCALE2 * rng.uniform(0.5, 2.0))))


def _mirrored(rng: np.random.Generator, n: int, k: int, order: Array) -> Any:
    nibbles = rng.integers(0, 16, (n, k), dtype=np.uint8)
    nibbles[:, k // 2 :] = nibbles[:, order] ^ 8
    scales = np.repeat(rng.integers(0x28, 0x58, (n, 1), dtype=np.uint8), k // 16, axis=1)
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4), scales, float(np.float32(SCALE2 * rng.uniform(0.5, 2.0)))


def _tables(prefix: str, experts: Sequence[Any]) -> Arguments:
    return {
        f"{prefix}packed_ptrs": Table([each and each[0] for each in experts]),
        f"{prefix}scale_ptrs": Table([each and each[1] for each in experts]),
        f"{prefix}scale2_vals": np.array([each[2] if each else np.nan for each in experts], np.float32),
    }


def _shared(prefix: str, weight: Any) -> Arguments:
    packed, scale, s2 = weight or (None, None, 1.0)
    return {f"{prefix}_packed": packed, f"{prefix}_scale": scale, f"{prefix}_s2": s2}


def _routed(c: Call, prefix: str, expert: int) -> Any:
    packed, scales = c.behind(f"{prefix}packed_ptrs", expert), c.behind(f"{prefix}scale_ptrs", expert)
    scale2 = float(getattr(c, f"{prefix}scale2_vals")[expert])
    return None if packed is None else weights(packed, scales, scale2)


def _alone(c: Call, prefix: str) -> Any:
    packed, scale, s2 = (getattr(c, f"{prefix}_{name}") for name in ("packed", "scale", "s2"))
    return None if packed is None else weights(packed, scale, s2)


NVFP4 = Flavour(_draw, _mirrored, _tables, _shared, _routed, _alone)


# ------------------------------------------------------------ expectations


def _product(x: Any, weight: Any, outputs: int, slack: Callable[[int], float] | None) -> Any:
    """x . weight in FP64, or with `slack` how far off it may be; zeros without a weight."""
    if weight is None:
        return np.zeros(outputs)
    return weight @ x if slack is None else slack(len(x)) * (np.abs(weight) @ np.abs(x))


def lost(k: int) -> float:
    """What FP32 may lose relative to the sum of magnitudes: adding products 32 at a time or in a tree, and a few
    roundings of each."""
    return (k / 16 + 24) * 2.0**-24


def lost_gated(k: int) -> float:
    return lost(k) + SILU_BOUND


def routed_slots(flavour: Flavour, c: Call, rows: Any, prefix: str, slack: Callable[[int], float] | None) -> Any:
    """rows [..., top_k, K] through the experts that the call's ids name: [..., top_k, N]."""
    ids = c.expert_indices
    result = np.zeros((*ids.shape, c.N))
    for at in np.ndindex(ids.shape):
        result[at] = _product(rows[at], flavour.routed(c, prefix, int(ids[at])), c.N, slack)
    return result


def _alone_rows(c: Call, rows: Any, weight: Any, slack: Callable[[int], float] | None) -> Any:
    flat = [_product(row, weight, c.N, slack) for row in rows.reshape(-1, c.K)]
    return np.array(flat).reshape((*rows.shape[:-1], c.N))


def gated(gate: Array, up: Array) -> Any:
    with np.errstate(over="ignore"):
        return f64(gate) / (1.0 + np.exp(-f64(gate))) * f64(up)


def project_bounds(flavour: Flavour) -> Mapping[str, Bound]:
    """Of the gate and up projections."""

    def routed(prefix: str, slack: Callable[[int], float] | None) -> Callable[[Call], Any]:
        def value(c: Call) -> Any:
            rows = np.broadcast_to(f64(c.A)[..., None, :], (*c.expert_indices.shape, c.K))
            return routed_slots(flavour, c, rows, prefix, slack)

        return value

    def alone(prefix: str, slack: Callable[[int], float] | None) -> Callable[[Call], Any]:
        def value(c: Call) -> Any:
            has = flavour.alone(c, "sh_gate") is not None
            return _alone_rows(c, f64(c.A), flavour.alone(c, prefix) if has else None, slack)

        return value

    return {
        "gate_out": rounds(routed("gate_", None), slack=routed("gate_", lost)),
        "up_out": rounds(routed("up_", None), slack=routed("up_", lost)),
        "sh_gate_out": rounds(alone("sh_gate", None), slack=alone("sh_gate", lost)),
        "sh_up_out": rounds(alone("sh_up", None), slack=alone("sh_up", lost)),
    }


def down_bounds(
    flavour: Flavour,
    shared: bool = True,
    activation: Callable[[Call, Array, Array], Any] = lambda c, gate, up: gated(gate, up),
) -> Mapping[str, Bound]:
    """Of the down projection; `shared`: of a kernel with a shared expert. `activation` of a gate and an up, in FP64."""

    def routed(slack: Callable[[int], float] | None) -> Callable[[Call], Any]:
        return lambda c: (
            routed_slots(flavour, c, activation(c, c.gate_out, c.up_out), "", slack)
            + (0.0 if slack is None else routed_slots(flavour, c, SILU_FLOOR * f64(c.up_out), "", lambda k: 1.0))
        )

    def alone(slack: Callable[[int], float] | None) -> Callable[[Call], Any]:
        def value(c: Call) -> Any:
            weight = flavour.alone(c, "sh_down")
            floor = 0.0 if slack is None else _alone_rows(c, SILU_FLOOR * f64(c.sh_up_in), weight, lambda k: 1.0)
            return _alone_rows(c, activation(c, c.sh_gate_in, c.sh_up_in), weight, slack) + floor

        return value

    both = {"C": rounds(routed(None), slack=routed(lost_gated))}
    return both | ({"sh_down_out": rounds(alone(None), slack=alone(lost_gated))} if shared else {})


# ------------------------------------------------------------ arguments


@dataclass(frozen=True, slots=True)
class Shape:
    """experts, top_k, N, K; rows None for a kernel for one row. `missing` experts have no weights, `repeated` ids are
    all the same, `alone` (the shared expert) may be absent. `gate` scales the gates of a down projection."""

    experts: int
    top_k: int
    n: int
    k: int
    rows: int | None = None
    missing: tuple[int, ...] = ()
    repeated: bool = False
    alone: bool = True
    gate: float = 1.5

    @property
    def lead(self) -> tuple[int, ...]:
        """The axis of rows."""
        return () if self.rows is None else (self.rows,)

    def __str__(self) -> str:
        rows = "" if self.rows is None else f"rows={self.rows} "
        return f"{rows}E={self.experts} top_k={self.top_k} N={self.n} K={self.k}"


def ids(rng: np.random.Generator, shape: Shape) -> Array:
    """Distinct experts a row, the last of all among them; or one for all."""
    count = shape.rows or 1
    if shape.top_k == 0:
        return np.zeros(1, U32)
    if shape.repeated:
        chosen = np.full((count, shape.top_k), shape.experts - 1)
    else:
        chosen = np.stack([rng.permutation(shape.experts)[: shape.top_k] for _ in range(count)])
    if not (chosen == shape.experts - 1).any():
        chosen[-1, -1] = shape.experts - 1
    return chosen.reshape(*shape.lead, shape.top_k).astype(U32)


def project(flavour: Flavour, shape: Shape) -> Draw:
    """Arguments of the gate and up projections."""

    def draw(rng: np.random.Generator) -> Arguments:
        def some(missing: tuple[int, ...]) -> list[Any]:
            all_of_them = range(shape.experts)
            return [None if e in missing else flavour.draw(rng, shape.n, shape.k) for e in all_of_them]

        # Without the shared expert's gate there is none, even if its up projection is there.
        alone = [flavour.draw(rng, shape.n, shape.k) if shape.alone else None, flavour.draw(rng, shape.n, shape.k)]
        return {
            "A": Normal(spread=4),
            **flavour.tables("gate_", some(shape.missing)),
            **flavour.tables("up_", some(shape.missing[:1])),
            **flavour.shared("sh_gate", alone[0]),
            **flavour.shared("sh_up", alone[1]),
            "expert_indices": ids(rng, shape),
            **_idle(shape, shape.n, "gate_out", "up_out"),
            **sizes(shape),
        }

    return draw


def project_mirrored(flavour: Flavour, shape: Shape) -> Draw:
    """The same with sums that cancel to what was rounded on the way."""

    def draw(rng: np.random.Generator) -> Arguments:
        order = rng.permutation(shape.k // 2)

        def weight() -> Any:
            return flavour.mirrored(rng, shape.n, shape.k, order)

        return {
            "A": mirrored_rows(rng, shape.lead, shape.k, order),
            **flavour.tables("gate_", [weight() for _ in range(shape.experts)]),
            **flavour.tables("up_", [weight() for _ in range(shape.experts)]),
            **flavour.shared("sh_gate", weight()),
            **flavour.shared("sh_up", weight()),
            "expert_indices": ids(rng, shape),
            **sizes(shape),
        }

    return draw


def down(flavour: Flavour, shape: Shape, shared: bool = True) -> Draw:
    """Arguments of a down projection."""

    def draw(rng: np.random.Generator) -> Arguments:
        found = range(shape.experts)
        experts = [None if e in shape.missing else flavour.draw(rng, shape.n, shape.k) for e in found]
        alone = flavour.draw(rng, shape.n, shape.k) if shape.alone else None
        routed: Arguments = {
            "gate_out": Normal(shape.gate),
            "up_out": Normal(shape.gate),
            **flavour.tables("", experts),
            "expert_indices": ids(rng, shape),
            **_idle(shape, shape.k, "gate_out", "up_out"),
            **_idle(shape, shape.n, "C"),
            **sizes(shape),
        }
        more = {"sh_gate_in": Normal(shape.gate), "sh_up_in": Normal(shape.gate), **flavour.shared("sh_down", alone)}
        return {**routed, **(more if shared else {})}

    return draw


def down_mirrored(flavour: Flavour, shape: Shape, shared: bool = True) -> Draw:
    """The same with sums that cancel. Gates are above 20, where the sigmoid is 1 however exp is computed."""

    def draw(rng: np.random.Generator) -> Arguments:
        order = rng.permutation(shape.k // 2)

        def weight() -> Any:
            return flavour.mirrored(rng, shape.n, shape.k, order)

        def rows(lead: tuple[int, ...]) -> tuple[Array, Array]:
            gate = rng.uniform(20.0, 120.0, (*lead, shape.k)).astype(BF16)
            gate[..., shape.k // 2 :] = gate[..., order]
            return gate, mirrored_rows(rng, lead, shape.k, order)

        gate, up = rows((*shape.lead, shape.top_k))
        sh_gate, sh_up = rows(shape.lead)
        routed: Arguments = {
            "gate_out": gate,
            "up_out": up,
            **flavour.tables("", [weight() for _ in range(shape.experts)]),
            "expert_indices": ids(rng, shape),
            **sizes(shape),
        }
        more = {"sh_gate_in": sh_gate, "sh_up_in": sh_up, **flavour.shared("sh_down", weight())}
        return {**routed, **(more if shared else {})}

    return draw


def _idle(shape: Shape, width: int, *names: str) -> Arguments:
    """Buffers that a launch without routed experts gets all the same and leaves alone: there are none of no bytes."""
    return {} if shape.top_k else {name: Poisoned((1, width)) for name in names}


def sizes(shape: Shape) -> Arguments:
    """The scalars."""
    return {"N": shape.n, "K": shape.k, "top_k": shape.top_k}


def mirrored_rows(rng: np.random.Generator, lead: tuple[int, ...], k: int, order: Array) -> Array:
    x = (normal(rng, *lead, k).astype(F32) * 2.0 ** rng.integers(-10, 10, (*lead, k))).astype(BF16)
    x[..., k // 2 :] = x[..., order]
    return x


# ------------------------------------------------------------ cases


def cases(flavour: Flavour, rows: int | None) -> tuple[tuple[Case, ...], tuple[Case, ...]]:
    """Of the kernels for one row (None) or several: (gate and up, down)."""
    close = [
        Shape(1, 1, 1, 16, rows),
        Shape(5, 3, 5, 48, rows),
        Shape(4, 2, 9, 2064, rows),
        Shape(3, 2, 34, 544, rows),
        Shape(6, 4, 13, 80, rows, missing=(1, 5)),
        Shape(4, 2, 11, 64, rows, repeated=True),
    ]
    odd = {
        "no shared expert": Shape(3, 2, 12, 48, rows, alone=False),
        "the shared expert alone": Shape(2, 0, 12, 48, rows),
    }
    exact = [Shape(4, 2, 19, 96, rows), Shape(3, 2, 9, 1056, rows), Shape(2, 1, 5, 4128, rows)]
    grid = (1, 1 if rows is None else rows, 1)

    def make(draw: Callable[[Flavour, Shape], Draw], bounds: Mapping[str, Bound]) -> list[Case]:
        def held(shape: Shape) -> Mapping[str, Bound]:
            # Without routed experts their buffers have to stay as they are, bit for bit.
            return bounds if shape.top_k else {name: each for name, each in bounds.items() if name.startswith("sh_")}

        named = {str(each): each for each in close} | odd
        return [Case(name, draw(flavour, each), held(each), grid=grid) for name, each in named.items()]

    def ordered(draw: Callable[[Flavour, Shape], Draw], outputs: tuple[str, ...]) -> list[Case]:
        equal = {name: bits() for name in outputs}
        return [
            Case(f"sums that cancel, {each}", draw(flavour, each), equal, grid=grid, tag="decision", subject=ORDER)
            for each in exact
        ]

    gate_up = make(project, project_bounds(flavour))
    gate_up += ordered(project_mirrored, ("gate_out", "up_out", "sh_gate_out", "sh_up_out"))
    silu_down = make(down, down_bounds(flavour))
    large = Shape(3, 2, 10, 96, rows, gate=12.0)
    silu_down.append(
        Case(
            "values beyond 10",
            down(flavour, large),
            down_bounds(flavour),
            grid=grid,
            tag="decision",
            subject=CLAMP,
        )
    )
    silu_down += ordered(down_mirrored, ("C", "sh_down_out"))
    return tuple(gate_up), tuple(silu_down)


_ONE, _ROWS = cases(NVFP4, None), cases(NVFP4, 3)

CASES: Mapping[str, tuple[Case, ...]] = {
    "moe_expert_gate_up_shared": _ONE[0],
    "moe_expert_silu_down_shared": _ONE[1],
    "spark_moe_expert_gate_up_shared_rows": _ROWS[0],
    "spark_moe_expert_silu_down_shared_rows": _ROWS[1],
}
