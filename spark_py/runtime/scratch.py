# SPDX-License-Identifier: AGPL-3.0-only
"""The scratch buffer: its size, who uses which bytes of it, and leases that keep users apart.

The engine places users at fixed offsets that overlap for large batches and long contexts, and relies on every path
uploading its layout again before use. Here the offsets are the same, and a region is leased for as long as its
content must survive: one that would run into another's lease raises.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

from .decode_meta import DecodeMetaLayout, max_blocks_for
from .errors import (
    CapacityError,
    ReleasedError,
    ScratchBoundsError,
    ScratchOverlapError,
)
from .gpu import DevicePtr
from .launch import div_ceil
from .sizes import align_up, count

__all__ = [
    "ARGMAX_OFFSET",
    "DECODE_META_OFFSET",
    "LP_SCRATCH_OFF",
    "MTP_META_HEADER_BYTES",
    "MTP_META_OFFSET",
    "PROPOSE_MAX_ROWS",
    "QWEN4_MTP_META_OFFSET",
    "V4_ARGMAX_OFFSET",
    "VERIFY_MAX_ROWS",
    "ScratchLease",
    "ScratchMap",
    "ScratchRegion",
    "scratch_size",
]

ARGMAX_OFFSET = 0
V4_ARGMAX_OFFSET = 64
LP_SCRATCH_OFF = 256
DECODE_META_OFFSET = 32768
QWEN4_MTP_META_OFFSET = 40960
MTP_META_OFFSET = 49152
MTP_META_HEADER_BYTES = 256
VERIFY_META_HEADER_BYTES = 2048
VERIFY_MAX_ROWS = 96
PROPOSE_MAX_ROWS = 32
OWNER_SLABS = 4
_SCRATCH_MIN = 65536
_BATCHED_PREFILL_STREAMS = 8


@dataclass(frozen=True, slots=True)
class ScratchRegion:
    """`nbytes` bytes of scratch from byte `offset` on, under the name of their user.

    The class methods are the engine's map. Counts are rows, experts per token and block-table entries.
    """

    name: str
    offset: int
    nbytes: int

    def __post_init__(self) -> None:
        count(f"offset of scratch region {self.name}", self.offset, 0)
        count(f"nbytes of scratch region {self.name}", self.nbytes)

    @property
    def end(self) -> int:
        """The first byte after the region."""
        return self.offset + self.nbytes

    def overlaps(self, other: ScratchRegion) -> bool:
        """Whether the two share a byte."""
        return self.offset < other.end and other.offset < self.end

    def as_tuple(self) -> tuple[str, int, int]:
        """(name, offset, nbytes)."""
        return self.name, self.offset, self.nbytes

    @classmethod
    def moe_routing(cls, rows: int, experts_per_token: int) -> ScratchRegion:
        """u32 expert ids, then f32 weights, [rows, experts_per_token] each. Passes 32768 above 4096 routes."""
        routes = count("rows", rows) * count("experts_per_token", experts_per_token)
        return cls("moe_routing", 0, 8 * routes)

    @classmethod
    def prefill_meta(cls, rows: int, experts_per_token: int, max_blocks: int, *, mrope: bool = False) -> ScratchRegion:
        """Behind the routing: u32 positions (three rows under M-RoPE), i64 slots, i32 block table, i32 length."""
        start = 8 * count("rows", rows) * count("experts_per_token", experts_per_token, 0)
        slots = align_up(4 * rows * (3 if mrope else 1), 8)
        return cls("prefill_meta", start, slots + 8 * rows + 4 * count("max_blocks", max_blocks) + 4)

    @classmethod
    def argmax(cls) -> ScratchRegion:
        """u32: the id that a Qwen-family head picked."""
        return cls("argmax", ARGMAX_OFFSET, 4)

    @classmethod
    def v4_argmax(cls) -> ScratchRegion:
        """u32: the id that the DeepSeek-V4 head picked."""
        return cls("v4_argmax", V4_ARGMAX_OFFSET, 4)

    @classmethod
    def propose_ids(cls, rows: int) -> ScratchRegion:
        """u32[rows]: picks of a batched propose, at most 32."""
        return cls("propose_ids", ARGMAX_OFFSET, 4 * _at_most("rows", rows, PROPOSE_MAX_ROWS, "a batched propose"))

    @classmethod
    def propose_logprobs(cls, rows: int) -> ScratchRegion:
        """f32[rows]: log-probabilities of the picks of a batched propose, at most 32."""
        return cls(
            "propose_logprobs", LP_SCRATCH_OFF, 4 * _at_most("rows", rows, PROPOSE_MAX_ROWS, "a batched propose")
        )

    @classmethod
    def decode_meta(cls, layout: DecodeMetaLayout, rows: int, max_blocks: int) -> ScratchRegion:
        """The target's decode metadata; `rows` is the padded batch."""
        return cls("decode_meta", DECODE_META_OFFSET, layout.meta_bytes(max_blocks, rows))

    @classmethod
    def verify_meta(cls, rows: int, max_blocks: int) -> ScratchRegion:
        """Metadata of a batched verify, at most 96 rows: positions u32 +0, seq_slot i32 +384, slots i64 +768, seq_lens
        i32 +1536, block table i32 +2048."""
        table = 4 * _at_most("rows", rows, VERIFY_MAX_ROWS, "a batched verify") * count("max_blocks", max_blocks)
        return cls("verify_meta", DECODE_META_OFFSET, VERIFY_META_HEADER_BYTES + table)

    @classmethod
    def owner_slab(cls, owner: int, max_blocks: int) -> ScratchRegion:
        """Metadata of one of at most 4 owners of the GLM-5 path; slabs are align256(768 + 20 * max_blocks) apart."""
        if count("owner", owner, 0) >= OWNER_SLABS:
            raise CapacityError("owner", owner, OWNER_SLABS - 1, "the last owner slab")
        stride = align_up(768 + 20 * count("max_blocks", max_blocks), 256)
        return cls(f"owner_slab[{owner}]", DECODE_META_OFFSET + owner * stride, stride)

    @classmethod
    def mtp_meta(cls, entries: int, offset: int = MTP_META_OFFSET) -> ScratchRegion:
        """A draft head's slab: u32 position +0, i64 slot +8, i32 length +16, i32 block table of `entries` +256."""
        return cls("mtp_meta", offset, MTP_META_HEADER_BYTES + 4 * count("entries", entries))


