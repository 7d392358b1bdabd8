# SPDX-License-Identifier: AGPL-3.0-only
"""PagedTarget: what targets have in common whose sequences keep their rows in blocks of one pool.

A forward runs in chunks of rows; each row attends as a sequence of its own over the paged cache, so that prefill,
decode and verify are one computation. Logits are sums that `gemv::dense_gemv_bf16` makes, also of several rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

import ml_dtypes
import numpy as np

from ...ops.argmax import argmax_bf16, argmax_bf16_batch
from ...ops.dense_gemv_bf16_batchm import MAX_ROWS, dense_gemv_batchm
from ...ops.gemv import dense_gemv
from ...ops.norm import rms_norm
from ...runtime.buffers import BufferArena
from ...runtime.gpu import DevicePtr, GpuBackend, StreamLike
from ...runtime.kv_cache import KvCacheConfig, PagedKvCache
from ...runtime.launch import div_ceil
from ...runtime.scratch import ScratchRegion
from ...runtime.sizes import count
from ..config import ModelConfig
from ..layer import AttnMetadataDev
from ..weight_map import DenseWeight
from .base import Target, TargetRows, TargetState

__all__ = ["BLOCK_SIZE", "PagedTarget"]

BLOCK_SIZE = 16
"""Tokens in a KV block."""
_SLOTS_AT, _SEQ_LENS_AT, _TABLE_AT = 768, 1536, 2048  # within the verify metadata; positions are at 0
_BF16 = 2  # bytes


class PagedTarget(Target):
    """The target over weights that somebody else owns; it owns its KV pool, the arena's `hidden_states`, `norm_output`
    and `logits` while it computes, and each state's memory.

    A subclass sets `kv_cache`, leaves what it made to `_made`, and writes `_layers`. `norm` BF16 [h] is used as the
    kernel `norm_k` does; `lm_head` is BF16 [V, h]. A chunk has as many rows as the batched GEMV takes, the arena holds
    and `most_rows` allows.
    """

    kv_cache: PagedKvCache

    def __init__(
        self,
        gpu: GpuBackend,
        buffers: BufferArena,
        config: ModelConfig,
        vocab_size: int,
        norm: DenseWeight,
        lm_head: DenseWeight,
        norm_k: tuple[str, str],
        most_rows: int = MAX_ROWS,
    ) -> None:
        super().__init__(gpu, buffers, config, vocab_size)
        self._norm, self._lm_head = norm, lm_head
        self._rms_norm_k = gpu.kernel(*norm_k)
        self._gemv_k = gpu.kernel("gemv", "dense_gemv_bf16")
        self._gemv_batchm_k = gpu.try_kernel("dense_gemv_bf16_batchm", "dense_gemv_bf16_batchm")
        self._argmax_k = gpu.kernel("argmax", "argmax_bf16")
        self._argmax_batch_k = gpu.try_kernel("argmax", "argmax_bf16_batch")
        self.chunk_rows = max(1, min(MAX_ROWS, buffers.max_batch_tokens(), most_rows))
        self._made = ExitStack()

    def _pool(self, shape: KvCacheConfig, max_seqs: int, num_blocks: int | None) -> PagedKvCache:
        """The KV pool: `num_blocks`, or enough for `max_seqs` sequences of the arena's max_seq_len."""
        blocks = count("max_seqs", max_seqs) * div_ceil(self.max_seq_len, BLOCK_SIZE)
        return PagedKvCache(shape, blocks if num_blocks is None else num_blocks, self.gpu, "target.kv")

    # ------------------------------------------------------------ states

    def alloc_state(self) -> TargetState:
        size = self.max_seq_len * self.config.hidden_size * _BF16
        return TargetState(self.gpu.alloc(size, "target.hidden"), self.config.hidden_size)

    def free_state(self, state: TargetState) -> None:
        if state.freed:
            return
        self.kv_cache.free_blocks(state.block_table)
        state.block_table.clear()
        state.tokens.clear()
        state.freed = True
        self.gpu.free(state.hidden)

    def room(self, state: TargetState) -> int:
        blocks = len(state.block_table) + self.kv_cache.num_free_blocks()
        return min(self.max_seq_len, blocks * BLOCK_SIZE) - state.seq_len

    def release(self) -> None:
        """Free the KV pool and what else the target made; a second call does nothing."""
        self._made.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    # ------------------------------------------------------------ forward

    @abstractmethod
    def _layers(self, ids: list[int], start: int, state: TargetState, stream: StreamLike) -> None:
        """Embedding and all layers over `ids` at positions `start` on: hidden rows into the state, KV into the pool."""

    def forward(
        self, tokens: Sequence[int], state: TargetState, stream: StreamLike, picks: int, keep_logits: bool = False
    ) -> TargetRows:
        ids = self._checked(tokens, state, picks)
        start = state.seq_len
        self.kv_cache.grow_table(state.block_table, div_ceil(start + len(ids), BLOCK_SIZE), "target")
        picked: list[int] = []
        logits: list[np.ndarray[Any, Any]] = []
        for first in range(0, len(ids), self.chunk_rows):
            chunk = ids[first : first + self.chunk_rows]
            self._layers(chunk, start + first, state, stream)
            wanted = min(len(chunk), first + len(chunk) - (len(ids) - picks))
            if wanted > 0:
                last = start + first + len(chunk) - wanted
                picked += self._pick(state.hidden.offset(_BF16 * last * self.config.hidden_size), wanted, stream)
                if keep_logits:
                    logits.append(self._read_logits(wanted, stream))
        state.tokens += ids
        return TargetRows(tuple(picked), state.hidden_row(start), np.concatenate(logits) if logits else None)

    def _pick(self, hidden: DevicePtr, rows: int, stream: StreamLike) -> list[int]:
        """LM head and argmax of a state's hidden rows BF16 [rows, h]; logits stay in the arena."""
        gpu, buf, vocab = self.gpu, self.buffers, self.vocab_size
        normed, logits = self._final_norm(hidden, rows, stream), buf.logits()
        self._project(normed, self._lm_head, logits, rows, vocab, self.config.hidden_size, stream)
        picks = np.empty(rows, np.uint32)
        with buf.lease(ScratchRegion.propose_ids(rows)) as ids:
            if self._argmax_batch_k:
                argmax_bf16_batch(gpu, self._argmax_batch_k, logits, ids.ptr, rows, vocab, vocab, stream)
            else:
                for row in range(rows):
                    at, to = logits.offset(_BF16 * row * vocab), ids.ptr.offset(4 * row)
                    argmax_bf16(gpu, self._argmax_k, at, to, vocab, stream)
            gpu.copy_d2h_on_stream(ids.ptr, picks, stream)
        return [int(pick) for pick in picks]

    def _final_norm(self, hidden: DevicePtr, rows: int, stream: StreamLike) -> DevicePtr:
        """Where BF16 [rows, h] are behind the final norm: in norm_output."""
        normed, h, eps = self.buffers.norm_output(), self.config.hidden_size, self.config.rms_norm_eps
        rms_norm(self.gpu, self._rms_norm_k, hidden, self._norm, normed, rows, h, eps, stream)
        return normed

    def _read_logits(self, rows: int, stream: StreamLike) -> np.ndarray[Any, Any]:
        logits = np.empty((rows, self.vocab_size), ml_dtypes.bfloat16)
        self.gpu.copy_d2h_on_stream(self.buffers.logits(), logits.view(np.uint8), stream)
        return logits

    def _project(
        self, x: DevicePtr, weight: DenseWeight, out: DevicePtr, m: int, n: int, k: int, stream: StreamLike
    ) -> None:
        """out [m, n] = x [m, k] . weight [n, k] transposed; a row has the same bits for every m."""
        if m > 1 and self._gemv_batchm_k:
            dense_gemv_batchm(self.gpu, self._gemv_batchm_k, x, weight, out, m, n, k, n, stream)
            return
        for row in range(m):
            at, to = x.offset(_BF16 * row * k), out.offset(_BF16 * row * n)
            dense_gemv(self.gpu, self._gemv_k, at, weight, to, n, k, stream)

    # ------------------------------------------------------------ metadata

    @contextmanager
    def _row_metadata(self, start: int, m: int, table: list[int], stream: StreamLike) -> Iterator[AttnMetadataDev]:
        """Metadata of `m` rows at positions `start` on, each a sequence with the same table, while scratch holds it."""
        region = ScratchRegion.verify_meta(m, len(table))
        meta = np.zeros(region.nbytes, np.uint8)
        positions = np.arange(start, start + m)
        blocks = np.array(table, np.int64)
        slots = blocks[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        parts = (
            (0, positions.astype(np.uint32)),
            (_SLOTS_AT, slots),
            (_SEQ_LENS_AT, (positions + 1).astype(np.int32)),
            (_TABLE_AT, np.tile(blocks.astype(np.int32), m)),
        )
        for at, values in parts:
            meta[at : at + values.nbytes] = values.view(np.uint8)
        with self.buffers.lease(region) as lease:
            self.gpu.copy_h2d_async(meta, lease.ptr, stream)
            base = lease.ptr
            slot, lengths, tables = (base.offset(at) for at in (_SLOTS_AT, _SEQ_LENS_AT, _TABLE_AT))
            yield AttnMetadataDev(base, base, base, slot, lengths, tables, len(table), m)
