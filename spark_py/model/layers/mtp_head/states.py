# SPDX-License-Identifier: AGPL-3.0-only
"""MtpStates: sequences' rows in the KV pool of a head with one module. The half of `layers/mtp_head/draft_proposer.rs`
that does not depend on what the module computes."""

from __future__ import annotations

import logging
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import ClassVar

from ....runtime.errors import InvalidArgumentError, ProposerStateError
from ....runtime.gpu import DevicePtr, GpuBackend, StreamLike
from ....runtime.sizes import count
from ...layer import DraftProposer, ForwardContext, GrammarMask, ProposerState
from ...row_policy import rows_to_keep
from ..mtp_checks import check_address, check_last_row, check_position, check_token, check_verdict, require_verdict
from .grammar import MaskWords, masks_per_draft
from .new import KV_BLOCK_SIZE, log
from .pick import MtpHeadPick
from .types import MtpProposerState, MtpSnapshot

__all__ = ["MtpStates"]


class _Undo:
    """What `MtpStates._undone_on_error` gives; as a generator it would take a propose three times as long."""

    __slots__ = ("_before", "_conf", "_deferred", "_head", "_owned")

    def __init__(self, head: MtpStates, owned: Sequence[MtpProposerState]) -> None:
        self._head, self._owned = head, owned
        self._before = [own.snapshot() for own in owned]
        self._conf, self._deferred = head.last_conf, head._deferred

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            return
        head = self._head
        head.last_conf, head._deferred = self._conf, self._deferred
        for own, taken in zip(self._owned, self._before, strict=True):
            head.restore_state(own, taken)


class MtpStates(MtpHeadPick, DraftProposer):
    """States, verdicts and checks of a head that sets the fields below. Its pool has blocks of KV_BLOCK_SIZE rows.

    A state belongs to the head that made it. What raises leaves it as it was, blocks included.
    """

    state_class: ClassVar[type[MtpProposerState]] = MtpProposerState
    log: ClassVar[logging.Logger] = log

    max_seq_len: int
    embed_rows: int

    # ------------------------------------------------------------ states

    def alloc_state(self, gpu: GpuBackend) -> MtpProposerState:
        """A fresh state. One that is dropped without `free_state` gives its blocks back too, with a warning."""
        state = self.state_class()
        head = weakref.ref(self)

        def reclaim(table: list[int]) -> None:
            if table and (owner := head()) is not None and not owner._released:
                owner.log.warning("a drafter state with %d KV blocks was dropped without free_state", len(table))
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

    def restore_state(self, state: MtpProposerState, taken: MtpSnapshot) -> None:
        """Take a state of this head back to `state.snapshot()` and give back the blocks that came after it."""
        self._free_table(state.restore(taken))

    def _own(self, state: ProposerState) -> MtpProposerState:
        if not isinstance(state, self.state_class):
            raise ProposerStateError(f"a {type(state).__name__} is no state of this {type(self).__name__}")
        if state not in self._states:
            raise ProposerStateError(f"the state belongs to another {type(self).__name__}")
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

    def after_verify(self, num_accepted: int, state: ProposerState, stream: StreamLike) -> None:
        """Keep the rows that `rows_to_keep` says; blocks stay for the next rows. ProposerStateError without a propose
        whose verdict is outstanding, InvalidArgumentError for more accepted than drafted."""
        own = self._own(state)
        drafted = own.last_num_drafted
        accepted = check_verdict(num_accepted, drafted)
        keep = rows_to_keep(self.levers.row_policy, drafted, accepted, self.levers.refeed)
        own.seq_len -= drafted - keep
        if keep == 0:
            own.last_pair_key = own.base_pair_key
        elif own.last_pair_key is not None:
            own.last_pair_key -= drafted - keep
        own.last_num_drafted, own.base_pair_key = 0, None

    def _masks(self, grammar_bitmask: GrammarMask | None, num_drafts: int) -> list[MaskWords | None]:
        """An entry a draft to be made: one, which is said once, where a single mask covers one position."""
        masks = masks_per_draft(grammar_bitmask, num_drafts, self.draft_vocab)
        if len(masks) < num_drafts and not self._warned_masks:
            self._warned_masks = True
            self.log.warning("one grammar mask covers one position: 1 draft instead of %d", num_drafts)
        return masks

    def _undone_on_error(self, *owned: MtpProposerState) -> _Undo:
        """What raises inside leaves the states, their blocks and what is known of the last propose as they were."""
        return _Undo(self, owned)

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
        return self.catchup_drafter(prompt_tokens, hiddens, 0, 1, state, ctx, stream, hidden_stacks)

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
        check_last_row(first, len(ids) - 1, self.max_seq_len)
        if len(ids) > 1:
            given = ("hiddens", hiddens) if hidden_stacks is None else ("hidden_stacks", hidden_stacks)
            check_address(*given)
        with self._undone_on_error(own):
            return self._feed_rows(ids, hiddens, hidden_stacks, base, first, own, ctx, stream)

    @abstractmethod
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
        """The work of `catchup_drafter`, whose arguments are known to be right; gives the rows written."""

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
        return check_token(name, token, self.embed_rows)

    def _position(self, position: int, drafts: int) -> int:
        return check_position(position, drafts, self.max_seq_len)

    def _require_verdict(self, state: MtpProposerState, what: str) -> None:
        require_verdict(state.last_num_drafted, what)
