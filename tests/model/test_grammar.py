# SPDX-License-Identifier: AGPL-3.0-only
"""Drafts under a grammar mask: the bit order, ties, masks per position, and masks that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_py.model.layers.mtp_head.grammar import allowed_tokens, masked_argmax, masks_per_draft
from spark_py.model.levers import ModelLevers
from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from tests.model.support import BF16, download, make_rig


def mask_of(ids: list[int], words: int = 7) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Bit j % 32 of word j // 32, set one by one with Python's integers."""
    mask = [0] * words
    for j in ids:
        mask[j // 32] |= 1 << (j % 32)
    return np.array([word - 2**32 if word >= 2**31 else word for word in mask], np.int32)


def test_bits_of_a_mask(rng: np.random.Generator) -> None:
    ids = sorted({0, 31, 32, 63, 202, *(int(i) for i in rng.integers(0, 203, 30))})
    assert allowed_tokens(mask_of([*ids, 203, 223]), 203).tolist() == ids
    assert allowed_tokens(np.array([-1], np.int32), 5).tolist() == [0, 1, 2, 3, 4]
    assert allowed_tokens(mask_of(ids)[::1].astype(">i4").astype(np.int32), 203).tolist() == ids


@pytest.mark.parametrize(
    ("logits", "ids", "picked"),
    [
        ([1, 5, 5, 2], [0, 1, 2, 3], 1),
        ([1, 5, 5, 2], [0, 2, 3], 2),
        ([9, 5, 5, 2], [3, 1], 1),
        ([np.nan, 5, np.nan, 2], [0, 2, 3], 3),
        ([np.nan, np.nan, 7, 2], [0, 1], 0),
        ([-np.inf, 7, -np.inf, 2], [0, 2], 0),
        ([0.0, -0.0, -1, -1], [1, 0], 0),
        ([1, 2, 3, 4], [], None),
    ],
)
def test_the_best_allowed_token(logits: list[float], ids: list[int], picked: int | None) -> None:
    assert masked_argmax(np.array(logits, np.float32), mask_of(ids, 1)) == picked


def test_one_mask_is_for_one_position() -> None:
    mask = mask_of([3])
    assert len(masks_per_draft(mask, 3, 203)) == 1
    assert masks_per_draft(None, 3, 203) == [None, None, None]
    assert len(masks_per_draft(np.stack([mask] * 3), 3, 203)) == 3
    assert len(masks_per_draft([mask] * 3, 3, 203)) == 3


@pytest.mark.parametrize(
    ("mask", "drafts", "words"),
    [
        (np.zeros(6, np.int32), 1, "is 6: the 203 draft tokens need 7"),
        (np.zeros((2, 6), np.int32), 2, "need 7"),
        (np.zeros((2, 7), np.int32), 3, "is 2: 3 drafts need as many masks"),
        (np.zeros((4, 7), np.int32), 3, "is 4: 3 drafts need as many masks"),
        ([], 1, "is 0: 1 drafts"),
        (np.zeros(7, np.int64), 1, "int64"),
        (np.zeros(203, bool), 1, "bool"),
        (np.zeros((1, 1, 7), np.int32), 1, r"int32\[1, 7\]"),
        ([0] * 7, 7, "int"),
        ("mask", 4, "str"),
        (5, 1, "5"),
    ],
)
def test_masks_that_do_not_fit(mask: Any, drafts: int, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        masks_per_draft(mask, drafts, 203)


def test_a_draft_is_the_best_allowed_token(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng, levers=ModelLevers(keep_logits=True))
    hidden = rng.standard_normal(rig.config.hidden_size).astype(BF16)
    free = rig.propose(rig.state(), 5, hidden, 9, 1)[0]
    logits = rig.logits()
    ids = [int(i) for i in np.argsort(-logits, kind="stable")[[4, 9, 20]]]
    assert free not in ids
    assert rig.propose(rig.state(), 5, hidden, 9, 1, grammar_bitmask=mask_of(ids)) == [ids[0]]
    everything = np.full(7, -1, np.int32)
    assert rig.propose(rig.state(), 5, hidden, 9, 1, grammar_bitmask=everything) == [free]


def test_several_drafts_under_one_mask_are_one(
    gpu: GpuBackend, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(gpu, rng)
    hidden, everything = rng.standard_normal(rig.config.hidden_size).astype(BF16), np.full(7, -1, np.int32)
    wanted = rig.propose(rig.state(), 5, hidden, 9, 3)
    for _ in range(2):
        state = rig.state()
        assert rig.propose(state, 5, hidden, 9, 3, grammar_bitmask=everything) == wanted[:1]
        assert (state.seq_len, state.last_num_drafted) == (1, 1)
    assert sum("one grammar mask" in r.message for r in caplog.records) == 1
    assert rig.propose(rig.state(), 5, hidden, 9, 3, grammar_bitmask=np.stack([everything] * 3)) == wanted


def test_each_draft_obeys_its_own_mask(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng)
    hidden = rng.standard_normal(rig.config.hidden_size).astype(BF16)
    masks = [mask_of([10]), mask_of([202]), mask_of([0, 31])]
    ids = rig.propose(rig.state(), 5, hidden, 9, 3, grammar_bitmask=masks)
    assert ids[:2] == [10, 202]
    assert ids[2] in (0, 31)


def test_a_masked_draft_is_known_and_its_embedding_staged(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng)
    hidden, target = rng.standard_normal(rig.config.hidden_size).astype(BF16), gpu.alloc(2 * rig.config.hidden_size)
    ids = rig.propose(rig.state(), 5, hidden, 9, 1, draft_embed_target=target, grammar_bitmask=mask_of([77]))
    assert ids == [77] == [rig.head.read_deferred_draft_token(gpu)]
    assert download(gpu, target, (64,)).tobytes() == rig.arrays["embed_tokens"][77].tobytes()


def test_a_mask_that_allows_nothing(
    gpu: GpuBackend, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    """Draft 0, never the last token, and no embedding."""
    rig = make_rig(gpu, rng)
    hidden, target = rng.standard_normal(rig.config.hidden_size).astype(BF16), gpu.alloc(2 * rig.config.hidden_size)
    gpu.memset(target, 0xFF, 2 * rig.config.hidden_size)
    state = rig.state()
    assert rig.propose(state, 5, hidden, 9, 1, draft_embed_target=target, grammar_bitmask=mask_of([])) == [0]
    assert "allows no token" in caplog.text
    assert (download(gpu, target, (64,), np.dtype(np.uint16)) == 0xFFFF).all()
    assert (state.seq_len, state.last_pair_key) == (1, 8)


def test_a_bad_mask_is_refused_before_any_work(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng)
    state, hidden = rig.state(), rng.standard_normal(rig.config.hidden_size)
    with pytest.raises(InvalidArgumentError, match="need 7"):
        rig.propose(state, 5, hidden, 9, 1, grammar_bitmask=np.zeros(6, np.int32))
    assert state.snapshot() == rig.state().snapshot()
