# SPDX-License-Identifier: AGPL-3.0-only
"""Proposes as graphs: nothing but launches differs from the head that drafts one by one, whose every bit they give."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from spark_py.model.layers.mtp_head import MtpHead, MtpProposerState, MtpQuantization, propose_graph
from spark_py.model.layers.mtp_head.propose_graph import MAX_GRAPH_DRAFTS, GraphKey, ProposeGraphs, ProposeInputs
from spark_py.model.levers import ModelLevers
from spark_py.model.weight_map import DenseWeight
from spark_py.runtime.buffers import BufferArena
from spark_py.runtime.errors import (
    CaptureStateError,
    FreedPointerError,
    KvCacheExhausted,
    ReleasedError,
    ScratchOverlapError,
)
from spark_py.runtime.gpu import DevicePtr, GpuBackend, GraphHandle
from spark_py.runtime.scratch import ScratchRegion
from tests.model.mtp_forms import FUSED, Form, make_form
from tests.model.support import BF16, Array, Rig, a_hidden, download, make_rig, upload

BY_STEP = ModelLevers(propose_graph=False)
CAPTURED = [
    Form(MtpQuantization.BF16),
    Form(MtpQuantization.FP8),
    Form(MtpQuantization.BF16, moe=True),
    Form(MtpQuantization.FP8, moe=True),
    Form(MtpQuantization.NVFP4, moe=True, nvfp4_lm_head=True),
]


@dataclass
class Twins:
    """A head that captures and one that does not, made of the same weights, and a state of each for each sequence."""

    graph: Rig
    steps: Rig
    states: list[tuple[MtpProposerState, MtpProposerState]]

    def propose(self, sequence: int, token: int, hidden: Array, position: int, drafts: int) -> list[int]:
        """Propose with both. Ids, state and what the arena keeps of the last row must be the same."""
        mine, other = self.states[sequence]
        ids = self.graph.propose(mine, token, hidden, position, drafts)
        assert ids == self.steps.propose(other, token, hidden, position, drafts)
        assert mine.snapshot() == other.snapshot()
        assert mine.block_table == other.block_table
        h, vocab = self.graph.config.hidden_size, self.graph.head.draft_vocab
        kept = [("hidden_states", h), ("norm_output", h), ("logits", vocab)]
        for name, elements in kept if self.graph.head.levers.keep_logits else kept[:2]:
            found, wanted = (
                download(rig.gpu, rig.ctx.buffers.pointer(name), (elements,)) for rig in (self.graph, self.steps)
            )
            assert found.tobytes() == wanted.tobytes(), name
        return ids

    def verdict(self, sequence: int, accepted: int) -> None:
        for rig, state in zip((self.graph, self.steps), self.states[sequence], strict=True):
            rig.head.after_verify(accepted, state, rig.stream)

    def same_rows(self) -> None:
        """K and V of all rows of all sequences."""
        for mine, other in self.states:
            for found, wanted in zip(self.graph.rows(mine), self.steps.rows(other), strict=True):
                assert found.tobytes() == wanted.tobytes()


def twins(
    gpu: GpuBackend,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    form: Form = CAPTURED[0],
    sequences: int = 1,
    levers: ModelLevers | None = None,
    **changes: Any,
) -> Twins:
    levers = levers or ModelLevers()
    graph, _ = make_form(gpu, rng, monkeypatch, form, levers=levers, **changes)
    off = replace(levers, propose_graph=False)
    steps, _ = make_form(gpu, rng, monkeypatch, form, levers=off, arrays=graph.arrays, **changes)
    return Twins(graph, steps, [(graph.state(), steps.state()) for _ in range(sequences)])


def walk(pair: Twins, rng: np.random.Generator, proposes: int, most: int = 3) -> None:
    """Sequences take turns with drafts and verdicts by chance. One that grows long ends; its blocks go to others."""
    positions = [1] * len(pair.states)
    for _ in range(proposes):
        i = int(rng.integers(len(pair.states)))
        drafts = int(rng.integers(1, most + 1))
        if positions[i] + drafts >= 60 or rng.random() < 0.03:
            for rig, state in zip((pair.graph, pair.steps), pair.states[i], strict=True):
                rig.head.free_state(rig.gpu, state)
            positions[i] = 1
        hidden = a_hidden(pair.graph, rng)
        pair.propose(i, int(rng.integers(203)), hidden, positions[i], drafts)
        accepted = int(rng.integers(0, drafts + 1))
        pair.verdict(i, accepted)
        positions[i] += accepted + 1
    pair.same_rows()


# ---------------------------------------------------------------- the same bits


@pytest.mark.parametrize("form", CAPTURED, ids=str)
def test_every_form_drafts_as_without_graphs(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, form: Form
) -> None:
    """Two sequences across block boundaries, freed and begun again in the other's blocks."""
    pair = twins(gpu, rng, monkeypatch, form, sequences=2, max_seq_len=64)
    walk(pair, rng, 120 if form == CAPTURED[0] else 30)
    assert len(pair.graph.head.propose_graphs) == 3
    assert pair.steps.head.propose_inputs is None


