# SPDX-License-Identifier: AGPL-3.0-only
"""How many drafts are made (ladder) and which are verified (D-Cut)."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_py.model.drafting.dcut import dcut_depths, dcut_keep, snap_ratio
from spark_py.model.drafting.ladder import DEFAULT_LADDER, check_ladder, mtp_ladder_drafts, parse_ladder
from spark_py.runtime.errors import InvalidArgumentError


def test_the_default_ladder() -> None:
    assert parse_ladder("4:3,8:1") == DEFAULT_LADDER


@pytest.mark.parametrize(
    ("ladder", "asked", "by_sequences"),
    [
        ("4:3,8:1", 3, {1: 3, 4: 3, 5: 1, 8: 1, 9: 1, 99: 1}),
        ("4:3,8:1", 2, {1: 2, 5: 1}),
        ("4:3,8:1", 1, {1: 1, 5: 1}),
        ("4:3,8:1", 0, {1: 0, 5: 0}),
        ("4:3,8:3,16:1,32:1", 3, {8: 3, 9: 1, 33: 1}),
        ("1:9,2:4", 8, {1: 8, 2: 4, 3: 4}),
        ("4:0", 3, {1: 1, 9: 1}),
        ("8:1,4:3", 3, {2: 1, 9: 3}),  # in the order given
    ],
)
def test_drafts_of_a_step(ladder: str, asked: int, by_sequences: dict[int, int]) -> None:
    steps = parse_ladder(ladder)
    assert steps is not None
    assert {n: mtp_ladder_drafts(n, asked, steps) for n in by_sequences} == by_sequences


@pytest.mark.parametrize("asked", [0, 1, 3, 9])
def test_without_a_ladder(asked: int) -> None:
    assert [mtp_ladder_drafts(n, asked, None) for n in (1, 8, 64)] == [asked] * 3


@pytest.mark.parametrize("wrong", [(0, 3), (-1, 3), (1, -1), (True, 1), (1, 1.5)])
def test_counts_that_are_refused(wrong: tuple[Any, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        mtp_ladder_drafts(*wrong, DEFAULT_LADDER)


def test_a_ladder_may_be_of_lists() -> None:
    assert check_ladder("ladder", [[4, 3], (8, 1)]) == DEFAULT_LADDER


# ---------------------------------------------------------------- D-Cut


@pytest.mark.parametrize(
    ("candidates", "sequences", "ratio", "budget", "keep"),
    [
        (2, 2, 0.75, 32, 2),  # 1.5
        (4, 2, 0.75, 32, 3),
        (2, 2, 0.25, 32, 1),  # 0.5
        (1, 1, 0.25, 32, 0),
        (16, 8, 0.75, 32, 12),
        (16, 8, 1.0, 32, 16),
        (16, 8, 1.0, 24, 8),
        (16, 8, 1.0, 16, 0),
        (0, 3, 1.0, 32, 0),
    ],
)
def test_how_many_are_kept(candidates: int, sequences: int, ratio: float, budget: int, keep: int) -> None:
    assert dcut_keep(candidates, sequences, ratio, budget) == keep


def test_a_budget_for_less_than_two_rows_a_sequence() -> None:
    with pytest.raises(InvalidArgumentError, match="row_budget"):
        dcut_keep(3, 3, 1.0, 5)


LN = math.log


@pytest.mark.parametrize(
    ("drafted", "log_probs", "ratio", "budget", "kept"),
    [
        # One sequence is sure, the other is not: the sure one keeps all, the other its first.
        ([3, 3], [[LN(0.9)] * 3, [LN(0.1)] * 3], 0.5, 32, [3, 1]),
        # It is the product up to a draft that counts, not its own probability.
        ([2, 2], [[LN(0.1), LN(1.0)], [LN(0.9), LN(0.5)]], 0.5, 32, [1, 2]),
        # Equal products: sequence by sequence, the shallower first.
        ([3, 3], [[0.0] * 3, [0.0] * 3], 0.5, 32, [3, 1]),
        ([3, 3], [[0.0] * 3, [0.0] * 3], 0.75, 32, [3, 2]),
        # What is not known counts as certain.
        ([3, 3], [[LN(0.9)] * 3, []], 0.5, 32, [1, 3]),
        ([3, 3], [[LN(0.9)], [LN(0.8), LN(0.9), LN(0.9)]], 0.5, 32, [3, 1]),
        # The budget is of rows, one more than drafts a sequence.
        ([3, 3], [[-0.1] * 3, [-0.12] * 3], 1.0, 6, [2, 2]),
        ([3, 3], [[-0.1] * 3, [-0.3] * 3], 1.0, 6, [3, 1]),
        ([3, 3], [[-0.1] * 3, [-0.2] * 3], 1.0, 4, [1, 1]),
        # A row of NaN has no distribution.
        ([2, 2], [[math.nan, -0.1], [-9.0, -9.0]], 0.5, 32, [1, 2]),
        ([2, 2], [[-math.inf, -math.inf], [-9.0, -9.0]], 0.5, 32, [1, 2]),
        # Fewer drafts, or none.
        ([0, 2, 1], [[], [-1.0, -1.0], [-5.0]], 1.0, 32, [0, 2, 1]),
        ([0, 0], [[], []], 1.0, 32, [0, 0]),
        ([1, 1], [[-1.0], [-2.0]], 0.25, 32, [1, 1]),
    ],
)
def test_which_are_kept(
    drafted: list[int], log_probs: list[list[float]], ratio: float, budget: int, kept: list[int]
) -> None:
    assert dcut_depths(drafted, log_probs, ratio, budget) == kept


def test_what_is_no_log_probability() -> None:
    with pytest.raises(InvalidArgumentError, match=r"log_probs\[0\]\[1\]"):
        dcut_depths([2], [[-0.1, 0.5]], 1.0, 32)
    with pytest.raises(InvalidArgumentError, match="log_probs is 1"):
        dcut_depths([2, 2], [[-0.1]], 1.0, 32)


@given(
    st.lists(st.lists(st.floats(-20, 0), max_size=6), min_size=1, max_size=8),
    st.sampled_from([0.25, 0.5, 0.75, 1.0]),
    st.integers(16, 60),
)
def test_the_best_are_kept(log_probs: list[list[float]], ratio: float, budget: int) -> None:
    """Against the definition: no draft that was cut has a larger product than one that was kept, and as many are kept
    as there may be."""
    drafted = [len(row) for row in log_probs]
    kept = dcut_depths(drafted, log_probs, ratio, budget)
    assert all(min(n, 1) <= k <= n for n, k in zip(drafted, kept, strict=True))
    deeper = sum(max(n - 1, 0) for n in drafted)
    some = [n for n in drafted if n]
    chosen = sum(kept) - len(some)
    assert chosen == (dcut_keep(deeper, len(some), ratio, budget) if deeper else 0)
    assert sum(kept) + len(some) <= budget
    sums = [[math.fsum(row[: j + 1]) for j in range(len(row))] for row in log_probs]
    cut = [sums[i][j] for i, n in enumerate(drafted) for j in range(kept[i], n)]
    took = [sums[i][j] for i in range(len(drafted)) for j in range(1, kept[i])]
    assert not cut or not took or max(cut) <= min(took) + 1e-9


@pytest.mark.parametrize(("asked", "ratio"), [(0.0, 0.25), (0.2, 0.25), (0.375, 0.5), (0.8, 0.75), (7.0, 1.0)])
def test_shares(asked: float, ratio: float) -> None:
    assert snap_ratio(asked) == ratio
