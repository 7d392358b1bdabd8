# SPDX-License-Identifier: AGPL-3.0-only
"""The arithmetic of rows: what is dropped, what is kept, what is fed again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_py.model.row_policy import RowPolicy, catchup_range, mtp_rows_to_trim, rows_to_keep
from spark_py.runtime.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("nd", "na", "off", "refeed"), [(1, 0, 1, 1), (1, 1, 0, 0), (2, 1, 1, 1), (2, 2, 0, 1), (3, 2, 1, 2), (3, 3, 0, 2)]
)
def test_the_engines_table(nd: int, na: int, off: int, refeed: int) -> None:
    assert (mtp_rows_to_trim(nd, na, False), mtp_rows_to_trim(nd, na, True)) == (off, refeed)


@pytest.mark.parametrize(
    ("policy", "refeed", "kept"),
    [
        (RowPolicy.SEED, False, [0, 1, 2, 3]),
        (RowPolicy.SEED, True, [0, 1, 1, 1]),
        (RowPolicy.VERIFIED, False, [1, 2, 3, 3]),
        (RowPolicy.VERIFIED, True, [1, 1, 1, 1]),
    ],
)
def test_rows_kept_of_three(policy: RowPolicy, refeed: bool, kept: list[int]) -> None:
    assert [rows_to_keep(policy, 3, na, refeed) for na in range(4)] == kept


@pytest.mark.parametrize(("nd", "na"), [(3, 4), (3, -1), (0, 0), (1, 2), (True, 1)])
def test_verdicts_that_cannot_be(nd: int, na: int) -> None:
    for policy in RowPolicy:
        with pytest.raises(InvalidArgumentError):
            rows_to_keep(policy, nd, na, False)


@pytest.mark.parametrize(
    ("last", "position", "start", "count", "wanted"),
    [
        (5, 10, 0, 10, (6, 3)),
        (8, 10, 0, 10, None),
        (7, 10, 0, 10, (8, 1)),
        (5, 10, 8, 2, (8, 1)),
        (5, 10, 0, 7, (6, 1)),
        (5, 10, 0, 6, None),
        (None, 10, 0, 10, None),
        (0, 1, 0, 1, None),
        (0, 3, 0, 3, (1, 1)),
    ],
)
def test_what_to_feed(last: int | None, position: int, start: int, count: int, wanted: tuple[int, int] | None) -> None:
    assert catchup_range(last, position, start, count) == wanted


@given(last=st.integers(0, 50), position=st.integers(1, 50), start=st.integers(0, 50), count=st.integers(0, 50))
def test_only_keys_that_are_missing_and_whose_hidden_is_there(last: int, position: int, start: int, count: int) -> None:
    """Against the definition: keys after the last, before position - 1, with a hidden row; contiguous from the
    first."""
    possible = [k for k in range(last + 1, position - 1) if start <= k < start + count]
    found = catchup_range(last, position, start, count)
    assert possible == ([] if found is None else list(range(found[0], found[0] + found[1])))
