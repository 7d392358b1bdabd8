# SPDX-License-Identifier: AGPL-3.0-only
"""MultiModuleMtpHead: which rows each module holds, what is refused, and what happens when things go wrong."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from spark_py.model.layers.mtp_head import MtpHead, MtpQuantization
from spark_py.model.layers.mtp_multi import MultiModuleMtpHead
from spark_py.model.row_policy import RowPolicy
from spark_py.runtime.errors import CapacityError, InvalidArgumentError, KvCacheExhausted, ProposerStateError
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from tests.model.multi_support import MultiRig, SlowModel, Text, check_rows, make_multi
from tests.model.support import Array, a_hidden, download, make_rig
from tests.thin import thinned

STEPS = 300
MODES = [(RowPolicy.SEED, False), (RowPolicy.VERIFIED, False), (RowPolicy.VERIFIED, True)]
IDS = ["seed", "verified", "verified_refeed"]


# ---------------------------------------------------------------- construction


def test_empty_modules_rejected() -> None:
    with pytest.raises(InvalidArgumentError, match="at least one module"):
        MultiModuleMtpHead([])


def test_modules_that_do_not_belong_together(gpu: GpuBackend, rng: np.random.Generator) -> None:
    one, narrow = make_rig(gpu, rng), make_rig(gpu, rng, hidden_size=128)
    other = make_multi(gpu, rng, 1, policy=RowPolicy.VERIFIED).first
    with pytest.raises(InvalidArgumentError, match="used once"):
        MultiModuleMtpHead([one.head, one.head])
    with pytest.raises(InvalidArgumentError, match=r"hidden size of modules\[1\] is 128"):
        MultiModuleMtpHead([one.head, narrow.head])
    with pytest.raises(InvalidArgumentError, match=r"levers of modules\[1\]"):
        MultiModuleMtpHead([one.head, other.head])


@pytest.mark.parametrize("modules", [1, 2, 3])
def test_the_number_of_modules_is_said(
    gpu: GpuBackend, rng: np.random.Generator, caplog: pytest.LogCaptureFixture, modules: int
) -> None:
    """The config has three: fewer are used and said, more are a mistake."""
    rig = make_multi(gpu, rng, modules, num_mtp_modules=3)
    assert rig.head.num_modules() == modules
    assert repr(rig.head) == f"MultiModuleMtpHead(modules={modules})"
    said = [r.getMessage() for r in caplog.records if "MTP modules" in r.getMessage()]
    assert said == ([] if modules == 3 else [f"using {modules} of 3 MTP modules"])
    with pytest.raises(InvalidArgumentError, match="num_mtp_modules is 3"):
        make_multi(gpu, rng, 4, num_mtp_modules=3)


def test_release_gives_everything_back(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """What stays is the test's own: as much as with modules that were released one by one."""
    start = gpu.live_bytes()
    rig = make_multi(gpu, rng, policy=RowPolicy.VERIFIED, refeed=True)
    text, state = Text(rig, rng, 5), rig.state()
    text.prefill(state)
    text.propose(state, 3)
    rig.head.release()
    rig.head.release()
    kept, start = gpu.live_bytes() - start, gpu.live_bytes()
    for other in make_multi(gpu, rng).rigs:
        other.head.release()
    assert gpu.live_bytes() - start == kept


# ---------------------------------------------------------------- rows


