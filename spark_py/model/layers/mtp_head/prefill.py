# SPDX-License-Identifier: AGPL-3.0-only
"""Twin of `layers/mtp_head/prefill.rs`: rows that are fed instead of drafted.

A drafter of one layer needs K and V of its input alone, so there is neither attention nor FFN here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....ops.gemm import dense_gemm
from ....ops.reshape_and_cache import reshape_and_cache
from ....ops.rope import rope
from ....runtime.gpu import DevicePtr, StreamLike
from ...layer import ForwardContext
from .forward import MtpHeadForward
from .new import BF16_BYTES, KV_BLOCK_SIZE, PREFILL_CHUNK, log
from .types import MtpPrefillScratch, MtpProposerState, ProjectionWeight

__all__ = ["MtpHeadPrefill"]


class MtpHeadPrefill(MtpHeadForward):
    """The row writer behind drafter prefill and catch-up."""

    @property
    def supports_drafter_prefill(self) -> bool:
        """Whether rows can be fed: the levers ask for it, the projections are BF16, and with `exact_drafter_rows` off
        there is a GEMM."""
        return self.prefill_scratch is not None and (self.levers.exact_drafter_rows or bool(self.dense_gemm_k))

    def drafter_rows_impl(
        self,
        tokens: Sequence[int],
        hiddens: DevicePtr,
        row_base: int,
        pos_base: int,
        state: MtpProposerState,
        ctx: ForwardContext,
        stream: StreamLike,
    ) -> int:
        """Write rows row_base .. for the pairs (tokens[r + 1], hiddens[r]) at RoPE position pos_base + r; see
        DraftProposer.catchup_drafter. The arguments are checked; fewer than two tokens have no pair."""
        scratch = self.prefill_scratch
        if scratch is None or not self.supports_drafter_prefill:
            if not self._warned_prefill:
                self._warned_prefill = True
                log.warning("the drafter is not fed: %s", self._why_not_fed())
            return 0
        rows = len(tokens) - 1
        if rows < 1:
            return 0
        self.reserve_rows(state, row_base + rows)
        started = self._clock(stream)
        for done in range(0, rows, PREFILL_CHUNK):
            c = min(PREFILL_CHUNK, rows - done)
            chunk = tokens[done + 1 : done + 1 + c]
            source = hiddens.offset(done * self.h * BF16_BYTES)
            self._write_chunk(scratch, chunk, source, row_base + done, pos_base + done, state, stream)
        state.seq_len = row_base + rows
        state.last_pair_key = pos_base + rows - 2
        if self.levers.prefill_profile:
            log.info("fed %d drafter rows in %.3f ms", rows, 1e3 * (self._clock(stream) - started))
        return rows

    def _why_not_fed(self) -> str:
        if not self.quant.supports_drafter_prefill():
            return f"its projections are in {self.quant.value}, and rows are fed in bf16 alone"
        if self.prefill_scratch is None:
            return "its levers ask for no scratch"
        return "the kernel set has no dense_gemm_bf16"

    def _write_chunk(
        self,
        s: MtpPrefillScratch,
        tokens: Sequence[int],
        hiddens: DevicePtr,
        row: int,
        position: int,
        state: MtpProposerState,
        stream: StreamLike,
    ) -> None:
        gpu, h, nq, nkv, hd, c = self.gpu, self.h, self.nq, self.nkv, self.hd, len(tokens)
        row_bytes = h * BF16_BYTES
        for r, token in enumerate(tokens):
            table_row = self.embed_tokens.weight.offset(token * row_bytes)
            gpu.copy_d2d_async(table_row, s.embed.offset(r * row_bytes), row_bytes, stream)
        self._rms_norm(s.embed, self.pre_fc_norm_embedding, s.normed_embed, c, h, stream)
        self._rms_norm(hiddens, self.pre_fc_norm_hidden, s.normed_hidden, c, h, stream)
        self._concat_rows(s.normed_embed, s.normed_hidden, s.concat, c, stream)
        self._project(s.concat, self.fc, s.fc_out, c, h, 2 * h, stream)
        self._rms_norm(s.fc_out, self.input_layernorm, s.normed2, c, h, stream)
        self._project(s.normed2, self.k_proj, s.k_out, c, nkv * hd, h, stream)
        self._project(s.normed2, self.v_proj, s.v_out, c, nkv * hd, h, stream)
        self._add_bias(s.k_out, self.k_bias, c, nkv * hd, stream)
        self._add_bias(s.v_out, self.v_bias, c, nkv * hd, stream)
        self._norm_keys(s.k_out, c, stream)
        positions = np.arange(position, position + c, dtype="<u4")
        slots = np.array([self._slot(state, row + r) for r in range(c)], "<i8")
        gpu.copy_h2d_async(positions, s.pos_dev, stream)
        gpu.copy_h2d_async(slots, s.slot_dev, stream)
        k_pool, v_pool = self.kv_cache.k_pool_ptr(self.attn_layer_idx), self.kv_cache.v_pool_ptr(self.attn_layer_idx)
        theta, rot = self.rope_theta, self.rotary_dim
        rope(gpu, self.rope_k, s.q_scratch, s.k_out, s.pos_dev, c, nq, nkv, hd, rot, theta, stream)
        reshape_and_cache(
            gpu, self.reshape_cache_k, s.k_out, s.v_out, k_pool, v_pool, s.slot_dev, c, nkv, hd, KV_BLOCK_SIZE,
            nkv * hd, nkv * hd, stream,
        )  # fmt: skip

    def _project(
        self,
        source: DevicePtr,
        proj: ProjectionWeight,
        output: DevicePtr,
        m: int,
        n: int,
        k: int,
        stream: StreamLike,
    ) -> None:
        """output [m, n] = source [m, k] . proj transposed: with the bits of `gemv` for each row, or by the GEMM."""
        if self.levers.exact_drafter_rows:
            self.gemv_rows(source, proj, output, m, n, k, stream)
        else:
            dense_gemm(self.gpu, self.dense_gemm_k, source, proj, output, m, n, k, stream)
