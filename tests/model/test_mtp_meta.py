# SPDX-License-Identifier: AGPL-3.0-only
"""The metadata slab: every byte of it, and the last block table that fits."""

from __future__ import annotations

import numpy as np
import pytest

from spark_py.model.layers.mtp_meta import mtp_attn_meta, pack_mtp_attn_meta
from spark_py.runtime.errors import CapacityError, InvalidArgumentError
from spark_py.runtime.gpu import DevicePtr


def test_every_byte(rng: np.random.Generator) -> None:
    table = [int(b) for b in rng.integers(0, 2**31, 5)]
    packed = pack_mtp_attn_meta(2**32 - 1, 2**40 + 3, 77, table, 4096)
    assert len(packed) == 256 + 20
    assert packed[0:4] == b"\xff\xff\xff\xff"
    assert packed[8:16] == (2**40 + 3).to_bytes(8, "little")
    assert packed[16:20] == (77).to_bytes(4, "little")
    assert not any(packed[4:8] + packed[20:256])
    assert [int.from_bytes(packed[256 + 4 * i : 260 + 4 * i], "little") for i in range(5)] == table


@pytest.mark.parametrize(("region", "entries"), [(2048, 448), (256, 0), (16384, 4032), (2051, 448), (2052, 449)])
def test_the_last_table_that_fits(region: int, entries: int) -> None:
    assert len(pack_mtp_attn_meta(1, 0, 1, [0] * entries, region)) == 256 + 4 * entries
    with pytest.raises(CapacityError) as caught:
        pack_mtp_attn_meta(1, 0, 1, [0] * (entries + 1), region)
    assert (caught.value.value, caught.value.capacity) == (entries + 1, entries)


@pytest.mark.parametrize("region", [0, 255])
def test_a_region_without_room_for_the_header(region: int) -> None:
    with pytest.raises(CapacityError):
        pack_mtp_attn_meta(1, 0, 1, [], region)


@pytest.mark.parametrize(
    ("position", "slot", "length", "table", "name"),
    [
        (2**32, 0, 1, [], "position"), (-1, 0, 1, [], "position"), (1, 2**63, 1, [], "global_slot"),
        (1, -1, 1, [], "global_slot"), (1, 0, 2**31, [], "seq_len"), (1, 0, 1, [2**31], "block"),
        (1, 0, 1, [-1], "block"),
    ],
)  # fmt: skip
def test_numbers_that_have_no_place(position: int, slot: int, length: int, table: list[int], name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        pack_mtp_attn_meta(position, slot, length, table, 4096)


def test_addresses_of_the_parts() -> None:
    meta = mtp_attn_meta(DevicePtr(4096), 9)
    assert meta.positions == meta.positions_h == meta.positions_w == DevicePtr(4096)
    assert (meta.slot, meta.seq_len, meta.block_table) == (DevicePtr(4104), DevicePtr(4112), DevicePtr(4352))
    assert (meta.max_blocks_per_seq, meta.num_seqs) == (9, 1)
