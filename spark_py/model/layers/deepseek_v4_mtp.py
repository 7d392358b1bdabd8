# SPDX-License-Identifier: AGPL-3.0-only
"""Twin of `layers/deepseek_v4_mtp.rs`: DeepSeek-V4's multi-token-prediction module as a DraftProposer.

The module's body is a whole V4 layer; what is around it is in `deepseek_v4_mtp_forward`. Later drafts come from the
same module again. What Rust has and this port does without: the low-rank form of connections, which V4MtpWeights cannot
hold, and a module without connections; a token id for hash routing, which an MTP module never has; `comm` and the flags
of other subsystems in its ForwardContext.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...runtime.gpu import DevicePtr, GpuBackend, StreamLike
from ...runtime.sizes import count
from ..layer import AttnMetadataDev, EmptyLayerState, ForwardContext, GrammarMask, LayerState, ProposerState
from .deepseek_v4_mtp_diagnostics import stage_norms
from .deepseek_v4_mtp_forward import DeepseekV4MtpForward
from .deepseek_v4_mtp_new import log
from .hidden_mode import HiddenMode
from .mtp_checks import check_address
from .mtp_head import MtpProposerState
from .mtp_head.diagnostics import log_shadow_topk, log_stage_norms
from .mtp_head.grammar import MaskWords
from .mtp_head.lm_head_argmax import LmHeadArgmax
from .mtp_head.new import BF16_BYTES, KV_BLOCK_SIZE
from .mtp_head.pick import PLACEHOLDER
from .mtp_head.propose_graph import GraphKey, ProposeGraphs, ProposeInputs, chain_drafts, graphs_wanted
from .mtp_head.states import MtpStates

__all__ = ["DeepseekV4MtpHead", "DeepseekV4MtpProposerState"]


@dataclass(slots=True, eq=False, weakref_slot=True)
class DeepseekV4MtpProposerState(MtpProposerState):
    """The drafter's rows of one sequence. `body_state`: that of the body, whose attention keeps everything in the
    pool."""

    body_state: LayerState = field(default_factory=EmptyLayerState)


class DeepseekV4MtpHead(DeepseekV4MtpForward, MtpStates):
    """A DeepSeek-V4 MTP module that drafts. See DeepseekV4MtpNew for the constructor, MtpStates for sequences' rows and
    verdicts, DraftProposer for the rest.

    Modes: a propose with a `target_hidden_stack`, FP32 [hc_mult, h], is in reference mode; its later drafts go on from
    the head's own streams. One without is in the engine's collapsed mode, its later drafts from the head's collapsed
    row. Rows are fed likewise, by `hidden_stacks` or `hiddens`. A sequence's rows may come from both; they differ.

    Positions: as in the engine, the row of a hidden is rotated one further than DeepSeek's code does. All rows are, so
    that nothing but distances counts; fed rows too.
    """

    state_class = DeepseekV4MtpProposerState
    log = log

    def _build(self) -> None:
        super()._build()
        self.propose_inputs: dict[bool, ProposeInputs] = {}
        self.propose_graphs: dict[bool, ProposeGraphs] = {}
        self.lm_head_argmax: LmHeadArgmax | None = None
        if graphs_wanted(self.levers):
            if self.spark_gemv_rows_k and not self.levers.keep_logits:
                vocab, table = self.draft_vocab, self.embed_tokens
                self.lm_head_argmax = LmHeadArgmax(self.gpu, self.lm_head, vocab, self.h, table, self._alloc) or None
            capacity = self.max_seq_len // KV_BLOCK_SIZE + 1
            for stacked, nbytes in ((False, self.h * BF16_BYTES), (True, self.shapes.hyper.stream_bytes)):
                self.propose_inputs[stacked] = ProposeInputs(self.gpu, nbytes, capacity, self._alloc, self._stack)
                self.propose_graphs[stacked] = ProposeGraphs(self.gpu)
                self._stack.callback(self.propose_graphs[stacked].release)

    @property
    def reads_streams(self) -> bool:
        """Whether the decoding loop is to pass the target's streams: in reference mode."""
        return self.hidden_mode is HiddenMode.REFERENCE

    def propose(
        self,
        last_token: int,
        target_hidden: DevicePtr,
        position: int,
        num_drafts: int,
        state: ProposerState,
        ctx: ForwardContext,
        stream: StreamLike,
        draft_embed_target: DevicePtr | None = None,
        grammar_bitmask: GrammarMask | None = None,
        target_hidden_stack: DevicePtr | None = None,
    ) -> list[int]:
        """`num_drafts` guesses, or one where a single grammar mask covers one position. 0 drafts touch nothing.

        Of target_hidden and target_hidden_stack the latter is read where it is given. Limits and errors are those of
        `MtpHead.propose`, as is the placeholder 0 with a draft_embed_target.
        """
        own = self._own(state)
        wanted = count("num_drafts", num_drafts, 0)
        if wanted == 0:
            return []
        token = self._token("last_token", last_token)
        start = self._position(position, wanted)
        stacked = target_hidden_stack is not None
        source = target_hidden if target_hidden_stack is None else target_hidden_stack
        check_address("target_hidden_stack" if stacked else "target_hidden", source)
        if draft_embed_target is not None:
            check_address("draft_embed_target", draft_embed_target)
        masks = self._masks(grammar_bitmask, wanted)
        self._require_verdict(own, "propose")
        self.check_buffers(ctx.buffers)

        with self._undone_on_error(own):
            # For all drafts, before anything is queued.
            self.reserve_rows(own, own.seq_len + len(masks))
            self.last_conf, self._deferred = 1.0, False
            own.base_pair_key = own.last_pair_key
            drafts = None
            if grammar_bitmask is None:
                drafts = self._propose_on_device(
                    token, source, stacked, start, wanted, own, ctx, stream, draft_embed_target
                )
            if drafts is None:
                drafts = self._propose_by_steps(
                    token, source, stacked, start, masks, own, ctx, stream, draft_embed_target
                )
            own.last_num_drafted = len(drafts)
        return drafts

    def _propose_by_steps(
        self,
        token: int,
        source: DevicePtr,
        stacked: bool,
        position: int,
        masks: Sequence[MaskWords | None],
        own: MtpProposerState,
        ctx: ForwardContext,
        stream: StreamLike,
        draft_embed_target: DevicePtr | None,
    ) -> list[int]:
        drafts: list[int] = []
        current_token, current_source = token, source
        for i, mask in enumerate(masks):
            embed_target = draft_embed_target if i == len(masks) - 1 else None
            draft = self.forward_one(
                current_token, current_source, stacked, position + i, own, ctx, stream, embed_target, mask
            )
            self.log.debug(
                "V4 MTP propose[%d]: token=%d pos=%d mtp_seq_len=%d → draft=%d",
                i, current_token, position + i, own.seq_len, draft,
            )  # fmt: skip
            if self.levers.shadow_topk:
                logits = self._read_logits(ctx.buffers.logits(), stream)
                log_shadow_topk(logits, position + i, self.levers.shadow_topk)
            if self.levers.debug_norms:
                log_stage_norms(stage_norms(self, ctx, stream, stacked), position + i)
            drafts.append(draft)
            # Later drafts feed on the head's own output.
            current_token, current_source = draft, self.chain_source(ctx, stacked)
        return drafts

    def _propose_on_device(
        self,
        token: int,
        source: DevicePtr,
        stacked: bool,
        position: int,
        drafts: int,
        own: MtpProposerState,
        ctx: ForwardContext,
        stream: StreamLike,
        draft_embed_target: DevicePtr | None,
    ) -> list[int] | None:
        """All drafts as one graph, with the bits of `_propose_by_steps`.
        None, and nothing done, where that must be done draft by draft."""
        inputs = self.propose_inputs.get(stacked)
        ours = getattr(self.forward_one, "__func__", None) is DeepseekV4MtpForward.forward_one
        if inputs is None or not inputs.fits(own.seq_len, drafts) or not ours:
            return None
        inputs.set(token, source, position, own.seq_len, drafts, own.block_table, stream)
        ctx.buffers.logits()  # an arena that was released says so
        pick = self.lm_head_argmax

        def forward(current: DevicePtr, meta: AttnMetadataDev, on: StreamLike) -> DevicePtr:
            self._forward_row(current, stacked, meta, ctx, on, logits=pick is None)
            return self.chain_source(ctx, stacked)

        def work(on: StreamLike) -> None:
            chain_drafts(self, inputs, drafts, ctx, forward, pick, on)

        self.propose_graphs[stacked].run(GraphKey(drafts, weakref.ref(ctx.buffers)), work, stream)
        if draft_embed_target is not None:
            self._stage_embedding(inputs.told(drafts - 1), draft_embed_target, stream)
        found = inputs.read(drafts if draft_embed_target is None else drafts - 1, stream)
        own.seq_len += drafts
        own.last_pair_key = position + drafts - 2
        self.log.debug(
            "V4 MTP propose: token=%d pos=%d mtp_seq_len=%d → drafts=%s", token, position, own.seq_len, found
        )
        return found if draft_embed_target is None else [*found, PLACEHOLDER]

    def after_verify(self, num_accepted: int, state: ProposerState, stream: StreamLike) -> None:
        """Keep the rows that `rows_to_keep` says: under SEED the engine's trim of drafted - accepted. The errors are
        those of MtpStates."""
        own = self._own(state)
        drafted, before = own.last_num_drafted, own.seq_len
        super().after_verify(num_accepted, state, stream)
        self.log.debug(
            "V4 MTP after_verify: accepted=%d drafted=%d trim=%d mtp_seq_len: %d → %d",
            num_accepted, drafted, before - own.seq_len, before, own.seq_len,
        )  # fmt: skip

    def free_state(self, gpu: GpuBackend, state: ProposerState) -> None:
        """Give the blocks and the body's state back; the state is fresh then. Any number of times."""
        super().free_state(gpu, state)
        assert isinstance(state, DeepseekV4MtpProposerState)
        state.body_state.release()

    def _feed_rows(
        self,
        tokens: Sequence[int],
        hiddens: DevicePtr,
        hidden_stacks: DevicePtr | None,
        row_base: int,
        pos_base: int,
        state: MtpProposerState,
        ctx: ForwardContext,
        stream: StreamLike,
    ) -> int:
        if not self.supports_drafter_prefill:
            if not self._warned_prefill:
                self._warned_prefill = True
                self.log.warning("the drafter is not fed: its levers ask for no scratch")
            return 0
        rows = len(tokens) - 1
        if rows < 1:
            return 0
        self.reserve_rows(state, row_base + rows)
        stacked = hidden_stacks is not None
        source = hiddens if hidden_stacks is None else hidden_stacks
        self._write_fed_rows(tokens[1:], source, stacked, pos_base, state, stream)
        return rows