@pytest.mark.no_sanitizer("300 steps launch too often for it; the tests of single steps run the same kernels")
@pytest.mark.deep
@pytest.mark.parametrize(("policy", "refeed"), MODES, ids=IDS)
def test_rows_over_random_accept_patterns(
    gpu: GpuBackend, rng: np.random.Generator, policy: RowPolicy, refeed: bool
) -> None:
    rig = make_multi(gpu, rng, policy=policy, refeed=refeed, max_seq_len=2048)
    free, model = rig.free_blocks(), SlowModel(3, policy, refeed)
    text, state = Text(rig, rng, 5), rig.state()
    assert text.prefill(state) == (4 if refeed else 0)
    if refeed:
        model.fed(text.tokens, text.position - 1)
    check_rows(rig, state, model)

    for step in range(STEPS):
        wanted, p = int(rng.integers(1, 5)), text.position
        drafts = text.propose(state, wanted)
        assert len(drafts) == min(wanted, 3)
        model.proposed(text.tokens, drafts)
        check_rows(rig, state, model)
        before = rig.rows(state) if step % 10 == 0 else None

        accepted = int(rng.integers(0, len(drafts) + 1))
        rig.head.after_verify(accepted, state, rig.first.stream)
        model.verified(len(drafts), accepted, p)
        check_rows(rig, state, model)
        if before is not None:
            assert all(old[: len(new)] == new for old, new in zip(before, rig.rows(state), strict=True))
        text.confirm(drafts[:accepted])
        if refeed:
            text.catch_up(state)
            model.fed(text.tokens, text.position - 1)
            check_rows(rig, state, model)

    if refeed:
        fresh = rig.state()
        text.prefill(fresh)
        assert rig.rows(state) == rig.rows(fresh), "the rows are those of a state that was fed the confirmed tokens"
        rig.head.free_state(gpu, fresh)
    rig.head.free_state(gpu, state)
    assert rig.free_blocks() == free


@pytest.mark.parametrize(("drafted", "accepted"), [(k, n) for k in (1, 2, 3) for n in range(k + 1)])
def test_each_verdict_leaves_the_confirmed_rows(
    gpu: GpuBackend, rng: np.random.Generator, drafted: int, accepted: int
) -> None:
    """VERIFIED with refeed: after every verdict, then a feed, then the next propose, bytes and drafts of a fresh
    state."""
    rig = make_multi(gpu, rng, policy=RowPolicy.VERIFIED, refeed=True)
    text, state, fresh = Text(rig, rng, 6), rig.state(), rig.state()
    text.prefill(state)
    drafts = text.propose(state, drafted)
    rig.head.after_verify(accepted, state, rig.first.stream)
    text.confirm(drafts[:accepted])
    assert text.catch_up(state) == accepted
    assert text.prefill(fresh) == 6 + accepted
    assert rig.rows(state) == rig.rows(fresh)
    assert [per.seq_len for per in state.per_module] == [6 + accepted - i for i in range(3)]
    assert text.propose(state, 3) == text.propose(fresh, 3)
    assert rig.rows(state) == rig.rows(fresh)
    assert {per.seq_len for per in state.per_module} == {text.position}, "one length, that of the sequence"


def test_after_an_accepted_run_the_seeds_modules_lack_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """The engine's rule: one row a module and step, whatever the sequence moves by."""
    rig = make_multi(gpu, rng)
    text, state = Text(rig, rng, 4), rig.state()
    for accepted, rows in ((3, [1, 1, 1]), (1, [2, 1, 1]), (0, [2, 1, 1]), (2, [3, 2, 1])):
        drafts = text.propose(state, 3)
        rig.head.after_verify(accepted, state, rig.first.stream)
        text.confirm(drafts[:accepted])
        assert [per.seq_len for per in state.per_module] == rows
    assert text.position == 4 + 4 + 6
    assert [per.last_pair_key for per in state.per_module] == [10, 11, 5]


@pytest.mark.parametrize("prompt", thinned([1, 2, 3, 4, 64, 65, 66, 67, 129, 130], keep=[1, 3, 5, 6]))
def test_prompts_around_the_first_rows_and_the_ends_of_chunks(
    gpu: GpuBackend, rng: np.random.Generator, prompt: int
) -> None:
    """A prompt fed at once, and one fed in pieces of one token and more: the same bytes, and the same drafts."""
    rig = make_multi(gpu, rng, policy=RowPolicy.VERIFIED, refeed=True)
    text, whole, pieces = Text(rig, rng, prompt), rig.state(), rig.state()
    assert text.prefill(whole) == prompt - 1
    assert [per.seq_len for per in whole.per_module] == [max(prompt - 1 - i, 0) for i in range(3)]
    at = 0
    while at < prompt - 1:
        n = min(int(rng.choice([1, 2, 5, 70])), prompt - 1 - at)
        assert rig.feed(pieces, text.tokens[at : at + n + 1], np.stack(text.hidden[at : at + n]), at, at + 1) == n
        at += n
    assert rig.rows(whole) == rig.rows(pieces)
    assert text.propose(whole, 3) == text.propose(pieces, 3)
    assert rig.rows(whole) == rig.rows(pieces)