def test_fed_rows_and_captured_ones(gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = twins(gpu, rng, monkeypatch)
    tokens, hidden = rng.integers(0, 203, 31).tolist(), rng.standard_normal((31, 64)).astype(BF16)
    for rig, state in zip((pair.graph, pair.steps), pair.states[0], strict=True):
        assert rig.feed(state, tokens, hidden) == 30
    position = 31
    for drafts in (3, 3, 3, 2, 2, 2):  # the fourth row of the first is in a new block
        pair.propose(0, 5, a_hidden(pair.graph, rng), position, drafts)
        pair.verdict(0, drafts)
        position += drafts + 1
    pair.same_rows()


def test_the_chain_goes_on_from_the_normed_row_too(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk(twins(gpu, rng, monkeypatch, levers=ModelLevers(chain_postnorm=True)), rng, 12)


@pytest.mark.parametrize("form", [CAPTURED[0], CAPTURED[1], CAPTURED[4]], ids=str)
def test_logits_are_written_where_somebody_wants_them(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, form: Form
) -> None:
    """With `keep_logits` the last draft's are those of a head without graphs; without it none are written."""
    walk(twins(gpu, rng, monkeypatch, form, levers=ModelLevers(keep_logits=True)), rng, 8)
    rig = twins(gpu, rng, monkeypatch, form, levers=ModelLevers()).graph
    vocab = rig.head.draft_vocab
    for turn in range(3):
        gpu.memset(rig.ctx.buffers.logits(), 0xA5, 2 * vocab)
        rig.propose(rig.state(), turn, a_hidden(rig, rng), 7, 3)
        left = download(gpu, rig.ctx.buffers.logits(), (vocab,), np.dtype(np.uint8))
        assert (left == 0xA5).all() == rig.head.picks


def test_the_hidden_row_may_lie_in_the_arena(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """Where the first draft writes: a target's row is there as often as not."""
    rig = make_rig(gpu, rng)
    other = make_rig(gpu, rng, arrays=rig.arrays, levers=BY_STEP)
    for _ in range(4):
        hidden = a_hidden(rig, rng)
        found = []
        for each in (rig, other):
            at, state = each.ctx.buffers.hidden_states(), each.state()
            gpu.copy_h2d(hidden.view(np.uint8), at)
            found.append(each.head.propose(3, at, 7, 3, state, each.ctx, each.stream))
            each.head.free_state(gpu, state)
        assert found[0] == found[1]


def test_a_deferred_draft_of_a_graph(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """Another target each time: the graph knows none. A single deferred draft waits for nothing."""
    rig = make_rig(gpu, rng)
    other = make_rig(gpu, rng, arrays=rig.arrays, levers=BY_STEP)
    for n in range(8):
        drafts = 1 + n % 2
        hidden, target = a_hidden(rig, rng), gpu.alloc(2 * rig.config.hidden_size)
        wanted = other.propose(other.state(), n, hidden, 9, drafts)
        assert rig.propose(rig.state(), n, hidden, 9, drafts, draft_embed_target=target) == [*wanted[:-1], 0]
        assert rig.head.read_deferred_draft_token(gpu) == wanted[-1]
        row = download(gpu, target, (rig.config.hidden_size,))
        assert row.tobytes() == rig.arrays["embed_tokens"][wanted[-1]].tobytes()
    assert len(rig.head.propose_graphs) == 2


def test_the_graph_runs_on_any_stream(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = twins(gpu, rng, monkeypatch)
    for n in range(6):
        gpu.synchronize(pair.graph.stream)
        pair.graph.stream = gpu.create_stream() if n % 2 else gpu.default_stream()
        pair.propose(0, n, a_hidden(pair.graph, rng), 1 + 3 * n, 2)
        pair.verdict(0, 2)
    assert len(pair.graph.head.propose_graphs) == 1


# ---------------------------------------------------------------- what a replay is


def test_a_replay_is_a_graph_and_nothing_else(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """The first time it is the launches of a head without graphs, but for the argmax of each draft."""
    rig = make_rig(gpu, rng)
    other = make_rig(gpu, rng, arrays=rig.arrays, levers=BY_STEP)
    hidden, kinds = rig.put(a_hidden(rig, rng)), []
    for each in (rig, rig, rig, other):
        with gpu.trace() as trace:
            each.head.propose(3, hidden, 4, 3, each.state(), each.ctx, each.stream)
        kinds.append([entry.kind for step in trace.steps for entry in step])
    # The LM head names the id and its embedding by itself; the inputs come by a launch of their own.
    assert kinds[0].count("launch") == kinds[3].count("launch") - 3 + 1
    assert kinds[2] == ["launch_graph"]


@pytest.mark.parametrize(
    "changes",
    [{"propose_graph": False}, {"draft_conf_tau": 0.1}, {"shadow_topk": 2}, {"debug_norms": True}],
    ids=lambda c: next(iter(c)),
)
def test_levers_that_keep_the_host_in_the_loop(gpu: GpuBackend, rng: np.random.Generator, changes: Any) -> None:
    head = make_rig(gpu, rng, levers=ModelLevers(**changes)).head
    assert head.propose_inputs is None
    assert not hasattr(head, "propose_graphs")


def test_experts_whose_ids_are_read_back(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, _ = make_form(gpu, rng, monkeypatch, Form(MtpQuantization.BF16, moe=True, hidden=FUSED))
    assert rig.head.ffn_reads_back
    assert rig.head.propose_inputs is None


def test_grammar_and_long_chains_go_draft_by_draft(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng)
    mask = np.full(7, -1, np.int32)
    for _ in range(3):
        rig.propose(rig.state(), 3, a_hidden(rig, rng), 4, 1, grammar_bitmask=mask)
        assert len(rig.propose(rig.state(), 3, a_hidden(rig, rng), 4, MAX_GRAPH_DRAFTS + 1)) == MAX_GRAPH_DRAFTS + 1
    assert len(rig.head.propose_graphs) == 0
    for _ in range(2):
        rig.propose(rig.state(), 3, a_hidden(rig, rng), 4, MAX_GRAPH_DRAFTS)
    assert len(rig.head.propose_graphs) == 1


def test_a_step_of_somebody_elses_is_called(gpu: GpuBackend, rng: np.random.Generator) -> None:
    class Counts(MtpHead):
        calls = 0

        def forward_one(self, *args: Any, **more: Any) -> int:
            self.calls += 1
            return super().forward_one(*args, **more)

    rig = make_rig(gpu, rng, head_class=Counts)
    for _ in range(3):
        rig.propose(rig.state(), 3, a_hidden(rig, rng), 4, 2)
    assert rig.head.calls == 6  # type: ignore[attr-defined]


# ---------------------------------------------------------------- errors and the end


def fails_once(gpu: GpuBackend, monkeypatch: pytest.MonkeyPatch, name: str, result: Any = None) -> None:
    """Make the backend's method `name` raise, or give `result`, the first time."""
    real, left = getattr(type(gpu), name), [1]

    def once(self: GpuBackend, *args: Any) -> Any:
        if not left:
            return real(self, *args)
        left.pop()
        if result is None:
            raise CaptureStateError(f"{name} on purpose")
        self.abort_capture_if_active(*args)
        return result

    monkeypatch.setattr(type(gpu), name, once)


@pytest.mark.parametrize(
    ("name", "result"), [("begin_capture", None), ("end_capture", None), ("end_capture", GraphHandle(0))], ids=str
)
def test_without_a_graph_all_is_done_launch_by_launch(
    gpu: GpuBackend,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    result: Any,
) -> None:
    pair = twins(gpu, rng, monkeypatch, max_seq_len=64)
    fails_once(gpu, monkeypatch, name, result)
    walk(pair, rng, 10)
    assert len(pair.graph.head.propose_graphs) == 0
    assert sum("not captured from here on" in r.message for r in caplog.records) == 1


def test_an_error_of_the_work_is_told_and_the_next_propose_captures(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While somebody holds the experts' routing: at the first run, the capture and a replay."""
    pair = twins(gpu, rng, monkeypatch, CAPTURED[2])
    rig, (state, _) = pair.graph, pair.states[0]
    for n in range(3):
        before, free = state.snapshot(), rig.head.kv_cache.num_free_blocks()
        with rig.ctx.buffers.lease(ScratchRegion("someone", 8, 8)), pytest.raises(ScratchOverlapError, match="someone"):
            rig.propose(state, 3, a_hidden(rig, rng), 1 + 2 * n, 2)
        assert (state.snapshot(), rig.head.kv_cache.num_free_blocks()) == (before, free)
        pair.propose(0, 3, a_hidden(rig, rng), 1 + 2 * n, 2)
        pair.verdict(0, 1)
    assert len(rig.head.propose_graphs) == 1


def test_a_launch_that_fails_is_undone(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the block that it took."""
    pair = twins(gpu, rng, monkeypatch)
    state, pool = pair.states[0][0], pair.graph.head.kv_cache
    for n in range(6):
        if n == 5:
            before, free = state.snapshot(), pool.num_free_blocks()
            fails_once(gpu, monkeypatch, "launch_graph")
            with pytest.raises(CaptureStateError, match="launch_graph on purpose"):
                pair.graph.propose(state, 3, a_hidden(pair.graph, rng), 1 + 4 * n, 3)
            assert (state.snapshot(), pool.num_free_blocks()) == (before, free)
        pair.propose(0, 3, a_hidden(pair.graph, rng), 1 + 4 * n, 3)
        pair.verdict(0, 3)
    assert len(state.block_table) == 2
    pair.same_rows()


def test_an_exhausted_pool_queues_nothing(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng, max_seq_len=32, levers=ModelLevers(mtp_max_seqs=1))
    hidden = rng.standard_normal((32, rig.config.hidden_size))
    neighbour, state = rig.state(), rig.state()
    rig.feed(neighbour, [1] * 18, hidden)
    rig.feed(state, [1] * 16, hidden)
    before, row = state.snapshot(), rig.put(hidden[16])
    with gpu.trace() as trace, pytest.raises(KvCacheExhausted):
        rig.head.propose(5, row, 16, 3, state, rig.ctx, rig.stream)
    assert (len(trace.steps), state.snapshot()) == (0, before)


def test_graphs_go_with_their_arena_and_their_head(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng)
    graphs = rig.head.propose_graphs

    def use() -> None:
        for _ in range(2):
            rig.propose(rig.state(), 3, a_hidden(rig, rng), 4, 2)

    use()
    rig.ctx.buffers.release()
    with pytest.raises(ReleasedError):
        use()
    rig.ctx = replace(rig.ctx, buffers=BufferArena(rig.config, 8, 256, 16, 4, gpu))
    gc.collect()
    use()
    assert len(graphs) == 1  # that of the first arena is gone
    use()
    rig.head.release()
    assert len(graphs) == 0


def test_graphs_are_not_kept_for_ever(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three kinds of propose and room for two, the one that was used last goes on with its graph."""
    monkeypatch.setattr(propose_graph, "MAX_GRAPHS", 2)
    pair, position, replays = twins(gpu, rng, monkeypatch), 1, []
    for drafts in (1, 1, 2, 2, 1, 3, 1, 2, 2, 2):
        with gpu.trace() as trace:
            pair.propose(0, 3, a_hidden(pair.graph, rng), position, drafts)
        replays.append("launch_graph" in [entry.kind for step in trace.steps for entry in step])
        pair.verdict(0, drafts)
        position += drafts + 1
        assert len(pair.graph.head.propose_graphs._graphs) <= 2
    assert replays == [False, True, False, True, True, False, True, False, True, True]
    pair.same_rows()


def test_memory_that_a_graph_uses_and_somebody_freed(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng)
    for _ in range(2):
        rig.propose(rig.state(), 3, a_hidden(rig, rng), 4, 2)
    state = rig.state()
    gpu.free(rig.head.norm.weight)
    with pytest.raises(FreedPointerError):
        rig.propose(state, 3, a_hidden(rig, rng), 4, 2)
    assert state.snapshot() == rig.state().snapshot()


# ---------------------------------------------------------------- faults that the tests above must see


def stale_width(patch: pytest.MonkeyPatch) -> None:
    """The table's width is that of the first table, and so is what is uploaded of it."""
    real, first = ProposeInputs.set, []

    def mutant(self: Any, token: Any, hidden: Any, position: Any, rows: Any, n: Any, table: Any, s: Any) -> None:
        first.append(-(-(rows + n) // 16))
        known = [*table[: first[0]], *[table[0]] * len(table)]
        real(self, token, hidden, position, rows, n, known, s)

    patch.setattr(ProposeInputs, "set", mutant)


def rehearsal_in_a_live_block(patch: pytest.MonkeyPatch) -> None:
    """Work is rehearsed before its inputs are there: with the metadata of the last propose."""
    real = ProposeInputs.set

    def mutant(self: Any, token: Any, hidden: Any, position: Any, rows: Any, n: Any, table: Any, s: Any) -> None:
        real(self, token, hidden, position, max(rows - 1, 0), n, table, s)
        live = rehearse.pop(id(self), None)
        if live is not None:
            live(s)
        real(self, token, hidden, position, rows, n, table, s)

    rehearse: dict[int, Callable[[Any], None]] = {}
    run = ProposeGraphs.run

    def remember(self: Any, key: Any, work: Any, stream: Any) -> None:
        run(self, key, work, stream)
        inputs = next(cell.cell_contents for cell in work.__closure__ if isinstance(cell.cell_contents, ProposeInputs))
        rehearse[id(inputs)] = work

    patch.setattr(ProposeInputs, "set", mutant)
    patch.setattr(ProposeGraphs, "run", remember)


def position_not_advanced(patch: pytest.MonkeyPatch) -> None:
    real = ProposeInputs.meta

    def mutant(self: ProposeInputs, draft: int) -> Any:
        return replace(real(self, draft), positions=real(self, 0).positions)

    patch.setattr(ProposeInputs, "meta", mutant)


def length_not_advanced(patch: pytest.MonkeyPatch) -> None:
    real = ProposeInputs.meta
    patch.setattr(ProposeInputs, "meta", lambda self, i: replace(real(self, i), seq_len=real(self, 0).seq_len))


def slot_not_advanced(patch: pytest.MonkeyPatch) -> None:
    real = ProposeInputs.meta
    patch.setattr(ProposeInputs, "meta", lambda self, i: replace(real(self, i), slot=real(self, 0).slot))


def hidden_row_of_the_first_run(patch: pytest.MonkeyPatch) -> None:
    """The target's row is taken once, and stays."""
    real, kept = ProposeInputs.set, {}

    def mutant(self: ProposeInputs, token: int, hidden: DevicePtr, *rest: Any) -> None:
        if self not in kept:
            gpu = self.exchange._gpu
            kept[self] = gpu.alloc(self.hidden_bytes)
            gpu.copy_d2d(hidden, kept[self], self.hidden_bytes)
        real(self, token, kept[self], *rest)

    patch.setattr(ProposeInputs, "set", mutant)


def a_null_graph_is_success(patch: pytest.MonkeyPatch) -> None:
    run = ProposeGraphs.run

    def mutant(self: Any, key: Any, work: Any, stream: Any) -> None:
        if key not in self._graphs or self._graphs[key] is not None:
            run(self, key, work, stream)

    patch.setattr(ProposeGraphs, "run", mutant)


@pytest.mark.parametrize(
    "mutant",
    [
        stale_width, rehearsal_in_a_live_block, position_not_advanced, length_not_advanced, slot_not_advanced,
        hidden_row_of_the_first_run, a_null_graph_is_success,
    ],
    ids=lambda m: m.__name__,
)  # fmt: skip
def test_mutants_differ(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, mutant: Callable[[Any], None]
) -> None:
    mutant(monkeypatch)
    pair = twins(gpu, rng, monkeypatch, sequences=2, max_seq_len=64)
    with pytest.raises(AssertionError):
        walk(pair, rng, 60)


def test_a_graph_keyed_by_the_number_of_drafts_alone_works_in_another_arena(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two arenas by turns: right with the key as it is, and the last row is in the wrong one with the mutant."""

    def last_rows_agree() -> bool:
        pair = twins(gpu, rng, monkeypatch)
        second = replace(pair.graph.ctx, buffers=BufferArena(pair.graph.config, 8, 256, 16, 4, gpu))
        contexts = [pair.graph.ctx, second]
        for n in range(6):
            pair.graph.ctx = contexts[n % 2]
            try:
                pair.propose(0, n, a_hidden(pair.graph, rng), 1 + 2 * n, 2)
            except AssertionError:
                return False
            pair.verdict(0, 2)
        return True

    assert last_rows_agree()
    one = weakref.ref(propose_graph.MtpHeadProposeGraph)
    monkeypatch.setattr(propose_graph, "GraphKey", lambda drafts, arena: GraphKey(drafts, one))  # type: ignore[arg-type]
    assert not last_rows_agree()


def test_the_slab_byte_for_byte(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """Three drafts after 30 rows: the last is the first row of the third block."""
    stack, stream = ExitStack(), gpu.default_stream()
    inputs = ProposeInputs(gpu, 16, 5, lambda name, nbytes: gpu.alloc(nbytes, name), stack)
    row, table, embed = rng.standard_normal(8).astype(BF16), rng.standard_normal((78, 8)).astype(BF16), gpu.alloc(16)
    source, weight = upload(gpu, row), DenseWeight(upload(gpu, table), (78, 8))
    inputs.set(77, source, 41, 30, 3, [9, 4, 6, 5], stream)
    inputs.exchange.fetch(inputs.slab, inputs.slab_bytes, 0, weight, inputs.hidden, embed, 1, 16, 8, stream)
    slab = download(gpu, inputs.slab, (32 * (1 + MAX_GRAPH_DRAFTS) + 12,), np.dtype(np.uint8))
    assert slab[:4].view(np.uint32)[0] == 77
    steps = slab[32:128].reshape(3, 32)
    assert steps[:, :4].copy().view(np.uint32).ravel().tolist() == [41, 42, 43]
    assert steps[:, 8:16].copy().view(np.int64).ravel().tolist() == [4 * 16 + 14, 4 * 16 + 15, 6 * 16]
    assert steps[:, 16:20].copy().view(np.int32).ravel().tolist() == [31, 32, 33]
    assert slab[-12:].view(np.int32).tolist() == [9, 4, 6]
    assert download(gpu, inputs.hidden, (8,)).tobytes() == row.tobytes()
    assert download(gpu, embed, (8,)).tobytes() == table[77].tobytes()
    assert (inputs.meta(2).block_table, inputs.meta(2).max_blocks_per_seq) == (inputs.slab.offset(544), 5)
    assert inputs.fits(64, 16)
    assert not inputs.fits(65, 16)
    assert not inputs.fits(0, 17)
    stack.close()
