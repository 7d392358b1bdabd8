# SPDX-License-Identifier: AGPL-3.0-only
"""DeepSeek-V4's draft head: which rows it keeps over proposes and verifies, its pool and the addresses there."""

from __future__ import annotations

import gc
import struct
from typing import Any

import numpy as np
import pytest

from spark_py.model.layers.deepseek_v4_mtp import DeepseekV4MtpHead
from spark_py.model.layers.hidden_mode import HiddenMode
from spark_py.model.layers.mtp_head import MtpProposerState
from spark_py.model.layers.mtp_meta import mtp_attn_meta, pack_mtp_attn_meta
from spark_py.model.levers import ModelLevers
from spark_py.model.row_policy import RowPolicy
from spark_py.runtime.errors import (
    CapacityError,
    KvCacheExhausted,
    ProposerStateError,
    ScratchBoundsError,
)
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.runtime.kv_cache import KvCacheConfig, KvCacheDtype, PagedKvCache
from spark_py.runtime.scratch import MTP_META_OFFSET
from spark_py.testing import download
from tests.model.v4_mtp_support import BLOCK, MODES, Rig, Text, make_rig

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
