# SPDX-License-Identifier: AGPL-3.0-only
"""DeepSeek-V4's draft head: grammar masks, deferred ids, confidence, the log, and graphs."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from spark_py.model.layer import ForwardContext
from spark_py.model.layers.hidden_mode import HiddenMode
from spark_py.model.levers import ModelLevers
from spark_py.runtime.buffers import BufferArena
from spark_py.runtime.errors import (
    ProposerStateError,
)
from spark_py.runtime.gpu import GpuBackend
from spark_py.testing import Array, download
from tests.model.v4_mtp_support import MODES, Text, make_rig


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
