# SPDX-License-Identifier: AGPL-3.0-only
"""Rows that outlive their sequence: what of them holds for the next prompt, and that their blocks are never lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_py.model.drafting.carry import (
    CarriedKv,
    DrafterCarry,
    PrefillCapture,
    common_prefix,
    merge_interval,
    plan_append,
)
from spark_py.model.levers import ModelLevers
from spark_py.runtime.errors import InvalidArgumentError, ProposerStateError
from spark_py.runtime.gpu import GpuBackend
from tests.model.support import Rig, make_rig

TEN = tuple(range(100, 110))


@pytest.mark.parametrize(
    ("rows", "key", "prompt", "usable"),
    [
        # 10 tokens, keys 0 .. 8: the whole sequence goes on.
        (9, 8, [*TEN, 7, 7], (9, 8)),
        (9, 8, TEN, (9, 8)),
        # A template wrote the last tokens otherwise: 6 in common leave key 4.
        (9, 8, [*TEN[:6], 1, 2, 3], (5, 4)),
        (9, 8, TEN[:6], (5, 4)),
        (9, 8, TEN[:2], (1, 0)),
        # One token in common has no pair.
        (9, 8, TEN[:1], None),
        (9, 8, [1, *TEN], None),
        (9, 8, [], None),
        # The rows end before the common prefix does.
        (4, 3, TEN, (4, 3)),
        # Compacted rows: as many go as keys.
        (6, 8, TEN, (6, 8)),
        (6, 8, TEN[:8], (4, 6)),
        (3, 8, TEN[:7], None),
        (3, 8, TEN[:8], (1, 6)),
    ],
)
def test_what_holds_for_a_prompt(rows: int, key: int, prompt: list[int], usable: tuple[int, int] | None) -> None:
    assert CarriedKv((0,), rows, key, TEN).usable_by(prompt) == usable


@given(st.sets(st.integers(0, 30), min_size=1), st.integers(0, 33))
def test_rows_that_hold_read_common_tokens_alone(keys: set[int], common: int) -> None:
    """Rows with gaps between their keys: those that stay are the first of the dense rows, and each reads tokens that
    both sequences have."""
    ordered = sorted(keys)
    tokens = tuple(range(ordered[-1] + 2))
    prompt = [*tokens[:common], -1]
    usable = CarriedKv((), len(ordered), ordered[-1], tokens).usable_by(prompt)
    if usable is None:
        return
    rows, key = usable
    assert 0 < rows <= len(ordered)
    assert ordered[rows - 1] <= key
    assert key + 1 < min(common, len(tokens)), "the pair's token is common"
    if len(ordered) == ordered[-1] + 1:
        assert rows == min(len(ordered), common - 1), "without gaps, every row that can stay does"


@pytest.mark.parametrize(
    ("last", "prompt_len", "lo", "hi", "plan"),
    [
        (5, 12, 0, 12, (6, 5)),
        (5, 12, 6, 11, (6, 5)),
        (5, 12, 6, 10, None),  # hidden row 10, of the last key, is not there
        (5, 12, 8, 12, (8, 3)),  # keys 6 and 7 stay missing
        (10, 12, 0, 12, None),
        (9, 12, 0, 12, (10, 1)),
        (5, 12, 11, 12, None),
        (20, 12, 0, 12, None),
        (0, 1, 0, 1, None),
        (0, 3, 0, 3, (1, 1)),
    ],
)
def test_what_is_appended(last: int, prompt_len: int, lo: int, hi: int, plan: tuple[int, int] | None) -> None:
    assert plan_append(last, prompt_len, lo, hi) == plan


@pytest.mark.parametrize(
    ("have", "lo", "hi", "wanted"),
    [
        (None, 3, 5, (3, 5)),
        ((0, 4), 4, 8, (0, 8)),
        ((4, 8), 0, 4, (0, 8)),
        ((0, 8), 2, 4, (0, 8)),
        ((2, 4), 0, 8, (0, 8)),
        ((0, 4), 5, 8, (5, 8)),
        ((5, 8), 0, 4, (0, 4)),
        ((0, 4), 9, 9, (0, 4)),
        (None, 3, 3, None),
    ],
)
def test_ranges_of_hidden_rows(have: tuple[int, int] | None, lo: int, hi: int, wanted: tuple[int, int] | None) -> None:
    assert merge_interval(have, lo, hi) == wanted


def test_common_prefix() -> None:
    assert [common_prefix(a, b) for a, b in (([], [1]), ([1, 2], [1, 2, 3]), ([1, 2], [1, 3]), ([2], [1]))] == [
        0,
        2,
        1,
        0,
    ]


# ---------------------------------------------------------------- whose prompt the buffer holds


def test_a_prompt_in_chunks() -> None:
    capture = PrefillCapture()
    stamp = capture.chunk(0, 512)
    assert capture.covers(stamp, 512)
    assert not capture.covers(stamp, 513)
    assert capture.chunk(512, 100, stamp) == stamp
    assert capture.covers(stamp, 612)
    assert capture.store == (0, 612)


def test_another_prefill_between_chunks_takes_the_buffer() -> None:
    """Two prompts whose chunks alternate: only the one that came last is whole, and the first is not taken for it."""
    capture = PrefillCapture()
    first = capture.chunk(0, 4)
    second = capture.chunk(0, 4)
    assert capture.chunk(4, 4, first) is None
    assert not capture.covers(first, 4)
    assert capture.covers(second, 4)
    assert capture.chunk(4, 4, second) == second
    assert capture.covers(second, 8)
    assert not capture.covers(None, 1)


@pytest.mark.parametrize("start", [3, 5])
def test_a_chunk_that_does_not_go_on(start: int) -> None:
    capture = PrefillCapture()
    stamp = capture.chunk(0, 4)
    assert capture.chunk(start, 4, stamp) is None


def test_a_warm_prompt_owns_nothing_but_its_rows_count_for_carried_ones() -> None:
    capture = PrefillCapture()
    assert capture.chunk(10, 6) is None
    assert capture.store == (10, 16)
    assert not capture.covers(None, 6)


# ---------------------------------------------------------------- the slot


def filled(rig: Rig, rng: np.random.Generator, tokens: list[int]) -> Any:
    state = rig.state()
    rig.feed(state, tokens, rng.standard_normal((len(tokens), rig.config.hidden_size)))
    return state


def test_rows_go_from_one_sequence_to_the_next(
    gpu: GpuBackend, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(gpu, rng, levers=ModelLevers(mtp_max_seqs=1))
    free = rig.head.kv_cache.num_free_blocks()
    tokens = rng.integers(0, 203, 40).tolist()
    state, carry = filled(rig, rng, tokens), DrafterCarry(rig.head, debug=True)
    keys, values = rig.rows(state)
    with caplog.at_level("INFO", "spark_py.model"):
        assert carry.put(state, tokens)
        rig.head.free_state(gpu, state)
        assert rig.head.kv_cache.num_free_blocks() == free - 3
        heir = rig.state()
        assert carry.adopt(heir, [*tokens[:30], 1, 2])
    assert [record.message for record in caplog.records] == [
        "drafter carry: kept 39 rows up to key 38 of 40 tokens",
        "drafter carry: took over 29 of 39 rows, up to key 28",
    ]
    assert carry.entry is None
    assert (rig.head.drafter_rows(heir), rig.head.last_pair_key(heir)) == (29, 28)
    found = rig.rows(heir)
    assert (found[0].tobytes(), found[1].tobytes()) == (keys[:29].tobytes(), values[:29].tobytes())
    rig.head.free_state(gpu, heir)
    assert rig.head.kv_cache.num_free_blocks() == free


def test_a_slot_that_is_dropped_or_filled_again_gives_its_blocks_back(
    gpu: GpuBackend, rng: np.random.Generator
) -> None:
    rig = make_rig(gpu, rng)
    free, carry = rig.head.kv_cache.num_free_blocks(), DrafterCarry(rig.head)
    assert not carry.put(rig.state(), [1, 2])
    for _ in range(3):
        tokens = rng.integers(0, 203, 20).tolist()
        assert carry.put(filled(rig, rng, tokens), tokens)
        assert rig.head.kv_cache.num_free_blocks() == free - 2
    assert not carry.adopt(rig.state(), [5, 6, 7] if tokens[0] != 5 else [6, 6, 7])
    assert (carry.entry, rig.head.kv_cache.num_free_blocks()) == (None, free)
    assert not carry.adopt(rig.state(), tokens)
    carry.put(filled(rig, rng, tokens), tokens)
    carry.drop()
    carry.drop()
    assert rig.head.kv_cache.num_free_blocks() == free


def test_a_state_that_has_rows_or_is_another_heads_takes_nothing_over(
    gpu: GpuBackend, rng: np.random.Generator
) -> None:
    rig, other = make_rig(gpu, rng), make_rig(gpu, rng)
    free, carry = rig.head.kv_cache.num_free_blocks(), DrafterCarry(rig.head)
    tokens = rng.integers(0, 203, 20).tolist()
    carry.put(filled(rig, rng, tokens), tokens)
    busy = filled(rig, rng, tokens)
    assert not carry.adopt(busy, tokens)
    assert rig.head.kv_cache.num_free_blocks() == free - 2
    carry.put(busy, tokens)
    with pytest.raises(ProposerStateError):
        carry.adopt(other.state(), tokens)
    assert (carry.entry, rig.head.kv_cache.num_free_blocks()) == (None, free)


def test_rows_whose_verdict_is_outstanding_are_not_taken(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng)
    tokens = rng.integers(0, 203, 20).tolist()
    state, carry = filled(rig, rng, tokens), DrafterCarry(rig.head)
    rig.propose(state, 3, rng.standard_normal(rig.config.hidden_size), 20, 2)
    with pytest.raises(ProposerStateError):
        carry.put(state, tokens)
    assert carry.entry is None
    assert rig.head.drafter_rows(state) == 21


def test_ranges_that_are_refused() -> None:
    with pytest.raises(InvalidArgumentError):
        merge_interval(None, -1, 3)
    with pytest.raises(InvalidArgumentError):
        PrefillCapture().chunk(0, 0)
