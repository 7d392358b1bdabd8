# SPDX-License-Identifier: AGPL-3.0-only
"""Target, TargetState, TargetRows: the model that verifies drafts, as the decoding loop sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...runtime.buffers import BufferArena
from ...runtime.errors import CapacityError, InvalidArgumentError, ReleasedError
from ...runtime.gpu import DevicePtr, GpuBackend, StreamLike
from ..config import ModelConfig

__all__ = ["Target", "TargetRows", "TargetState", "check_token"]


def check_token(name: str, token: int, vocab_size: int) -> int:
    """`token` as an int if it is an id below `vocab_size`. InvalidArgumentError otherwise, before anything is read:
    an id beyond the embedding table would be read from other memory."""
    number = isinstance(token, (int, np.integer)) and not isinstance(token, bool)
    if not number or not 0 <= token < vocab_size:
        raise InvalidArgumentError(name, token, f"a token id from 0 to {vocab_size - 1} is needed")
    return int(token)


@dataclass(slots=True)
class TargetState:
    """One sequence in a target: the tokens it has processed, its KV blocks and the hidden row of every token.

    `hidden` is BF16 [max_seq_len, hidden_size] on the device: row i is the raw residual stream (before the final norm)
    after token i; behind that norm where the family's drafters go on from there (`HeadBody.chain_after_norm`). Rows
    from `seq_len` on are stale. `streams`, of a target that keeps them: what `hidden` was collapsed from,
    `stream_bytes` a token; the model says in which format.
    """

    hidden: DevicePtr
    hidden_size: int
    tokens: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    freed: bool = False
    streams: DevicePtr = DevicePtr.NULL
    stream_bytes: int = 0

    @property
    def seq_len(self) -> int:
        """Tokens processed; also the position of the next one."""
        return len(self.tokens)

    def hidden_row(self, position: int) -> DevicePtr:
        """Address of the hidden row of the token at `position`, which must have been processed."""
        self._check_position(position)
        return self.hidden.offset(2 * position * self.hidden_size)

    def streams_row(self, position: int) -> DevicePtr:
        """Address of the residual streams of the token at `position`, which must have been processed."""
        if self.streams.is_null:
            raise InvalidArgumentError("streams", self.streams, "a target that keeps residual streams")
        self._check_position(position)
        return self.streams.offset(position * self.stream_bytes)

    def _check_position(self, position: int) -> None:
        if not 0 <= position < self.seq_len:
            raise InvalidArgumentError("position", position, f"the sequence has {self.seq_len} tokens")


@dataclass(frozen=True, slots=True)
class TargetRows:
    """What a forward over some rows gave.

    `picks` are the greedy choices, of every row after `verify`, of the last one after `prefill` and `decode`; equal
    maxima give the lowest id. `hidden` addresses the rows' hidden, BF16 [rows, hidden_size], as the state keeps
    them. `logits` are those that `picks` came from, BF16 [len(picks), vocab], on the host; None unless asked for.
    """

    picks: tuple[int, ...]
    hidden: DevicePtr
    logits: np.ndarray[Any, Any] | None = None


class Target(ABC):
    """A model that runs whole sequences and says what it would have picked after each row.

    Row-invariant: a row's logits and hidden have the same bits whatever the number of rows in the call and however
    the KV before it was written. A call that raises leaves the state as it was.
    """

    def __init__(self, gpu: GpuBackend, buffers: BufferArena, config: ModelConfig, vocab_size: int) -> None:
        self.gpu, self.buffers, self.config, self.vocab_size = gpu, buffers, config, vocab_size

    @property
    def max_seq_len(self) -> int:
        """Most tokens of a sequence."""
        return self.buffers.max_seq_len()

    @property
    def keeps_streams(self) -> bool:
        """Whether its states have the residual streams of every token, for drafters that read them."""
        return False

    @abstractmethod
    def alloc_state(self) -> TargetState:
        """A sequence without tokens."""

    @abstractmethod
    def free_state(self, state: TargetState) -> None:
        """Give back a state's blocks and memory. A second call does nothing."""

    @abstractmethod
    def room(self, state: TargetState) -> int:
        """Tokens that can be appended to the sequence now: what `max_seq_len` and the free KV blocks leave."""

    @abstractmethod
    def forward(
        self, tokens: Sequence[int], state: TargetState, stream: StreamLike, picks: int, keep_logits: bool = False
    ) -> TargetRows:
        """Append `tokens` to the sequence and pick after each of the last `picks` of them.

        InvalidArgumentError for no tokens or an id out of the vocabulary, CapacityError past `max_seq_len`,
        KvCacheExhausted where blocks are missing.
        """

    def prefill(
        self, tokens: Sequence[int], state: TargetState, stream: StreamLike, keep_logits: bool = False
    ) -> TargetRows:
        """Append a prompt, or a part of one, and pick after its last token."""
        return self.forward(tokens, state, stream, 1, keep_logits)

    def decode(self, token: int, state: TargetState, stream: StreamLike, keep_logits: bool = False) -> TargetRows:
        """Append one token and pick the next."""
        return self.forward([token], state, stream, 1, keep_logits)

    def verify(
        self, tokens: Sequence[int], state: TargetState, stream: StreamLike, keep_logits: bool = False
    ) -> TargetRows:
        """Append [last token, drafts ...] and pick after every one of them. `rollback` drops what was refused."""
        return self.forward(tokens, state, stream, len(tokens), keep_logits)

    def rollback(self, count: int, state: TargetState) -> None:
        """Drop the last `count` tokens of the sequence. Its blocks stay; rows written again have the same bits."""
        if not 0 <= count <= state.seq_len:
            raise InvalidArgumentError("count", count, f"the sequence has {state.seq_len} tokens to drop")
        if count:
            del state.tokens[-count:]

    def _checked(self, tokens: Sequence[int], state: TargetState, picks: int) -> list[int]:
        """The tokens as ints, once everything about a forward that can be known before is known to be right."""
        if state.freed:
            raise ReleasedError("a target's state that was freed")
        if len(tokens) == 0:
            raise InvalidArgumentError("tokens", list(tokens), "at least one token is needed")
        if not 0 <= picks <= len(tokens):
            raise InvalidArgumentError("picks", picks, f"at most the {len(tokens)} rows of the call")
        length = state.seq_len + len(tokens)
        if length > self.max_seq_len:
            raise CapacityError("sequence length", length, self.max_seq_len, "the max_seq_len of the target")
        return [check_token(f"tokens[{i}]", token, self.vocab_size) for i, token in enumerate(tokens)]
