# SPDX-License-Identifier: AGPL-3.0-only
"""Twin of `layers/mtp_head/draft_proposer.rs`: MtpHead as a DraftProposer."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np

from ....runtime.buffers import BufferArena
from ....runtime.errors import CapacityError, InvalidArgumentError, ProposerStateError
from ....runtime.gpu import DevicePtr, GpuBackend, StreamLike
from ....runtime.sizes import count, integer
from ...config import ModelConfig
from ...drafting.rows import propose_batch_cap
from ...layer import DraftProposer, ForwardContext, GrammarMask, ProposerState
from ...row_policy import rows_to_keep
from ...weight_map import QuantizedWeight
from .diagnostics import log_shadow_topk, log_stage_norms, stage_norms
from .grammar import masks_per_draft
from .new import BF16_BYTES, KV_BLOCK_SIZE, log
from .propose_graph_batch import MtpHeadProposeGraphBatch
from .types import MtpProposerState, MtpSnapshot

__all__ = ["MtpHead"]


class MtpHead(MtpHeadProposeGraphBatch, DraftProposer):
    """A Qwen3-Next, 3.5 or 3.6 MTP module that drafts. See MtpHeadNew for the constructor, DraftProposer for the rest.

    A state belongs to the head that made it. What raises leaves it as it was, blocks included.
    """

    # ------------------------------------------------------------ states

    def alloc_state(self, gpu: GpuBackend) -> MtpProposerState:
        """A fresh state. One that is dropped without `free_state` gives its blocks back too, with a warning."""
        state = MtpProposerState()
        head = weakref.ref(self)

        def reclaim(table: list[int]) -> None:
            if table and (owner := head()) is not None and not owner._released:
                log.warning("a drafter state with %d KV blocks was dropped without free_state", len(table))
                owner._free_table(table)

        state.watch(reclaim)
        self._states.add(state)
        return state

    def free_state(self, gpu: GpuBackend, state: ProposerState) -> None:
        """Give the blocks back; the state is fresh then. Any number of times."""
        self._free_table(self._own(state).block_table)
        self._own(state).reset()

    def _free_table(self, table: list[int]) -> None:
        if self._released:
            table.clear()
        with self._kv_lock:
            self.kv_cache.free_blocks(table)
            table.clear()

    def reserve_rows(self, state: MtpProposerState, rows: int) -> None:
        """Blocks for `rows` rows: all that are missing, or KvCacheExhausted and none."""
        self._ensure_blocks(state, rows)

    def restore_state(self, state: MtpProposerState, taken: MtpSnapshot) -> None:
        """Take a state of this head back to `state.snapshot()` and give back the blocks that came after it."""
        self._free_table(state.restore(taken))

    def _own(self, state: ProposerState) -> MtpProposerState:
        if not isinstance(state, MtpProposerState):
            raise ProposerStateError(f"a {type(state).__name__} is no state of an MtpHead")
        if state not in self._states:
            raise ProposerStateError("the state belongs to another MtpHead")
        return state

    def drafter_rows(self, state: ProposerState) -> int:
        """KV rows that the state holds."""
        return self._own(state).seq_len

    def last_pair_key(self, state: ProposerState) -> int | None:
        """Pair key of the last row that the state holds; None without rows."""
        return self._own(state).last_pair_key

    def last_confidence(self) -> float | None:
        """Smallest probability among the drafts of the last propose; None where draft_conf_tau is 0."""
        return self.last_conf if self.levers.draft_conf_tau > 0.0 else None

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
        _address("target_hidden", target_hidden)
        if draft_embed_target is not None:
            _address("draft_embed_target", draft_embed_target)
        masks = masks_per_draft(grammar_bitmask, drafts_wanted, self.draft_vocab)
        if len(masks) < drafts_wanted and not self._warned_masks:
            self._warned_masks = True
            log.warning("one grammar mask covers one position: 1 draft instead of %d", drafts_wanted)
        self._require_verdict(own, "propose")
        self.check_buffers(ctx.buffers)

        before = own.snapshot()
        conf, deferred = self.last_conf, self._deferred
        try:
            self._ensure_blocks(own, own.seq_len + len(masks))
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
        except BaseException:
            self.last_conf, self._deferred = conf, deferred
            self.restore_state(own, before)
            raise
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
        for i, hidden in enumerate(target_hiddens):
            self._check_gathered(f"target_hiddens[{i}]", hidden, n, ctx)
        for own in owned:
            self._require_verdict(own, "propose_batch")

        before = [own.snapshot() for own in owned]
        conf, deferred = self.last_conf, self._deferred
        hiddens: Sequence[DevicePtr] = target_hiddens
        try:
            # For all drafts of all sequences, before anything is queued.
            for own in owned:
                self._ensure_blocks(own, own.seq_len + drafts_wanted)
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
        except BaseException:
            self.last_conf, self._deferred = conf, deferred
            for own, taken in zip(owned, before, strict=True):
                self.restore_state(own, taken)
            raise
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

    def _check_gathered(self, name: str, hidden: DevicePtr, n: int, ctx: ForwardContext) -> None:
        _address(name, hidden)
        row_bytes, gates = self.h * BF16_BYTES, ctx.buffers.ssm_gates()
        if hidden < gates.offset(n * row_bytes) and gates < hidden.offset(row_bytes):
            raise InvalidArgumentError(name, hidden, "another buffer than ssm_gates, where all rows are gathered first")

    def _log_draft(self, position: int, ctx: ForwardContext, stream: StreamLike, row: int = 0, rows: int = 1) -> None:
        if self.levers.shadow_topk:
            log_shadow_topk(self._read_logits(self._logits_row(row, ctx), stream), position, self.levers.shadow_topk)
        if self.levers.debug_norms:
            log_stage_norms(stage_norms(self, ctx, stream, row, rows), position)

    def read_deferred_draft_token(self, gpu: GpuBackend) -> int:
        """The id that the last propose left on the device; ProposerStateError where it left none."""
        if not self._deferred:
            raise ProposerStateError("the last propose left no draft on the device: it had no draft_embed_target")
        token = np.empty(1, "<u4")
        gpu.copy_d2h(self.draft_token_id_dev, token.view(np.uint8))
        return int(token[0])

    def after_verify(self, num_accepted: int, state: ProposerState, stream: StreamLike) -> None:
        """Keep the rows that `rows_to_keep` says; blocks stay for the next rows. ProposerStateError without a propose
        whose verdict is outstanding, InvalidArgumentError for more accepted than drafted."""
        own = self._own(state)
        if own.last_num_drafted == 0:
            raise ProposerStateError("after_verify without drafts to verify: propose comes first, and each counts once")
        drafted = own.last_num_drafted
        keep = rows_to_keep(self.levers.row_policy, drafted, num_accepted, self.levers.refeed)
        own.seq_len -= drafted - keep
        if keep == 0:
            own.last_pair_key = own.base_pair_key
        elif own.last_pair_key is not None:
            own.last_pair_key -= drafted - keep
        own.last_num_drafted, own.base_pair_key = 0, None

    # ------------------------------------------------------------ feeding

    def prefill_drafter(
        self,
        prompt_tokens: Sequence[int],
        hiddens: DevicePtr,
        state: ProposerState,
        ctx: ForwardContext,
        stream: StreamLike,
        hidden_stacks: DevicePtr | None = None,
    ) -> int:
        """Feed a prompt to a fresh state: rows 0 .. P - 2 at positions 1 .. P - 1."""
        return self.catchup_drafter(prompt_tokens, hiddens, 0, 1, state, ctx, stream)

    def catchup_drafter(
        self,
        tokens: Sequence[int],
        hiddens: DevicePtr,
        row_base: int,
        pos_base: int,
        state: ProposerState,
        ctx: ForwardContext,
        stream: StreamLike,
        hidden_stacks: DevicePtr | None = None,
    ) -> int:
        """Append rows; see DraftProposer. InvalidArgumentError where `row_base` is not the state's row count or a pair
        key would not follow the last one, CapacityError for positions from max_seq_len on."""
        own = self._own(state)
        ids = [self._token(f"tokens[{i}]", token) for i, token in enumerate(tokens)]
        base, first = count("row_base", row_base, 0), count("pos_base", pos_base)
        self._require_verdict(own, "feeding rows")
        if base != own.seq_len:
            raise InvalidArgumentError("row_base", base, f"the state has {own.seq_len} rows")
        if own.last_pair_key is not None and first - 1 <= own.last_pair_key:
            raise InvalidArgumentError(
                "pos_base", first, f"the last pair key is {own.last_pair_key}, the next is larger"
            )
        if (last := first + len(ids) - 2) >= self.max_seq_len:
            raise CapacityError("position of the last row", last, self.max_seq_len - 1, "the last of a sequence")
        if len(ids) > 1:
            _address("hiddens", hiddens)
        before = own.snapshot()
        try:
            return self.drafter_rows_impl(ids, hiddens, base, first, own, ctx, stream)
        except BaseException:
            self.restore_state(own, before)
            raise

    def take_drafter_kv(self, state: ProposerState) -> tuple[list[int], int, int] | None:
        """Move the rows out; the state is fresh then. None where there are none."""
        own = self._own(state)
        self._require_verdict(own, "take_drafter_kv")
        if not own.block_table or own.seq_len == 0 or own.last_pair_key is None:
            return None
        taken = list(own.block_table), own.seq_len, own.last_pair_key
        own.reset()
        return taken

    def install_drafter_kv(self, state: ProposerState, blocks: Sequence[int], rows: int, last_pair_key: int) -> bool:
        """Move rows into a fresh state; False where it has any. The blocks are the state's from then on."""
        own = self._own(state)
        held, key = count("rows", rows), count("last_pair_key", last_pair_key, 0)
        if -(-held // KV_BLOCK_SIZE) > len(blocks):
            raise InvalidArgumentError("rows", held, f"{len(blocks)} blocks hold {len(blocks) * KV_BLOCK_SIZE}")
        if held > key + 1:
            raise InvalidArgumentError(
                "last_pair_key", key, f"at least {held - 1}, since {held} rows have keys of their own"
            )
        for block in blocks:
            if self.kv_cache.ref_count(block) == 0:
                raise InvalidArgumentError("blocks", block, "a block that was taken from this head and not given back")
        if own.block_table or own.seq_len:
            return False
        own.block_table.extend(blocks)
        own.seq_len, own.last_pair_key = held, key
        return True

    def free_drafter_kv(self, blocks: Sequence[int]) -> None:
        """Give back blocks that `take_drafter_kv` moved out."""
        self._free_table(list(blocks))

    # ------------------------------------------------------------ checks

    def _token(self, name: str, token: object) -> int:
        number = integer(name, token)
        if not 0 <= number < self.embed_rows:
            raise InvalidArgumentError(name, number, f"0 to {self.embed_rows - 1}, the rows of the embedding table")
        return number

    def _position(self, position: int, drafts: int) -> int:
        number = count("position", position)
        if (last := number + drafts) >= self.max_seq_len:
            raise CapacityError("position of the last draft", last, self.max_seq_len - 1, "the last of a sequence")
        return number

    def _require_verdict(self, state: MtpProposerState, what: str) -> None:
        if state.last_num_drafted:
            raise ProposerStateError(
                f"{what} before the verdict on the last {state.last_num_drafted} drafts: call after_verify first"
            )


def _address(name: str, ptr: DevicePtr) -> None:
    if not isinstance(ptr, DevicePtr) or ptr.is_null:
        raise InvalidArgumentError(name, ptr, "a device address is needed")
