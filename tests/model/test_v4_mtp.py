# SPDX-License-Identifier: AGPL-3.0-only
"""DeepseekV4MtpHead: which rows a sequence holds, what is refused, and what happens when things go wrong."""

from __future__ import annotations

import gc
import logging
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from spark_py.model.config import ModelConfig
from spark_py.model.layer import ForwardContext
from spark_py.model.layers.deepseek_v4_mtp import DeepseekV4MtpHead
from spark_py.model.layers.hidden_mode import HiddenMode
from spark_py.model.layers.mtp_head import MtpProposerState
from spark_py.model.layers.mtp_meta import mtp_attn_meta, pack_mtp_attn_meta
from spark_py.model.levers import ModelLevers
from spark_py.model.row_policy import RowPolicy
from spark_py.model.weight_map import DenseWeight
from spark_py.runtime.buffers import BufferArena
from spark_py.runtime.errors import (
    CapacityError,
    InvalidArgumentError,
    KvCacheExhausted,
    ProposerStateError,
    ScratchBoundsError,
    SparkError,
    UnsupportedError,
)
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.runtime.kv_cache import KvCacheConfig, KvCacheDtype, PagedKvCache
from spark_py.runtime.scratch import MTP_META_OFFSET
from spark_py.testing import Array, download
from tests.model.v4_mtp_support import BLOCK, MODES, RAW, Rig, Text, make_rig

RULES = [(policy, refeed) for policy in RowPolicy for refeed in (False, True)]
RULE_IDS = [f"{policy.value}{'_refeed' if refeed else ''}" for policy, refeed in RULES]


# ---------------------------------------------------------------- rows


