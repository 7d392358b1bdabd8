# SPDX-License-Identifier: AGPL-3.0-only
"""BlockPool: which blocks of a KV pool are free, and how many references the others have.

Twin of the bookkeeping of `kv_cache/paged_impl.rs`, with its log lines turned into errors. An operation that raises has
changed nothing. The pool has no lock: as in Rust, whoever shares it holds one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .errors import CapacityError, KvBlockFreeError, KvBlockRangeError, KvCacheExhausted, KvDoubleFreeError
from .sizes import count, integer

__all__ = ["BlockPool"]

MAX_BLOCKS = 2**31 - 1
"""Block tables are i32 on the device."""


class BlockPool:
    """`num_blocks` blocks. A block is free exactly when it has no references; a fresh one has one.

    The free list is a stack whose first block is 0. `owner` is a name of the caller's choice (a sequence, a proposer)
    that leak reports print; it stays with the block until the last reference is dropped.
    """

    def __init__(self, num_blocks: int) -> None:
        total = count("num_blocks", num_blocks)
        if total > MAX_BLOCKS:
            raise CapacityError("num_blocks", total, MAX_BLOCKS, "since block tables are i32")
        self._free = list(range(total - 1, -1, -1))
        self._refs = [0] * total
        self._owners: dict[int, str] = {}

    def num_blocks(self) -> int:
        """Blocks of the pool; 0 after release."""
        return len(self._refs)

    def num_free_blocks(self) -> int:
        """Blocks without a reference."""
        return len(self._free)

    def ref_count(self, block: int) -> int:
        """References of a block; 0 when it is free."""
        return self._refs[self._index(block)]

    def owner_of(self, block: int) -> str:
        """Name that a held block was taken under; "" without one."""
        return self._owners.get(self._index(block), "")

    def alloc_block(self, owner: str = "") -> int:
        """A free block, with one reference. KvCacheExhausted when there is none."""
        return self.alloc_blocks(1, owner)[0]

    def try_alloc_block(self, owner: str = "") -> int | None:
        """As `alloc_block`, but None when there is none."""
        try:
            return self.alloc_block(owner)
        except KvCacheExhausted:
            return None

    def alloc_blocks(self, n: int, owner: str = "") -> list[int]:
        """`n` free blocks, or KvCacheExhausted and none."""
        need = count("n", n, 0)
        if need > len(self._free):
            raise KvCacheExhausted(need, len(self._free))
        blocks = [self._free.pop() for _ in range(need)]
        for block in blocks:
            assert self._refs[block] == 0, f"block {block} was free and referenced"
            self._refs[block] = 1
            if owner:
                self._owners[block] = owner
        return blocks

    def grow_table(self, table: list[int], entries: int, owner: str = "") -> None:
        """Append fresh blocks until `table` has `entries`; all of them or none. A longer table stays as it is, so that
        a step that failed after growing can be tried again."""
        missing = count("entries", entries, 0) - len(table)
        if missing > 0:
            table.extend(self.alloc_blocks(missing, owner))

    def inc_ref(self, block: int) -> None:
        """Add a reference to a held block; KvBlockFreeError for a free one."""
        index = self._index(block)
        if self._refs[index] == 0:
            raise KvBlockFreeError(f"KV block {index} is free: only a held block can be shared", index)
        self._refs[index] += 1

    def dec_ref(self, block: int) -> bool:
        """Drop a reference; True when that was the last and the block is free now. KvDoubleFreeError for a free one:
        to put it on the free list again would hand one block to two sequences."""
        index = self._index(block)
        self._check_held(index, 1)
        return self._drop(index)

    def free_block(self, block: int) -> bool:
        """The same as `dec_ref`."""
        return self.dec_ref(block)

    def return_evicted_block(self, block: int) -> bool:
        """Drop exactly one reference of a block whose content went to disk; the rules are those of `dec_ref`."""
        return self.dec_ref(block)

    def free_blocks(self, table: Iterable[int]) -> int:
        """Drop one reference for each entry of a block table and give how many blocks became free. The whole table is
        checked first. Clear it afterwards: an empty table is freed any number of times."""
        blocks = [self._index(block) for block in table]
        for block, drops in Counter(blocks).items():
            self._check_held(block, drops)
        return sum([self._drop(block) for block in blocks])

    def leak_report(self) -> dict[str, list[int]]:
        """Blocks that are still held, by owner ("" for none), in order of index."""
        held: dict[str, list[int]] = {}
        for block, refs in enumerate(self._refs):
            if refs:
                held.setdefault(self._owners.get(block, ""), []).append(block)
        return held

    def _index(self, block: int) -> int:
        number = integer("KV block", block)
        if not 0 <= number < len(self._refs):
            raise KvBlockRangeError(number, len(self._refs))
        return number

    def _check_held(self, block: int, drops: int) -> None:
        refs = self._refs[block]
        if refs == 0:
            raise KvDoubleFreeError(f"KV block {block} is free already", block)
        if drops > refs:
            raise KvDoubleFreeError(f"KV block {block} has {refs} references, {drops} would be dropped", block)

    def _drop(self, block: int) -> bool:
        self._refs[block] -= 1
        if self._refs[block]:
            return False
        self._owners.pop(block, None)
        self._free.append(block)
        return True

    def _clear(self) -> None:
        self._free, self._refs, self._owners = [], [], {}
