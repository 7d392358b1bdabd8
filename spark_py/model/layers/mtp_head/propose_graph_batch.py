# SPDX-License-Identifier: AGPL-3.0-only
"""All drafts of a batched propose as one graph: the batch's half of `propose_graph`. Rust runs it launch by launch.

As for one sequence the host knows every position, slot and length beforehand, so that a replay is the graph alone.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ....ops.embed_from_argmax import batched_embed, embed_from_argmax
from ....runtime.buffers import BufferArena
from ....runtime.gpu import DevicePtr, StreamLike
from ....runtime.scratch import MTP_META_HEADER_BYTES, ScratchRegion
from ...drafting.rows import PROPOSE_META_SEQS
from ...layer import AttnMetadataDev, ForwardContext
from ...weight_map import MtpWeights
from .forward_batch import MtpHeadForwardBatch
from .new import BF16_BYTES, KV_BLOCK_SIZE
from .propose_exchange import ProposeExchange
from .propose_graph import MtpHeadProposeGraph
from .types import MtpProposerState

__all__ = ["MAX_BATCH_GRAPH_DRAFTS", "BatchGraphKey", "BatchInputs", "MtpHeadProposeGraphBatch", "table_width"]

_WORD = 4
_STEP_BYTES = 16
MAX_BATCH_GRAPH_DRAFTS = MTP_META_HEADER_BYTES // _STEP_BYTES - 1
"""Drafts of one graph: as many as the header of a sequence's slab has room for, beside its token."""
LEAST_WIDTH = 16
"""Entries of the narrowest table that a graph is made for; wider ones are twice as wide each, so that they are few."""


def table_width(blocks: int, capacity: int) -> int:
    """Entries a sequence of the tables where the longest sequence has `blocks`, of at most `capacity`."""
    return min(max(LEAST_WIDTH, 1 << (blocks - 1).bit_length()), capacity)


