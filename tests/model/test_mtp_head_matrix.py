# SPDX-License-Identifier: AGPL-3.0-only
"""Every way to draft with every kind of head, with and without a grammar: what is refused, and that all the rest drafts
what the plain way drafts, one row after the other.

Each cell has two heads of the same weights. Where a path runs GEMVs, or kernels that promise a GEMV's bits, ids and
rows of KV are the same bit for bit. Two paths run GEMMs, whose sums have another order: there ids are the same wherever
the two best logits of the plain way are further apart than the bound that belongs to the path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from spark_py.model.layers.mtp_head import MtpProposerState, MtpQuantization
from spark_py.model.layers.mtp_head.propose_graph_batch import BatchGraphKey
from spark_py.model.levers import ModelLevers
from spark_py.runtime.errors import UnsupportedError
from spark_py.runtime.gpu import GpuBackend
from tests.model.mtp_forms import CLEAR_ID, Form, make_form
from tests.model.mtp_head_batch_support import MANY, ONE_ULP, launched, near, tiled_rig, widen
from tests.model.support import Array, Rig, a_hidden, config, make_rig, random_weights, upload

Q = MtpQuantization
FORMS = [
    Form(Q.BF16), Form(Q.BF16, moe=True), Form(Q.FP8), Form(Q.FP8, moe=True),
    Form(Q.NVFP4, moe=True, nvfp4_lm_head=True),
]  # fmt: skip
ROUNDS = 3
"""Proposes of a cell: one that loads, one that captures, one that replays."""
BY_STEP, GRAPHS = ModelLevers(propose_graph=False), ModelLevers()


@dataclass(frozen=True)
class Route:
    """A way to draft: how many sequences propose together, how many drafts, and whether that is a graph."""

    name: str
    sequences: int
    drafts: int
    graph: bool

    def __str__(self) -> str:
        return self.name


ROUTES = [
    Route("single", 1, 3, False),
    Route("batch", 5, 3, False),
    Route("graph", 1, 1, True),
    Route("chain graph", 1, 3, True),
    Route("batched graph", 5, 3, True),
]


class Cell:
    """Sequences that draft by a route, and each a second time with the plain head."""

    def __init__(
        self, gpu: GpuBackend, rng: np.random.Generator, patch: pytest.MonkeyPatch, form: Form, route: Route
    ) -> None:
        self.gpu, self.rng, self.route = gpu, rng, route
        levers = GRAPHS if route.graph else BY_STEP
        self.rig: Rig = make_form(gpu, rng, patch, form, levers=levers)[0]
        self.plain: Rig = make_form(gpu, rng, patch, form, levers=BY_STEP, arrays=self.rig.arrays)[0]
        self.states = [self.rig.state() for _ in range(route.sequences)]
        self.twins = [self.plain.state() for _ in range(route.sequences)]
        # One stands where its block ends, the others at the beginning.
        self.lengths = [15, 1, 2, 3, 1][: route.sequences]
        for state, twin, length in zip(self.states, self.twins, self.lengths, strict=True):
            for at in range(1, length):
                self.write_row(state, twin, at)

    def write_row(self, state: MtpProposerState, twin: MtpProposerState, position: int) -> None:
        """A row of both: not every head can be fed."""
        token, hidden = int(self.rng.integers(203)), self.rig.put(a_hidden(self.rig, self.rng))
        for rig, each in ((self.rig, state), (self.plain, twin)):
            rig.head.write_row(token, hidden, position, each, rig.ctx, rig.stream)
        self.gpu.free(hidden)

    def inputs(self) -> tuple[list[int], list[Array]]:
        n = self.route.sequences
        return self.rng.integers(0, 203, n).tolist(), [a_hidden(self.rig, self.rng) for _ in range(n)]

    def together(self, tokens: Sequence[int], rows: Sequence[Array]) -> list[list[int]] | None:
        """A batched propose of all sequences."""
        at, h = upload(self.gpu, np.concatenate(rows)), 2 * self.rig.config.hidden_size
        hiddens = [at.offset(i * h) for i in range(len(rows))]
        rig, drafts = self.rig, self.route.drafts
        try:
            return rig.head.propose_batch(tokens, hiddens, self.lengths, drafts, self.states, rig.ctx, rig.stream)
        finally:
            self.gpu.free(at)

    def alone(
        self, rig: Rig, states: Sequence[MtpProposerState], tokens: Any, rows: Any, **more: Any
    ) -> list[list[int]]:
        each = zip(states, tokens, rows, self.lengths, strict=True)
        return [rig.propose(state, token, row, at, self.route.drafts, **more) for state, token, row, at in each]

    def verdict(self) -> None:
        for i, pair in enumerate(zip(self.states, self.twins, strict=True)):
            accepted = int(self.rng.integers(self.route.drafts + 1))
            for rig, state in zip((self.rig, self.plain), pair, strict=True):
                rig.head.after_verify(accepted, state, rig.stream)
            self.lengths[i] += accepted + 1

    def same_rows(self) -> None:
        for state, twin in zip(self.states, self.twins, strict=True):
            for found, wanted in zip(self.rig.rows(state), self.plain.rows(twin), strict=True):
                assert found.tobytes() == wanted.tobytes()


def kinds(trace: Any) -> list[str]:
    """What a backend was asked to do."""
    return [entry.kind for step in trace.steps for entry in step]


@pytest.mark.parametrize("route", ROUTES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_without_a_grammar(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, form: Form, route: Route
) -> None:
    """Ids, and rows of KV, are those of the plain head. A graph is replayed where the route has one."""
    cell = Cell(gpu, rng, monkeypatch, form, route)
    launched = []
    for _ in range(ROUNDS):
        tokens, rows = cell.inputs()
        wanted = cell.alone(cell.plain, cell.twins, tokens, rows)
        with gpu.trace() as trace:
            if route.sequences > 1:
                found = cell.together(tokens, rows)
            else:
                found = cell.alone(cell.rig, cell.states, tokens, rows)
        graphs = kinds(trace).count("launch_graph")
        assert found == wanted
        assert [len(ids) for ids in found] == [route.drafts] * route.sequences
        launched.append(graphs)
        cell.same_rows()
        cell.verdict()
    assert launched == ([0, 1, 1] if route.graph else [0, 0, 0])


@pytest.mark.parametrize("route", [route for route in ROUTES if route.sequences == 1], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_with_a_grammar(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, form: Form, route: Route
) -> None:
    """No graph is launched, also where one was before, and each draft obeys its mask."""
    cell = Cell(gpu, rng, monkeypatch, form, route)
    for turn in range(ROUNDS):
        tokens, rows = cell.inputs()
        more: dict[str, Any] = {}
        if turn % 2 == 0:
            more["grammar_bitmask"] = [masks_of(rng) for _ in range(route.drafts)]
        wanted = cell.alone(cell.plain, cell.twins, tokens, rows, **more)
        with gpu.trace() as trace:
            found = cell.alone(cell.rig, cell.states, tokens, rows, **more)
        assert found == wanted
        if more:
            assert ("launch" in kinds(trace), "launch_graph" in kinds(trace)) == (True, False)
            words = more["grammar_bitmask"]
            assert all(mask[i // 32] >> i % 32 & 1 for mask, i in zip(words, found[0], strict=True))
        cell.same_rows()
        cell.verdict()


@pytest.mark.parametrize("route", [route for route in ROUTES if route.sequences > 1], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_batches_that_are_not_offered(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, form: Form, route: Route
) -> None:
    """One sequence has a grammar, or a state of another proposer: None, and nothing happens. Masks that are all None
    are none."""

    class Other:
        block_table: list[int] = []  # noqa: RUF012 - the protocol's attribute

    rig, _ = make_form(gpu, rng, monkeypatch, form, levers=GRAPHS if route.graph else BY_STEP)
    states: list[Any] = [rig.state() for _ in range(3)]
    before, at = [state.snapshot() for state in states], rig.put(np.ones((3, rig.config.hidden_size)))
    hiddens = [at.offset(i * 2 * rig.config.hidden_size) for i in range(3)]

    def propose(states: list[Any], masks: list[Any] | None) -> list[list[int]] | None:
        return rig.head.propose_batch(
            [1, 2, 3], hiddens, [1, 2, 3], route.drafts, states, rig.ctx, rig.stream, grammar_bitmasks=masks
        )

    with gpu.trace() as trace:
        assert propose(states, [None, masks_of(rng), None]) is None
        assert propose(states, [[masks_of(rng)] * route.drafts] * 3) is None
        assert propose([*states[:2], Other()], None) is None
    assert kinds(trace) == []
    assert [state.snapshot() for state in states] == before
    assert [len(ids) for ids in propose(states, [None] * 3) or ()] == [route.drafts] * 3


def masks_of(rng: np.random.Generator) -> Array:
    """A mask that allows about half of the vocabulary."""
    return rng.integers(-(2**31), 2**31, 7).astype(np.int32)


@pytest.mark.parametrize("levers", [BY_STEP, GRAPHS], ids=["launch by launch", "graphs"])
def test_the_one_kind_that_is_refused(gpu: GpuBackend, rng: np.random.Generator, levers: ModelLevers) -> None:
    """By the constructor, with what to do instead."""
    with pytest.raises(UnsupportedError, match="dense FFN: use --mtp-quantization fp8 or bf16"):
        make_rig(gpu, rng, quant=Q.NVFP4, levers=levers)


# ---------------------------------------------------------------- sums in another order


@pytest.mark.parametrize("levers", [BY_STEP, GRAPHS], ids=["batch", "batched graph"])
@pytest.mark.parametrize("path", ["dense", "moe", "tiled LM head"])
def test_gemm_paths(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, path: str, levers: ModelLevers
) -> None:
    """More rows than the batched BF16 GEMV is for, and the tiled LM head, whose bound is a step of BF16 of either
    logit. `near` asserts that an id which differs is one of two that are close."""

    def clear(logits: Array) -> float:
        return CLEAR_ID if n == MANY else 2 * ONE_ULP * float(np.abs(logits).max())

    n = MANY
    if path == "tiled LM head":
        n = 8
        rig, twin = tiled_rig(gpu, rng, random_weights(rng, config()), True, levers)
    else:
        rig = widen(make_form(gpu, rng, monkeypatch, Form(Q.BF16, moe=path == "moe"), levers=levers)[0], 16)
    with gpu.trace() as trace:
        found = [near(rig, rng, n, clear, (0, 0, 1, 0)) for _ in range(2)]  # the second time a graph
    assert launched(trace, "w4a16::" if path == "tiled LM head" else "gemm::dense_gemm_bf16_pipelined") > 0
    unclear, differ, _ = (float(np.mean(each)) for each in zip(*found, strict=True))
    print(f"{path}: of the drafts {unclear:.1%} are closer than the bound, {differ:.1%} differ")
    assert unclear < 0.7, "some drafts say something"
    if levers.propose_graph:
        graphs = rig.head.propose_graphs._graphs
        assert [handle is not None for key, handle in graphs.items() if isinstance(key, BatchGraphKey)] == [True]
    if path == "tiled LM head":
        for ptr in (twin.weight, twin.weight_scale):
            gpu.free(ptr)
