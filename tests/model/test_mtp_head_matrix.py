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
from tests.model.support import Array, Rig, a_hidden, config, make_rig, random_weights, upload
from tests.model.test_mtp_head_batch import MANY, ONE_ULP, near, tiled_rig, widen

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
        # Two stand where a block ends, the others at its beginning.
        self.lengths = [15, 1, 16, 3, 2][: route.sequences]
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

    def together(self, tokens: Sequence[int], rows: Sequence[Array], **more: Any) -> list[list[int]] | None:
        """A batched propose of all sequences."""
        at, h = upload(self.gpu, np.concatenate(rows)), 2 * self.rig.config.hidden_size
        hiddens, states = [at.offset(i * h) for i in range(len(rows))], more.pop("states", self.states)
        rig, drafts = self.rig, self.route.drafts
        try:
            return rig.head.propose_batch(tokens, hiddens, self.lengths, drafts, states, rig.ctx, rig.stream, **more)
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


@pytest.mark.parametrize("route", ROUTES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_with_a_grammar(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, form: Form, route: Route
) -> None:
    """No graph is launched, and each draft obeys its mask. A batch is refused, and nothing happens."""
    cell = Cell(gpu, rng, monkeypatch, form, route)
    for _ in range(ROUNDS):
        tokens, rows = cell.inputs()
        masks = [rng.integers(-(2**31), 2**31, 7).astype(np.int32) for _ in range(route.drafts)]
        if route.sequences > 1:
            before = [state.snapshot() for state in cell.states]
            some: list[Any] = [None] * (route.sequences - 1) + [masks]
            with gpu.trace() as trace:
                assert cell.together(tokens, rows, grammar_bitmasks=some) is None
            assert not any(kind.startswith("launch") for kind in kinds(trace))
            assert [state.snapshot() for state in cell.states] == before
            assert cell.together(tokens, rows, grammar_bitmasks=[None] * route.sequences) is not None
            cell.alone(cell.plain, cell.twins, tokens, rows)
        else:
            wanted = cell.alone(cell.plain, cell.twins, tokens, rows, grammar_bitmask=masks)
            with gpu.trace() as trace:
                found = cell.alone(cell.rig, cell.states, tokens, rows, grammar_bitmask=masks)
            assert (found, "launch" in kinds(trace), "launch_graph" in kinds(trace)) == (wanted, True, False)
            assert all(mask[i // 32] >> i % 32 & 1 for mask, i in zip(masks, found[0], strict=True))
        cell.same_rows()
        cell.verdict()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_states_of_another_type(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, form: Form
) -> None:
    """No batched propose, as a sequence of another proposer has its own."""

    class Other:
        block_table: list[int] = []  # noqa: RUF012 - the protocol's attribute

    for route in (ROUTES[1], ROUTES[4]):
        cell = Cell(gpu, rng, monkeypatch, form, route)
        tokens, rows = cell.inputs()
        before = [state.snapshot() for state in cell.states]
        assert cell.together(tokens, rows, states=[*cell.states[:-1], Other()]) is None
        assert [state.snapshot() for state in cell.states] == before


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
    found = [near(rig, rng, n, clear) for _ in range(2)]  # the second time a graph
    unclear, differ, _ = (float(np.mean(each)) for each in zip(*found, strict=True))
    print(f"{path}: of the drafts {unclear:.1%} are closer than the bound, {differ:.1%} differ")
    assert unclear < 0.7, "some drafts say something"
    if levers.propose_graph:
        graphs = rig.head.propose_graphs._graphs
        assert [handle is not None for key, handle in graphs.items() if isinstance(key, BatchGraphKey)] == [True]
    if path == "tiled LM head":
        for ptr in (twin.weight, twin.weight_scale):
            gpu.free(ptr)