def test_after_a_pause_the_modules_begin_again(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """Without the rows before it, a module has no hidden row to go on from: module i begins i positions later. Rows
    are rotated at the position that was given."""
    rig = make_multi(gpu, rng, policy=RowPolicy.VERIFIED, refeed=True)
    text, state = Text(rig, rng, 4), rig.state()
    text.prefill(state)
    drafts = rig.propose(state, 9, text.hidden[-1], 100, 3)
    assert [(per.seq_len, per.last_pair_key) for per in state.per_module] == [(4, 99), (3, 100), (2, 101)]
    rig.head.after_verify(1, state, rig.first.stream)
    assert [(per.seq_len, per.last_pair_key) for per in state.per_module] == [(4, 99), (3, 100), (1, 2)]
    assert rig.feed(state, [9, drafts[0]], text.hidden[-1][None], 4, 101) == 1
    assert [(per.seq_len, per.last_pair_key) for per in state.per_module] == [(5, 100), (3, 100), (1, 2)]
    rig.propose(state, 3, text.hidden[0], 102, 3)
    # Module 1 goes on at 102 from module 0's output at 101, module 2 from module 1's at 101.
    assert [(per.seq_len, per.last_pair_key) for per in state.per_module] == [(6, 101), (5, 102), (4, 103)]


def test_a_sequence_that_was_never_fed(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_multi(gpu, rng, policy=RowPolicy.VERIFIED, refeed=True)
    text, state = Text(rig, rng, 7), rig.state()
    for accepted, rows in ((0, [1, 0, 0]), (3, [5, 4, 3]), (2, [8, 7, 6])):
        drafts = text.propose(state, 3)
        rig.head.after_verify(accepted, state, rig.first.stream)
        text.confirm(drafts[:accepted])
        text.catch_up(state)
        assert [per.seq_len for per in state.per_module] == rows
        assert {per.last_pair_key for per in state.per_module if per.seq_len} == {text.position - 2}


def test_only_a_modules_own_blocks_are_written(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """Two sequences, whose tables differ from module to module; all other blocks keep their bytes."""
    rig = make_multi(gpu, rng, policy=RowPolicy.VERIFIED, refeed=True)
    rig.rigs[1].head.kv_cache.alloc_block()
    text, other, state = Text(rig, rng, 18), rig.state(), rig.state()
    text.prefill(other)
    text.prefill(state)
    assert [per.block_table for per in state.per_module] == [[2, 3], [2], [1]]

    def pools() -> list[Array]:
        return [
            np.stack([np.concatenate(r.head.kv_cache.read_block(0, b)) for b in range(r.head.kv_cache.num_blocks())])
            for r in rig.rigs
        ]

    before = pools()
    text.propose(state, 3)
    changed = [np.flatnonzero((a != b).any(axis=1)).tolist() for a, b in zip(before, pools(), strict=True)]
    assert changed == [[3], [3], [1, 2]]


def test_modules_in_fp8_are_fed_too(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """Rows go through the whole body, so that a format without a prefill of its own is fed too."""
    rig = make_multi(gpu, rng, 2, policy=RowPolicy.VERIFIED, refeed=True, quant=MtpQuantization.FP8)
    text, state, fresh = Text(rig, rng, 20), rig.state(), rig.state()
    assert text.prefill(state) == 19
    drafts = text.propose(state, 2)
    rig.head.after_verify(2, state, rig.first.stream)
    text.confirm(drafts)
    text.catch_up(state)
    text.prefill(fresh)
    assert rig.rows(state) == rig.rows(fresh)


# ---------------------------------------------------------------- how many drafts


@pytest.mark.parametrize(("policy", "refeed"), MODES, ids=IDS)
def test_drafts_end_at_the_number_of_modules(
    gpu: GpuBackend, rng: np.random.Generator, policy: RowPolicy, refeed: bool
) -> None:
    rig = make_multi(gpu, rng, policy=policy, refeed=refeed)
    text = Text(rig, rng, 5)
    state = rig.state()
    text.prefill(state)
    before = rig.snapshots(state)
    with gpu.trace() as trace:
        assert text.rig.head.propose(1, DevicePtr.NULL, 5, 0, state, rig.first.ctx, rig.first.stream) == []
    assert len(trace.steps) == 0
    assert rig.snapshots(state) == before
    with pytest.raises(InvalidArgumentError, match="num_drafts is -1"):
        text.propose(state, -1)
    found = []
    for n in (1, 2, 3, 4, 17):
        state = rig.state()
        text.prefill(state)
        found.append(text.propose(state, n))
        assert state.last_num_drafted == len(found[-1]) == min(n, 3)
    assert all(shorter == found[-1][: len(shorter)] for shorter in found)


def test_the_end_of_the_sequence(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """The capped number of drafts counts; a propose that does not fit changes nothing."""
    rig = make_multi(gpu, rng, max_seq_len=32)
    state, hidden = rig.state(), a_hidden(rig.first, rng)
    with pytest.raises(CapacityError, match="position of the last draft is 32"):
        rig.propose(state, 1, hidden, 29, 9)
    assert len(rig.propose(state, 1, hidden, 28, 9)) == 3


# ---------------------------------------------------------------- masks, deferred ids, confidence


def allow(vocab: int, *tokens: int) -> Array:
    mask = np.zeros(-(-vocab // 32), np.uint32)
    for token in tokens:
        mask[token // 32] |= np.uint32(1 << token % 32)
    return mask.view(np.int32)


@pytest.mark.parametrize("refeed", [False, True])
def test_one_mask_is_one_draft_and_a_mask_a_position_is_as_many(
    gpu: GpuBackend, rng: np.random.Generator, caplog: pytest.LogCaptureFixture, refeed: bool
) -> None:
    rig = make_multi(gpu, rng, policy=RowPolicy.VERIFIED, refeed=refeed)
    vocab, hidden = rig.head.draft_vocab, a_hidden(rig.first, rng)
    one = allow(vocab, 77)
    for _ in range(2):
        assert rig.propose(rig.state(), 1, hidden, 9, 3, grammar_bitmask=one) == [77]
    assert len([r for r in caplog.records if "one position" in r.message]) == 1
    masks = [allow(vocab, token) for token in (5, 202, 33, 64)]
    assert rig.propose(rig.state(), 1, hidden, 9, 4, grammar_bitmask=masks) == [5, 202, 33]
    assert rig.propose(rig.state(), 1, hidden, 9, 2, grammar_bitmask=masks[:2]) == [5, 202]
    state = rig.state()
    before = rig.snapshots(state)
    for wrong in (masks[:3], one[:-1], one.astype(np.int64)):
        with pytest.raises(InvalidArgumentError, match="grammar_bitmask"):
            rig.propose(state, 1, hidden, 9, 4, grammar_bitmask=wrong)
    assert rig.snapshots(state) == before


@pytest.mark.parametrize(("policy", "refeed"), MODES, ids=IDS)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_deferred_id_is_in_the_module_that_drafted_last(
    gpu: GpuBackend, rng: np.random.Generator, policy: RowPolicy, refeed: bool, k: int
) -> None:
    """Fewer drafts than modules: the last module's buffer has an older id, or none at all."""
    rig = make_multi(gpu, rng, policy=policy, refeed=refeed)
    text = Text(rig, rng, 5)
    with pytest.raises(ProposerStateError, match="draft_embed_target"):
        rig.head.read_deferred_draft_token(gpu)
    for other in rig.rigs:
        gpu.memset(other.head.draft_token_id_dev, 0xEE, 4)
    plain, state = rig.state(), rig.state()
    text.prefill(plain)
    text.prefill(state)
    ids = text.propose(plain, k)
    h = rig.first.config.hidden_size
    target = rig.first.put(np.zeros(h))
    found = text.propose(state, k, draft_embed_target=target)
    assert found == [*ids[:-1], 0]
    assert rig.head.read_deferred_draft_token(gpu) == ids[-1]
    assert download(gpu, target, (h,)).tobytes() == rig.first.arrays["embed_tokens"][ids[-1]].tobytes()
    for other in rig.rigs[: k - 1] + rig.rigs[k:]:
        assert download(gpu, other.head.draft_token_id_dev, (4,), np.dtype(np.uint8)).tolist() == [0xEE] * 4
    rig.head.after_verify(0, state, rig.first.stream)
    text.confirm([])
    text.propose(state, k)
    with pytest.raises(ProposerStateError):
        rig.head.read_deferred_draft_token(gpu)


def test_confidence_is_that_of_the_least_sure_module(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_multi(gpu, rng, levers={"draft_conf_tau": 0.5})
    assert rig.head.last_confidence() is None
    hidden, least = a_hidden(rig.first, rng), 1.0
    for k in (1, 2, 3):
        rig.propose(rig.state(), 3, hidden, 7, k)
        logits = rig.first.logits()
        least = min(least, float(np.exp(logits - logits.max()).sum() ** -1))
        assert rig.head.last_confidence() == pytest.approx(least, rel=1e-12)
    rig.propose(rig.state(), 3, hidden, 7, 1)
    assert rig.head.last_confidence() == pytest.approx(rig.rigs[0].head.last_conf)
    assert make_multi(gpu, rng).head.last_confidence() is None


# ---------------------------------------------------------------- order of calls


@pytest.mark.parametrize(("policy", "refeed"), MODES, ids=IDS)
def test_a_verdict_counts_once(gpu: GpuBackend, rng: np.random.Generator, policy: RowPolicy, refeed: bool) -> None:
    rig = make_multi(gpu, rng, policy=policy, refeed=refeed)
    state, hidden, stream = rig.state(), a_hidden(rig.first, rng), rig.first.stream
    with pytest.raises(ProposerStateError, match="propose comes first"):
        rig.head.after_verify(0, state, stream)
    rig.propose(state, 3, hidden, 4, 2)
    before = rig.snapshots(state)
    for wrong in (3, -1):
        with pytest.raises(InvalidArgumentError, match=f"num_accepted is {wrong}"):
            rig.head.after_verify(wrong, state, stream)
    with pytest.raises(ProposerStateError, match="2 drafts"):
        rig.propose(state, 3, hidden, 6, 2)
    with pytest.raises(ProposerStateError, match="2 drafts"):
        rig.feed(state, [1, 2, 3], np.stack([hidden] * 2), 2, 6)
    assert rig.snapshots(state) == before
    rig.head.after_verify(0, state, stream)
    after = rig.snapshots(state)
    with pytest.raises(ProposerStateError):
        rig.head.after_verify(0, state, stream)
    assert rig.snapshots(state) == after
    assert state.last_num_drafted == 0


def test_states_of_others_are_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig, other = make_multi(gpu, rng, 2), make_multi(gpu, rng, 2)
    hidden = a_hidden(rig.first, rng)
    with pytest.raises(ProposerStateError, match="another MultiModuleMtpHead"):
        rig.propose(other.state(), 1, hidden, 4, 1)
    with pytest.raises(ProposerStateError, match="no state of a MultiModuleMtpHead"):
        rig.propose(rig.first.state(), 1, hidden, 4, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("token", [-1, 203, 2**32 - 1, np.int32(-1), True, 3.0], ids=repr)
def test_a_token_outside_the_table_is_refused(gpu: GpuBackend, rng: np.random.Generator, token: Any) -> None:
    rig = make_multi(gpu, rng, 2, policy=RowPolicy.VERIFIED, refeed=True)
    state, hidden = rig.state(), rig.first.put(a_hidden(rig.first, rng))
    with gpu.trace() as trace:
        with pytest.raises(ValueError, match="last_token"):
            rig.head.propose(token, hidden, 4, 2, state, rig.first.ctx, rig.first.stream)
        with pytest.raises(ValueError, match=r"tokens\[1\]"):
            rig.head.prefill_drafter([1, token, 2], hidden, state, rig.first.ctx, rig.first.stream)
    assert len(trace.steps) == 0


def test_rows_are_fed_where_they_belong_or_not_at_all(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_multi(gpu, rng, 2, policy=RowPolicy.VERIFIED, refeed=True, max_seq_len=20)
    state, hidden = rig.state(), rng.standard_normal((30, rig.first.config.hidden_size))
    assert rig.feed(state, [], hidden) == rig.feed(state, [4], hidden) == 0
    assert rig.feed(state, [4, 5, 6], hidden) == 2
    before = rig.snapshots(state)
    with pytest.raises(InvalidArgumentError, match="row_base is 0"):
        rig.feed(state, [4, 5, 6], hidden)
    with pytest.raises(InvalidArgumentError, match="last row is at 2"):
        rig.feed(state, [4, 5, 6], hidden, 2, 2)
    with pytest.raises(CapacityError, match=r"is 20: the limit is 19"):
        rig.feed(state, list(range(19)), hidden, 2, 3)
    with pytest.raises(InvalidArgumentError, match="position is 2"):
        rig.propose(state, 1, hidden[0], 2, 1)
    assert rig.snapshots(state) == before


def test_without_refeed_nothing_is_fed_and_that_is_said(
    gpu: GpuBackend, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_multi(gpu, rng, refeed=True)
    assert "refeed does nothing" in caplog.text
    state = rig.state()
    assert rig.head.supports_drafter_prefill is False
    assert Text(rig, rng, 5).prefill(state) == 0
    assert [per.seq_len for per in state.per_module] == [0, 0, 0]


# ---------------------------------------------------------------- errors and blocks


class FailsAt(MtpHead):
    """Heads whose n-th row of all fails after it was written, body or draft."""

    left = 10**9

    @classmethod
    def _count(cls) -> None:
        cls.left -= 1
        if cls.left == 0:
            raise RuntimeError("the device is on strike")

    def forward_one(self, *args: Any, **more: Any) -> int:
        picked = super().forward_one(*args, **more)
        self._count()
        return picked

    def write_row(self, *args: Any, **more: Any) -> None:
        super().write_row(*args, **more)
        self._count()

    def drafter_rows_impl(self, *args: Any, **more: Any) -> int:
        rows = super().drafter_rows_impl(*args, **more)
        self._count()
        return rows


def undone(rig: MultiRig, text: Text, act: Callable[[Any], Any], rows: Sequence[int]) -> None:
    """Let `act` fail at each of `rows`, the last one that it writes among them: all is as before. Then it works."""
    state, fresh = rig.state(), rig.state()
    text.prefill(state)
    text.prefill(fresh)
    for row in rows:
        before, free, held = rig.snapshots(state), rig.free_blocks(), rig.rows(state)
        FailsAt.left = row
        try:
            with pytest.raises(RuntimeError, match="strike"):
                act(state)
        finally:
            FailsAt.left = 10**9
        assert rig.snapshots(state) == before
        assert (rig.free_blocks(), rig.rows(state)) == (free, held)
    assert act(state) == act(fresh)
    assert rig.rows(state) == rig.rows(fresh)


@pytest.mark.parametrize(("policy", "refeed"), MODES, ids=IDS)
def test_an_error_at_any_row_of_a_propose_is_undone(
    gpu: GpuBackend, rng: np.random.Generator, policy: RowPolicy, refeed: bool
) -> None:
    """Row 16 is the first of a new block in one module or another."""
    rig = make_multi(gpu, rng, policy=policy, refeed=refeed, head_class=FailsAt)
    text = Text(rig, rng, 17)
    undone(rig, text, lambda state: text.propose(state, 3), range(1, 7 if refeed else 4))


def test_an_error_at_a_row_of_a_feed_is_undone(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """Two chunks, whose first rows go on from what the prefill left; then drafts that need it again."""
    rig = make_multi(gpu, rng, policy=RowPolicy.VERIFIED, refeed=True, head_class=FailsAt)
    text = Text(rig, rng, 6)
    more = np.stack([a_hidden(rig.first, rng) for _ in range(66)])
    tokens = [int(t) for t in rng.integers(0, 203, 67)]
    # 64 rows of two bodies, then one write of the last module; 2 rows and one.
    rows = (1, 2, 64, 65, 128, 129, 130, 133, 134)
    undone(rig, text, lambda state: rig.feed(state, tokens, more, 5, 6), rows)


def test_a_propose_that_failed_leaves_what_a_late_feed_needs(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """A verdict, then a propose that fails before the feed that belongs between them, then the feed."""
    rig = make_multi(gpu, rng, policy=RowPolicy.VERIFIED, refeed=True, head_class=FailsAt)
    text, state, fresh = Text(rig, rng, 6), rig.state(), rig.state()
    text.prefill(state)
    for k, accepted in ((3, 0), (1, 1)):
        drafts = text.propose(state, k)
        rig.head.after_verify(accepted, state, rig.first.stream)
        text.confirm(drafts[:accepted])
    FailsAt.left = 3
    try:
        with pytest.raises(RuntimeError, match="strike"):
            text.propose(state, 3)
    finally:
        FailsAt.left = 10**9
    text.catch_up(state)
    text.prefill(fresh)
    assert rig.rows(state) == rig.rows(fresh)


@pytest.mark.parametrize(("policy", "refeed"), MODES, ids=IDS)
def test_a_pool_that_is_full_in_one_module(
    gpu: GpuBackend, rng: np.random.Generator, policy: RowPolicy, refeed: bool
) -> None:
    rig = make_multi(gpu, rng, policy=policy, refeed=refeed, max_seq_len=32, main_kv_blocks=0)
    text, state = Text(rig, rng, 4), rig.state()
    cache = rig.rigs[2].head.kv_cache
    taken = [cache.alloc_block() for _ in range(cache.num_free_blocks())]
    before, free = rig.snapshots(state), rig.free_blocks()
    with gpu.trace() as trace, pytest.raises(KvCacheExhausted):
        text.rig.head.propose(1, DevicePtr(4096), 4, 3, state, rig.first.ctx, rig.first.stream)
    assert len(trace.steps) == 0
    assert (rig.snapshots(state), rig.free_blocks()) == (before, free)
    cache.free_blocks(taken)
    assert len(text.propose(state, 3)) == 3


@pytest.mark.no_sanitizer("1000 requests launch too often for it")
@pytest.mark.deep
@pytest.mark.parametrize(("policy", "refeed"), MODES, ids=IDS)
def test_a_thousand_requests_lose_nothing(
    gpu: GpuBackend, rng: np.random.Generator, caplog: pytest.LogCaptureFixture, policy: RowPolicy, refeed: bool
) -> None:
    """alloc, propose, verify, free, one in ten dropped without free; `free_state` twice does no harm."""
    rig = make_multi(gpu, rng, 2, policy=policy, refeed=refeed)
    free, hidden = rig.free_blocks(), rig.first.put(a_hidden(rig.first, rng))
    ctx, stream, live = rig.first.ctx, rig.first.stream, 0
    with caplog.at_level(logging.ERROR):
        for cycle in range(1000):
            state = rig.state()
            drafts = rig.head.propose(cycle % 200, hidden, 5, 2, state, ctx, stream)
            rig.head.after_verify(cycle % (len(drafts) + 1), state, stream)
            if cycle % 10:
                rig.head.free_state(gpu, state)
                rig.head.free_state(gpu, state)
                assert state.snapshot() == rig.state().snapshot()
            del state
            if cycle == 0:
                gc.collect()
                live = gpu.live_bytes()
    gc.collect()
    assert rig.free_blocks() == free
    assert gpu.live_bytes() == live


def test_a_freed_state_begins_again(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_multi(gpu, rng, policy=RowPolicy.VERIFIED, refeed=True)
    text, state = Text(rig, rng, 20), rig.state()
    text.prefill(state)
    first = text.propose(state, 3)
    rig.head.free_state(gpu, state)
    assert all(not per.block_table and per.seq_len == 0 for per in state.per_module)
    text.prefill(state)
    assert text.propose(state, 3) == first


def test_the_log_of_a_propose(gpu: GpuBackend, rng: np.random.Generator, caplog: pytest.LogCaptureFixture) -> None:
    rig = make_multi(gpu, rng, 2)
    state = rig.state()
    with caplog.at_level(logging.DEBUG, "spark_py.model.mtp_multi"):
        a, b = rig.propose(state, 7, a_hidden(rig.first, rng), 4, 5)
        rig.head.after_verify(1, state, rig.first.stream)
    assert [r.getMessage() for r in caplog.records if r.name.endswith("mtp_multi")] == [
        f"MultiMTP propose[0/2]: token=7 pos=4 module_seq_len=1 → draft={a}",
        f"MultiMTP propose[1/2]: token={a} pos=5 module_seq_len=1 → draft={b}",
        "MultiMTP after_verify: accepted=1 of 2; per-module trim done",
    ]
