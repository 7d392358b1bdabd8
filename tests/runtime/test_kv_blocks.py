# SPDX-License-Identifier: AGPL-3.0-only
"""Blocks of the KV pool: order, references, exhaustion, and what is freed twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from spark_py.runtime import kv_blocks
from spark_py.runtime.errors import (
    CapacityError,
    InvalidArgumentError,
    KvBlockFreeError,
    KvBlockRangeError,
    KvCacheError,
    KvCacheExhausted,
    KvDoubleFreeError,
)
from spark_py.runtime.kv_cache import BlockPool


def test_blocks_come_in_order_and_return_last_in_first_out() -> None:
    pool = BlockPool(5)
    assert [pool.alloc_block() for _ in range(3)] == [0, 1, 2]
    assert pool.alloc_blocks(2) == [3, 4]
    pool.free_block(1)
    pool.free_block(3)
    assert pool.alloc_blocks(2) == [3, 1]
    assert pool.num_free_blocks() == 0


def test_shared_blocks() -> None:
    pool = BlockPool(2)
    block = pool.alloc_block()
    pool.inc_ref(block)
    pool.inc_ref(block)
    assert pool.ref_count(block) == 3
    assert [pool.dec_ref(block), pool.return_evicted_block(block), pool.free_block(block)] == [False, False, True]
    assert (pool.ref_count(block), pool.num_free_blocks()) == (0, 2)


@pytest.mark.parametrize("name", ["dec_ref", "free_block", "return_evicted_block"])
def test_a_block_is_not_freed_twice(name: str) -> None:
    """A second entry on the free list would hand one block to two sequences."""
    pool = BlockPool(3)
    pool.alloc_blocks(2)
    drop: Callable[[int], bool] = getattr(pool, name)
    assert drop(1) is True
    for block in (1, 2):
        with pytest.raises(KvDoubleFreeError, match=f"KV block {block} is free already") as error:
            drop(block)
        assert error.value.block == block
    assert pool.num_free_blocks() == 2
    assert sorted(pool.alloc_blocks(2)) == [1, 2]


def test_a_table_is_freed_whole_or_not_at_all() -> None:
    pool = BlockPool(4)
    table = pool.alloc_blocks(3)
    for bad, error in (
        ([0, 1, 3], KvDoubleFreeError),
        ([0, 1, 0], KvDoubleFreeError),
        ([0, 4], KvBlockRangeError),
        ([0, -1], KvBlockRangeError),
        ([0, 1.0], InvalidArgumentError),
        ([0, True], InvalidArgumentError),
    ):
        with pytest.raises(error):
            pool.free_blocks(bad)
        assert [pool.ref_count(block) for block in range(4)] == [1, 1, 1, 0]
    pool.inc_ref(2)
    assert pool.free_blocks([*table, 2]) == 3
    assert pool.num_free_blocks() == 4
    assert pool.free_blocks([]) == 0
    assert pool.free_blocks(np.array([], np.int32)) == 0


def test_a_free_block_cannot_be_shared() -> None:
    pool = BlockPool(2)
    with pytest.raises(KvBlockFreeError) as error:
        pool.inc_ref(1)
    assert error.value.block == 1
    assert pool.num_free_blocks() == 2
    for block in (-1, 2, 2**31, -(2**70)):
        for operation in (pool.inc_ref, pool.dec_ref, pool.ref_count, pool.owner_of):
            with pytest.raises(KvBlockRangeError):
                operation(block)


@pytest.mark.parametrize("bad", [0, -1, 1.0, True, None])
def test_pool_sizes(bad: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="num_blocks"):
        BlockPool(bad)
    with pytest.raises(CapacityError, match="i32"):
        BlockPool(2**31)


def test_the_largest_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kv_blocks.MAX_BLOCKS == 2_147_483_647
    monkeypatch.setattr(kv_blocks, "MAX_BLOCKS", 3)
    assert BlockPool(3).num_free_blocks() == 3
    with pytest.raises(CapacityError) as error:
        BlockPool(4)
    assert (error.value.value, error.value.capacity) == (4, 3)


# ---------------------------------------------------------------- exhaustion


def test_exhaustion_says_what_was_needed_and_changes_nothing() -> None:
    pool = BlockPool(3)
    pool.alloc_block("a")
    table = [0]
    asks: list[Callable[[], object]] = [
        lambda: pool.alloc_blocks(3, "b"),
        lambda: pool.grow_table(table, 4, "b"),
    ]
    for ask in asks:
        with pytest.raises(KvCacheExhausted, match="KV cache exhausted: 2 free blocks, 3 needed") as error:
            ask()
        assert (error.value.need, error.value.free) == (3, 2)
        assert table == [0]
        assert pool.num_free_blocks() == 2
        assert pool.leak_report() == {"a": [0]}
    assert pool.alloc_blocks(2) == [1, 2]
    with pytest.raises(KvCacheExhausted, match="KV cache exhausted: no free blocks"):
        pool.alloc_block()
    assert pool.try_alloc_block() is None
    assert pool.alloc_blocks(0) == []
    with pytest.raises(InvalidArgumentError):
        pool.alloc_blocks(-1)


def test_two_blocks_and_three_askers() -> None:
    """Only the one that asks fails; it can go on when a block is returned."""
    pool = BlockPool(2)
    tables: dict[str, list[int]] = {name: [] for name in "abc"}
    failed = []
    for name, table in tables.items():
        try:
            pool.grow_table(table, 1, name)
        except KvCacheExhausted as error:
            failed.append((name, error.need, error.free))
    assert failed == [("c", 1, 0)]
    assert tables == {"a": [0], "b": [1], "c": []}
    pool.free_blocks(tables["a"])
    tables["a"].clear()
    pool.grow_table(tables["c"], 1, "c")
    assert tables["c"] == [0]
    assert pool.leak_report() == {"c": [0], "b": [1]}


def test_growing_again_takes_nothing_more() -> None:
    """A step that failed after its table grew is tried again with the table as it is."""
    pool = BlockPool(4)
    table: list[int] = []
    pool.grow_table(table, 0)
    assert table == []
    pool.grow_table(table, 2)
    pool.grow_table(table, 2)
    pool.grow_table(table, 1)
    assert table == [0, 1]
    assert pool.num_free_blocks() == 2
    pool.grow_table(table, 3)
    assert table == [0, 1, 2]


def test_a_thousand_sequences_leave_the_pool_as_it_was(rng: np.random.Generator) -> None:
    pool = BlockPool(8)
    for _ in range(1000):
        table: list[int] = []
        wanted = int(rng.integers(1, 12))
        try:
            for entries in range(1, wanted + 1):
                pool.grow_table(table, entries, "sequence")
        except KvCacheExhausted:
            assert len(table) == 8
        stale = list(table)
        pool.free_blocks(table)
        table.clear()
        pool.free_blocks(table)  # a state that is freed twice has an empty table
        with pytest.raises(KvDoubleFreeError):
            pool.free_blocks(stale)
        assert pool.num_free_blocks() == 8
    assert sorted(pool.alloc_blocks(8)) == list(range(8))


class PoolMachine(RuleBasedStateMachine):
    """Random use of a pool against a dictionary of reference counts and a list of free blocks."""

    @initialize(size=st.integers(1, 6))
    def build(self, size: int) -> None:
        self.size = size
        self.pool = BlockPool(size)
        self.refs: dict[int, int] = {}
        self.owners: dict[int, str] = {}
        self.stack = list(reversed(range(size)))

    def take(self, count: int, owner: str) -> list[int]:
        blocks = [self.stack.pop() for _ in range(count)]
        for block in blocks:
            self.refs[block] = 1
            self.owners[block] = owner
        return blocks

    def drop(self, block: int) -> None:
        self.refs[block] -= 1
        if not self.refs[block]:
            del self.refs[block], self.owners[block]
            self.stack.append(block)

    @rule(count=st.integers(0, 7), owner=st.sampled_from(["", "a", "b"]))
    def alloc(self, count: int, owner: str) -> None:
        if count > len(self.stack):
            with pytest.raises(KvCacheExhausted) as error:
                self.pool.alloc_blocks(count, owner)
            assert (error.value.need, error.value.free) == (count, len(self.stack))
        else:
            assert self.pool.alloc_blocks(count, owner) == self.take(count, owner)

    @rule(owner=st.sampled_from(["", "a"]))
    def try_alloc(self, owner: str) -> None:
        expected = self.take(1, owner)[0] if self.stack else None
        assert self.pool.try_alloc_block(owner) == expected

    @rule(block=st.integers(-1, 6))
    def share(self, block: int) -> None:
        if block in self.refs:
            self.pool.inc_ref(block)
            self.refs[block] += 1
        else:
            with pytest.raises(KvCacheError):
                self.pool.inc_ref(block)

    @rule(block=st.integers(-1, 6), name=st.sampled_from(["dec_ref", "free_block", "return_evicted_block"]))
    def release_one(self, block: int, name: str) -> None:
        operation = getattr(self.pool, name)
        if block in self.refs:
            last = self.refs[block] == 1
            assert operation(block) is last
            self.drop(block)
        else:
            with pytest.raises(KvDoubleFreeError if 0 <= block < self.size else KvBlockRangeError):
                operation(block)

    @rule(table=st.lists(st.integers(0, 5), max_size=6))
    def release_table(self, table: list[int]) -> None:
        fits = all(table.count(block) <= self.refs.get(block, 0) for block in table)
        if fits:
            before = len(self.stack)
            freed = self.pool.free_blocks(table)
            for block in table:
                self.drop(block)
            assert freed == len(self.stack) - before
        else:
            with pytest.raises(KvCacheError):
                self.pool.free_blocks(table)

    @precondition(lambda self: self.refs)
    @rule(data=st.data(), extra=st.integers(0, 3))
    def grow(self, data: st.DataObject, extra: int) -> None:
        table = [data.draw(st.sampled_from(sorted(self.refs)))]
        if extra > len(self.stack):
            with pytest.raises(KvCacheExhausted):
                self.pool.grow_table(table, 1 + extra, "g")
            assert len(table) == 1
        else:
            expected = table + self.take(extra, "g")
            self.pool.grow_table(table, 1 + extra, "g")
            assert table == expected

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.pool.num_blocks() == self.size
        assert self.pool.num_free_blocks() == len(self.stack)
        assert [self.pool.ref_count(block) for block in range(self.size)] == [
            self.refs.get(block, 0) for block in range(self.size)
        ]
        held: dict[str, list[int]] = {}
        for block in sorted(self.refs):
            held.setdefault(self.owners[block], []).append(block)
        assert self.pool.leak_report() == held


TestPoolMachine = PoolMachine.TestCase
