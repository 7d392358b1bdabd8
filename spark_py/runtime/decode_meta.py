# SPDX-License-Identifier: AGPL-3.0-only
"""DecodeMetaLayout: where a decode batch finds its positions, slots, lengths and block tables.

Twin of `DecodeMetaLayout` of `buffers.rs`. One upload per step holds the metadata of all rows, padded to a rung, since
captured graphs exist for the rungs alone.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from .errors import CapacityError, InvalidArgumentError
from .sizes import count

__all__ = ["DECODE_BATCH_RUNGS", "DECODE_META_MAX_ROWS", "DECODE_META_MIN_ROWS", "DecodeMetaLayout", "max_blocks_for"]

DECODE_BATCH_RUNGS = (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Batch sizes that a decode batch is padded to."""
DECODE_META_MIN_ROWS = 32
DECODE_META_MAX_ROWS = 128
_UNPAGED_BLOCKS = 256


def max_blocks_for(max_seq_len: int, kv_block_size: int) -> int:
    """Block-table entries of one sequence: floor(max_seq_len / kv_block_size) + 1, or 256 where the size is 0."""
    length, block = count("max_seq_len", max_seq_len), count("kv_block_size", kv_block_size, 0)
    return length // block + 1 if block else _UNPAGED_BLOCKS


@dataclass(frozen=True, slots=True)
class DecodeMetaLayout:
    """Byte offsets within the decode metadata of `rows` rows; `rows` is a rung from 32 to 128.

    positions u32 | seq_slot i32 (LoRA) | slots i64 (KV) | seq_lens i32 | ssm_slots i32 (-1 pads) | block table i32,
    one row of `max_blocks` entries a sequence.
    """

    rows: int

    def __post_init__(self) -> None:
        if self.rows not in DECODE_BATCH_RUNGS or self.rows < DECODE_META_MIN_ROWS:
            rungs = ", ".join(str(rung) for rung in DECODE_BATCH_RUNGS if rung >= DECODE_META_MIN_ROWS)
            raise InvalidArgumentError("rows", self.rows, f"one of {rungs}")

    @classmethod
    def for_batch(cls, max_batch_size: int) -> DecodeMetaLayout:
        """The layout for batches of up to `max_batch_size` sequences; CapacityError above 128."""
        batch = count("max_batch_size", max_batch_size)
        if batch > DECODE_META_MAX_ROWS:
            raise CapacityError("max_batch_size", batch, DECODE_META_MAX_ROWS, "the largest rung of decode metadata")
        return cls(DECODE_BATCH_RUNGS[bisect_left(DECODE_BATCH_RUNGS, max(batch, DECODE_META_MIN_ROWS))])

    @property
    def positions_off(self) -> int:
        """u32[rows]."""
        return 0

    @property
    def seq_slot_off(self) -> int:
        """i32[rows]: adapter slot of each row."""
        return 4 * self.rows

    @property
    def slots_off(self) -> int:
        """i64[rows]: KV slot that each row writes."""
        return 8 * self.rows

    @property
    def seq_lens_off(self) -> int:
        """i32[rows]."""
        return 16 * self.rows

    @property
    def ssm_slots_off(self) -> int:
        """i32[rows]: state slot of each row, -1 for padding."""
        return 20 * self.rows

    @property
    def block_table_off(self) -> int:
        """i32[rows, max_blocks]; everything before it is the header."""
        return 24 * self.rows

    def meta_bytes(self, max_blocks: int, rows: int | None = None) -> int:
        """Bytes of the header and of `rows` block-table rows (all of them unless given)."""
        used = self.rows if rows is None else count("rows", rows, 0)
        if used > self.rows:
            raise CapacityError("rows", used, self.rows, "the rows of this decode metadata")
        return self.block_table_off + 4 * used * count("max_blocks", max_blocks, 0)
