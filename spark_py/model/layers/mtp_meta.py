# SPDX-License-Identifier: AGPL-3.0-only
"""Twin of `layers/mtp_meta.rs`: the slab that tells RoPE, the KV write and attention where one row of a drafter
goes."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from ...runtime.errors import CapacityError, InvalidArgumentError
from ...runtime.gpu import DevicePtr
from ...runtime.scratch import MTP_META_HEADER_BYTES
from ...runtime.sizes import count
from ..layer import AttnMetadataDev

__all__ = ["SEQ_LEN_OFFSET", "SLOT_OFFSET", "mtp_attn_meta", "pack_mtp_attn_meta"]

SLOT_OFFSET = 8
SEQ_LEN_OFFSET = 16
_HEADER = struct.Struct("<I4xqi236x")
assert _HEADER.size == MTP_META_HEADER_BYTES

_U32_MAX, _I32_MAX, _I64_MAX = 2**32 - 1, 2**31 - 1, 2**63 - 1


def _within(name: str, value: int, limit: int, kind: str) -> int:
    number = count(name, value, 0)
    if number > limit:
        raise InvalidArgumentError(name, number, f"0 to {limit}, since it is stored as {kind}")
    return number


def pack_mtp_attn_meta(
    position: int, global_slot: int, seq_len: int, block_table: Sequence[int], region_bytes: int
) -> bytes:
    """u32 position at 0, i64 slot at 8, i32 seq_len at 16 (the row to be written included), zeros to 256, i32 blocks.

    256 + 4 * len(block_table) bytes. CapacityError where that is more than `region_bytes`: the table is too long for
    its place, and nothing is cut off.
    """
    room = max(count("region_bytes", region_bytes, 0) - MTP_META_HEADER_BYTES, -4) // 4
    if len(block_table) > room:
        raise CapacityError(
            "entries of the MTP block table", len(block_table), room, f"the room in {region_bytes} bytes of metadata"
        )
    header = _HEADER.pack(
        _within("position", position, _U32_MAX, "u32"),
        _within("global_slot", global_slot, _I64_MAX, "i64"),
        _within("seq_len", seq_len, _I32_MAX, "i32"),
    )
    for block in block_table:
        _within("block", block, _I32_MAX, "i32")
    return header + np.asarray(block_table, dtype="<i4").tobytes()


def mtp_attn_meta(base: DevicePtr, max_blocks_per_seq: int) -> AttnMetadataDev:
    """Where the parts of a slab at `base` are; one sequence, the three rows of M-RoPE positions being one."""
    return AttnMetadataDev(
        positions=base,
        positions_h=base,
        positions_w=base,
        slot=base.offset(SLOT_OFFSET),
        seq_len=base.offset(SEQ_LEN_OFFSET),
        block_table=base.offset(MTP_META_HEADER_BYTES),
        max_blocks_per_seq=max_blocks_per_seq,
        num_seqs=1,
    )
