# SPDX-License-Identifier: AGPL-3.0-only
"""What a head and its graphs tell each other without a copy that the host queues. Rust's head uploads before the graph
of each draft and reads back after it.

A graph's first kernel fetches what the host wrote into page-locked memory, and ids are written there by the kernels
that find them: a propose is a few stores of the host, the launch of a graph, and one wait.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache

from ....ops.spark_propose_inputs import PIECE, Given, spark_propose_inputs
from ....runtime.errors import BackendClosedError, InvalidArgumentError, ReleasedError, ReleasedHandleError
from ....runtime.gpu import DevicePtr, GpuBackend, HostPtr, StreamLike
from ....runtime.sizes import align_up
from ...weight_map import DenseWeight
from .new import BF16_BYTES

__all__ = ["BlockTables", "ProposeExchange"]

_WORD, _ADDRESS = 4, 8
_SOURCES_AT = PIECE
_FOUND_ALIGN = 256
_MOST_TABLES = 256


class BlockTables:
    """Block tables as i32, packed when they change: to see that one has not takes a tenth of packing it."""

    def __init__(self) -> None:
        self._packed: dict[int, tuple[list[int], bytes]] = {}

    def packed(self, table: list[int], blocks: int) -> bytes:
        """The first `blocks` entries of `table` as little-endian i32."""
        known = self._packed.get(id(table))  # of another one, where that is gone: its entries tell
        if known is None or known[0] != table:
            if len(self._packed) >= _MOST_TABLES:
                self._packed.clear()
            known = self._packed[id(table)] = table.copy(), struct.pack(f"<{len(table)}i", *table)
        return known[1] if blocks == len(table) else known[1][: _WORD * blocks]


class ProposeExchange:
    """Page-locked memory of the graphs of a head, for `rows` rows at most: u32 number of pieces of the slab at 0, u64
    addresses of hidden rows [rows] from 16 on, a slab of `slab_bytes`, and `found_words` words that graphs write.

    One propose at a time: `begin`, stores to `memory` from `slab_at` on and `give`, what launches `fetch` and writes to
    `found`, `finish`. A set without the kernel that fetches copies instead: hidden rows before the graph, the slab
    within.
    """

    def __init__(self, gpu: GpuBackend, rows: int, slab_bytes: int, found_words: int, stack: ExitStack) -> None:
        self._gpu, self.tables = gpu, BlockTables()
        self.slab_at = align_up(_SOURCES_AT + _ADDRESS * rows, PIECE)
        found_at = align_up(self.slab_at + slab_bytes, _FOUND_ALIGN)
        nbytes = found_at + _WORD * found_words
        self._kernel = gpu.try_kernel("spark_propose_inputs", "spark_propose_inputs")
        host = gpu.alloc_host_pinned(nbytes)
        self._gone = False
        stack.callback(self._release, host, nbytes)
        self._base = gpu.host_ptr_to_device(host)
        self.found = self._base.offset(found_at)
        """Where the graphs write, as they see it."""
        pinned = gpu.pinned_view(host, nbytes)
        self._slab = pinned[self.slab_at : self.slab_at + slab_bytes]
        self.memory = memoryview(pinned.data)
        self._words = self.memory[found_at:].cast("I")
        self._reals = self.memory[found_at:].cast("f")
        self._event = gpu.create_event()
        stack.callback(self._destroy_event)
        # Whose graph may still read what `begin` lets the host write: that of a propose that nobody has waited for.
        self._reader: StreamLike | None = None
        self._marked = False

    @staticmethod
    @lru_cache
    def _head(rows: int) -> struct.Struct:
        """What comes before the slab: pieces, and addresses."""
        return struct.Struct(f"<I12x{rows}Q")

    def _release(self, host: HostPtr, nbytes: int) -> None:
        self._gone = True
        if not self._gpu.closed:
            self._gpu.free_host_pinned(host, nbytes)

    def _destroy_event(self) -> None:
        if not self._gpu.closed:
            self._gpu.destroy_event(self._event)

    @property
    def embeds(self) -> bool:
        """Whether `fetch` brings the embeddings too."""
        return bool(self._kernel)

    def begin(self, stream: StreamLike) -> None:
        """Before the first store for a propose on `stream`: wait where the graph of the last one may still read."""
        if self._gone:
            raise ReleasedError("the head was released")
        if self._gpu.closed:
            raise BackendClosedError("propose on a backend that was closed")
        if self._reader is not None:
            self._settle(self._reader)
        self._reader, self._marked = stream, False

    def _settle(self, stream: StreamLike) -> None:
        if self._marked:
            self._gpu.event_synchronize(self._event)
        else:  # it failed half way
            with suppress(ReleasedHandleError):  # a stream that is gone was waited for
                self._gpu.synchronize(stream)

    def give(
        self, used: int, sources: Sequence[DevicePtr], row_bytes: int, hidden: DevicePtr, stream: StreamLike
    ) -> None:
        """What `fetch` is to bring: the first `used` bytes of the slab, and rows of row_bytes from `sources` to
        `hidden`. InvalidArgumentError or PointerError for a row that is no memory."""
        gpu = self._gpu
        if not self._kernel:
            for i, source in enumerate(sources):
                gpu.copy_d2d_async(source, hidden.offset(i * row_bytes), row_bytes, stream)
            return
        gpu.check_ranges(sources, row_bytes, "hidden row")
        addresses = [source.address for source in sources]
        for address in addresses:
            if address % BF16_BYTES:
                raise InvalidArgumentError("hidden row", hex(address), f"an address that is a multiple of {BF16_BYTES}")
        self._head(len(addresses)).pack_into(self.memory, 0, -(-used // PIECE), *addresses)

    def fetch(
        self,
        slab: DevicePtr,
        slab_bytes: int,
        tokens_at: int,
        table: DenseWeight,
        hidden: DevicePtr,
        embed: DevicePtr,
        rows: int,
        row_bytes: int,
        h: int,
        stream: StreamLike,
    ) -> None:
        """Queue, or capture, what brings to `slab` the slab of the propose at hand, slab_bytes at most, to `hidden` its
        hidden rows and, where `embeds`, to `embed` the rows of `table` whose tokens lie at byte tokens_at of the
        slab."""
        if not self._kernel:
            self._gpu.copy_h2d_async_retained(self._slab[:slab_bytes], slab, stream)
            return
        at = self._base.offset(self.slab_at)
        given = Given(at, self._base, self._base.offset(_SOURCES_AT), at.offset(tokens_at))
        spark_propose_inputs(
            self._gpu, self._kernel, given, table, slab, hidden, embed, rows, row_bytes, h, stream
        )  # fmt: skip

    def finish(self, words: int, stream: StreamLike) -> list[int]:
        """The first words of `found`, once `stream` has done what it was given; 0 of them wait for nothing."""
        if words == 0:
            self._gpu.record_event(self._event, stream)
            self._marked = True
            return []
        self._gpu.synchronize(stream)
        self._reader = None
        return self._words[:words].tolist()

    def reals(self, first: int, last: int) -> list[float]:
        """Words first to last - 1 of `found` as FP32, after `finish`."""
        return [float(real) for real in self._reals[first:last]]
