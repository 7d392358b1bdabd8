# SPDX-License-Identifier: AGPL-3.0-only
"""Twin of `layers/mtp_head/propose_graph.rs`: all drafts of a propose as one graph, with nothing to upload before it
and nothing to read back after it (see `propose_exchange`).

The host knows position, slot and length of each row before the first one runs: only the ids and the hidden rows pass
from draft to draft, and they stay on the device. Rust captures a single draft and goes through the host in between.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple, Protocol

from ....ops.argmax import argmax_bf16
from ....ops.embed_from_argmax import embed_from_argmax
from ....ops.spark_propose_inputs import PIECE
from ....runtime.buffers import BufferArena
from ....runtime.errors import CaptureStateError
from ....runtime.gpu import DevicePtr, GpuBackend, GraphHandle, StreamLike
from ....runtime.scratch import ScratchRegion
from ....runtime.sizes import align_up
from ...layer import AttnMetadataDev, ForwardContext
from ...levers import ModelLevers
from ...weight_map import MtpWeights
from ..mtp_meta import SEQ_LEN_OFFSET, SLOT_OFFSET
from .forward import MtpHeadForward
from .forward_batch import MtpHeadForwardBatch
from .lm_head_argmax import LmHeadArgmax
from .new import BF16_BYTES, KV_BLOCK_SIZE, log
from .pick import PLACEHOLDER, MtpHeadPick
from .propose_exchange import ProposeExchange
from .types import MtpProposerState

__all__ = [
    "MAX_GRAPH_DRAFTS",
    "GraphKey",
    "MtpHeadProposeGraph",
    "ProposeGraphs",
    "ProposeInputs",
    "chain_drafts",
    "graphs_wanted",
]

MAX_GRAPH_DRAFTS = 16
"""Drafts of one graph; a propose of more goes draft by draft."""
MAX_GRAPHS = 128
"""Graphs that a head holds; of more, those that were used last."""
_ID_BYTES = 4
_STEP = struct.Struct("<I4xqi12x")
_TOKEN_BYTES = 32
_TABLE = _TOKEN_BYTES + MAX_GRAPH_DRAFTS * _STEP.size
_SLABS = [struct.Struct("<I28x" + drafts * "I4xqi12x") for drafts in range(MAX_GRAPH_DRAFTS + 1)]


class ProposeInputs:
    """What a graph reads that differs from propose to propose, and where it leaves the ids: fixed buffers.

    `set` writes a slab of host memory, which the graph fetches to one on the device: u32 token at 0; for draft i, from
    byte 32 * (1 + i) on, u32 position at 0, i64 slot at 8 and i32 length at 16, the row itself included; i32 block
    table [capacity] after the last of MAX_GRAPH_DRAFTS. `hidden`: `hidden_bytes`, a copy of the target's row.

    capacity: blocks of the longest sequence. A graph bakes it in as the width of the table, so that it holds for every
    length up to there; what a table has beyond the sequence is never read.
    """

    def __init__(
        self,
        gpu: GpuBackend,
        hidden_bytes: int,
        capacity: int,
        alloc: Callable[[str, int], DevicePtr],
        stack: ExitStack,
    ) -> None:
        self.hidden_bytes, self.capacity = hidden_bytes, capacity
        self.slab_bytes = align_up(_TABLE + 4 * capacity, PIECE)
        self.exchange = ProposeExchange(gpu, 1, self.slab_bytes, MAX_GRAPH_DRAFTS, stack)
        self.slab = alloc("propose_graph.inputs", self.slab_bytes)
        self.hidden = alloc("propose_graph.hidden", self.hidden_bytes)
        self.ids = alloc("propose_graph.ids", MAX_GRAPH_DRAFTS * _ID_BYTES)

    def fits(self, rows: int, drafts: int) -> bool:
        """Whether `drafts` drafts after `rows` rows have a place here."""
        return drafts <= MAX_GRAPH_DRAFTS and _blocks(rows + drafts) <= self.capacity

    def set(
        self,
        token: int,
        target_hidden: DevicePtr,
        position: int,
        rows: int,
        drafts: int,
        block_table: list[int],
        stream: StreamLike,
    ) -> None:
        """The inputs of `drafts` drafts, the first at `position`, of a sequence of `rows` rows, which `fits`.
        block_table has the blocks of all of them; target_hidden is read by the next graph and not later."""
        exchange, size, blocks = self.exchange, KV_BLOCK_SIZE, _blocks(rows + drafts)
        exchange.begin(stream)
        steps = [token]
        for row in range(rows, rows + drafts):
            steps += (position + row - rows, block_table[row // size] * size + row % size, row + 1)
        memory, at = exchange.memory, exchange.slab_at
        _SLABS[drafts].pack_into(memory, at, *steps)
        memory[at + _TABLE : at + _TABLE + 4 * blocks] = exchange.tables.packed(block_table, blocks)
        exchange.give(_TABLE + 4 * blocks, (target_hidden,), self.hidden_bytes, self.hidden, stream)

    def id(self, draft: int) -> DevicePtr:
        """Where the id of a draft that is not the last is left for the next one."""
        return self.ids.offset(draft * _ID_BYTES)

    def told(self, draft: int) -> DevicePtr:
        """Where the host finds the id of a draft: page-locked memory, as the device sees it."""
        return self.exchange.found.offset(draft * _ID_BYTES)

    def read(self, drafts: int, stream: StreamLike) -> list[int]:
        """The ids of the first `drafts` drafts, once the stream has done them; 0 of them wait for nothing."""
        return self.exchange.finish(drafts, stream)

    def meta(self, draft: int) -> AttnMetadataDev:
        """Where the metadata of a draft's row is."""
        base = self.slab.offset(_step(draft))
        return AttnMetadataDev(
            positions=base,
            positions_h=base,
            positions_w=base,
            slot=base.offset(SLOT_OFFSET),
            seq_len=base.offset(SEQ_LEN_OFFSET),
            block_table=self.slab.offset(_TABLE),
            max_blocks_per_seq=self.capacity,
            num_seqs=1,
        )


