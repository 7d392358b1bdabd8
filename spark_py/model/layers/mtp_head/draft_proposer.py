# SPDX-License-Identifier: AGPL-3.0-only
"""Twin of `layers/mtp_head/draft_proposer.rs`: MtpHead as a DraftProposer."""

from __future__ import annotations

from collections.abc import Sequence

from ....runtime.buffers import BufferArena
from ....runtime.errors import InvalidArgumentError
from ....runtime.gpu import DevicePtr, StreamLike
from ....runtime.sizes import count
from ...config import ModelConfig
from ...drafting.rows import propose_batch_cap
from ...layer import ForwardContext, GrammarMask, ProposerState
from ...weight_map import QuantizedWeight
from ..mtp_checks import check_address
from .diagnostics import log_shadow_topk, log_stage_norms, stage_norms
from .new import BF16_BYTES
from .propose_graph_batch import MtpHeadProposeGraphBatch
from .states import MtpStates
from .types import MtpProposerState

__all__ = ["MtpHead"]


class MtpHead(MtpHeadProposeGraphBatch, MtpStates):
    """An MTP module that drafts, with Qwen3-Next's body or another. See MtpHeadNew for the constructor, MtpStates for
    sequences' rows and verdicts, DraftProposer for the rest."""

    # ------------------------------------------------------------ drafting

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

        position: 1 to max_seq_len - 1 - num_drafts, so that every draft still has a place in the sequence;
        CapacityError beyond. ProposerStateError while the verdict on the last propose is outstanding, KvCacheExhausted
        where the pool has not all the blocks. With a draft_embed_target the last id is a placeholder 0, unless a mask
        was given.
        """
        own = self._own(state)
        drafts_wanted = count("num_drafts", num_drafts, 0)
        if drafts_wanted == 0:
            return []
        token = self._token("last_token", last_token)
        start = self._position(position, drafts_wanted)
        check_address("target_hidden", target_hidden)
        if draft_embed_target is not None:
            check_address("draft_embed_target", draft_embed_target)
        masks = self._masks(grammar_bitmask, drafts_wanted)
        self._require_verdict(own, "propose")
        self.check_buffers(ctx.buffers)

        with self._undone_on_error(own):
            self.reserve_rows(own, own.seq_len + len(masks))
            self.last_conf, self._deferred = 1.0, False
            own.base_pair_key = own.last_pair_key
            if grammar_bitmask is None:
                chained = self._propose_on_device(
                    token, target_hidden, start, drafts_wanted, own, ctx, stream, draft_embed_target
                )
                if chained is not None:
                    own.last_num_drafted = drafts_wanted
                    return chained
            drafts: list[int] = []
            cur_token, cur_hidden = token, target_hidden
            for i, mask in enumerate(masks):
                embed_target = draft_embed_target if i == len(masks) - 1 else None
                draft = self.forward_one(cur_token, cur_hidden, start + i, own, ctx, stream, embed_target, mask)
                own.last_num_drafted += 1
                drafts.append(draft)
                if self.levers.shadow_topk or self.levers.debug_norms:
                    self._log_draft(start + i, ctx, stream)
                cur_token, cur_hidden = draft, self._chain_hidden(ctx)
        return drafts

    def propose_batch(
        self,
        last_tokens: Sequence[int],
        target_hiddens: Sequence[DevicePtr],
        positions: Sequence[int],
        num_drafts: int,
        states: Sequence[ProposerState],
        ctx: ForwardContext,
        stream: StreamLike,
        out_conf: list[list[float]] | None = None,
        grammar_bitmasks: Sequence[GrammarMask | None] | None = None,
    ) -> list[list[int]] | None:
        """`propose` for each sequence, in one pass a position. None for fewer sequences than 2 or more than
        `propose_batch_max`, for a state of another proposer's type, and where a sequence has a grammar mask: its next
        draft waits for what the grammar says of the last, so that such sequences propose alone.

        A hidden row may lie anywhere but in `ssm_gates`. The errors are those of `propose`; CapacityError also for a
        block table beyond a propose_meta_stride that was asked for, InvalidArgumentError for a state that is there
        twice. After an error all states and `out_conf` are as they were.
        """
        n = len(states)
        masks = [None] * n if grammar_bitmasks is None else grammar_bitmasks
        given: dict[str, Sequence[object]] = {"last_tokens": last_tokens, "target_hiddens": target_hiddens}
        given |= {"positions": positions, "grammar_bitmasks": masks}
        for name, items in given.items():
            if len(items) != n:
                raise InvalidArgumentError(f"length of {name}", len(items), f"one for each of the {n} states")
        drafts_wanted = count("num_drafts", num_drafts, 0)
        offered = self.can_propose_batch(n, ctx.buffers) and all(isinstance(s, MtpProposerState) for s in states)
        if not offered or any(mask is not None for mask in masks):
            return None
        owned = [self._own(state) for state in states]
        if len(set(owned)) < n:
            raise InvalidArgumentError("states", n, "a state of its own for each sequence: one is there twice")
        drafts: list[list[int]] = [[] for _ in owned]
        log_probs: list[list[float]] = [[] for _ in owned]
        if drafts_wanted == 0:
            if out_conf is not None:
                out_conf[:] = log_probs
            return drafts
        tokens = [self._token(f"last_tokens[{i}]", token) for i, token in enumerate(last_tokens)]
        starts = [self._position(position, drafts_wanted) for position in positions]
        self._check_gathered(target_hiddens, ctx)
        for own in owned:
            self._require_verdict(own, "propose_batch")

        hiddens: Sequence[DevicePtr] = target_hiddens
        with self._undone_on_error(*owned):
            # For all drafts of all sequences, before anything is queued.
            for own in owned:
                self.reserve_rows(own, own.seq_len + drafts_wanted)
                own.base_pair_key = own.last_pair_key
            self.last_conf, self._deferred = 1.0, False
            chained = self._propose_batch_on_device(
                tokens, hiddens, starts, drafts_wanted, owned, ctx, stream, out_conf is not None
            )
            if chained is not None:
                drafts, log_probs = chained
            for j in range(drafts_wanted if chained is None else 0):
                at = [start + j for start in starts]
                tokens, known = self.forward_batch_position(
                    tokens, hiddens, at, owned, ctx, stream, log_probs=out_conf is not None, tables=j == 0
                )
                for i, token in enumerate(tokens):
                    drafts[i].append(token)
                    log_probs[i].append(known[i] if known else 0.0)
                if self.levers.shadow_topk or self.levers.debug_norms:
                    for i, position in enumerate(at):
                        self._log_draft(position, ctx, stream, i, n)
                chain, row_bytes = self._chain_hidden(ctx), self.h * BF16_BYTES
                hiddens = [chain.offset(i * row_bytes) for i in range(n)]
        if out_conf is not None:
            out_conf[:] = log_probs
        return drafts

    def propose_batch_max(self, buffers: BufferArena, config: ModelConfig) -> int:
        """Most sequences of one batched propose, at most 32: as many rows of this head as the arena's buffers hold,
        whatever `config` is. An NVFP4 LM head limits it to what the set's batched GEMVs take. 1: none."""
        sizes = buffers.sizes()
        widths = self.w4a16_batchm if isinstance(self.lm_head, QuantizedWeight) else None
        cap = propose_batch_cap(sizes, self.h, buffers.max_batch_tokens(), widths, self.levers.gemv_exact_m_tiers)
        for name, nbytes in self.row_bytes().items():
            cap = min(cap, getattr(sizes, name) // nbytes)
        return max(1, cap)

    def can_propose_batch(self, sequences: int, buffers: BufferArena) -> bool:
        """Whether a batched propose takes so many sequences: 2 at least."""
        return 2 <= sequences <= self.propose_batch_max(buffers, self.config)

    def _check_gathered(self, hiddens: Sequence[DevicePtr], ctx: ForwardContext) -> None:
        row_bytes, gates = self.h * BF16_BYTES, ctx.buffers.ssm_gates().address
        for i, hidden in enumerate(hiddens):
            check_address(f"target_hiddens[{i}]", hidden)
            if gates - row_bytes < hidden.address < gates + len(hiddens) * row_bytes:
                limit = "another buffer than ssm_gates, where all rows are gathered first"
                raise InvalidArgumentError(f"target_hiddens[{i}]", hidden, limit)

    def _log_draft(self, position: int, ctx: ForwardContext, stream: StreamLike, row: int = 0, rows: int = 1) -> None:
        if self.levers.shadow_topk:
            log_shadow_topk(self._read_logits(self._logits_row(row, ctx), stream), position, self.levers.shadow_topk)
        if self.levers.debug_norms:
            log_stage_norms(stage_norms(self, ctx, stream, row, rows), position)

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
        return self.drafter_rows_impl(tokens, hiddens, row_base, pos_base, state, ctx, stream)
