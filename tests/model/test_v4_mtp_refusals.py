# SPDX-License-Identifier: AGPL-3.0-only
"""DeepSeek-V4's draft head: what it refuses, and that an error changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from spark_py.model.config import ModelConfig
from spark_py.model.layer import ForwardContext
from spark_py.model.layers.deepseek_v4_mtp import DeepseekV4MtpHead
from spark_py.model.layers.hidden_mode import HiddenMode
from spark_py.model.levers import ModelLevers
from spark_py.model.weight_map import DenseWeight
from spark_py.runtime.buffers import BufferArena
from spark_py.runtime.errors import (
    CapacityError,
    InvalidArgumentError,
    KvCacheExhausted,
    ProposerStateError,
    SparkError,
    UnsupportedError,
)
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.runtime.kv_cache import KvCacheDtype
from tests.model.v4_mtp_support import MODES, RAW, Text, make_rig


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
