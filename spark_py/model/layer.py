# SPDX-License-Identifier: AGPL-3.0-only
"""What layers and draft heads agree on: their context, their state, and the DraftProposer interface.

Twin of `layer.rs` and of the trait `DraftProposer`: names, argument order and defaults are Rust's.
Row, pair key and position are explained in `row_policy`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from ..runtime.buffers import BufferArena
from ..runtime.gpu import DevicePtr, GpuBackend, StreamLike
from .levers import ModelLevers

if TYPE_CHECKING:
    from .config import ModelConfig

__all__ = [
    "AttnMetadataDev",
    "DraftProposer",
    "EmptyLayerState",
    "ForwardContext",
    "GrammarMask",
    "LayerState",
    "ProposerState",
]

GrammarMask: TypeAlias = "np.ndarray[Any, np.dtype[np.int32]] | Sequence[np.ndarray[Any, np.dtype[np.int32]]]"
"""int32 words, bit j % 32 of word j // 32 set where token j is allowed (the layout of xgrammar and llguidance): [words]
for the next position alone, or one row a draft, [num_drafts, words]."""


@runtime_checkable
class LayerState(Protocol):
    """What a layer keeps of one sequence between steps; `release` gives back what it holds, any number of times."""

    def release(self) -> None: ...


class EmptyLayerState:
    """The state of a layer that keeps everything in the KV pool."""

    __slots__ = ()

    def release(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True)
class AttnMetadataDev:
    """Device addresses of the attention metadata of `num_seqs` sequences.

    positions u32 (h and w: the other rows of M-RoPE, or the same address); slot i64, block * block_size + offset, where
    the new row is written; seq_len i32, the new row included; block_table i32 [num_seqs, max_blocks_per_seq].
    """

    positions: DevicePtr
    positions_h: DevicePtr
    positions_w: DevicePtr
    slot: DevicePtr
    seq_len: DevicePtr
    block_table: DevicePtr
    max_blocks_per_seq: int
    num_seqs: int


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What a forward pass works with. `attn_metadata` is that of the target's own step; a draft head makes its own.

    Drafters share `buffers` with the target, and every step of theirs destroys its `hidden_states` and `logits`.
    """

    buffers: BufferArena
    gpu: GpuBackend
    config: ModelConfig
    levers: ModelLevers
    attn_metadata: AttnMetadataDev | None = None


@runtime_checkable
class ProposerState(Protocol):
    """A proposer's state of one sequence. Opaque: a proposer refuses another's with ProposerStateError."""

    @property
    def block_table(self) -> list[int]: ...


class DraftProposer(ABC):
    """Drafts tokens that a target then verifies. Methods may only be called from one thread at a time.

    A step: `propose`, the target's verify, `after_verify`, and with refeed `catchup_drafter`. An operation that raises
    leaves the sequence's state as it was.
    """

    @abstractmethod
    def alloc_state(self, gpu: GpuBackend) -> ProposerState:
        """A state for a new sequence, without rows and blocks."""

    def alloc_state_for(self, gpu: GpuBackend, budget_tokens: int | None) -> ProposerState:
        """As `alloc_state`, for a sequence of at most `budget_tokens` tokens (None: unknown, Rust's usize::MAX)."""
        return self.alloc_state(gpu)

    def block_gamma(self) -> int | None:
        """Drafts that come as one block, where they do."""
        return None

    def last_confidence(self) -> float | None:
        """Smallest probability among the drafts of the last propose, where it is measured."""
        return None

    @property
    def supports_drafter_prefill(self) -> bool:
        """Whether `prefill_drafter` and `catchup_drafter` feed rows. Where False, both give 0 and the drafter never
        sees the prompt. (Rust has no such method: its 0 means this and "nothing to feed".)"""
        return False

    @property
    def reads_streams(self) -> bool:
        """Whether it wants the target's residual streams, as `target_hidden_stack` and `hidden_stacks`. Only targets
        that keep them serve it; a batched propose is not given them."""
        return False

    def drafter_rows(self, state: ProposerState) -> int:
        """KV rows that the drafter holds of the sequence."""
        return 0

    def last_pair_key(self, state: ProposerState) -> int | None:
        """Pair key of the last row; None without rows."""
        return None

    def take_drafter_kv(self, state: ProposerState) -> tuple[list[int], int, int] | None:
        """Move (blocks, rows, last pair key) out of the state, which is fresh then; None where there are no rows."""
        return None

    def install_drafter_kv(self, state: ProposerState, blocks: Sequence[int], rows: int, last_pair_key: int) -> bool:
        """Move what `take_drafter_kv` gave into a fresh state; False where the proposer cannot."""
        return False

    def free_drafter_kv(self, blocks: Sequence[int]) -> None:  # noqa: B027 - optional, as in Rust
        """Give back blocks that `take_drafter_kv` moved out and that no state took over."""

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
        """Append len(tokens) - 1 rows to the `row_base` that the state has, and give their number.

        Row r is the pair (tokens[r + 1], hiddens[r]) at RoPE position pos_base + r, pair key pos_base + r - 1. hiddens:
        BF16 [len(tokens) - 1, h], the target's raw residual stream after tokens[r]. Which: `row_policy.catchup_range`.
        hidden_stacks: the residual streams of the same rows; whoever reads them then does not read `hiddens`.
        """
        return 0

    @abstractmethod
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
        """Up to `num_drafts` guesses of the tokens that follow `last_token`, which is sampled and not yet processed.

        target_hidden: BF16 [h], the target's raw residual stream, before its final norm, after the last processed one.
        position: how many tokens the target has processed. draft_embed_target: BF16 [h] that receives the embedding of
        the last draft, whose id may then be a placeholder 0 until `read_deferred_draft_token`. target_hidden_stack: the
        residual streams before they were collapsed, for heads with hyper-connections; others do not read it.
        """

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
        """As `propose`, for several sequences in one pass: a list of drafts each; None where that is not offered for
        these sequences, and where one of them drafts under a grammar. `out_conf` becomes a list a sequence, ln of the
        probability of each draft, 0.0 where it is not measured; it stays empty where the proposer measures none."""
        return None

    def propose_batch_max(self, buffers: BufferArena, config: ModelConfig) -> int:
        """Most sequences of one `propose_batch`; 1 where it is not offered."""
        return 1

    def prefill_drafter(
        self,
        prompt_tokens: Sequence[int],
        hiddens: DevicePtr,
        state: ProposerState,
        ctx: ForwardContext,
        stream: StreamLike,
        hidden_stacks: DevicePtr | None = None,
    ) -> int:
        """Feed a prompt of P tokens to a fresh state and give the rows written, P - 1. hiddens: BF16 [P, h] (the last
        row is not read), the target's raw residual stream. hidden_stacks: as in `catchup_drafter`."""
        return 0

    def read_deferred_draft_token(self, gpu: GpuBackend) -> int:
        """The id behind the placeholder of the last propose with a draft_embed_target."""
        return 0

    @abstractmethod
    def after_verify(self, num_accepted: int, state: ProposerState, stream: StreamLike) -> None:
        """Drop rows of the last propose, of whose drafts the target accepted the first `num_accepted`. Once a propose;
        not after one that gave no drafts."""

    def free_state(self, gpu: GpuBackend, state: ProposerState) -> None:  # noqa: B027 - optional, as in Rust
        """Give back everything that the state holds; it is fresh then. Any number of times."""
