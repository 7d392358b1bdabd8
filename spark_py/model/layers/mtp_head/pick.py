# SPDX-License-Identifier: AGPL-3.0-only
"""MtpHeadPick: where a row goes and what token it guesses. The two ends of `layers/mtp_head/forward.rs`, which do not
depend on what the module computes between them."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from ....ops.argmax import argmax_bf16
from ....ops.embed_from_argmax import embed_from_argmax
from ....runtime.errors import ProposerStateError
from ....runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ....runtime.kv_cache import PagedKvCache
from ....runtime.scratch import ScratchRegion
from ...layer import AttnMetadataDev, ForwardContext
from ...weight_map import DenseWeight
from ..mtp_meta import mtp_attn_meta, pack_mtp_attn_meta
from .grammar import MaskWords, masked_argmax
from .life import MtpHeadLife
from .new import KV_BLOCK_SIZE, log
from .types import MtpProposerState

__all__ = ["PLACEHOLDER", "MtpHeadPick"]

PLACEHOLDER = 0
"""Returned instead of an id that stays on the device."""


class MtpHeadPick(MtpHeadLife):
    """Blocks, slot and metadata of a row, and the choice among its logits, of a head that sets the fields below."""

    h: int
    kv_cache: PagedKvCache
    draft_vocab: int
    embed_tokens: DenseWeight
    target_embed_tokens: DenseWeight
    draft_token_id_dev: DevicePtr
    argmax_k: KernelHandle
    embed_from_argmax_k: KernelHandle

    # ------------------------------------------------------------ the row's place

    def reserve_rows(self, state: MtpProposerState, rows: int) -> None:
        """Blocks for `rows` rows: all that are missing, or KvCacheExhausted and none."""
        if rows <= KV_BLOCK_SIZE * len(state.block_table):
            return
        with self._kv_lock:
            self.kv_cache.grow_table(state.block_table, -(-rows // KV_BLOCK_SIZE), self.owner)

    def _slot(self, state: MtpProposerState, row: int) -> int:
        return state.block_table[row // KV_BLOCK_SIZE] * KV_BLOCK_SIZE + row % KV_BLOCK_SIZE

    def _upload_meta(
        self, base: DevicePtr, region_bytes: int, position: int, state: MtpProposerState, stream: StreamLike
    ) -> AttnMetadataDev:
        """The metadata of the state's next row, which has its block."""
        packed = pack_mtp_attn_meta(
            position, self._slot(state, state.seq_len), state.seq_len + 1, state.block_table, region_bytes
        )
        self.gpu.copy_h2d_async(packed, base, stream)
        return mtp_attn_meta(base, len(state.block_table))

    # ------------------------------------------------------------ the pick

    def _select(
        self,
        ctx: ForwardContext,
        stream: StreamLike,
        position: int,
        embed_target: DevicePtr | None,
        mask: MaskWords | None,
    ) -> int:
        """The id of the largest logit; equal ones give the lowest, NaN never wins."""
        gpu, logits = self.gpu, ctx.buffers.logits()
        with ctx.buffers.lease(ScratchRegion.argmax()) as lease:
            if mask is None:
                argmax_bf16(gpu, self.argmax_k, logits, lease.ptr, self.draft_vocab, stream)
                if embed_target is not None:
                    self._stage_embedding(lease.ptr, embed_target, stream)
                    return PLACEHOLDER
                picked = np.empty(1, "<u4")
                gpu.copy_d2h_on_stream(lease.ptr, picked.view(np.uint8), stream)
                return int(picked[0])
            chosen = masked_argmax(self._read_logits(logits, stream), mask)
            if chosen is None:
                # Never the last token again: that one may be the boundary of a role.
                self._warn_no_token(position)
                return 0
            if embed_target is not None:
                gpu.copy_h2d_async(np.array([chosen], "<u4").tobytes(), lease.ptr, stream)
                self._stage_embedding(lease.ptr, embed_target, stream)
            return chosen

    def _warn_no_token(self, position: int) -> None:
        log.warning("the grammar allows no token of the draft vocabulary (%d): draft 0", self.draft_vocab)

    def _stage_embedding(self, picked: DevicePtr, target: DevicePtr, stream: StreamLike) -> None:
        kernel, table, id_dev = self.embed_from_argmax_k, self.target_embed_tokens, self.draft_token_id_dev
        embed_from_argmax(self.gpu, kernel, picked, table, target, id_dev, self.h, stream)
        self._deferred = True

    def read_deferred_draft_token(self, gpu: GpuBackend) -> int:
        """The id that the last propose left on the device; ProposerStateError where it left none."""
        if not self._deferred:
            raise ProposerStateError("the last propose left no draft on the device: it had no draft_embed_target")
        token = np.empty(1, "<u4")
        gpu.copy_d2h(self.draft_token_id_dev, token.view(np.uint8))
        return int(token[0])

    def _read_logits(self, logits: DevicePtr, stream: StreamLike) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        raw = np.empty(self.draft_vocab, ml_dtypes.bfloat16)
        self.gpu.copy_d2h_on_stream(logits, raw.view(np.uint8), stream)
        return raw.astype(np.float32)

    def _measure_confidence(self, logits: DevicePtr, stream: StreamLike) -> None:
        """Lower `last_conf` to the softmax probability of the largest logit."""
        values = self._read_logits(logits, stream).astype(np.float64)
        with np.errstate(invalid="ignore"):
            total = float(np.exp(values - np.fmax.reduce(values)).sum())
        # A row with a NaN or an infinite maximum has no distribution: no confidence at all.
        self.last_conf = min(self.last_conf, 1.0 / max(1.0, total) if math.isfinite(total) else 0.0)