def _at_most(name: str, value: int, limit: int, what: str) -> int:
    number = count(name, value)
    if number > limit:
        raise CapacityError(name, number, limit, f"the rows of {what}")
    return number


class ScratchLease:
    """A region that is in use. Leave the `with` block, or call `release`, when its content is no longer needed."""

    __slots__ = ("_map", "region")

    def __init__(self, scratch: ScratchMap, region: ScratchRegion) -> None:
        self._map: ScratchMap | None = scratch
        self.region = region

    @property
    def ptr(self) -> DevicePtr:
        """Device address of the region; ReleasedError after release."""
        if self._map is None:
            raise ReleasedError(f"the lease of scratch region {self.region.name} was released")
        return self._map.base.offset(self.region.offset)

    def release(self) -> None:
        """End the lease; a second call does nothing."""
        if self._map is not None:
            self._map._live.remove(self)
            self._map = None

    def __enter__(self) -> ScratchLease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


class ScratchMap:
    """Leases of one scratch buffer of `nbytes` at `base`. For one stream and one thread at a time, as the buffer."""

    def __init__(self, base: DevicePtr, nbytes: int) -> None:
        self.base = base
        self.nbytes = count("nbytes", nbytes)
        self._live: list[ScratchLease] = []

    def lease(self, region: ScratchRegion) -> ScratchLease:
        """Take a region. ScratchBoundsError past the end, ScratchOverlapError where a live lease holds a byte of it."""
        if region.end > self.nbytes:
            raise ScratchBoundsError(region.as_tuple(), self.nbytes)
        for held in self._live:
            if region.overlaps(held.region):
                raise ScratchOverlapError(region.as_tuple(), held.region.as_tuple())
        lease = ScratchLease(self, region)
        self._live.append(lease)
        return lease

    def live(self) -> tuple[ScratchRegion, ...]:
        """Regions on lease, lowest offset first."""
        return tuple(sorted((lease.region for lease in self._live), key=lambda region: region.offset))

    def room_at(self, offset: int) -> int:
        """Bytes from `offset` to the next live lease or the end; 0 where `offset` is leased or past the end."""
        start = count("offset", offset, 0)
        ahead = [region for region in self.live() if region.end > start]
        limit = min(self.nbytes, ahead[0].offset) if ahead else self.nbytes
        return max(0, limit - start)


def scratch_size(
    max_batch_tokens: int,
    experts_per_token: int,
    max_seq_len: int,
    kv_block_size: int,
    max_batch_size: int,
    *,
    mrope: bool = False,
) -> int:
    """Bytes of the engine's scratch buffer: the largest of 64 KiB and what prefill, decode or verify, and batched
    prefill need. (`buffers/sizes.rs`)"""
    m, k = count("max_batch_tokens", max_batch_tokens), count("experts_per_token", experts_per_token, 0)
    layout = DecodeMetaLayout.for_batch(max_batch_size)
    max_blocks = max_blocks_for(max_seq_len, kv_block_size)
    return max(
        _SCRATCH_MIN,
        ScratchRegion.prefill_meta(m, k, max_blocks, mrope=mrope).end,
        ScratchRegion.verify_meta(VERIFY_MAX_ROWS, max_blocks).end,
        ScratchRegion.decode_meta(layout, layout.rows, max_blocks).end,
        batched_prefill_size(m, k, mrope=mrope),
    )


def batched_prefill_size(max_batch_tokens: int, experts_per_token: int, *, mrope: bool = False) -> int:
    """Scratch bytes of a prefill that packs up to 8 sequences: routing, per-sequence slabs, packed metadata."""
    n = _BATCHED_PREFILL_STREAMS
    chunk = max(1, div_ceil(max_batch_tokens, n))
    tokens = n * chunk
    return (
        align_up(tokens * experts_per_token * 8, 64)
        + n * max(16 * chunk + 64, 4096)
        + (3 if mrope else 1) * align_up(4 * tokens, 8)
        + align_up(8 * tokens, 8)
        + 3 * align_up(8 * n, 8)
        + align_up(4 * (n + 1), 8)
        + align_up(4 * n, 8)
    )
