# SPDX-License-Identifier: AGPL-3.0-only
"""What tests of targets read back, as bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spark_py.model.target import PagedTarget, TargetRows, TargetState
from tests.model.tiny import Array


def ids(rng: np.random.Generator, count: int, vocab: int = 300) -> list[int]:
    found: list[int] = rng.integers(0, vocab, count).tolist()
    return found


def hidden(target: PagedTarget, ptr: Any, rows: int) -> Array:
    """`rows` hidden rows as bits."""
    found = np.empty((rows, target.config.hidden_size), np.uint16)
    target.gpu.copy_d2h(ptr, found.view(np.uint8))
    return found


def kv(target: PagedTarget, state: TargetState) -> list[Array]:
    """The bits of every KV row of a sequence, by layer and side."""
    found = []
    for layer in range(target.config.num_hidden_layers):
        blocks = [target.kv_cache.read_block(layer, block) for block in state.block_table]
        for side in zip(*blocks, strict=True):
            rows = np.concatenate(side).view(np.uint16).reshape(len(side) * 16, -1)
            found.append(rows[: state.seq_len])
    return found


def streams(target: PagedTarget, state: TargetState) -> list[Array]:
    """The bits of every token's residual streams, of a target that keeps them."""
    if not target.keeps_streams or not state.seq_len:
        return []
    found = np.empty((state.seq_len, state.stream_bytes // 4), np.uint32)
    target.gpu.copy_d2h(state.streams_row(0), found.view(np.uint8))
    return [found]


class Trail:
    """What a sequence gave, row by row: logits, picks, hidden rows, streams, and its KV at the end."""

    def __init__(self, target: PagedTarget) -> None:
        self.target, self.state = target, target.alloc_state()
        self.logits: list[Array] = []
        self.picks: list[int] = []

    def verify(self, tokens: Sequence[int]) -> None:
        self._take(self.target.verify(tokens, self.state, self.target.gpu.default_stream(), True))

    def decode(self, token: int) -> None:
        self._take(self.target.decode(token, self.state, self.target.gpu.default_stream(), True))

    def prefill(self, tokens: Sequence[int]) -> None:
        self._take(self.target.prefill(tokens, self.state, self.target.gpu.default_stream(), True))

    def _take(self, rows: TargetRows) -> None:
        assert rows.logits is not None
        assert len(rows.logits) == len(rows.picks)
        self.logits += list(rows.logits.view(np.uint16))
        self.picks += rows.picks

    def bits(self) -> list[Array]:
        rows = hidden(self.target, self.state.hidden_row(0), self.state.seq_len)
        return [rows, *streams(self.target, self.state), *kv(self.target, self.state)]

    def close(self) -> None:
        self.target.free_state(self.state)
