# SPDX-License-Identifier: AGPL-3.0-only
"""Batched proposes as graphs: nothing but launches differs from the head that goes draft by draft, whose every bit they
give; and proof that a key that lacks anything would show."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from spark_py.model.layers.mtp_head import MtpHead, MtpProposerState, MtpQuantization, propose_graph_batch
from spark_py.model.layers.mtp_head.propose_exchange import ProposeExchange
from spark_py.model.layers.mtp_head.propose_graph_batch import (
    MAX_BATCH_GRAPH_DRAFTS,
    BatchGraphKey,
    BatchInputs,
    table_width,
)
from spark_py.model.levers import ModelLevers
from spark_py.model.weight_map import DenseWeight
from spark_py.runtime.buffers import BufferArena
from spark_py.runtime.errors import CaptureStateError, ScratchOverlapError, SparkError
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.runtime.scratch import ScratchRegion
from tests.model.mtp_forms import FUSED, Form, hide, make_form
from tests.model.support import Rig, a_hidden, download, make_rig, upload
from tests.model.test_mtp_head_graph import CAPTURED, fails_once

BF16_DENSE = CAPTURED[0]
MOST = 5
"""Sequences of a pair of rigs."""


@dataclass
class Twins:
    """A head that captures and one that does not, made of the same weights, and MOST sequences, each with a state of
    either head. `lengths`: the position at which a sequence drafts next."""

    graph: Rig
    steps: Rig
    states: list[tuple[MtpProposerState, MtpProposerState]]
    lengths: list[int]

    def propose(self, rng: np.random.Generator, which: list[int], drafts: int, confident: bool) -> list[list[int]]:
        """Propose for some sequences with both heads. Ids, probabilities, states and what the arena keeps of the last
        rows must be the same."""
        gpu, n, h = self.graph.gpu, len(which), 2 * self.graph.config.hidden_size
        tokens, rows = rng.integers(0, 203, n).tolist(), [a_hidden(self.graph, rng) for _ in which]
        found = []
        for side, rig in enumerate((self.graph, self.steps)):
            states, at = [self.states[i][side] for i in which], upload(gpu, np.concatenate(rows))
            hiddens = [at.offset(h * i) for i in range(n)]
            conf: list[list[float]] | None = [] if confident else None
            ids = rig.head.propose_batch(
                tokens, hiddens, [self.lengths[i] for i in which], drafts, states, rig.ctx, rig.stream, conf
            )
            gpu.free(at)
            rows_of = [("hidden_states", h // 2), ("norm_output", h // 2)]
            head = self.graph.head
            if not head.picks or (confident and head.argmax_batch_lp_k):
                rows_of.append(("logits", 203))
            kept = [download(gpu, rig.ctx.buffers.pointer(name), (n * width,)).tobytes() for name, width in rows_of]
            found.append((ids, conf, [state.snapshot() for state in states], kept))
        assert found[0] == found[1]
        ids = found[0][0]
        assert ids is not None
        return ids

    def verdict(self, i: int, accepted: int) -> None:
        for rig, state in zip((self.graph, self.steps), self.states[i], strict=True):
            rig.head.after_verify(accepted, state, rig.stream)
        self.lengths[i] += accepted + 1

    def same_rows(self) -> None:
        """K and V of all rows of all sequences."""
        for mine, other in self.states:
            for found, wanted in zip(self.graph.rows(mine), self.steps.rows(other), strict=True):
                assert found.tobytes() == wanted.tobytes()


def twins(
    gpu: GpuBackend,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    form: Form = BF16_DENSE,
    levers: ModelLevers | None = None,
    **changes: Any,
) -> Twins:
    levers, changes = levers or ModelLevers(), {"max_seq_len": 64} | changes
    graph, _ = make_form(gpu, rng, monkeypatch, form, levers=levers, **changes)
    off = replace(levers, propose_graph=False)
    steps, _ = make_form(gpu, rng, monkeypatch, form, levers=off, arrays=graph.arrays, **changes)
    return Twins(graph, steps, [(graph.state(), steps.state()) for _ in range(MOST)], [1] * MOST)


def walk(
    pair: Twins, rng: np.random.Generator, proposes: int, sequences: tuple[int, ...] = (2, 3), most: int = 2
) -> None:
    """Some sequences draft together, others the next time, with verdicts by chance. One that grows long ends; its
    blocks go to others."""
    for _ in range(proposes):
        which = rng.permutation(MOST)[: rng.choice(sequences)].tolist()
        drafts = int(rng.integers(1, most + 1))
        for i in which:
            if pair.lengths[i] + drafts >= pair.graph.head.max_seq_len - 1 or rng.random() < 0.03:
                for rig, state in zip((pair.graph, pair.steps), pair.states[i], strict=True):
                    rig.head.free_state(rig.gpu, state)
                pair.lengths[i] = 1
        pair.propose(rng, which, drafts, bool(rng.integers(2)))
        for i in which:
            pair.verdict(i, int(rng.integers(0, drafts + 1)))
    pair.same_rows()


# ---------------------------------------------------------------- the same bits


@pytest.mark.parametrize("form", CAPTURED, ids=str)
def test_every_form_drafts_as_without_graphs(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, form: Form
) -> None:
    """Groups of two and three across block boundaries, one and two drafts, with and without probabilities."""
    pair = twins(gpu, rng, monkeypatch, form)
    walk(pair, rng, 40 if form == BF16_DENSE else 16)
    graphs = pair.graph.head.propose_graphs
    assert 0 < len(graphs) <= 8
    assert {type(key) for key in graphs._graphs} == {BatchGraphKey}
    assert pair.steps.head.propose_inputs is None


@pytest.mark.parametrize("form", [BF16_DENSE, CAPTURED[-1]], ids=str)
def test_attention_of_all_sequences_in_one_launch(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, form: Form
) -> None:
    """Heads of 64 elements: lengths and tables are read by their strides, which a graph bakes in."""
    pair = twins(gpu, rng, monkeypatch, form, head_dim=64, num_attention_heads=2, num_key_value_heads=1)
    assert pair.graph.head.split_attention is not None
    walk(pair, rng, 14)
    with gpu.trace() as trace:
        pair.propose(rng, [0, 1, 2], 2, False)
    assert "launch_graph" in kinds_of(trace)


def grow(gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> Twins:
    """Two sequences of up to 5 blocks, with graphs for 1, 2, 4 and 8."""
    monkeypatch.setattr(propose_graph_batch, "LEAST_WIDTH", 1)
    pair = twins(gpu, rng, monkeypatch, max_seq_len=128)
    for _ in range(24):
        pair.propose(rng, [0, 1], 3, False)
        for i in (0, 1):
            pair.verdict(i, 3)
    pair.same_rows()
    return pair


def test_tables_of_several_widths(gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a graph of its own, and a sequence of 16 rows more goes on in the next."""
    pair = grow(gpu, rng, monkeypatch)
    assert {key.width for key in pair.graph.head.propose_graphs._graphs} == {1, 2, 4, 8}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("lacks", "levers"),
    [("embed_from_argmax::batched_embed", ModelLevers()), ("argmax::argmax_bf16_batch", ModelLevers()),
     ("nothing", ModelLevers(chain_postnorm=True)), ("nothing", ModelLevers(keep_logits=True)),
     ("spark_gemv_rows::spark_gemv_rows_argmax", ModelLevers())],
    ids=["no batched embedding", "no batched argmax", "chain behind the norm", "logits kept", "no argmax in the head"],
)  # fmt: skip
def test_sets_and_levers(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, lacks: str, levers: ModelLevers
) -> None:
    hide(monkeypatch, gpu, "nothing", function=lacks)
    walk(twins(gpu, rng, monkeypatch, levers=levers), rng, 12)