class SlowModel:
    """The written rule on whole lists: each row as (position, token), oldest first, and the blocks needed at most.

    SEED keeps as many of a propose's rows as drafts were accepted, VERIFIED those whose token is confirmed. With refeed
    only a row made from the target's own output may stay, the first, and what is missing then is fed.
    """

    def __init__(self, policy: RowPolicy, refeed: bool) -> None:
        self.policy, self.refeed = policy, refeed
        self.rows: list[tuple[int, int]] = []
        self.blocks = 0

    def _put(self, more: list[tuple[int, int]]) -> None:
        self.rows += more
        self.blocks = max(self.blocks, -(-len(self.rows) // BLOCK))

    def fed(self, tokens: list[int], keys: list[int]) -> None:
        self._put([(key + 1, tokens[key + 1]) for key in keys])

    def proposed(self, tokens: list[int], drafts: list[int]) -> None:
        p, whole = len(tokens) - 1, [*tokens, *drafts]
        self._put([(q, whole[q]) for q in range(p, p + len(drafts))])

    def verified(self, tokens: list[int], drafts: list[int], accepted: int) -> None:
        p = len(tokens) - 1
        own = self.rows[len(self.rows) - len(drafts) :]
        del self.rows[len(self.rows) - len(drafts) :]
        if self.policy is RowPolicy.SEED:
            own = own[:accepted]
        else:
            confirmed = [*tokens, *drafts[:accepted]]
            own = [row for row in own if row[0] < len(confirmed) and confirmed[row[0]] == row[1]]
        self.rows += [row for row in own if not self.refeed or row[0] == p]


def check_rows(rig: Rig, state: MtpProposerState, model: SlowModel) -> None:
    assert rig.head.drafter_rows(state) == state.seq_len == len(model.rows)
    assert rig.head.last_pair_key(state) == (model.rows[-1][0] - 1 if model.rows else None)
    assert len(state.block_table) == len(set(state.block_table)) == model.blocks


class RowsOnly(DeepseekV4MtpHead):
    """Writes a row's latent without attention and experts, and guesses anything: for rules over many steps."""

    def forward_one(
        self, token: int, source: DevicePtr, stacked: bool, position: int, state: MtpProposerState, ctx: Any,
        stream: Any, *rest: Any,
    ) -> int:  # fmt: skip
        self._write_fed_rows([token], source, stacked, position, state, stream)
        return (7 * token + position) % 203


@pytest.mark.no_sanitizer("steps launch too often for it; the tests of single steps run the same kernels")
@pytest.mark.parametrize(
    ("head_class", "steps"), [(RowsOnly, 24), pytest.param(DeepseekV4MtpHead, 300, marks=pytest.mark.deep)]
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("policy", "refeed"), RULES, ids=RULE_IDS)
def test_rows_over_random_accept_patterns(
    gpu: GpuBackend, rng: np.random.Generator, policy: RowPolicy, refeed: bool, mode: HiddenMode,
    head_class: type[DeepseekV4MtpHead], steps: int,
) -> None:  # fmt: skip
    levers = ModelLevers(row_policy=policy, refeed=refeed)
    rig = make_rig(gpu, rng, mode, levers=levers, max_seq_len=2048, head_class=head_class)
    free, model = rig.head.kv_cache.num_free_blocks(), SlowModel(policy, refeed)
    text, state = Text(rig, rng, 5), rig.state()
    assert text.prefill(state) == 4
    model.fed(text.tokens, [0, 1, 2, 3])
    check_rows(rig, state, model)
    for step in range(steps):
        wanted = int(rng.integers(1, 5))
        drafts = text.propose(state, wanted)
        assert len(drafts) == wanted
        model.proposed(text.tokens, drafts)
        check_rows(rig, state, model)
        before = rig.rows(state) if step % 20 == 0 else None

        accepted = int(rng.integers(0, wanted + 1))
        rig.head.after_verify(accepted, state, rig.stream)
        model.verified(text.tokens, drafts, accepted)
        check_rows(rig, state, model)
        if before is not None:
            after = rig.rows(state)
            assert before[: len(after)] == after
        text.confirm(drafts[:accepted])
        if refeed:
            model.fed(text.tokens, text.catch_up(state))
            check_rows(rig, state, model)

    if refeed and policy is RowPolicy.VERIFIED:
        fresh = rig.state()
        text.prefill(fresh)
        assert rig.rows(state) == rig.rows(fresh), "the rows are those of a state that was fed the confirmed tokens"
        rig.head.free_state(gpu, fresh)
    rig.head.free_state(gpu, state)
    assert rig.head.kv_cache.num_free_blocks() == free


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("prompt", [1, 2, 17, 66, 130])
def test_prompts_at_once_and_in_pieces(
    gpu: GpuBackend, rng: np.random.Generator, prompt: int, mode: HiddenMode
) -> None:
    """Chunks of 64 rows, and blocks of 16: the same bytes, which are those of proposes too."""
    rig = make_rig(gpu, rng, mode)
    text, whole, pieces, drafted = Text(rig, rng, prompt), rig.state(), rig.state(), rig.state()
    assert text.prefill(whole) == prompt - 1
    at = 0
    while at < prompt - 1:
        n = min(int(rng.choice([1, 2, 5, 70])), prompt - 1 - at)
        assert rig.feed(pieces, text.tokens[at : at + n + 1], np.stack(text.stacks[at : at + n]), at, at + 1) == n
        at += n
    assert rig.rows(whole) == rig.rows(pieces)
    for position in range(1, min(prompt, 20)):
        rig.propose(drafted, text.tokens[position], text.stacks[position - 1], position, 1)
        drafted.last_num_drafted = 0
    assert rig.rows(whole)[: drafted.seq_len] == rig.rows(drafted)
    assert text.propose(whole, 3) == text.propose(pieces, 3)
    assert rig.rows(whole) == rig.rows(pieces)


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_rows_are_those_of_a_fresh_state_whatever_was_there(
    gpu: GpuBackend, rng: np.random.Generator, accepted: int, mode: HiddenMode
) -> None:
    """VERIFIED with refeed, in blocks that were used before: after a verdict and a feed, bytes and drafts of a state
    that never guessed wrong."""
    rig = make_rig(gpu, rng, mode, levers=ModelLevers(row_policy=RowPolicy.VERIFIED, refeed=True))
    used, text, state = rig.state(), Text(rig, rng, 30), rig.state()
    text.prefill(used)
    text.propose(used, 3)
    rig.head.free_state(gpu, used)
    text.prefill(state)
    drafts = text.propose(state, 3)
    rig.head.after_verify(accepted, state, rig.stream)
    text.confirm(drafts[:accepted])
    assert len(text.catch_up(state)) == accepted
    fresh = rig.state()
    assert text.prefill(fresh) == 30 + accepted
    assert rig.rows(state) == rig.rows(fresh)
    assert text.propose(state, 3) == text.propose(fresh, 3)
    assert rig.rows(state) == rig.rows(fresh)


def test_the_engines_rule_in_numbers(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """SEED without refeed: max(drafted, 1) - accepted rows go, whatever the position; keys that are skipped stay
    skipped."""
    rig = make_rig(gpu, rng, HiddenMode.COLLAPSED)
    text, state = Text(rig, rng, 4), rig.state()
    for drafted, accepted, rows, key in ((3, 3, 3, 5), (1, 0, 3, 5), (2, 1, 4, 8), (1, 1, 5, 10), (3, 0, 5, 10)):
        drafts = text.propose(state, drafted)
        rig.head.after_verify(accepted, state, rig.stream)
        text.confirm(drafts[:accepted])
        assert (state.seq_len, state.last_pair_key) == (rows, key)


def test_sequences_do_not_touch_each_others_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """Turn by turn over several blocks: each holds the bytes and makes the drafts of a head of its own."""
    levers = ModelLevers(row_policy=RowPolicy.VERIFIED, refeed=True)
    rig = make_rig(gpu, rng, levers=levers)
    texts = [Text(rig, rng, prompt) for prompt in (3, 15, 16, 31)]
    states = [rig.state() for _ in texts]
    for text, state in zip(texts, states, strict=True):
        text.prefill(state)
    for _ in range(4):
        drafts = [text.propose(state, 3) for text, state in zip(texts, states, strict=True)]
        for text, state, found in zip(texts, states, drafts, strict=True):
            accepted = int(rng.integers(0, 4))
            rig.head.after_verify(accepted, state, rig.stream)
            text.confirm(found[:accepted])
            text.catch_up(state)
    for text, state in zip(texts, states, strict=True):
        alone = rig.state()
        text.prefill(alone)
        assert rig.rows(state) == rig.rows(alone)
    tables = [block for state in states for block in state.block_table]
    assert len(tables) == len(set(tables))


@pytest.mark.no_sanitizer("cycles launch too often for it")
@pytest.mark.parametrize(
    ("head_class", "cycles"), [(RowsOnly, 40), pytest.param(DeepseekV4MtpHead, 1000, marks=pytest.mark.deep)]
)
def test_cycles_leak_nothing(
    gpu: GpuBackend, rng: np.random.Generator, caplog: pytest.LogCaptureFixture, head_class: Any, cycles: int
) -> None:
    """Freed once, twice, after an error, or dropped."""
    rig = make_rig(gpu, rng, max_seq_len=64, head_class=head_class)
    free, live, dropped = rig.head.kv_cache.num_free_blocks(), None, 0
    stack = rig.a_stack(rng)
    for cycle in range(cycles):
        state = rig.state()
        drafts = rig.propose(state, cycle % 203, stack, 1 + cycle % 40, 1 + cycle % 3)
        kind = cycle % 4
        if kind == 1:
            with pytest.raises(ProposerStateError):
                rig.propose(state, 1, stack, 5, 1)
        if kind < 3:
            rig.head.after_verify(int(rng.integers(0, len(drafts) + 1)), state, rig.stream)
        if kind == 3:
            del state
            dropped += 1
        else:
            for _ in range(1 + kind):
                rig.head.free_state(gpu, state)
            assert (state.seq_len, state.block_table, state.last_pair_key) == (0, [], None)
        if cycle == 12:
            live = gpu.live_bytes()
    gc.collect()
    assert rig.head.kv_cache.num_free_blocks() == free
    assert gpu.live_bytes() == live
    assert sum("without free_state" in record.message for record in caplog.records) == dropped


# ---------------------------------------------------------------- the pool and its addresses


@pytest.mark.parametrize("kv_dtype", [KvCacheDtype.BF16, KvCacheDtype.FP8])
def test_the_pool(gpu: GpuBackend, rng: np.random.Generator, kv_dtype: KvCacheDtype) -> None:
    """One layer, one latent row a token for key and value, and blocks for every sequence that may draft."""
    rig = make_rig(gpu, rng, levers=ModelLevers(mtp_max_seqs=3), max_seq_len=40, kv_dtype=kv_dtype)
    kv, size = rig.head.kv_cache, 2 if kv_dtype is KvCacheDtype.BF16 else 1
    layout = kv.layout(0)
    assert (layout.num_kv_heads, layout.head_dim, kv.config.num_layers, kv.config.shared_kv) == (1, 32, 1, True)
    assert rig.raw["head_dim"] == rig.config.kv_lora_rank == 32
    assert kv.num_blocks() == (40 // 16 + 1) * 3
    assert kv.total_bytes() == kv.num_blocks() * 16 * 32 * size
    states = [rig.state() for _ in range(3)]
    for state in states:
        text = Text(rig, rng, 37)
        text.prefill(state)
        text.propose(state, 2)
    assert kv.num_free_blocks() == 0, "three sequences of the full length, exactly"
    other = rig.state()
    with pytest.raises(KvCacheExhausted):
        rig.propose(other, 1, rig.a_stack(rng), 5, 1)
    rig.head.free_state(gpu, states[1])
    assert len(rig.propose(other, 1, rig.a_stack(rng), 5, 1)) == 1


def test_the_engines_addresses(gpu: GpuBackend) -> None:
    """The original's layout for DeepSeek-V4-Flash, which this head does not use: 44 layers on two sides, rows of
    512 + 64 elements, the MTP module in the last layer; and its slab of metadata."""
    layers, row = 43 + 1, 512 + 64
    config = KvCacheConfig(block_size=16, num_kv_heads=1, head_dim=row, num_layers=layers, dtype=KvCacheDtype.BF16)
    with PagedKvCache(config, 2, gpu) as kv:
        k, v = kv.k_pool_ptr(layers - 1), kv.v_pool_ptr(layers - 1)
        assert k != v
        assert kv.k_cache_ptr(layers - 1, 1) == k.offset(16 * row * 2)
        assert kv.block_stride_bytes_for_layer(layers - 1) == 18432
        assert kv.total_bytes() == layers * 2 * 2 * 18432
    slab = pack_mtp_attn_meta(77, 5 * 16 + 3, 20, [4, 5], 4096)
    assert len(slab) == 256 + 8
    assert struct.unpack_from("<I", slab, 0)[0] == 77
    assert struct.unpack_from("<q", slab, 8)[0] == 83
    assert struct.unpack_from("<i", slab, 16)[0] == 20
    assert struct.unpack_from("<2i", slab, 256) == (4, 5)
    base = DevicePtr(1 << 20)
    meta = mtp_attn_meta(base, 2)
    assert [p.offset(0) for p in (meta.positions, meta.slot, meta.seq_len, meta.block_table)] == [
        base, base.offset(8), base.offset(16), base.offset(256),
    ]  # fmt: skip


def test_metadata_of_a_row(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """What the slab at 49152 says of each draft's row: the absolute position, and slot and length by the rows held."""
    rig = make_rig(gpu, rng, levers=ModelLevers(propose_graph=False))
    rig.head.kv_cache.alloc_block()
    state, stack = rig.state(), rig.a_stack(rng)
    for row in range(20):
        rig.propose(state, 1, stack, 100 + 3 * row, 1)
        state.last_num_drafted = 0
        scratch = download(gpu, rig.ctx.buffers.scratch().offset(MTP_META_OFFSET), (264,), np.dtype(np.uint8)).tobytes()
        position, slot, length = struct.unpack_from("<I4xqi", scratch)
        assert (position, slot, length) == (100 + 3 * row, (1 + row // 16) * 16 + row % 16, row + 1)
        assert list(struct.unpack_from(f"<{1 + row // 16}i", scratch, 256)) == [1, 2][: 1 + row // 16]


def test_the_last_block_whose_table_fits_in_scratch_and_one_more(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """A table that fits to the byte, and one entry too many: refused, and the state is as before, blocks included."""
    levers = ModelLevers(propose_graph=False, mtp_max_seqs=1)
    rig = make_rig(gpu, rng, levers=levers, max_seq_len=1 << 16, arena_seq_len=256)
    state, stack = rig.state(), rig.a_stack(rng)
    room = (rig.ctx.buffers.scratch_bytes() - MTP_META_OFFSET - 256) // 4
    assert room == (65536 - 49152 - 256) // 4
    state.seq_len, state.last_pair_key = (room - 1) * BLOCK + 15, 100
    assert len(rig.propose(state, 1, stack, 1000, 1)) == 1
    rig.head.after_verify(1, state, rig.stream)
    assert len(state.block_table) == room
    before = rig.snapshot(state)
    for _ in range(2):
        with pytest.raises((ScratchBoundsError, CapacityError)):
            rig.propose(state, 1, stack, 1001, 1)
        assert rig.snapshot(state) == before
    free = rig.head.kv_cache.num_free_blocks()
    rig.head.free_state(gpu, state)
    assert rig.head.kv_cache.num_free_blocks() == free + room


# ---------------------------------------------------------------- refusals


def test_an_arena_that_is_too_small_is_named(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """A configuration without linear attention or connections gives an arena without room for a row of each stream."""
    rig, config = make_rig(gpu, rng), ModelConfig.from_dict(RAW | {"hc_mult": 1})
    state, ptr = rig.state(), gpu.alloc(4096)
    ctx = ForwardContext(BufferArena(config, 1, 256, 16, 1, gpu), gpu, config, rig.ctx.levers)
    with pytest.raises(CapacityError, match=r"bytes that the V4 MTP head writes to ssm_gates is 512: the limit is 256"):
        rig.head.propose(1, ptr, 5, 1, state, ctx, rig.stream)
    assert (state.seq_len, state.block_table) == (0, [])


@pytest.mark.parametrize("mode", MODES)
def test_wrong_arguments_change_nothing(gpu: GpuBackend, rng: np.random.Generator, mode: HiddenMode) -> None:
    rig = make_rig(gpu, rng, mode)
    text, state, foreign = Text(rig, rng, 18), rig.state(), make_rig(gpu, rng).state()
    text.prefill(state)
    drafts = text.propose(state, 3)
    rig.head.after_verify(1, state, rig.stream)
    text.confirm(drafts[:1])
    head, stack, token = rig.head, text.stacks[-1], text.tokens[-1]
    ptr, many = gpu.alloc(1 << 16), [1] * 4

    def feed(tokens: list[Any], row_base: Any, pos_base: Any, **more: Any) -> Callable[[], Any]:
        args = (tokens, ptr, row_base, pos_base, state, rig.ctx, rig.stream)
        return lambda: head.catchup_drafter(*args, **more)

    def propose(token: Any, position: Any, n: Any, **more: Any) -> Callable[[], Any]:
        return lambda: rig.propose(state, token, stack, position, n, **more)

    bad: list[tuple[Callable[[], Any], type[SparkError], str]] = [
        (propose(-1, 20, 1), InvalidArgumentError, "last_token"),
        (propose(203, 20, 1), InvalidArgumentError, "last_token is 203"),
        (propose(np.int32(-1), 20, 1), InvalidArgumentError, "last_token"),
        (propose(1.0, 20, 1), InvalidArgumentError, "last_token"),
        (propose(token, 0, 1), InvalidArgumentError, "position"),
        (propose(token, 253, 3), CapacityError, "position of the last draft is 256"),
        (propose(token, 20, -1), InvalidArgumentError, "num_drafts"),
        (propose(token, 20, 1, draft_embed_target=DevicePtr.NULL), InvalidArgumentError, "draft_embed_target"),
        (propose(token, 20, 1, grammar_bitmask=np.zeros(6, np.int32)), InvalidArgumentError, "grammar_bitmask"),
        (
            lambda: head.propose(token, DevicePtr.NULL, 20, 1, state, rig.ctx, rig.stream),
            InvalidArgumentError, "target_hidden ",
        ),
        (
            lambda: head.propose(
                token, ptr, 20, 1, state, rig.ctx, rig.stream, target_hidden_stack=DevicePtr.NULL
            ),
            InvalidArgumentError, "target_hidden_stack",
        ),
        (lambda: head.propose(token, ptr, 20, 1, foreign, rig.ctx, rig.stream), ProposerStateError, "belongs to"),
        (lambda: head.after_verify(0, state, rig.stream), ProposerStateError, "after_verify without drafts"),
        (lambda: head.read_deferred_draft_token(gpu), ProposerStateError, "left no draft"),
        (feed(many, 17, 40), InvalidArgumentError, "row_base"),
        (feed(many, 18, 18), InvalidArgumentError, "pos_base"),
        (feed(many, 18, 254), CapacityError, "position of the last row"),
        (feed([1, 203], 18, 40), InvalidArgumentError, r"tokens\[1\]"),
        (feed(many, 18, 40, hidden_stacks=DevicePtr.NULL), InvalidArgumentError, "hidden_stacks"),
    ]  # fmt: skip
    before, rows = rig.snapshot(state), rig.rows(state)
    for call, kind, match in bad:
        with pytest.raises(kind, match=match):
            call()
        assert rig.snapshot(state) == before, match
    assert rig.rows(state) == rows

    text.propose(state, 2)
    pending: list[tuple[Callable[[], Any], type[SparkError], str]] = [
        (propose(token, 40, 1), ProposerStateError, "before the verdict"),
        (feed(many, 20, 40), ProposerStateError, "before the verdict"),
        (lambda: head.after_verify(3, state, rig.stream), InvalidArgumentError, "num_accepted"),
        (lambda: head.after_verify(-1, state, rig.stream), InvalidArgumentError, "num_accepted"),
        (lambda: head.after_verify([1], state, rig.stream), InvalidArgumentError, "num_accepted"),  # type: ignore[arg-type]
        (lambda: head.take_drafter_kv(state), ProposerStateError, "before the verdict"),
    ]
    before = rig.snapshot(state)
    for call, kind, match in pending:
        with pytest.raises(kind, match=match):
            call()
        assert rig.snapshot(state) == before, match
    head.after_verify(2, state, rig.stream)
    with pytest.raises(ProposerStateError, match="each counts once"):
        head.after_verify(0, state, rig.stream)


def test_no_drafts_touch_nothing(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng)
    state = rig.state()
    with gpu.trace() as trace:
        assert rig.head.propose(1, DevicePtr.NULL, 5, 0, state, rig.ctx, rig.stream) == []
    assert len(trace.steps) == 0
    assert (state.seq_len, state.block_table, state.last_num_drafted) == (0, [], 0)


class Failing(DeepseekV4MtpHead):
    """A head whose third row fails, with the row's latent written."""

    fails = False
    made = 0

    def forward_one(self, *args: Any, **more: Any) -> int:
        draft = super().forward_one(*args, **more)
        self.made += 1
        if self.fails and self.made == 3:
            raise CapacityError("rows", 3, 2, "of a test")
        return draft


@pytest.mark.parametrize("mode", MODES)
def test_a_propose_that_fails_gives_its_blocks_back(
    gpu: GpuBackend, rng: np.random.Generator, mode: HiddenMode
) -> None:
    """In the middle of a propose that took a block, again and again; the same propose then succeeds, with the drafts of
    a state that never failed."""
    rig = make_rig(gpu, rng, mode, head_class=Failing)
    head: Any = rig.head
    text, state, other = Text(rig, rng, 15), rig.state(), rig.state()
    text.prefill(state)
    text.prefill(other)
    before, rows = rig.snapshot(state), rig.rows(state)
    head.fails = True
    for _ in range(3):
        head.made = 0
        with pytest.raises(CapacityError, match="of a test"):
            text.propose(state, 4)
        assert rig.snapshot(state) == before
    assert rig.rows(state) == rows
    head.fails = False
    assert text.propose(state, 4) == text.propose(other, 4)
    assert rig.rows(state) == rig.rows(other)


def test_only_the_asking_sequence_goes_without_blocks(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng, levers=ModelLevers(mtp_max_seqs=1), max_seq_len=30)
    one, two = rig.state(), rig.state()
    stack = rig.a_stack(rng)
    rig.propose(one, 1, stack, 1, 1)
    rig.head.after_verify(1, one, rig.stream)
    rig.propose(two, 1, stack, 1, 1)
    rig.head.after_verify(1, two, rig.stream)
    one.seq_len, before = 15, rig.snapshot(two)
    with pytest.raises(KvCacheExhausted, match="1 needed"):
        rig.propose(one, 1, stack, 20, 2)
    assert (one.seq_len, len(one.block_table), one.last_num_drafted) == (15, 1, 0)
    assert rig.snapshot(two) == before
    assert len(rig.propose(one, 1, stack, 20, 1)) == 1


def test_what_is_not_offered(gpu: GpuBackend, rng: np.random.Generator) -> None:
    live = gpu.live_bytes()
    with pytest.raises(UnsupportedError, match="nvfp4"):
        make_rig(gpu, rng, kv_dtype=KvCacheDtype.NVFP4)
    rig = make_rig(gpu, rng)
    gpu_bytes = gpu.live_bytes()
    with rig.head as head:
        assert head.propose_batch_max(rig.ctx.buffers, rig.config) == 1
        states = [rig.state(), rig.state()]
        assert head.propose_batch([1, 2], [DevicePtr.NULL] * 2, [5, 5], 1, states, rig.ctx, rig.stream) is None
        assert (head.block_gamma(), head.last_confidence()) == (None, None)
    head.release()
    assert live < gpu.live_bytes() < gpu_bytes


def test_a_head_that_is_not_fed_says_so(
    gpu: GpuBackend, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(gpu, rng, levers=ModelLevers(drafter_prefill=False))
    assert not rig.head.supports_drafter_prefill
    text, state = Text(rig, rng, 9), rig.state()
    assert text.prefill(state) == text.prefill(state) == 0
    assert len([r for r in caplog.records if "the drafter is not fed" in r.message]) == 1
    assert rig.head.drafter_rows(state) == 0
    assert len(text.propose(state, 2)) == 2
    assert make_rig(gpu, rng).head.supports_drafter_prefill


def test_draft_tables_are_the_targets(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """A head without one of them is refused, by name."""
    rig = make_rig(gpu, rng)
    for name in ("embed_tokens", "lm_head"):
        tables = {"embed_tokens": rig.head.embed_tokens, "lm_head": rig.head.lm_head}
        tables[name] = DenseWeight(DevicePtr.NULL, (203, 64))
        with pytest.raises(InvalidArgumentError, match=name):
            DeepseekV4MtpHead(rig.head.module, *tables.values(), rig.config, gpu, 0, 64, ModelLevers())


# ---------------------------------------------------------------- masks, deferred ids, confidence, the log


def allow(vocab: int, *tokens: int) -> Array:
    mask = np.zeros(-(-vocab // 32), np.uint32)
    for token in tokens:
        mask[token // 32] |= np.uint32(1 << token % 32)
    return mask.view(np.int32)


@pytest.mark.parametrize("mode", MODES)
def test_grammar_masks(
    gpu: GpuBackend, rng: np.random.Generator, mode: HiddenMode, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(gpu, rng, mode)
    vocab, stack = rig.head.draft_vocab, rig.a_stack(rng)
    for _ in range(2):
        assert rig.propose(rig.state(), 1, stack, 9, 3, grammar_bitmask=allow(vocab, 77)) == [77]
    assert len([r for r in caplog.records if "one position" in r.message]) == 1
    masks = [allow(vocab, token) for token in (5, 202, 33)]
    state = rig.state()
    assert rig.propose(state, 1, stack, 9, 3, grammar_bitmask=masks) == [5, 202, 33]
    assert state.last_num_drafted == 3
    # Nothing allowed: 0, said, and a row all the same, which the verdict drops.
    state = rig.state()
    assert rig.propose(state, 1, stack, 11, 1, grammar_bitmask=allow(vocab)) == [0]
    assert any("V4 MTP grammar mask allowed zero tokens at pos 11" in r.getMessage() for r in caplog.records)
    assert state.seq_len == 1
    # The best of what is allowed, and with everything allowed the draft without a mask.
    free, whole = rig.propose(rig.state(), 1, stack, 9, 1), allow(vocab, *range(vocab))
    assert rig.propose(rig.state(), 1, stack, 9, 1, grammar_bitmask=whole) == free
    logits = rig.logits()
    some = sorted(int(t) for t in rng.permutation(vocab)[:40])
    best = some[int(np.argmax(logits[some]))]
    assert rig.propose(rig.state(), 1, stack, 9, 1, grammar_bitmask=allow(vocab, *some)) == [best]


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_the_deferred_id_is_the_last_drafts(
    gpu: GpuBackend, rng: np.random.Generator, mode: HiddenMode, graph: bool
) -> None:
    rig = make_rig(gpu, rng, mode, levers=ModelLevers(propose_graph=graph))
    text, h = Text(rig, rng, 5), rig.raw["hidden_size"]
    target = gpu.alloc(2 * h)
    for n in (1, 2, 3, 3, 3):
        plain, state = rig.state(), rig.state()
        ids = text.propose(plain, n)
        gpu.memset(target, 0xFF, 2 * h)
        assert text.propose(state, n, draft_embed_target=target) == [*ids[:-1], 0]
        assert rig.head.read_deferred_draft_token(gpu) == ids[-1]
        embedding = rig.arrays["embed.weight"][ids[-1]]
        assert download(gpu, target, (h,), embedding.dtype).tobytes() == embedding.tobytes()
        assert rig.rows(plain) == rig.rows(state)
    text.propose(rig.state(), 1)
    with pytest.raises(ProposerStateError, match="left no draft"):
        rig.head.read_deferred_draft_token(gpu)
    masked = text.propose(
        rig.state(), 1, draft_embed_target=target, grammar_bitmask=allow(rig.head.draft_vocab, 50, 51)
    )
    assert masked[0] in (50, 51)
    assert rig.head.read_deferred_draft_token(gpu) == masked[0]


def test_confidence_is_the_smallest_probability(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng, levers=ModelLevers(draft_conf_tau=0.5))
    text, found = Text(rig, rng, 5), []
    for n in (1, 2, 3):
        text.propose(rig.state(), n)
        logits = rig.logits()
        share = np.exp(logits - logits.max())
        found.append(float(share.max() / share.sum()))
        assert rig.head.last_confidence() == pytest.approx(min(found), rel=1e-6)


def test_the_log_has_the_engines_words(
    gpu: GpuBackend, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(gpu, rng, levers=ModelLevers(propose_graph=False, shadow_topk=2, debug_norms=True))
    text, state = Text(rig, rng, 5), rig.state()
    with caplog.at_level(logging.DEBUG):
        drafts = text.propose(state, 2)
        rig.head.after_verify(1, state, rig.stream)
    said = [record.getMessage() for record in caplog.records]
    assert f"V4 MTP propose[0]: token={text.tokens[-1]} pos=5 mtp_seq_len=1 → draft={drafts[0]}" in said
    assert f"V4 MTP propose[1]: token={drafts[0]} pos=6 mtp_seq_len=2 → draft={drafts[1]}" in said
    assert "V4 MTP after_verify: accepted=1 drafted=2 trim=1 mtp_seq_len: 2 → 1" in said
    assert sum(line.startswith("draft after position") for line in said) == 2
    norms = [line for line in said if line.startswith("norms at position 6")]
    assert len(norms) == 1
    assert "nan" not in norms[0]


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_drafts_as_single_launches_do(gpu: GpuBackend, rng: np.random.Generator, mode: HiddenMode) -> None:
    """Over lengths that cross blocks, numbers of drafts, two arenas and both modes in one head: ids and rows."""
    rig = make_rig(gpu, rng, mode)
    plain = make_rig(gpu, rng, mode, arrays=rig.arrays, levers=ModelLevers(propose_graph=False))
    text, states = Text(rig, rng, 13), [rig.state(), plain.state()]
    for each, state in zip((rig, plain), states, strict=True):
        each.feed(state, text.tokens[:-1], np.stack(text.stacks))
    other = BufferArena(rig.config, 4, 256, 16, 4, gpu)
    contexts = [rig.ctx, ForwardContext(other, gpu, rig.config, rig.ctx.levers)]
    for step in range(14):
        n, rig.ctx = 1 + step % 2, contexts[step // 3 % 2]
        rig.stacked = plain.stacked = (mode is HiddenMode.REFERENCE) == (step != 7)
        found = []
        for each, state in zip((rig, plain), states, strict=True):
            found.append(each.propose(state, text.tokens[-1], text.stacks[-1], text.position, n))
            each.head.after_verify(n - 1, state, each.stream)
        assert found[0] == found[1], f"step {step}"
        text.confirm(found[0][: n - 1])
        assert rig.rows(states[0]) == plain.rows(states[1]), f"step {step}"
    assert sum(len(graphs) for graphs in rig.head.propose_graphs.values()) == 4
    assert len(plain.head.propose_graphs) == 0
