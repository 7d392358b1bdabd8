# SPDX-License-Identifier: AGPL-3.0-only
"""Who uses which bytes of scratch, and that a lease keeps two users apart."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_py.runtime import scratch
from spark_py.runtime.decode_meta import DecodeMetaLayout
from spark_py.runtime.errors import (
    CapacityError,
    InvalidArgumentError,
    ReleasedError,
    ScratchBoundsError,
    ScratchOverlapError,
)
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.runtime.scratch import ScratchMap, ScratchRegion, scratch_size

BASE = DevicePtr(0x10000)
R32 = DecodeMetaLayout(32)


def fresh(nbytes: int = 65536) -> ScratchMap:
    return ScratchMap(BASE, nbytes)


def test_offsets_are_the_engines() -> None:
    assert scratch.ARGMAX_OFFSET == 0
    assert scratch.V4_ARGMAX_OFFSET == 64
    assert scratch.LP_SCRATCH_OFF == 256
    assert scratch.DECODE_META_OFFSET == 32768
    assert scratch.QWEN4_MTP_META_OFFSET == 40960
    assert scratch.MTP_META_OFFSET == 49152
    assert scratch.MTP_META_HEADER_BYTES == 256


@pytest.mark.parametrize(
    ("region", "offset", "nbytes"),
    [
        (ScratchRegion.argmax(), 0, 4),
        (ScratchRegion.v4_argmax(), 64, 4),
        (ScratchRegion.propose_ids(32), 0, 128),
        (ScratchRegion.propose_logprobs(32), 256, 128),
        (ScratchRegion.moe_routing(512, 8), 0, 32_768),
        (ScratchRegion.prefill_meta(100, 8, 10), 6400, 1244),  # 400 + 800 + 40 + 4
        (ScratchRegion.prefill_meta(3, 1, 10), 24, 84),  # 12 pad to 16
        (ScratchRegion.prefill_meta(100, 8, 10, mrope=True), 6400, 2044),
        (ScratchRegion.decode_meta(R32, 32, 1025), 32_768, 131_968),
        (ScratchRegion.decode_meta(R32, 1, 3904), 32_768, 16_384),
        (ScratchRegion.decode_meta(DecodeMetaLayout(48), 48, 10), 32_768, 3072),
        (ScratchRegion.verify_meta(96, 1025), 32_768, 395_648),
        (ScratchRegion.owner_slab(0, 100), 32_768, 2816),  # 2768 up to a multiple of 256
        (ScratchRegion.owner_slab(3, 100), 41_216, 2816),
        (ScratchRegion.mtp_meta(1), 49_152, 260),
        (ScratchRegion.mtp_meta(4032), 49_152, 16_384),
        (ScratchRegion.mtp_meta(10, scratch.QWEN4_MTP_META_OFFSET), 40_960, 296),
    ],
)
def test_regions(region: ScratchRegion, offset: int, nbytes: int) -> None:
    assert (region.offset, region.nbytes, region.end) == (offset, nbytes, offset + nbytes)


@pytest.mark.parametrize(
    ("m", "k", "seq", "block", "batch", "mrope", "expected"),
    [
        (1, 0, 64, 16, 1, False, 65_536),
        (1024, 0, 16384, 16, 8, False, 428_416),  # verify: 34816 + 96 * 1025 * 4
        (8, 10, 131072, 16, 40, False, 3_180_928),
        (200, 2, 1000, 0, 128, True, 166_912),  # decode: 32768 + 24 * 128 + 128 * 256 * 4
        (8192, 8, 1024, 16, 8, False, 754_440),  # batched: 524288 + 131584 + 32768 + 65536 + 264
        (1032, 8, 64, 16, 8, False, 111_464),
    ],
)
def test_scratch_sizes(m: int, k: int, seq: int, block: int, batch: int, mrope: bool, expected: int) -> None:
    assert scratch_size(m, k, seq, block, batch, mrope=mrope) == expected


def test_prefill_metadata_follows_the_routing() -> None:
    # 2 * 4096 * 8 * 4 bytes of routing, then 4096 positions and slots, 65537 entries and a length.
    region = ScratchRegion.prefill_meta(4096, 8, 65537)
    assert region.end == 262_144 + 16_384 + 32_768 + 262_148 + 4


def test_batched_prefill_terms() -> None:
    # 1032 tokens of 8 experts: 66048 + 32768 + 4128 + 8256 + 192 + 40 + 32
    assert scratch.batched_prefill_size(1032, 8) == 111_464
    # M-RoPE has three rows of positions.
    assert scratch.batched_prefill_size(1032, 8, mrope=True) == 111_464 + 2 * 4128
    # One token still makes a chunk of one for each of the 8 sequences: 512 + 32768 + 32 + 64 + 192 + 40 + 32.
    assert scratch.batched_prefill_size(1, 8) == 33_640
    # Chunks of 512 tokens outgrow 4096 bytes of slab: 262144 + 8 * 8256 + 16384 + 32768 + 264.
    assert scratch.batched_prefill_size(4096, 8) == 377_608


# ---------------------------------------------------------------- collisions


@pytest.mark.parametrize(("rows", "fits"), [(32, 122), (4, 976), (1, 3904)])
def test_decode_metadata_runs_under_the_mtp_slab(rows: int, fits: int) -> None:
    """3904 entries lie between 32768 + 768 and 49152, whatever the rows."""
    room = fresh(1 << 20)
    with room.lease(ScratchRegion.mtp_meta(64)):
        room.lease(ScratchRegion.decode_meta(R32, rows, fits)).release()
        with pytest.raises(ScratchOverlapError) as error:
            room.lease(ScratchRegion.decode_meta(R32, rows, fits + 1))
    nbytes = 768 + 4 * rows * (fits + 1)
    assert error.value.region == ("decode_meta", 32_768, nbytes)
    assert error.value.held == ("mtp_meta", 49_152, 512)
    assert f"decode_meta [32768, {32768 + nbytes})" in str(error.value)
    assert "mtp_meta [49152, 49664)" in str(error.value)


def test_the_other_way_round_too() -> None:
    room = fresh(1 << 20)
    target = room.lease(ScratchRegion.decode_meta(R32, 32, 123))
    with pytest.raises(ScratchOverlapError, match="runs into decode_meta"):
        room.lease(ScratchRegion.mtp_meta(1))
    target.release()
    room.lease(ScratchRegion.mtp_meta(1)).release()


@pytest.mark.parametrize(("rows", "k", "fits"), [(512, 8, True), (4096, 1, True), (513, 8, False), (4097, 1, False)])
def test_routing_runs_into_decode_metadata(rows: int, k: int, fits: bool) -> None:
    room = fresh(1 << 20)
    with room.lease(ScratchRegion.decode_meta(R32, 1, 1)):
        if fits:
            room.lease(ScratchRegion.moe_routing(rows, k)).release()
        else:
            with pytest.raises(ScratchOverlapError, match="moe_routing"):
                room.lease(ScratchRegion.moe_routing(rows, k))


def test_batched_propose_results_lie_side_by_side() -> None:
    room = fresh()
    with room.lease(ScratchRegion.propose_ids(32)), room.lease(ScratchRegion.propose_logprobs(32)):
        assert [region.name for region in room.live()] == ["propose_ids", "propose_logprobs"]
        # The V4 head's result lies inside the ids of a batch above 16.
        with pytest.raises(ScratchOverlapError):
            room.lease(ScratchRegion.v4_argmax())
    with room.lease(ScratchRegion.propose_ids(16)):
        room.lease(ScratchRegion.v4_argmax()).release()


def test_the_qwen4_slab_lies_in_the_targets_metadata() -> None:
    room = fresh()
    slab = ScratchRegion.mtp_meta(4, scratch.QWEN4_MTP_META_OFFSET)
    with room.lease(ScratchRegion.decode_meta(R32, 1, 1856)):  # 768 + 7424 = 8192
        room.lease(slab).release()
    with room.lease(ScratchRegion.decode_meta(R32, 1, 1857)), pytest.raises(ScratchOverlapError):
        room.lease(slab)


def test_owner_slabs_do_not_overlap() -> None:
    room = fresh(1 << 20)
    for owner in range(4):
        room.lease(ScratchRegion.owner_slab(owner, 333))
    ends = [region.end for region in room.live()]
    assert [region.offset for region in room.live()][1:] == ends[:-1]


def test_the_last_block_that_fits_and_one_more() -> None:
    """64 KiB of scratch: 4032 entries, which is 64512 tokens in blocks of 16."""
    room = fresh(65536)
    room.lease(ScratchRegion.mtp_meta(4032)).release()
    with pytest.raises(ScratchBoundsError) as error:
        room.lease(ScratchRegion.mtp_meta(4033))
    assert (error.value.region, error.value.size) == (("mtp_meta", 49_152, 16_388), 65_536)
    assert "65536 bytes" in str(error.value)
    assert room.live() == ()


# ---------------------------------------------------------------- leases


def test_a_lease_has_an_address_while_it_lives() -> None:
    room = fresh()
    with room.lease(ScratchRegion.mtp_meta(8)) as lease:
        assert lease.ptr == BASE.offset(49_152)
        assert room.live() == (lease.region,)
    assert room.live() == ()
    lease.release()
    with pytest.raises(ReleasedError, match="mtp_meta"):
        _ = lease.ptr


def test_a_lease_ends_when_its_user_fails() -> None:
    room = fresh()
    with pytest.raises(ZeroDivisionError), room.lease(ScratchRegion.argmax()):
        raise ZeroDivisionError
    room.lease(ScratchRegion.argmax())


def test_the_same_region_is_leased_once() -> None:
    room = fresh()
    first = room.lease(ScratchRegion.argmax())
    with pytest.raises(ScratchOverlapError):
        room.lease(ScratchRegion.argmax())
    first.release()
    second = room.lease(ScratchRegion.argmax())
    # Ending the first again must not end the second.
    first.release()
    assert room.live() == (second.region,)


def test_room() -> None:
    room = fresh()
    assert room.room_at(49_152) == 16_384
    assert room.room_at(65_535) == 1
    assert room.room_at(65_536) == room.room_at(70_000) == 0
    with room.lease(ScratchRegion.mtp_meta(1)):
        assert room.room_at(32_768) == 16_384
        assert room.room_at(49_152) == 0
        assert room.room_at(49_411) == 0
        assert room.room_at(49_412) == 16_124


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: ScratchRegion("x", -1, 4), InvalidArgumentError),
        (lambda: ScratchRegion("x", 0, 0), InvalidArgumentError),
        (lambda: ScratchRegion("x", 0, 1.5), InvalidArgumentError),
        (lambda: ScratchRegion.propose_ids(33), CapacityError),
        (lambda: ScratchRegion.propose_logprobs(33), CapacityError),
        (lambda: ScratchRegion.propose_ids(0), InvalidArgumentError),
        (lambda: ScratchRegion.verify_meta(97, 1), CapacityError),
        (lambda: ScratchRegion.owner_slab(4, 1), CapacityError),
        (lambda: ScratchRegion.decode_meta(R32, 33, 1), CapacityError),
        (lambda: ScratchRegion.mtp_meta(0), InvalidArgumentError),
        (lambda: ScratchRegion.mtp_meta(1, -4), InvalidArgumentError),
    ],
)
def test_regions_that_cannot_be(make: Callable[[], ScratchRegion], error: type[Exception]) -> None:
    with pytest.raises(error):
        make()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 70), st.integers(1, 40)), max_size=60))
def test_leases_against_a_map_of_bytes(steps: list[tuple[bool, int, int]]) -> None:
    room = fresh(64)
    owner: list[int | None] = [None] * 64
    held = {}
    for number, (take, at, size) in enumerate(steps):
        if not take and held:
            key = sorted(held)[at % len(held)]
            held.pop(key).release()
            owner = [None if who == key else who for who in owner]
            continue
        region = ScratchRegion(f"r{number}", at, size)
        free = at + size <= 64 and all(who is None for who in owner[at : at + size])
        if free:
            held[number] = room.lease(region)
            owner[at : at + size] = [number] * size
        else:
            with pytest.raises((ScratchOverlapError, ScratchBoundsError)):
                room.lease(region)
        assert {region.name for region in room.live()} == {f"r{key}" for key in held}
        assert room.room_at(at) == next((i for i, who in enumerate(owner[at:]) if who is not None), max(0, 64 - at))


def test_leased_bytes_are_those_of_the_buffer(gpu: GpuBackend) -> None:
    ptr = gpu.alloc(65536, "scratch")
    gpu.memset(ptr, 0xFF, 65536)
    room = ScratchMap(ptr, 65536)
    with room.lease(ScratchRegion.mtp_meta(4032)) as slab, room.lease(ScratchRegion.argmax()) as pick:
        gpu.memset(slab.ptr, 1, slab.region.nbytes)
        gpu.memset(pick.ptr, 2, pick.region.nbytes)
    host = np.empty(65536, np.uint8)
    gpu.copy_d2h(ptr, host)
    assert (host[:4] == 2).all()
    assert (host[4:49152] == 0xFF).all()
    assert (host[49152:] == 1).all()
    gpu.free(ptr)
