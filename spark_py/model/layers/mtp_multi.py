# SPDX-License-Identifier: AGPL-3.0-only
"""Twin of `layers/mtp_multi.rs`: a proposer of several MTP modules (MiniMax M2, DeepSeek-V3 style).

It differs from the single MtpHead in one way: each draft is made by another module, with weights and a KV cache of its
own. Draft i comes from `modules[i].forward_one(previous draft, previous module's hidden)`. Asked for fewer drafts than
there are modules, the first of them draft.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from weakref import WeakSet

from ...runtime.errors import InvalidArgumentError, ProposerStateError
from ...runtime.gpu import DevicePtr, GpuBackend, StreamLike
from ...runtime.sizes import count
from ..layer import DraftProposer, ForwardContext, GrammarMask, ProposerState
from ..row_policy import RowPolicy
from .mtp_checks import check_address, check_last_row, check_position, check_token, check_verdict, require_verdict
from .mtp_head import MtpHead
from .mtp_head.grammar import MaskWords, masks_per_draft
from .mtp_multi_rows import CompleteRows, last_position
from .mtp_multi_state import MultiModuleMtpState, MultiSnapshot, OutputStore

__all__ = ["MultiModuleMtpHead", "MultiModuleMtpState"]

log = logging.getLogger("spark_py.model.mtp_multi")


class MultiModuleMtpHead(DraftProposer):
    """N independent MTP modules, one for each draft.

    modules: not empty, all different, of one backend, hidden size and set of levers, with as many rows in the embedding
    table; the head takes them over, and `release` releases them. InvalidArgumentError otherwise, and for more modules
    than the config's `num_mtp_modules` says; fewer are logged, and `num_modules` is what there is.

    Which rows stay after a verify of k drafts:

    SEED, the engine's rule: a propose writes one row a module, and module i keeps its row where i < accepted. The
    sequence moves on by 1 + accepted, so that every module lacks rows from then on, and none sees the prompt.

    VERIFIED: module i keeps its row where its token is confirmed, i <= accepted.

    VERIFIED with refeed: no module ever lacks a row (see mtp_multi_rows for the rule). Prompts and accepted drafts are
    fed, `supports_drafter_prefill` is True, and a propose writes what later modules need besides the rows of drafts.
    A feed runs the whole body of every module but the last, row by row, in the arena: it destroys `hidden_states`.
    Without rows that go before, as after a pause of drafting, module i begins i positions later again.

    Rows are neither carried to other sequences nor drafted in batches. Drafts go on from `output_row` of the module
    before, `hidden_states` as in the engine or what its body says, whatever `chain_postnorm` says.
    """

    def __init__(self, modules: Sequence[MtpHead]) -> None:
        if not modules:
            raise InvalidArgumentError(
                "modules of a MultiModuleMtpHead", 0, "at least one module is needed; a single one can be an MtpHead"
            )
        self.modules = list(modules)
        first = self.modules[0]
        self.gpu, self.levers, self.h = first.gpu, first.levers, first.h
        if len({id(module) for module in self.modules}) < len(self.modules):
            raise InvalidArgumentError("modules", self.modules, "each has weights and a KV cache of its own, used once")
        for i, module in enumerate(self.modules):
            for what, value, wanted in (
                ("backend", module.gpu, self.gpu),
                ("levers", module.levers, self.levers),
                ("hidden size", module.h, self.h),
                ("embedding rows", module.embed_rows, first.embed_rows),
            ):
                if value is not wanted and value != wanted:
                    raise InvalidArgumentError(f"{what} of modules[{i}]", value, f"that of modules[0], {wanted}")
        configured = first.config.num_mtp_modules
        if configured and len(self.modules) > configured:
            raise InvalidArgumentError("modules", len(self.modules), f"num_mtp_modules is {configured}")
        if len(self.modules) < configured:
            log.warning("using %d of %d MTP modules", len(self.modules), configured)
        self.max_seq_len = min(module.max_seq_len for module in self.modules)
        self.embed_rows = first.embed_rows
        self.draft_vocab = max(module.draft_vocab for module in self.modules)
        self._verified = self.levers.row_policy is RowPolicy.VERIFIED
        self._states: WeakSet[MultiModuleMtpState] = WeakSet()
        self._warned_masks = False
        self._last_conf: float | None = None
        self._deferred: int | None = None
        self._stack = ExitStack()
        self._rows: CompleteRows | None = None
        if self._verified and self.levers.refeed:
            try:
                store = OutputStore(self.gpu, len(self.modules), self.h, self._stack)
            except BaseException:
                self._stack.close()
                raise
            self._rows = CompleteRows(self.modules, store)
        elif self.levers.refeed:
            log.warning("refeed does nothing for several modules under row policy %s", self.levers.row_policy.value)
        for module in self.modules:
            self._stack.callback(module.release)

    def __repr__(self) -> str:
        return f"MultiModuleMtpHead(modules={len(self.modules)})"

    def num_modules(self) -> int:
        """Modules that there are: the most drafts of a propose."""
        return len(self.modules)

    # ------------------------------------------------------------ life

    def release(self) -> None:
        """Release every module and what this head has itself; a second call does nothing. All are tried, then an error
        is raised."""
        self._stack.close()

    def __enter__(self) -> MultiModuleMtpHead:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    # ------------------------------------------------------------ states

    def alloc_state(self, gpu: GpuBackend) -> MultiModuleMtpState:
        """A fresh state of every module. One that is dropped gives its blocks back too, with a warning."""
        state = MultiModuleMtpState([module.alloc_state(gpu) for module in self.modules])
        if self._rows is not None:
            self._rows.store.watch(state, state.slab)
        self._states.add(state)
        return state

    def free_state(self, gpu: GpuBackend, state: ProposerState) -> None:
        """Give the blocks of every module back; the state is fresh then. Any number of times."""
        own = self._own(state)
        for module, per in zip(self.modules, own.per_module, strict=True):
            module.free_state(gpu, per)
        own.last_num_drafted = own.last_start = 0
        own.outputs = None
        if self._rows is not None:
            self._rows.store.give_back(own.slab)

    def _own(self, state: ProposerState) -> MultiModuleMtpState:
        if not isinstance(state, MultiModuleMtpState):
            raise ProposerStateError(f"a {type(state).__name__} is no state of a MultiModuleMtpHead")
        if state not in self._states:
            raise ProposerStateError("the state belongs to another MultiModuleMtpHead")
        return state

    def drafter_rows(self, state: ProposerState) -> int:
        """KV rows of module 0, which begins first."""
        return self._own(state).per_module[0].seq_len

    def last_pair_key(self, state: ProposerState) -> int | None:
        """Pair key of the last row of module 0; None without rows."""
        return self._own(state).per_module[0].last_pair_key

    def last_confidence(self) -> float | None:
        """Smallest probability among the drafts of the last propose; None where draft_conf_tau is 0 or none was
        made."""
        return self._last_conf if self.levers.draft_conf_tau > 0.0 else None

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
        """Guesses, draft i from module i: `num_drafts`, but not more than there are modules, and one where a single
        grammar mask covers one position (masks for each are num_drafts in number). 0 drafts touch nothing.

        The errors are those of `MtpHead.propose`; what raises leaves every module's state as it was. With a
        draft_embed_target, which the last draft alone receives, the last id is a placeholder 0, unless a mask was
        given.
        """
        own = self._own(state)
        wanted = count("num_drafts", num_drafts, 0)
        if wanted == 0:
            return []
        token, start = check_token("last_token", last_token, self.embed_rows), count("position", position)
        masks = masks_per_draft(grammar_bitmask, wanted, self.draft_vocab)
        if len(masks) < wanted and not self._warned_masks:
            self._warned_masks = True
            log.warning("one grammar mask covers one position: 1 draft instead of %d", wanted)
        del masks[len(self.modules) :]
        k = len(masks)
        check_position(start, k, self.max_seq_len)
        check_address("target_hidden", target_hidden)
        if draft_embed_target is not None:
            check_address("draft_embed_target", draft_embed_target)
        require_verdict(own.last_num_drafted, "propose")
        self._check_buffers(ctx)
        ahead = max(last_position(per) for per in own.per_module)
        if self._rows is not None and start <= ahead:
            raise InvalidArgumentError("position", start, f"the last row is at {ahead}, the next one comes after it")

        before, conf, deferred = own.snapshot(), self._last_conf, self._deferred
        try:
            self._last_conf, self._deferred = None, None
            for per in own.per_module:
                per.base_pair_key = per.last_pair_key
            own.last_start = start

            def draft(i: int, token: int, hidden: DevicePtr) -> int:
                # The last draft's embedding alone is staged: the verify reads it.
                embed_target = draft_embed_target if i == k - 1 else None
                return self._draft(i, k, token, hidden, start + i, own, ctx, stream, embed_target, masks[i])

            if self._rows is None:
                drafts = self._draft_rows(draft, token, target_hidden, k, own, ctx)
            else:
                drafts = self._rows.draft(draft, token, target_hidden, start, k, own, ctx, stream)
        except BaseException:
            self._last_conf, self._deferred = conf, deferred
            self._restore(own, before)
            raise
        return drafts

    def _draft_rows(
        self,
        draft: Callable[[int, int, DevicePtr], int],
        token: int,
        hidden: DevicePtr,
        k: int,
        own: MultiModuleMtpState,
        ctx: ForwardContext,
    ) -> list[int]:
        """One row a draft, as the engine does."""
        for module, per in zip(self.modules[:k], own.per_module, strict=False):
            module.reserve_rows(per, per.seq_len + 1)
        drafts: list[int] = []
        for i in range(k):
            token = draft(i, token, hidden)
            drafts.append(token)
            # Module i + 1 consumes module i's hidden state, which is there before the LM head runs.
            hidden = self.modules[i].output_row(ctx)
        return drafts

    def _draft(
        self,
        i: int,
        k: int,
        token: int,
        hidden: DevicePtr,
        position: int,
        own: MultiModuleMtpState,
        ctx: ForwardContext,
        stream: StreamLike,
        embed_target: DevicePtr | None,
        mask: MaskWords | None,
    ) -> int:
        module, per = self.modules[i], own.per_module[i]
        module.last_conf = 1.0
        draft = module.forward_one(token, hidden, position, per, ctx, stream, embed_target, mask)
        per.last_num_drafted += 1
        own.last_num_drafted += 1
        self._last_conf = module.last_conf if self._last_conf is None else min(self._last_conf, module.last_conf)
        if embed_target is not None:
            self._deferred = i
        log.debug(
            "MultiMTP propose[%d/%d]: token=%d pos=%d module_seq_len=%d → draft=%d",
            i, k, token, position, per.seq_len, draft,
        )  # fmt: skip
        return draft

    def read_deferred_draft_token(self, gpu: GpuBackend) -> int:
        """The id that the last propose left on the device, in the module that made the last draft; ProposerStateError
        where it left none. (Rust reads the last module's, which is another where fewer drafted.)"""
        if self._deferred is None:
            raise ProposerStateError("the last propose left no draft on the device: it had no draft_embed_target")
        return self.modules[self._deferred].read_deferred_draft_token(gpu)

    def after_verify(self, num_accepted: int, state: ProposerState, stream: StreamLike) -> None:
        """Keep the rows that the policy says; blocks stay for the next rows. ProposerStateError without a propose whose
        verdict is outstanding, InvalidArgumentError for more accepted than drafted."""
        own = self._own(state)
        k = own.last_num_drafted
        accepted = check_verdict(num_accepted, k)
        confirmed = own.last_start + accepted
        for i, per in enumerate(own.per_module):
            written = per.last_num_drafted
            if self._rows is not None:
                drop = min(max(last_position(per) - confirmed, 0), written)
            else:
                drop = written if i > accepted or (i == accepted and not self._verified) else 0
            per.seq_len -= drop
            if drop and drop == written:
                per.last_pair_key = per.base_pair_key
            elif drop and per.last_pair_key is not None:
                per.last_pair_key -= drop
            per.last_num_drafted, per.base_pair_key = 0, None
        if own.outputs is not None:
            own.outputs.keep(own.last_start, confirmed)
        own.last_num_drafted = 0
        log.debug("MultiMTP after_verify: accepted=%d of %d; per-module trim done", accepted, k)

    # ------------------------------------------------------------ complete modules

    @property
    def supports_drafter_prefill(self) -> bool:
        """Whether rows can be fed: where the levers say VERIFIED with refeed."""
        return self._rows is not None

    def prefill_drafter(
        self,
        prompt_tokens: Sequence[int],
        hiddens: DevicePtr,
        state: ProposerState,
        ctx: ForwardContext,
        stream: StreamLike,
        hidden_stacks: DevicePtr | None = None,
    ) -> int:
        """Feed a prompt to a fresh state: rows at positions i + 1 .. P - 1 of module i. Gives P - 1, module 0's."""
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
        """Append rows to every module, and give module 0's; see DraftProposer, where row_base is module 0's. A row that
        a module has already is not written again. 0 where `supports_drafter_prefill` is False. The errors are those of
        `MtpHead.catchup_drafter`."""
        own = self._own(state)
        ids = [check_token(f"tokens[{i}]", token, self.embed_rows) for i, token in enumerate(tokens)]
        base, first = count("row_base", row_base, 0), count("pos_base", pos_base)
        require_verdict(own.last_num_drafted, "feeding rows")
        if self._rows is None:
            return 0
        if base != (held := own.per_module[0].seq_len):
            raise InvalidArgumentError("row_base", base, f"module 0 has {held} rows")
        if first <= (ahead := last_position(own.per_module[0])):
            raise InvalidArgumentError("pos_base", first, f"the last row is at {ahead}, the next one comes after it")
        if check_last_row(first, len(ids) - 1, self.max_seq_len) < first:
            return 0
        check_address("hiddens", hiddens)
        self._check_buffers(ctx)
        before = own.snapshot()
        try:
            self._rows.feed(ids[1:], hiddens, first, own, ctx, stream)
        except BaseException:
            self._restore(own, before)
            raise
        return len(ids) - 1

    # ------------------------------------------------------------ checks

    def _restore(self, own: MultiModuleMtpState, before: MultiSnapshot) -> None:
        for module, per, taken in zip(self.modules, own.per_module, before.per_module, strict=True):
            module.restore_state(per, taken)
        own.restore(before)

    def _check_buffers(self, ctx: ForwardContext) -> None:
        for module in self.modules:
            module.check_buffers(ctx.buffers)