def graphs_wanted(levers: ModelLevers) -> bool:
    """Whether a head is to capture its proposes: asked for, and nothing is to be read after each draft."""
    reads = levers.draft_conf_tau > 0.0 or levers.shadow_topk > 0 or levers.debug_norms
    return levers.propose_graph and not reads


def _blocks(rows: int) -> int:
    return -(-rows // KV_BLOCK_SIZE)


def _step(draft: int) -> int:
    return _TOKEN_BYTES + draft * _STEP.size


def chain_drafts(
    head: MtpHeadPick,
    inputs: ProposeInputs,
    drafts: int,
    ctx: ForwardContext,
    forward: Callable[[DevicePtr, AttnMetadataDev, StreamLike], DevicePtr],
    pick: LmHeadArgmax | None,
    stream: StreamLike,
) -> None:
    """Queue, or capture, drafts one after the other: the embedding of the last id in `ssm_qkvz`; `forward(hidden, meta,
    stream)`, which makes `logits`, or `norm_output` alone for a `pick`, and gives the next draft's hidden row; the id.
    The host finds each id where `told` says."""
    gpu, table, h, exchange, embed_k = head.gpu, head.embed_tokens, head.h, inputs.exchange, head.embed_from_argmax_k
    embed, normed, logits = ctx.buffers.ssm_qkvz(), ctx.buffers.norm_output(), ctx.buffers.logits()
    exchange.fetch(
        inputs.slab, inputs.slab_bytes, 0, table, inputs.hidden, embed, 1, inputs.hidden_bytes, h, stream
    )  # fmt: skip
    if not exchange.embeds:
        # The token has its place already: as the kernel's second output it stays as it is.
        embed_from_argmax(gpu, embed_k, inputs.slab, table, embed, inputs.slab, h, stream)
    hidden = inputs.hidden
    for draft in range(drafts):
        hidden = forward(hidden, inputs.meta(draft), stream)
        told, last = inputs.told(draft), draft + 1 == drafts
        if pick is not None:
            pick.run(normed, told, None if last else embed, 1, stream)
            continue
        # The last id is read by the host alone.
        picked = told if last else inputs.id(draft)
        argmax_bf16(gpu, head.argmax_k, logits, picked, head.draft_vocab, stream)
        if not last:
            embed_from_argmax(gpu, embed_k, picked, table, embed, told, h, stream)


class HasArena(Protocol):
    """A key of ProposeGraphs: equal for proposes that one graph serves."""

    @property
    def arena(self) -> weakref.ref[BufferArena]:
        """The arena whose buffers the graph works in."""


class GraphKey(NamedTuple):
    """What a graph bakes in and a head may meet more than one of: the number of drafts, and the arena whose buffers it
    works in. All the rest a head decides when it is built. Another arena at the same addresses is another key."""

    drafts: int
    arena: weakref.ref[BufferArena]


class ProposeGraphs:
    """The graphs of a head.

    The first time that `run` sees a key it does the work launch by launch, which loads all that it needs: no rehearsal
    is needed then, which would have to write somewhere. The second time it captures the work, and replays from then on.
    A graph replays on any stream; captures have a stream of their own, so that the caller's, which may be the legacy
    one, never captures.
    """

    def __init__(self, gpu: GpuBackend) -> None:
        self._gpu = gpu
        self._stream: int | None = None
        self._graphs: dict[HasArena, GraphHandle | None] = {}
        self._failed = False

    def __len__(self) -> int:
        """Graphs that are held."""
        return sum(graph is not None for graph in self._graphs.values())

    def run(self, key: HasArena, work: Callable[[StreamLike], None], stream: StreamLike) -> None:
        """Do on `stream` what `work` queues. It must queue the same for each call with the same key."""
        graph = self._graphs.get(key)
        seen = graph is not None or key in self._graphs
        if seen:
            self._graphs[key] = self._graphs.pop(key)  # the last in the dict is the last used
        if graph is None and seen and not self._failed:
            try:
                graph = self._graphs[key] = self._capture(work)
            except Exception as error:
                # If it is the work that fails and not the capture, then here again, as it should without graphs.
                work(stream)
                self._failed = True
                log.warning("proposes are not captured from here on, but run launch by launch: %s", error)
                return
        if graph is not None:
            self._gpu.launch_graph(graph, stream)
            return
        work(stream)
        if not seen:
            self._make_room()
            self._graphs[key] = None

    def _capture(self, work: Callable[[StreamLike], None]) -> GraphHandle:
        if self._stream is None:
            self._stream = self._gpu.create_stream()
        self._gpu.begin_capture(self._stream)
        try:
            work(self._stream)
            graph = self._gpu.end_capture(self._stream)
        except BaseException:
            self._gpu.abort_capture_if_active(self._stream)
            raise
        if graph.is_null:
            # Nothing would run, and the ids would be the last propose's.
            raise CaptureStateError("the capture gave no graph")
        return graph

    def _make_room(self) -> None:
        """Destroy the graphs of arenas that are gone, and those that were not used for longest where there are many."""
        gone = [key for key in self._graphs if key.arena() is None]
        living = [key for key in self._graphs if key.arena() is not None]
        for key in gone + living[: max(0, len(living) + 1 - MAX_GRAPHS)]:
            self._gpu.destroy_graph(self._graphs.pop(key) or GraphHandle(0))

    def release(self) -> None:
        """Destroy all. A backend that was closed before has done so itself."""
        graphs, stream = [graph for graph in self._graphs.values() if graph is not None], self._stream
        self._graphs.clear()
        self._stream = None
        if self._gpu.closed:
            return
        with ExitStack() as stack:
            if stream is not None:
                stack.callback(self._gpu.destroy_stream, stream)
            for graph in graphs:
                stack.callback(self._gpu.destroy_graph, graph)


class MtpHeadProposeGraph(MtpHeadForwardBatch):
    """A propose of one sequence whose drafts never pass through the host."""

    propose_inputs: ProposeInputs | None = None
    """None for a head none of whose proposes can be captured."""
    picks = False
    """Whether captured proposes write no logits where `lm_head_argmax` has the LM head's own bits."""
    lm_head_argmax: LmHeadArgmax

    def _build(self, weights: MtpWeights, main_kv_blocks: int) -> None:
        super()._build(weights, main_kv_blocks)
        if graphs_wanted(self.levers) and not self.ffn_reads_back:
            capacity = self.max_seq_len // KV_BLOCK_SIZE + 1
            self.propose_inputs = ProposeInputs(self.gpu, self.h * BF16_BYTES, capacity, self._alloc, self._stack)
            self.propose_graphs = ProposeGraphs(self.gpu)
            self._stack.callback(self.propose_graphs.release)
            if not self.levers.keep_logits:
                lm_head, table = self.lm_head, self.embed_tokens
                self.lm_head_argmax = LmHeadArgmax(self.gpu, lm_head, self.draft_vocab, self.h, table, self._alloc)
                self.picks = bool(self.lm_head_argmax) and self._takes((lm_head,), self.h)
            self._routing = ScratchRegion.moe_routing(1, max(1, self.experts_per_token))

    def _propose_on_device(
        self,
        token: int,
        target_hidden: DevicePtr,
        position: int,
        drafts: int,
        state: MtpProposerState,
        ctx: ForwardContext,
        stream: StreamLike,
        draft_embed_target: DevicePtr | None,
    ) -> list[int] | None:
        """`drafts` times `forward_one`, each from the id and hidden row of the one before, with the same bits in ids,
        rows and the arena's `hidden_states`, `norm_output` and, with `keep_logits`, `logits`; `scratch` gets neither
        metadata nor id. None, and nothing done, where that must be done draft by draft. The state has its blocks; its
        rows count on return.

        With a draft_embed_target the last id is PLACEHOLDER and stays on the device; a single draft then waits for
        nothing.
        """
        inputs = self.propose_inputs
        if inputs is None or not inputs.fits(state.seq_len, drafts) or not self._steps_are_ours():
            return None
        inputs.set(token, target_hidden, position, state.seq_len, drafts, state.block_table, stream)
        self._run_drafts(inputs, drafts, ctx, stream)
        if draft_embed_target is not None:
            self._stage_embedding(inputs.told(drafts - 1), draft_embed_target, stream)
        ids = inputs.read(drafts if draft_embed_target is None else drafts - 1, stream)
        state.seq_len += drafts
        state.last_pair_key = position + drafts - 2
        return ids if draft_embed_target is None else [*ids, PLACEHOLDER]

    def _steps_are_ours(self) -> bool:
        """Whether `forward_one` is the head's own. What a subclass or a caller put in its place wants to be called,
        once a draft."""
        return getattr(self.forward_one, "__func__", None) is MtpHeadForward.forward_one

    def _run_drafts(self, inputs: ProposeInputs, drafts: int, ctx: ForwardContext, stream: StreamLike) -> None:
        buf = ctx.buffers
        embed = buf.ssm_qkvz()
        if self.dense_ffn_generic is None:
            # A pass leases it for its experts, a replay writes it without asking.
            buf.lease(self._routing).release()
        pick = self.lm_head_argmax if self.picks else None

        def forward(hidden: DevicePtr, meta: AttnMetadataDev, on: StreamLike) -> DevicePtr:
            (self._forward_row if pick is None else self._forward_to_norm)(embed, hidden, meta, ctx, on)
            return self._chain_hidden(ctx)

        def work(on: StreamLike) -> None:
            chain_drafts(self, inputs, drafts, ctx, forward, pick, on)

        self.propose_graphs.run(GraphKey(drafts, weakref.ref(buf)), work, stream)

    def _chain_hidden(self, ctx: ForwardContext) -> DevicePtr:
        """The hidden row from which the next draft goes on: the drafter's residual stream, or what it is after the
        final norm."""
        return ctx.buffers.norm_output() if self.levers.chain_postnorm else self.output_row(ctx)