@dataclass(frozen=True)
class BatchInputs:
    """What a graph reads that differs from propose to propose, and where it leaves what it found, for n sequences.

    `set` writes a slab of host memory, which the graph fetches to `base`: for each draft i64 slots [n], u32 positions
    [n] and i32 lengths [n], the row itself included; then u32 tokens [n], those before the first draft; then i32 block
    tables [n, width], of which what a table has beyond its sequence is never read. In the exchange's `found`: u32 ids
    [drafts, n], and FP32 [drafts, n], ln of their probabilities. Hidden rows go to `hidden`, where the pass begins.
    """

    base: DevicePtr
    exchange: ProposeExchange
    n: int
    drafts: int
    width: int

    def set(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        rows: Sequence[int],
        tables: Sequence[list[int]],
        hiddens: Sequence[DevicePtr],
        hidden: DevicePtr,
        row_bytes: int,
        stream: StreamLike,
    ) -> None:
        """The inputs of sequences of `rows` rows, whose first drafts are at `positions`; each table has the blocks of
        all drafts, `width` at most. The rows of row_bytes at `hiddens` go to `hidden`."""
        n, size, exchange, words = self.n, KV_BLOCK_SIZE, self.exchange, list[int]()
        for draft in range(self.drafts):
            at = [row + draft for row in rows]
            words += [table[row // size] * size + row % size for table, row in zip(tables, at, strict=True)]
            words += [position + draft for position in positions]
            words += [row + 1 for row in at]
        exchange.begin(stream)
        _layout(n, self.drafts).pack_into(exchange.memory, exchange.slab_at, *words, *tokens)
        start = exchange.slab_at + self._tables_at
        for table, row in zip(tables, rows, strict=True):
            packed = exchange.tables.packed(table, -(-(row + self.drafts) // size))
            exchange.memory[start : start + len(packed)] = packed
            start += _WORD * self.width
        exchange.give(self.slab_bytes, hiddens, row_bytes, hidden, stream)

    @property
    def slab_bytes(self) -> int:
        """Bytes of the slab."""
        return self._tables_at + _WORD * self.n * self.width

    @property
    def tokens_at(self) -> int:
        """Where the tokens are in the slab."""
        return self.drafts * self.n * _STEP_BYTES

    @property
    def _tables_at(self) -> int:
        return self.tokens_at + self.n * _WORD

    @property
    def tokens(self) -> DevicePtr:
        """The ids before the first draft."""
        return self.base.offset(self.tokens_at)

    def ids(self, draft: int) -> DevicePtr:
        """Where the ids of a draft are left."""
        return self.exchange.found.offset(draft * self.n * _WORD)

    def log_probs(self, draft: int) -> DevicePtr:
        """Where ln of their probabilities is left."""
        return self.exchange.found.offset((self.drafts + draft) * self.n * _WORD)

    def metas(self, draft: int) -> list[AttnMetadataDev]:
        """Where the metadata of each sequence's row of a draft is."""
        slots = self.base.offset(draft * self.n * _STEP_BYTES)
        positions, lengths = slots.offset(8 * self.n), slots.offset(12 * self.n)
        tables = self.base.offset(self._tables_at)
        return [
            AttnMetadataDev(
                positions=(position := positions.offset(_WORD * i)),
                positions_h=position,
                positions_w=position,
                slot=slots.offset(8 * i),
                seq_len=lengths.offset(_WORD * i),
                block_table=tables.offset(_WORD * self.width * i),
                max_blocks_per_seq=self.width,
                num_seqs=1,
            )
            for i in range(self.n)
        ]


@lru_cache
def _layout(n: int, drafts: int) -> struct.Struct:
    """The slab of n sequences up to its tables."""
    return struct.Struct("<" + drafts * f"{n}q{n}I{n}i" + f"{n}I")


class BatchGraphKey(NamedTuple):
    """What a batch's graph bakes in and a head may meet more than one of: also how many sequences there are, how wide
    their tables are, and whether probabilities are told. Which kernels run is a matter of the head and of the number of
    sequences."""

    drafts: int
    arena: weakref.ref[BufferArena]
    n: int
    width: int
    log_probs: bool


class MtpHeadProposeGraphBatch(MtpHeadProposeGraph):
    """A batched propose whose drafts never pass through the host."""

    batch_exchange: ProposeExchange

    def _build(self, weights: MtpWeights, main_kv_blocks: int) -> None:
        super()._build(weights, main_kv_blocks)
        if self.propose_inputs is not None:
            slab, words = PROPOSE_META_SEQS * self.propose_meta_stride, 2 * MAX_BATCH_GRAPH_DRAFTS * PROPOSE_META_SEQS
            self.batch_exchange = ProposeExchange(self.gpu, PROPOSE_META_SEQS, slab, words, self._stack)

    def _propose_batch_on_device(
        self,
        tokens: Sequence[int],
        hiddens: Sequence[DevicePtr],
        positions: Sequence[int],
        drafts: int,
        states: Sequence[MtpProposerState],
        ctx: ForwardContext,
        stream: StreamLike,
        log_probs: bool,
    ) -> tuple[list[list[int]], list[list[float]]] | None:
        """`drafts` times `forward_batch_position`, each from the ids and hidden rows of the one before, with the same
        bits: of each sequence the ids, and ln of their probabilities where they are wanted. `scratch` gets no id. None,
        and nothing done, where that must be done draft by draft, or where it would tell what does not fit. The states
        have their blocks; their rows count on return.
        """
        n, capacity = len(states), (self.propose_meta_stride - MTP_META_HEADER_BYTES) // _WORD
        rows = [state.seq_len for state in states]
        blocks = -(-(max(rows) + drafts) // KV_BLOCK_SIZE)
        if self.propose_inputs is None or drafts > MAX_BATCH_GRAPH_DRAFTS or blocks > capacity:
            return None
        if not self._batch_steps_are_ours():
            return None
        exchange, width = self.batch_exchange, table_width(blocks, capacity)
        inputs, gates = BatchInputs(self.propose_meta, exchange, n, drafts, width), ctx.buffers.ssm_gates()
        tables = [state.block_table for state in states]
        inputs.set(tokens, positions, rows, tables, hiddens, gates, self.h * BF16_BYTES, stream)
        told = log_probs and bool(self.argmax_batch_lp_k)
        self._run_batch_drafts(inputs, told, ctx, stream)
        ids = exchange.finish(drafts * n, stream)
        certain = exchange.reals(drafts * n, 2 * drafts * n) if told else [0.0] * (drafts * n)
        for position, state in zip(positions, states, strict=True):
            state.seq_len += drafts
            state.last_pair_key = position + drafts - 2
            state.last_num_drafted = drafts
        return [ids[i::n] for i in range(n)], [certain[i::n] for i in range(n)]

    def _batch_steps_are_ours(self) -> bool:
        """As `_steps_are_ours`, for `forward_batch_position`."""
        step = getattr(self.forward_batch_position, "__func__", None)
        return step is MtpHeadForwardBatch.forward_batch_position

    def _run_batch_drafts(self, inputs: BatchInputs, log_probs: bool, ctx: ForwardContext, stream: StreamLike) -> None:
        buf, n, row_bytes = ctx.buffers, inputs.n, self.h * BF16_BYTES
        if self.dense_ffn_generic is None:
            # A pass leases it for its experts, a replay writes it without asking.
            buf.lease(ScratchRegion.moe_routing(n, self.experts_per_token)).release()

        picks = not log_probs and self._picks_rows(n)

        def work(on: StreamLike) -> None:
            gates, embed = buf.ssm_gates(), buf.ssm_qkvz()
            inputs.exchange.fetch(
                inputs.base, inputs.slab_bytes, inputs.tokens_at, self.embed_tokens, gates, embed, n, row_bytes,
                self.h, on,
            )  # fmt: skip
            if not inputs.exchange.embeds:
                self._embed_rows(inputs.tokens, embed, n, on)
            for draft in range(inputs.drafts):
                if draft:
                    self.gpu.copy_d2d_async(self._chain_hidden(ctx), gates, n * row_bytes, on)
                self._forward_batch_rows(n, inputs.metas(draft), ctx, on)
                ids, last = inputs.ids(draft), draft + 1 == inputs.drafts
                if picks:
                    self.lm_head_argmax.run(buf.norm_output(), ids, None if last else embed, n, on)
                    continue
                self._lm_head_rows(buf.norm_output(), buf.logits(), n, on)
                self._argmax_rows(n, ids, inputs.log_probs(draft) if log_probs else None, ctx, on)
                if not last:
                    self._embed_rows(ids, embed, n, on)

        key = BatchGraphKey(inputs.drafts, weakref.ref(buf), n, inputs.width, log_probs)
        self.propose_graphs.run(key, work, stream)

    def _picks_rows(self, n: int) -> bool:
        """Whether the LM head's launch names the winners of n rows: where its products are those of `_lm_head_rows`."""
        if not self.picks or self._in_tiles(n):
            return False
        return self._in_one_launch((self.lm_head,), n, self.draft_vocab)

    def _embed_rows(self, ids: DevicePtr, output: DevicePtr, n: int, stream: StreamLike) -> None:
        """output BF16 [n, h]: the embeddings of u32 [n] on the device."""
        gpu, h, table = self.gpu, self.h, self.embed_tokens
        if self.batched_embed_k:
            batched_embed(gpu, self.batched_embed_k, ids, table, output, n, h, stream)
            return
        for i in range(n):
            at, kernel = ids.offset(_WORD * i), self.embed_from_argmax_k
            # The id has its place already: as the kernel's second output it stays as it is.
            embed_from_argmax(gpu, kernel, at, table, output.offset(i * h * BF16_BYTES), at, h, stream)