@pytest.mark.parametrize("form", CAPTURED, ids=str)
def test_the_engines_own_kernels_are_enough(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, form: Form
) -> None:
    """A set without any kernel of this project's drafts the same; FP8 experts then run one by one, without a graph."""
    hide(monkeypatch, gpu, "spark_", function="gemv_fp8w::spark_")
    pair = twins(gpu, rng, monkeypatch, form)
    walk(pair, rng, 6, sequences=(2,))
    with gpu.trace() as trace:
        pair.propose(rng, [0, 1], 1, False)
        for i in (0, 1):
            pair.verdict(i, 1)
        pair.propose(rng, [0, 1], 1, False)
    assert "spark_" not in str(trace.steps)
    assert ("launch_graph" in kinds_of(trace)) is not pair.graph.head.ffn_reads_back


def test_single_and_batched_proposes_take_turns(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has graphs and inputs of its own."""
    pair = twins(gpu, rng, monkeypatch)
    for _ in range(5):
        walk(pair, rng, 2, sequences=(2,), most=1)
        hidden = a_hidden(pair.graph, rng)
        ids = [
            rig.propose(state, 7, hidden, pair.lengths[0], 2)
            for rig, state in zip((pair.graph, pair.steps), pair.states[0], strict=True)
        ]
        assert ids[0] == ids[1]
        pair.verdict(0, 1)
    pair.same_rows()
    assert len({type(key) for key in pair.graph.head.propose_graphs._graphs}) == 2


# ---------------------------------------------------------------- what a replay is


def kinds_of(trace: Any) -> list[str]:
    return [entry.kind for step in trace.steps for entry in step]


def batch(rig: Rig, n: int, drafts: int = 2, conf: list[list[float]] | None = None) -> list[list[int]] | None:
    """A batched propose of fresh states, whose hidden rows lie one after the other, in a part of the arena."""
    at, h = rig.ctx.buffers.expert_gate_out(), 2 * rig.config.hidden_size
    rig.gpu.memset_async(at, 0x3C, n * h, rig.stream)
    hiddens, states = [at.offset(h * i) for i in range(n)], [rig.state() for _ in range(n)]
    return rig.head.propose_batch(list(range(n)), hiddens, [4] * n, drafts, states, rig.ctx, rig.stream, conf)


def test_a_replay_is_a_graph_and_nothing_else(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """The first time it is the launches of a head without graphs, and one for the embeddings of each draft."""
    rig, kinds = make_rig(gpu, rng), []
    other = make_rig(gpu, rng, arrays=rig.arrays, levers=ModelLevers(propose_graph=False))
    for each in (rig, rig, rig, other):
        with gpu.trace() as trace:
            batch(each, 4, 3, [])
        kinds.append(kinds_of(trace))
    assert kinds[0].count("launch") == kinds[3].count("launch") + 3
    assert kinds[2][1:] == ["launch_graph"]


@pytest.mark.parametrize(
    "changes",
    [{"propose_graph": False}, {"draft_conf_tau": 0.1}, {"shadow_topk": 2}, {"debug_norms": True}],
    ids=lambda c: next(iter(c)),
)
def test_levers_that_keep_the_host_in_the_loop(gpu: GpuBackend, rng: np.random.Generator, changes: Any) -> None:
    rig = make_rig(gpu, rng, levers=ModelLevers(**changes))
    for _ in range(3):
        with gpu.trace() as trace:
            batch(rig, 2)
    assert "launch_graph" not in kinds_of(trace)


def test_experts_whose_ids_are_read_back(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, _ = make_form(gpu, rng, monkeypatch, Form(MtpQuantization.BF16, moe=True, hidden=FUSED))
    for _ in range(3):
        with gpu.trace() as trace:
            batch(rig, 2)
    assert "launch_graph" not in kinds_of(trace)


def test_long_chains_go_draft_by_draft(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng)
    for drafts in (MAX_BATCH_GRAPH_DRAFTS + 1, MAX_BATCH_GRAPH_DRAFTS):
        for _ in range(2):
            assert [len(ids) for ids in batch(rig, 2, drafts) or ()] == [drafts] * 2
    assert [key.drafts for key in rig.head.propose_graphs._graphs] == [MAX_BATCH_GRAPH_DRAFTS]


def test_a_step_of_somebody_elses_is_called(gpu: GpuBackend, rng: np.random.Generator) -> None:
    class Counts(MtpHead):
        calls = 0

        def forward_batch_position(self, *args: Any, **more: Any) -> Any:
            self.calls += 1
            return super().forward_batch_position(*args, **more)

    rig = make_rig(gpu, rng, head_class=Counts)
    for _ in range(3):
        batch(rig, 2)
    assert rig.head.calls == 6  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("blocks", "capacity", "width"),
    [(1, 448, 16), (16, 448, 16), (17, 448, 32), (33, 448, 64), (300, 448, 448), (448, 448, 448), (3, 5, 5)],
)
def test_how_wide_tables_are(blocks: int, capacity: int, width: int) -> None:
    assert table_width(blocks, capacity) == width


def test_the_inputs_byte_for_byte(gpu: GpuBackend) -> None:
    """Two drafts of three sequences; the last of the second is the first row of its second block."""
    base, gates, embed, stream, stack = gpu.alloc(4096), gpu.alloc(12), gpu.alloc(12), gpu.default_stream(), ExitStack()
    inputs = BatchInputs(base, ProposeExchange(gpu, 3, 4096, 12, stack), 3, 2, 4)
    rows, table = [upload(gpu, np.array([i, 9], np.uint16)) for i in range(3)], np.arange(20, dtype=np.uint16)
    inputs.set([7, 8, 9], [41, 30, 5], [30, 15, 0], [[9, 4], [6, 5], [3]], rows, gates, 4, stream)
    weight = DenseWeight(upload(gpu, table), (10, 2))
    inputs.exchange.fetch(base, inputs.slab_bytes, inputs.tokens_at, weight, gates, embed, 3, 4, 2, stream)
    assert download(gpu, gates, (6,), np.dtype(np.uint16)).tolist() == [0, 9, 1, 9, 2, 9]
    assert download(gpu, embed, (6,), np.dtype(np.uint16)).tolist() == [14, 15, 16, 17, 18, 19]
    slab = download(gpu, base, (96 + 12 + 48,), np.dtype(np.uint8))
    for draft in (0, 1):
        step = slab[48 * draft : 48 * draft + 48]
        assert step[:24].view("<i8").tolist() == [4 * 16 + 14 + draft, (6 * 16 + 15, 5 * 16)[draft], 3 * 16 + draft]
        assert step[24:36].view("<u4").tolist() == [41 + draft, 30 + draft, 5 + draft]
        assert step[36:].view("<i4").tolist() == [31 + draft, 16 + draft, 1 + draft]
    assert slab[96:108].view("<u4").tolist() == [7, 8, 9]
    assert slab[108:].view("<i4").reshape(3, 4).tolist() == [[9, 4, 0, 0], [6, 5, 0, 0], [3, 0, 0, 0]]
    meta = inputs.metas(1)[2]
    assert [at.address - base.address for at in (meta.slot, meta.positions, meta.seq_len, meta.block_table)] == [
        48 + 16, 48 + 24 + 8, 48 + 36 + 8, 108 + 32,
    ]  # fmt: skip
    assert (meta.max_blocks_per_seq, meta.num_seqs, inputs.tokens) == (4, 1, base.offset(96))
    found = inputs.exchange.found
    assert (inputs.ids(1), inputs.log_probs(0), inputs.log_probs(1)) == tuple(found.offset(12 * i) for i in (1, 2, 3))
    stack.close()


def test_the_longest_tables_and_chains_fit_their_place(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """32 sequences with all that a graph takes."""
    for max_seq_len in (64, 16384):
        head = make_rig(gpu, rng, max_seq_len=max_seq_len).head
        capacity = (head.propose_meta_stride - 256) // 4
        inputs = BatchInputs(head.propose_meta, head.batch_exchange, 32, MAX_BATCH_GRAPH_DRAFTS, capacity)
        full, stream, at = [[0] * capacity] * 32, gpu.default_stream(), gpu.alloc(2 * 32 * 8)
        full_rows = 16 * capacity - MAX_BATCH_GRAPH_DRAFTS
        inputs.set([0] * 32, [1] * 32, [full_rows] * 32, full, [at] * 32, at, 2, stream)
        inputs.exchange.fetch(
            inputs.base, inputs.slab_bytes, inputs.tokens_at, head.embed_tokens, at, at.offset(64), 32, 2, 1, stream
        )
        last = inputs.log_probs(MAX_BATCH_GRAPH_DRAFTS - 1).offset(4 * 31)
        gpu.memset(last, 0, 4)  # the last word; one past it is another's memory
        with pytest.raises(SparkError):
            gpu.memset(last, 0, 8)


def test_blocks_that_nobody_has_stay_as_they_are(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """When a batch runs for the first time, is captured and is replayed: also those of a sequence that ended."""
    rig = make_rig(gpu, rng)
    ended, kv = rig.state(), rig.head.kv_cache
    rig.feed(ended, [1] * 34, rng.standard_normal((34, rig.config.hidden_size)))
    freed = list(ended.block_table)
    rig.head.free_state(gpu, ended)

    def blocks(which: list[int]) -> bytes:
        gpu.synchronize(rig.stream)
        return b"".join(side.tobytes() for block in which for side in kv.read_block(0, block))

    states = [rig.state(), rig.state()]
    for state in states:
        rig.head.reserve_rows(state, 1)
    others = [b for b in range(kv.num_blocks()) if not any(b in state.block_table for state in states)]
    assert set(freed) & set(others)
    before, at = blocks(others), rig.put(np.ones((2, rig.config.hidden_size)))
    for _ in range(3):
        hiddens = [at, at.offset(2 * rig.config.hidden_size)]
        rig.head.propose_batch([1, 2], hiddens, [4, 5], 3, states, rig.ctx, rig.stream)
        assert blocks(others) == before
        for state in states:
            rig.head.after_verify(0, state, rig.stream)
    assert len(rig.head.propose_graphs) == 1


# ---------------------------------------------------------------- errors and the end


@pytest.mark.parametrize("name", ["begin_capture", "end_capture"])
def test_without_a_graph_all_is_done_launch_by_launch(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pair = twins(gpu, rng, monkeypatch)
    fails_once(gpu, monkeypatch, name)
    walk(pair, rng, 8, sequences=(2,))
    assert len(pair.graph.head.propose_graphs) == 0


def test_an_error_is_undone_at_the_first_run_the_capture_and_a_replay(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody holds the experts' routing; then the launch of the graph itself fails. Blocks, rows and probabilities
    are as they were, and the next propose is the other head's."""
    pair = twins(gpu, rng, monkeypatch, CAPTURED[2])
    rig, states = pair.graph, [pair.states[i][0] for i in (0, 1)]
    at, h = upload(gpu, np.zeros(128, np.uint16)), 2 * rig.config.hidden_size

    def fails(error: type[SparkError]) -> None:
        before, free, conf = [state.snapshot() for state in states], rig.head.kv_cache.num_free_blocks(), [[7.0]]
        with pytest.raises(error):
            rig.head.propose_batch(
                [1, 2], [at, at.offset(h)], [pair.lengths[0], pair.lengths[1]], 2, states, rig.ctx, rig.stream, conf
            )
        assert [state.snapshot() for state in states] == before
        assert (rig.head.kv_cache.num_free_blocks(), conf) == (free, [[7.0]])

    def goes_on() -> None:
        pair.propose(rng, [0, 1], 2, True)
        for i in (0, 1):
            pair.verdict(i, 1)

    for _ in range(3):
        with rig.ctx.buffers.lease(ScratchRegion("someone", 8, 8)):
            fails(ScratchOverlapError)
        goes_on()
    with monkeypatch.context() as patch:
        fails_once(gpu, patch, "launch_graph")
        fails(CaptureStateError)
    goes_on()
    assert len(rig.head.propose_graphs) == 1
    pair.same_rows()


def test_graphs_go_with_their_arena_and_their_head(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng)
    graphs = rig.head.propose_graphs
    for _ in range(2):
        batch(rig, 2)
    rig.ctx.buffers.release()
    rig.ctx = replace(rig.ctx, buffers=BufferArena(rig.config, 8, 256, 16, 4, gpu))
    gc.collect()
    batch(rig, 2)
    assert len(graphs) == 0  # that of the first arena is gone
    batch(rig, 2)
    assert len(graphs) == 1
    rig.head.release()
    assert len(graphs) == 0


# ---------------------------------------------------------------- faults that the tests above must see


def with_keys(patch: pytest.MonkeyPatch, change: Callable[[BatchGraphKey], BatchGraphKey]) -> None:
    """A graph is kept under a key that says less."""
    patch.setattr(propose_graph_batch, "BatchGraphKey", lambda *parts: change(BatchGraphKey(*parts)))


def by_n_alone(patch: pytest.MonkeyPatch) -> None:
    with_keys(patch, lambda key: key._replace(drafts=0, log_probs=False, width=0))


def by_drafts_alone(patch: pytest.MonkeyPatch) -> None:
    with_keys(patch, lambda key: key._replace(log_probs=False, n=0, width=0))


def without_drafts(patch: pytest.MonkeyPatch) -> None:
    with_keys(patch, lambda key: key._replace(drafts=0))


def without_probabilities(patch: pytest.MonkeyPatch) -> None:
    with_keys(patch, lambda key: key._replace(log_probs=False))


def without_n(patch: pytest.MonkeyPatch) -> None:
    with_keys(patch, lambda key: key._replace(n=0))


def metas_of(patch: pytest.MonkeyPatch, change: Callable[[Any, Any, int], Any]) -> None:
    """change(meta, meta of the same sequence in the first draft, draft)"""
    real = BatchInputs.metas

    def mutant(self: BatchInputs, draft: int) -> list[Any]:
        return [change(meta, first, draft) for meta, first in zip(real(self, draft), real(self, 0), strict=True)]

    patch.setattr(BatchInputs, "metas", mutant)


def position_not_advanced(patch: pytest.MonkeyPatch) -> None:
    metas_of(patch, lambda meta, first, draft: replace(meta, positions=first.positions))


def slot_not_advanced(patch: pytest.MonkeyPatch) -> None:
    metas_of(patch, lambda meta, first, draft: replace(meta, slot=first.slot))


def length_not_advanced(patch: pytest.MonkeyPatch) -> None:
    metas_of(patch, lambda meta, first, draft: replace(meta, seq_len=first.seq_len))


def one_table_for_all(patch: pytest.MonkeyPatch) -> None:
    real = BatchInputs.metas
    patch.setattr(
        BatchInputs,
        "metas",
        lambda self, draft: [replace(meta, block_table=real(self, 0)[0].block_table) for meta in real(self, draft)],
    )


def the_same_token_for_each_draft(patch: pytest.MonkeyPatch) -> None:
    real = MtpHead._embed_rows

    def mutant(self: Any, ids: DevicePtr, output: DevicePtr, n: int, stream: Any) -> None:
        key = next(iter(self.propose_graphs._graphs), None)
        real(self, ids if key is None else self.propose_meta.offset(16 * n * key.drafts), output, n, stream)

    patch.setattr(MtpHead, "_embed_rows", mutant)


def hidden_rows_of_the_target_for_each_draft(patch: pytest.MonkeyPatch) -> None:
    """The drafter's own rows are not handed on: the next draft reads what the norm left of the target's."""
    patch.setattr(MtpHead, "_chain_hidden", lambda self, ctx: ctx.buffers.ssm_deinterleaved())


WILD = [by_n_alone, by_drafts_alone, without_drafts, without_n]
"""Their graphs read a slab that was laid out for another: slots are then any number, and rows are written anywhere."""
MUTANTS = [
    *WILD, without_probabilities, position_not_advanced, slot_not_advanced, length_not_advanced, one_table_for_all,
    the_same_token_for_each_draft, hidden_rows_of_the_target_for_each_draft,
]  # fmt: skip


def eager_is_right(patch: pytest.MonkeyPatch, pair: Twins) -> None:
    """The mutants are for the graph's head alone: the other keeps the methods as they are."""
    for name in ("_chain_hidden", "_embed_rows"):
        method = getattr(MtpHead, name)
        patch.setattr(pair.steps.head, name, method.__get__(pair.steps.head))


@pytest.mark.no_sanitizer("the faults read memory that nobody wrote")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_mutants_differ(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, mutant: Callable[[Any], None]
) -> None:
    if mutant in WILD and gpu.name == "cuda":
        pytest.skip("the fault writes to any address, which only a backend that checks memory survives")
    pair = twins(gpu, rng, monkeypatch)
    # What nobody writes is block 0 and token 0.
    gpu.memset(pair.graph.head.propose_meta, 0, 32 * pair.graph.head.propose_meta_stride)
    eager_is_right(monkeypatch, pair)
    mutant(monkeypatch)
    with pytest.raises((AssertionError, SparkError)):
        walk(pair, rng, 40)


@pytest.mark.no_sanitizer("the fault reads memory that nobody wrote")
def test_a_key_without_the_width_of_tables(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_keys(monkeypatch, lambda key: key._replace(width=0))
    with pytest.raises((AssertionError, SparkError)):
        grow(gpu, rng, monkeypatch)


@pytest.mark.no_sanitizer("with the fault, rows are read from where nobody wrote them")
def test_a_key_without_the_arena(gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two arenas by turns: right with the key as it is, and the last rows are in the wrong one with the mutant."""

    def agree() -> bool:
        pair = twins(gpu, rng, monkeypatch)
        contexts = [pair.graph.ctx, replace(pair.graph.ctx, buffers=BufferArena(pair.graph.config, 8, 64, 16, 4, gpu))]
        for turn in range(6):
            pair.graph.ctx = contexts[turn % 2]
            try:
                walk(pair, rng, 1, sequences=(2,), most=1)
            except AssertionError:
                return False
        return True

    assert agree()
    one = weakref.ref(BatchGraphKey)
    with_keys(monkeypatch, lambda key: key._replace(arena=one))  # type: ignore[arg-type]
    assert not agree()
