# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of modules hyper_connection and spark_hyper_connection. The maths is the official one, which is a decision:
some of the engine's revisions compute something else under the same names.

Bounds are first-order: a sum of n products in FP32 is off by (terms in a chain) * 2**-24 * the sum of magnitudes, a
sigmoid by a quarter of its argument's error, and sinkhorn's logarithm by the logits' error once a half step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...catalog.spec import Call, Dim3
from ..case import Alias, Argument, Case, Draw
from ..compare import Bound, bits, f64, rounds
from ..inputs import F32, Array, Normal, normal

UNIT = 2.0**-24
SUBJECT = "hyper-connection maths"

# (tokens, hidden_size, hc_mult): quads that end early, rows off 16 bytes, one stream, V4's size.
SHAPES = (
    (1, 1, 4),
    (3, 5, 3),
    (2, 64, 4),
    (3, 33, 4),
    (2, 130, 2),
    (2, 7, 1),
    (2, 1030, 4),
    (1, 4096, 4),
    (1, 4100, 4),
    (2, 515, 3),
)


def chain(size: int) -> int:
    """The longest chain of additions of a sum of `size` products over 256 threads, and a few roundings more."""
    return 4 * -(-size // 1024) + 12


def logits(streams: Array, fn: Array, scales: Array, base: Array, norm_eps: float) -> tuple[Array, Array]:
    """FP64 (fn x) r scale + base and how far off FP32 may be, [T, rows] each."""
    x = f64(streams).reshape(len(streams), -1)
    f = f64(fn)
    r = 1.0 / np.sqrt((x * x).mean(axis=1, keepdims=True) + norm_eps)
    m = x @ f.T * r
    steps = UNIT * chain(x.shape[1])
    off = np.abs(x) @ np.abs(f).T * r * steps + np.abs(m) * steps
    exact = m * scales + base
    return exact, np.abs(scales) * off + 4 * UNIT * (np.abs(m * scales) + np.abs(base))


def sigmoid(x: Array) -> Array:
    result: Array = 1.0 / (1.0 + np.exp(-x))
    return result


def sinkhorn(values: Array, iters: int, eps: float) -> Array:
    """FP64 comb of logits [T, hc, hc]."""
    comb = np.exp(values - values.max(axis=2, keepdims=True))
    comb = comb / comb.sum(axis=2, keepdims=True) + eps
    for turn in range(iters):
        if turn:
            comb = comb / (comb.sum(axis=2, keepdims=True) + eps)
        comb = comb / (comb.sum(axis=1, keepdims=True) + eps)
    result: Array = comb
    return result


def pre_oracle(
    streams: Array, fn: Array, scale: Array, base: Array, iters: int, norm_eps: float, hc_eps: float
) -> tuple[tuple[Array, Array], tuple[Array, Array], tuple[Array, Array]]:
    """(y, post, comb) of `hc_pre`, each as (FP64 value, how far off it may be before its last rounding)."""
    tokens, hc, _ = streams.shape
    scales = np.repeat(f64(scale), [hc, hc, hc * hc])
    exact, off = logits(streams, fn, scales, f64(base), norm_eps)
    post = 2.0 * sigmoid(exact[:, hc : 2 * hc])
    post_off = off[:, hc : 2 * hc] / 2 + 16 * UNIT * post
    comb = sinkhorn(exact[:, 2 * hc :].reshape(tokens, hc, hc), iters, hc_eps)
    worst = off[:, 2 * hc :].max(axis=1)[:, None, None]
    comb_off = (2 * iters + 2) * (worst + 6 * UNIT) * comb
    return _mixed(streams, exact[:, :hc], off[:, :hc], hc_eps), (post, post_off), (comb, comb_off)


def head_oracle(
    streams: Array, fn: Array, scale: Array, base: Array, norm_eps: float, hc_eps: float
) -> tuple[Array, Array]:
    """y of `hc_head` and how far off it may be before its rounding to BF16."""
    exact, off = logits(streams, fn, np.full(streams.shape[1], f64(scale)[0]), f64(base), norm_eps)
    return _mixed(streams, exact, off, hc_eps)


def _mixed(streams: Array, exact: Array, off: Array, hc_eps: float) -> tuple[Array, Array]:
    weights = sigmoid(exact) + hc_eps
    x = f64(streams)
    slack = off / 4 + 12 * UNIT * weights
    return np.einsum("ti,tid->td", weights, x), np.einsum("ti,tid->td", slack, np.abs(x))


def post_oracle(block_out: Array, residual: Array, post: Array, comb: Array) -> tuple[Array, Array]:
    """`hc_post` in FP64, and how far off FP32 may be."""
    o, x, p, c = f64(block_out), f64(residual), f64(post), f64(comb)
    exact = p[:, :, None] * o[:, None] + np.einsum("tij,tid->tjd", c, x)
    size = np.abs(p)[:, :, None] * np.abs(o)[:, None] + np.einsum("tij,tid->tjd", np.abs(c), np.abs(x))
    return exact, 6 * UNIT * size


def shares_oracle(streams: Array, fn: Array) -> tuple[Array, Array]:
    """The shares of spark_hc_mix [T, rows + 1, 8] in FP64, and how far off FP32 may be."""
    x = f64(streams).reshape(len(streams), -1)
    warp = np.arange(x.shape[1]) // 4 % 256 // 32
    terms = np.concatenate([x[:, None] * f64(fn)[None], (x * x)[:, None]], axis=1)
    exact = np.stack([np.where(warp == share, terms, 0.0).sum(axis=2) for share in range(8)], axis=2)
    size = np.stack([np.where(warp == share, np.abs(terms), 0.0).sum(axis=2) for share in range(8)], axis=2)
    return exact, UNIT * chain(x.shape[1]) * size


def streams_of(rng: np.random.Generator, tokens: int, hc: int, size: int) -> Array:
    """Tokens of different magnitudes, some where norm_eps counts."""
    return (rng.standard_normal((tokens, hc, size)) * 10.0 ** rng.uniform(-3, 2, (tokens, 1, 1))).astype(F32)


def weights_of(rng: np.random.Generator, rows: int, size: int) -> Array:
    """Rows whose product with a normalised vector is about 1."""
    values: Array = rng.standard_normal((rows, size)) / np.sqrt(size)
    return values.astype(F32)


def _pre(shape: tuple[int, int, int], iters: int, times: float, eps: float, blind: bool = False) -> Draw:
    tokens, size, hc = shape
    rows = (2 + hc) * hc

    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        fn = weights_of(rng, rows, hc * size)
        if blind:  # logits are the base alone
            fn = np.zeros_like(fn)
        return {
            "streams": streams_of(rng, tokens, hc, size),
            "hc_fn": fn,
            "hc_scale": np.array([1.5, -0.75, times], F32),
            "hc_base": (rng.standard_normal(rows) * np.repeat([1.0, 1.0, times], [hc, hc, hc * hc])).astype(F32),
            "hidden_size": size,
            "hc_mult": hc,
            "sinkhorn_iters": iters,
            "norm_eps": eps,
            "hc_eps": eps,
        }

    return draw


def _head(shape: tuple[int, int, int], eps: float) -> Draw:
    tokens, size, hc = shape

    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        return {
            "streams": streams_of(rng, tokens, hc, size),
            "head_fn": weights_of(rng, hc, hc * size),
            "head_scale": np.array([-1.75], F32),
            "head_base": rng.standard_normal(hc).astype(F32),
            "hidden_size": size,
            "hc_mult": hc,
            "norm_eps": eps,
            "hc_eps": eps,
        }

    return draw


def _post(shape: tuple[int, int, int], **more: Argument) -> Draw:
    tokens, size, hc = shape

    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        return {
            "block_out": normal(rng, tokens, size),
            "residual": streams_of(rng, tokens, hc, size),
            "post": rng.uniform(0, 2, (tokens, hc)).astype(F32),
            "comb": rng.uniform(0, 1, (tokens, hc, hc)).astype(F32),
            "hidden_size": size,
            "hc_mult": hc,
            **more,
        }

    return draw


def _bound(oracle: Callable[[Call], tuple[Array, Array]]) -> Bound:
    return rounds(lambda c: oracle(c)[0], 0.0, lambda c: oracle(c)[1])


def _pre_part(part: int) -> Callable[[Call], tuple[Array, Array]]:
    return lambda c: pre_oracle(c.streams, c.hc_fn, c.hc_scale, c.hc_base, c.sinkhorn_iters, c.norm_eps, c.hc_eps)[part]


_PRE = {"y_out": _bound(_pre_part(0)), "post_out": _bound(_pre_part(1)), "comb_out": _bound(_pre_part(2))}
_HEAD = {"y_out": _bound(lambda c: head_oracle(c.streams, c.head_fn, c.head_scale, c.head_base, c.norm_eps, c.hc_eps))}
_OUT = _bound(lambda c: post_oracle(c.block_out, c.residual, c.post, c.comb))

# (iterations, factor of comb's logits, epsilon): few iterations of large logits are far from their limit.
SETTINGS = ((20, 1.0, 1e-6), (1, 8.0, 1e-6), (2, 8.0, 0.03), (3, 8.0, 1e-6), (20, 8.0, 0.03))


def _tokens(shape: tuple[int, int, int]) -> Dim3:
    return shape[0], 1, 1


def _on_y(shape: tuple[int, int, int]) -> Dim3:
    return 1, shape[0], 1


def name(shape: tuple[int, int, int]) -> str:
    """A shape in words."""
    return "{} tokens, H={} hc={}".format(*shape)


def _pre_cases(grid: Callable[[tuple[int, int, int]], Dim3], extend: Callable[[Draw], Draw]) -> tuple[Case, ...]:
    shapes = [(shape, *SETTINGS[at % len(SETTINGS)]) for at, shape in enumerate(SHAPES)]
    settings = [((2, 64, 4), *setting) for setting in SETTINGS]
    return tuple(
        Case(
            f"{name(shape)}, {iters} iterations, logits x{times:g}, eps {eps:g}{', base alone' if blind else ''}",
            extend(_pre(shape, iters, times, eps, blind)),
            _PRE,
            grid(shape),
            *(("decision", SUBJECT) if blind else ()),
        )
        for blind, runs in ((False, shapes), (True, settings))
        for shape, iters, times, eps in runs
    )


def _head_cases(grid: Callable[[tuple[int, int, int]], Dim3], extend: Callable[[Draw], Draw]) -> tuple[Case, ...]:
    return tuple(
        Case(f"{name(shape)}, eps {eps:g}", extend(_head(shape, eps)), _HEAD, grid(shape))
        for shape in SHAPES
        for eps in (1e-6, 0.03)
    )


def _post_cases(grid: Callable[[tuple[int, int, int]], Dim3]) -> tuple[Case, ...]:
    kinds = ((name(shape), _post(shape), {"out": _OUT}, shape) for shape in SHAPES)
    aliased = (
        (f"{name(s)}, in place", _post(s, out=Alias("residual")), {"residual": _OUT}, s) for s in (SHAPES[2], SHAPES[4])
    )
    return tuple(
        # With one stream there is no other way to contract.
        Case(text, draw, bounds, grid(shape), *(("decision", SUBJECT) if shape[2] > 1 else ()))
        for text, draw, bounds, shape in (*kinds, *aliased)
    )


def _same(draw: Draw) -> Draw:
    return draw


def _from_shares(fn: str) -> Callable[[Draw], Draw]:
    """Arguments of the kernel that finishes: exact shares, rounded once, in place of the rows of `fn`."""

    def extend(draw: Draw) -> Draw:
        def arguments(rng: np.random.Generator) -> Mapping[str, Argument]:
            made: dict[str, Any] = dict(draw(rng))
            made["shares"] = shares_oracle(made["streams"], made.pop(fn))[0].astype(F32)
            return made

        return arguments

    return extend


def _from_totals(c: Call) -> tuple[Array, Array]:
    """The logits of a finishing kernel and their error, from its shares."""
    totals = f64(c.shares).sum(axis=2)
    size = np.abs(f64(c.shares)).sum(axis=2)
    n = c.hc_mult * c.hidden_size
    r = 1.0 / np.sqrt(totals[:, -1:] / n + c.norm_eps)
    return totals[:, :-1] * r, size[:, :-1] * r * 12 * UNIT


def finished_pre(part: int) -> Callable[[Call], tuple[Array, Array]]:
    """Part 0, 1 or 2 of what spark_hc_pre_finish gives in FP64, and how far off FP32 may be."""

    def oracle(c: Call) -> tuple[Array, Array]:
        hc = c.hc_mult
        m, off = _from_totals(c)
        scales = np.repeat(f64(c.hc_scale), [hc, hc, hc * hc])
        exact = m * scales + f64(c.hc_base)
        off = np.abs(scales) * off + 4 * UNIT * (np.abs(m * scales) + np.abs(f64(c.hc_base)))
        if part == 0:
            return _mixed(c.streams, exact[:, :hc], off[:, :hc], c.hc_eps)
        if part == 1:
            post = 2.0 * sigmoid(exact[:, hc : 2 * hc])
            return post, off[:, hc : 2 * hc] / 2 + 16 * UNIT * post
        comb = sinkhorn(exact[:, 2 * hc :].reshape(-1, hc, hc), c.sinkhorn_iters, c.hc_eps)
        worst = off[:, 2 * hc :].max(axis=1)[:, None, None]
        return comb, (2 * c.sinkhorn_iters + 2) * (worst + 6 * UNIT) * comb

    return oracle


def finished_head(c: Call) -> tuple[Array, Array]:
    """y of spark_hc_head_finish likewise."""
    m, off = _from_totals(c)
    scale, base = f64(c.head_scale)[0], f64(c.head_base)
    off = np.abs(scale) * off + 4 * UNIT * (np.abs(m * scale) + np.abs(base))
    return _mixed(c.streams, m * scale + base, off, c.hc_eps)


def _mix(shape: tuple[int, int, int], rows: int) -> Draw:
    tokens, size, hc = shape

    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        return {
            "streams": streams_of(rng, tokens, hc, size),
            "fn": weights_of(rng, rows, hc * size),
            "hidden_size": size,
            "hc_mult": hc,
            "rows": rows,
        }

    return draw


def _bounds_of(parts: Mapping[str, Callable[[Call], tuple[Array, Array]]]) -> Mapping[str, Bound]:
    return {output: _bound(oracle) for output, oracle in parts.items()}


def _with(cases: tuple[Case, ...], bounds: Mapping[str, Bound]) -> tuple[Case, ...]:
    return tuple(Case(c.name, c.arguments, bounds, c.grid, c.tag, c.subject) for c in cases)


CASES: Mapping[str, tuple[Case, ...]] = {
    "hc_expand": tuple(
        Case(
            name(shape),
            lambda rng, shape=shape: {"hidden": Normal(), "hidden_size": shape[1], "hc_mult": shape[2]},  # type: ignore[misc]
            {"streams": bits()},
            _tokens(shape),
        )
        for shape in SHAPES
    ),
    "hc_pre": _pre_cases(_tokens, _same),
    "hc_post": _post_cases(_tokens),
    "hc_head": _head_cases(_tokens, _same),
}

SPARK_CASES: Mapping[str, tuple[Case, ...]] = {
    "spark_hc_mix": tuple(
        Case(
            f"{name(shape)} rows={rows}",
            _mix(shape, rows),
            {"shares": _bound(lambda c: shares_oracle(c.streams, c.fn))},
            _on_y(shape),
        )
        for shape in SHAPES
        for rows in (shape[2], (2 + shape[2]) * shape[2])
    ),
    "spark_hc_pre_finish": _with(
        _pre_cases(_on_y, _from_shares("hc_fn")),
        _bounds_of({"y_out": finished_pre(0), "post_out": finished_pre(1), "comb_out": finished_pre(2)}),
    ),
    "spark_hc_head_finish": _with(_head_cases(_on_y, _from_shares("head_fn")), _bounds_of({"y_out": finished_head})),
    "spark_hc_post": _post_cases(_on_y),
}
