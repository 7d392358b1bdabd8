# SPDX-License-Identifier: AGPL-3.0-only
"""Twin of `layers/mtp_head/propose_graph.rs`: all drafts of a propose as one graph, with one upload before it and one
read-back after it.

The host knows position, slot and length of each row before the first one runs: only the ids and the hidden rows pass
from draft to draft, and they stay on the device. Rust captures a single draft and goes through the host in between.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from ....ops.argmax import argmax_bf16
from ....ops.embed_from_argmax import embed_from_argmax
from ....runtime.buffers import BufferArena
from ....runtime.errors import CaptureStateError
from ....runtime.gpu import DevicePtr, GpuBackend, GraphHandle, StreamLike
from ....runtime.scratch import ScratchRegion
from ...layer import AttnMetadataDev, ForwardContext
from ...levers import ModelLevers
from ...weight_map import MtpWeights
from ..mtp_meta import SEQ_LEN_OFFSET, SLOT_OFFSET
from .forward import MtpHeadForward
from .forward_batch import MtpHeadForwardBatch
from .new import BF16_BYTES, KV_BLOCK_SIZE, log
from .pick import PLACEHOLDER
from .types import MtpProposerState

__all__ = ["MAX_GRAPH_DRAFTS", "GraphKey", "MtpHeadProposeGraph", "ProposeGraphs", "ProposeInputs", "graphs_wanted"]

MAX_GRAPH_DRAFTS = 16
"""Drafts of one graph; a propose of more goes draft by draft."""
MAX_GRAPHS = 128
"""Graphs that a head holds; of more, those that were used last."""
_ID_BYTES = 4
_STEP = struct.Struct("<I4xqi12x")
_TOKEN = struct.Struct("<I28x")
_TABLE = _TOKEN.size + MAX_GRAPH_DRAFTS * _STEP.size


class ProposeInputs:
    """What a graph reads that differs from propose to propose, and where it leaves the ids: fixed device buffers.

    One slab, which `set` fills with one upload: u32 token at 0; for draft i, from byte 32 * (1 + i) on, u32 position
    at 0, i64 slot at 8 and i32 length at 16, the row itself included; i32 block table [capacity] after the last of
    MAX_GRAPH_DRAFTS. `hidden`: `hidden_bytes`, a copy of the target's row. `ids`: u32
    [MAX_GRAPH_DRAFTS].

    capacity: blocks of the longest sequence. A graph bakes it in as the width of the table, so that it holds for every
    length up to there; what a table has beyond the sequence is never read.
    """

    def __init__(self, hidden_bytes: int, capacity: int, alloc: Callable[[str, int], DevicePtr]) -> None:
        self.hidden_bytes, self.capacity = hidden_bytes, capacity
        self.slab = alloc("propose_graph.inputs", _TABLE + 4 * capacity)
        self.hidden = alloc("propose_graph.hidden", self.hidden_bytes)
        self.ids = alloc("propose_graph.ids", MAX_GRAPH_DRAFTS * _ID_BYTES)

    def fits(self, rows: int, drafts: int) -> bool:
        """Whether `drafts` drafts after `rows` rows have a place here."""
        return drafts <= MAX_GRAPH_DRAFTS and _blocks(rows + drafts) <= self.capacity

    def set(
        self,
        gpu: GpuBackend,
        token: int,
        target_hidden: DevicePtr,
        position: int,
        rows: int,
        drafts: int,
        block_table: Sequence[int],
        stream: StreamLike,
    ) -> None:
        """Queue the inputs of `drafts` drafts, the first at `position`, of a sequence of `rows` rows, which `fits`.
        block_table has the blocks of all of them; target_hidden is read here and not later."""
        table = block_table[: _blocks(rows + drafts)]
        slab = bytearray(_TABLE + 4 * len(table))
        _TOKEN.pack_into(slab, 0, token)
        for i in range(drafts):
            row = rows + i
            slot = table[row // KV_BLOCK_SIZE] * KV_BLOCK_SIZE + row % KV_BLOCK_SIZE
            _STEP.pack_into(slab, _step(i), position + i, slot, row + 1)
        struct.pack_into(f"<{len(table)}i", slab, _TABLE, *table)
        gpu.copy_h2d_async(slab, self.slab, stream)
        gpu.copy_d2d_async(target_hidden, self.hidden, self.hidden_bytes, stream)

    @property
    def token(self) -> DevicePtr:
        """The id before the first draft."""
        return self.slab

    def id(self, draft: int) -> DevicePtr:
        """Where the id of a draft is left."""
        return self.ids.offset(draft * _ID_BYTES)

    def read(self, gpu: GpuBackend, drafts: int, stream: StreamLike) -> list[int]:
        """The ids of the first `drafts` drafts, once the stream has done them; 0 of them wait for nothing."""
        if drafts == 0:
            return []
        ids = np.empty(drafts, "<u4")
        gpu.copy_d2h_on_stream(self.ids, ids.view(np.uint8), stream)
        return [int(each) for each in ids]

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
    return _TOKEN.size + draft * _STEP.size


@dataclass(frozen=True)
class GraphKey:
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
        self._graphs: dict[GraphKey, GraphHandle | None] = {}
        self._failed = False

    def __len__(self) -> int:
        """Graphs that are held."""
        return sum(graph is not None for graph in self._graphs.values())

    def run(self, key: GraphKey, work: Callable[[StreamLike], None], stream: StreamLike) -> None:
        """Do on `stream` what `work` queues. It must queue the same for each call with the same key."""
        graph = None
        if seen := key in self._graphs:
            graph = self._graphs[key] = self._graphs.pop(key)  # the last in the dict is the last used
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

    def _build(self, weights: MtpWeights, main_kv_blocks: int) -> None:
        super()._build(weights, main_kv_blocks)
        if graphs_wanted(self.levers) and not self.ffn_reads_back:
            capacity = self.max_seq_len // KV_BLOCK_SIZE + 1
            self.propose_inputs = ProposeInputs(self.h * BF16_BYTES, capacity, self._alloc)
            self.propose_graphs = ProposeGraphs(self.gpu)
            self._stack.callback(self.propose_graphs.release)

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
        rows and the arena's `hidden_states`, `norm_output` and `logits`; `scratch` gets neither metadata nor id. None,
        and nothing done, where that must be done draft by draft. The state has its blocks; its rows count on return.

        With a draft_embed_target the last id is PLACEHOLDER and stays on the device; a single draft then waits for
        nothing.
        """
        inputs = self.propose_inputs
        if inputs is None or not inputs.fits(state.seq_len, drafts) or not self._steps_are_ours():
            return None
        inputs.set(self.gpu, token, target_hidden, position, state.seq_len, drafts, state.block_table, stream)
        self._run_drafts(inputs, drafts, ctx, stream)
        if draft_embed_target is not None:
            self._stage_embedding(inputs.id(drafts - 1), draft_embed_target, stream)
        ids = inputs.read(self.gpu, drafts if draft_embed_target is None else drafts - 1, stream)
        state.seq_len += drafts
        state.last_pair_key = position + drafts - 2
        return ids if draft_embed_target is None else [*ids, PLACEHOLDER]

    def _steps_are_ours(self) -> bool:
        """Whether `forward_one` is the head's own. What a subclass or a caller put in its place wants to be called,
        once a draft."""
        return getattr(self.forward_one, "__func__", None) is MtpHeadForward.forward_one

    def _run_drafts(self, inputs: ProposeInputs, drafts: int, ctx: ForwardContext, stream: StreamLike) -> None:
        buf = ctx.buffers
        logits = buf.logits()
        if self.dense_ffn_generic is None:
            # A pass leases it for its experts, a replay writes it without asking.
            buf.lease(ScratchRegion.moe_routing(1, self.experts_per_token)).release()

        def work(on: StreamLike) -> None:
            hidden, source = inputs.hidden, inputs.token
            for draft in range(drafts):
                picked, embed = inputs.id(draft), buf.ssm_qkvz()
                # The id has its place already: as the kernel's second output it stays as it is.
                table, kernel = self.embed_tokens, self.embed_from_argmax_k
                embed_from_argmax(self.gpu, kernel, source, table, embed, source, self.h, on)
                self._forward_row(embed, hidden, inputs.meta(draft), ctx, on)
                argmax_bf16(self.gpu, self.argmax_k, logits, picked, self.draft_vocab, on)
                hidden, source = self._chain_hidden(ctx), picked

        self.propose_graphs.run(GraphKey(drafts, weakref.ref(buf)), work, stream)

    def _chain_hidden(self, ctx: ForwardContext) -> DevicePtr:
        """The hidden row from which the next draft goes on: the drafter's residual stream, or what it is after the
        final norm."""
        return ctx.buffers.norm_output() if self.levers.chain_postnorm else self.output_row(ctx)
