# SPDX-License-Identifier: AGPL-3.0-only
"""The catch-up ring: what it holds, what is fed from it, and that labels and rows are never mixed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_py.model.drafting.catchup import CatchupRing, FeedSegment, RingLabels, fnv1a, plan_catchup
from spark_py.model.row_policy import catchup_range
from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend


def labels(size: int, start: int, count: int) -> RingLabels:
    return RingLabels(size, start, count)


@pytest.mark.parametrize(
    ("last", "rows", "position", "ring", "segments"),
    [
        # Position 10: keys up to 8; the drafter's last is 5; key k reads label k + 1.
        (5, 6, 10, labels(64, 1, 10), [(6, 3, 7)]),
        (8, 9, 10, labels(64, 1, 10), []),
        (7, 8, 10, labels(64, 1, 10), [(8, 1, 9)]),
        # The ring begins later than what is missing: keys before it stay missing.
        (5, 6, 10, labels(64, 9, 2), [(8, 1, 9)]),
        # The ring ends early: label 8 is the last, key 7.
        (5, 6, 10, labels(64, 1, 8), [(6, 2, 7)]),
        (5, 6, 10, labels(64, 1, 6), []),
        # Around the end of the ring: label 8 is in row 0 of 8, label 7 in row 7.
        (4, 5, 10, labels(8, 3, 8), [(5, 2, 6), (7, 2, 0)]),
        (6, 7, 10, labels(8, 3, 8), [(7, 2, 0)]),
        # One row: every key is a segment of its own.
        (7, 8, 10, labels(1, 9, 1), [(8, 1, 0)]),
        # Nothing to go on from.
        (None, 0, 10, labels(64, 1, 10), []),
        (5, 0, 10, labels(64, 1, 10), []),
        (5, 6, 10, labels(64, 0, 0), []),
        (0, 1, 1, labels(64, 1, 1), []),
        (0, 1, 3, labels(64, 1, 3), [(1, 1, 2)]),
    ],
)
def test_what_is_fed(
    last: int | None, rows: int, position: int, ring: RingLabels, segments: list[tuple[int, int, int]]
) -> None:
    assert plan_catchup(last, rows, position, ring) == [FeedSegment(*segment) for segment in segments]


@given(
    st.integers(0, 40), st.integers(1, 60), st.integers(1, 12), st.integers(1, 50), st.integers(0, 12), st.data()
)  # fmt: skip
def test_segments_are_the_keys_that_are_missing(
    last: int, position: int, size: int, start: int, count: int, data: st.DataObject
) -> None:
    """Against the definition, and without a shift against the rule of rows that are all at hand."""
    ring = labels(size, start, min(count, size))
    shift = data.draw(st.integers(-4, 4))
    held = set(range(ring.start, ring.start + ring.count))
    wanted = [k for k in range(last + 1, position - 1) if k + 1 + shift in held]
    segments = plan_catchup(last, last + 1, position, ring, shift)
    assert [k for s in segments for k in range(s.first, s.first + s.rows)] == wanted
    for s in segments:
        assert s.slot == (s.first + 1 + shift) % size
        assert s.slot + s.rows <= size, "one piece of memory"
    if shift == 0:
        found = catchup_range(last, position, max(ring.start - 1, 0), ring.count)
        assert found == ((segments[0].first, len(wanted)) if segments else None)


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 14)), max_size=12))
def test_rows_that_are_kept(size: int, steps: list[tuple[int, int]]) -> None:
    """Against a ring of Python values: whatever is saved, a label's row is where it belongs, and the range is the
    longest that is whole."""
    ring, memory, label = RingLabels(size), [-1] * size, 1
    unbroken = 0
    for jump, rows in steps:
        label += jump
        unbroken = rows if jump or not unbroken else unbroken + rows
        copies = ring.save(label, rows)
        assert len(copies) <= 2
        for source, slot, length in copies:
            assert slot + length <= size
            memory[slot : slot + length] = range(label + source, label + source + length)
        label += rows
        assert (ring.start + ring.count, ring.count) == (label, min(unbroken, size))
        assert [memory[n % size] for n in range(ring.start, ring.start + ring.count)] == list(range(ring.start, label))


def test_a_save_that_does_not_go_on_begins_anew() -> None:
    ring = RingLabels(8)
    ring.save(5, 3)
    ring.save(8, 1)
    assert (ring.start, ring.count) == (5, 4)
    ring.save(8, 1)
    assert (ring.start, ring.count) == (8, 1), "written again after a rollback"
    ring.save(12, 2)
    assert (ring.start, ring.count) == (12, 2)
    ring.clear()
    assert plan_catchup(5, 6, 14, ring) == []


@pytest.mark.parametrize(("label", "rows"), [(0, 1), (-1, 1), (1, 0), (True, 1), (1, 1.0)])
def test_labels_that_are_refused(label: Any, rows: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        RingLabels(4).save(label, rows)


def test_hidden_rows_on_the_device(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """The hidden of token i is at label i + 1, over several turns of a ring of 5."""
    h, size = 8, 5
    rows = rng.integers(0, 2**16, (17, h), dtype=np.uint16)
    source = gpu.alloc(rows.nbytes)
    gpu.copy_h2d(source_bytes := rows.view(np.uint8).reshape(-1), source)
    assert source_bytes.nbytes == 17 * h * 2
    ring, stream = CatchupRing(gpu, 2 * h, size), gpu.default_stream()
    position = 0
    for n in (1, 3, 2, 7, 4):
        ring.save(position, source.offset(position * h * 2), n, stream)
        position += n
        for label in range(ring.labels.start, ring.labels.start + ring.labels.count):
            found = np.empty(h, np.uint16)
            gpu.copy_d2h_on_stream(ring.row(label % size), found.view(np.uint8), stream)
            np.testing.assert_array_equal(found, rows[label - 1])
    assert (ring.labels.start, ring.labels.count) == (13, 5)
    ring.release()
    ring.release()
    gpu.free(source)
    assert gpu.live_bytes() == 0


@pytest.mark.parametrize(
    ("data", "value"), [(b"", 0xCBF29CE484222325), (b"a", 0xAF63DC4C8601EC8C), (b"foobar", 0x85944171F73967E8)]
)
def test_published_values_of_the_hash(data: bytes, value: int) -> None:
    assert fnv1a(data) == value
