# SPDX-License-Identifier: AGPL-3.0-only
"""The forward half of `layers/deepseek_v4_mtp.rs`: from a token and what the target left of the one before it to the
next token, and rows that are written without a guess.

    embed   = embed_tokens[token]
    h_in    = e_proj . rms_norm(embed, enorm) + h_proj . rms_norm(hidden, hnorm)      combiner
    streams = h_in, for every stream                                                  collapsed mode, as the engine
    streams_s = e_proj . rms_norm(embed, enorm) + h_proj . rms_norm(stack_s, hnorm)   reference mode, stream by stream
    streams = body(streams)                                                           attention and experts
    logits  = lm_head . rms_norm(head of connections (streams), norm)

Each product and the sum are rounded to BF16; the streams are FP32, as the layers of the target store them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...ops.residual_add import residual_add
from ...ops.rms_norm_vanilla import rms_norm
from ...ops.spark_rms_norm_f32 import rms_norm as stream_norm
from ...ops.spark_rms_norm_f32 import rms_norm_both
from ...runtime.gpu import DevicePtr, StreamLike
from ...runtime.scratch import ScratchRegion
from ..layer import AttnMetadataDev, ForwardContext
from ..weight_map import DenseWeight
from .deepseek_v4_mtp_new import FEED_CHUNK, CombinerBuffers, DeepseekV4MtpNew, log
from .mtp_head import MtpProposerState
from .mtp_head.grammar import MaskWords
from .mtp_head.new import BF16_BYTES
from .mtp_head.pick import MtpHeadPick

__all__ = ["DeepseekV4MtpForward"]


class DeepseekV4MtpForward(DeepseekV4MtpNew, MtpHeadPick):
    """The forward passes. A row that drafts works in the arena's buffers, under the names of its accessors; rows that
    are fed have buffers of their own.

    `stacked` says which mode a pass is in: `source` is FP32 streams [rows, hc_mult, h] where True, BF16 [rows, h] where
    False.
    """

    def forward_one(
        self,
        token: int,
        source: DevicePtr,
        stacked: bool,
        position: int,
        state: MtpProposerState,
        ctx: ForwardContext,
        stream: StreamLike,
        draft_embed_target: DevicePtr | None = None,
        grammar_bitmask: MaskWords | None = None,
    ) -> int:
        """Write pair key `position - 1` and give the guess for token `position + 1`. The state has the row's block.

        source may be `chain_source`, which holds this row's own on return: the next draft's. With a draft_embed_target
        and no mask the result is PLACEHOLDER and the id stays in `draft_token_id_dev`.
        """
        # 1. Embed the last token (a gather from the shared table).
        buf, row_bytes = ctx.buffers, self.h * BF16_BYTES
        embed_out = buf.ssm_qkvz()
        self.gpu.copy_d2d_async(self.embed_tokens.weight.offset(token * row_bytes), embed_out, row_bytes, stream)

        # Metadata at its own place in scratch, behind the target's; uploaded before all launches.
        with buf.lease(ScratchRegion.mtp_meta(len(state.block_table))) as lease:
            meta = self._upload_meta(lease.ptr, lease.region.nbytes, position, state, stream)
            self._forward_row(source, stacked, meta, ctx, stream)

        # 7. Argmax (grammar-masked when a mask is supplied).
        if self.levers.draft_conf_tau > 0.0:
            self._measure_confidence(buf.logits(), stream)
        token_id = self._select(ctx, stream, position, draft_embed_target, grammar_bitmask)
        state.seq_len += 1
        state.last_pair_key = position - 1
        return token_id

    def _forward_row(
        self,
        source: DevicePtr,
        stacked: bool,
        meta: AttnMetadataDev,
        ctx: ForwardContext,
        stream: StreamLike,
        logits: bool = True,
    ) -> None:
        """Steps 2 to 6, from the embedding in `ssm_qkvz` to `logits`, or to `norm_output` without them: launches and
        copies on the device alone."""
        buf, combiner = ctx.buffers, CombinerBuffers.of(ctx.buffers)
        # 2. and 3. Combiner, and streams.
        self._combine(combiner, source, stacked, 1, stream)
        # 4. Body: connections, attention, which writes the row, and experts, on the streams in place.
        self.body.decode(combiner.streams, meta, stream)
        # 5. and 6. The streams as one row, final norm and shared LM head.
        h_out, normed = buf.hidden_states(), buf.norm_output()
        self.connections.collapse_normed(self.module.hc_head, combiner.streams, h_out, self.norm, normed, 1, stream)
        if logits:
            self._lm_head(normed, buf.logits(), stream)

    def _combine(self, b: CombinerBuffers, source: DevicePtr, stacked: bool, rows: int, stream: StreamLike) -> None:
        """b.streams of b.embed and `source`, which is not read after the second norm: it may be `b.h_in` or
        `b.streams`, which are written later."""
        gpu, h, hc = self.gpu, self.h, self.hc_mult
        if not stacked:
            self._rms_norm(b.embed, self.module.enorm, b.normed_embed, rows, stream)
            self._rms_norm(source, self.module.hnorm, b.normed_hidden, rows, stream)
            self.e_proj.run_beside(self.h_proj, b.normed_embed, b.h_in, rows, b.normed_hidden, b.h_branch, rows, stream)
            if self.connections.expand_sum(b.h_in, b.h_branch, b.streams, rows, False, stream):
                return
            residual_add(gpu, self.residual_add_k, b.h_in, b.h_branch, rows * h, stream)
            self.connections.expand(b.h_in, b.streams, rows, stream)
            return
        enorm, hnorm = self.module.enorm, self.module.hnorm
        if both := self.norm_both_k:
            rms_norm_both(
                gpu, both, b.embed, enorm, b.normed_embed, source, hnorm, b.normed_hidden, rows, h, hc, self.eps, stream
            )
        else:
            self._rms_norm(b.embed, enorm, b.normed_embed, rows, stream)
            stream_norm(gpu, self.stream_norm_k, source, hnorm, b.normed_hidden, rows * hc, h, self.eps, stream)
        self.e_proj.run_beside(
            self.h_proj, b.normed_embed, b.h_in, rows, b.normed_hidden, b.h_branch, rows * hc, stream
        )
        # The embedding's branch is the same for all streams of a row.
        if self.connections.expand_sum(b.h_branch, b.h_in, b.streams, rows, True, stream):
            return
        row_bytes = h * BF16_BYTES
        for s in range(hc):
            target = b.spread.offset(s * row_bytes)
            gpu.copy_d2d_2d_async(b.h_in, row_bytes, target, hc * row_bytes, row_bytes, rows, stream)
        residual_add(gpu, self.residual_add_k, b.h_branch, b.spread, rows * hc * h, stream)
        self.connections.widen(b.h_branch, b.streams, rows, stream)

    def chain_source(self, ctx: ForwardContext, stacked: bool) -> DevicePtr:
        """What the draft after the last one reads: in reference mode the head's streams, in collapsed mode its
        collapsed row, as the engine, or with `chain_postnorm` that row behind the final norm."""
        if stacked:
            return ctx.buffers.hc_streams()
        return ctx.buffers.norm_output() if self.levers.chain_postnorm else ctx.buffers.hidden_states()

    # ------------------------------------------------------------ rows without a guess

    @property
    def supports_drafter_prefill(self) -> bool:
        """Whether rows can be fed: where the levers asked for it when the head was built. Rust's head cannot."""
        return self.feed_buffers is not None

    def _write_fed_rows(
        self,
        tokens: Sequence[int],
        source: DevicePtr,
        stacked: bool,
        pos_base: int,
        state: MtpProposerState,
        stream: StreamLike,
    ) -> None:
        """Append a row for each of `tokens`, from `source` on, at positions pos_base on; the state has their blocks.
        Each has the bits that a propose writes: a head of one layer needs neither attention nor experts for it."""
        b, source_bytes = self.feed_buffers, self.hc_mult * self.h * 4 if stacked else self.h * BF16_BYTES
        assert b is not None
        started = self._clock(stream)
        for done in range(0, len(tokens), FEED_CHUNK):
            chunk = tokens[done : done + FEED_CHUNK]
            self._write_chunk(b, chunk, source.offset(done * source_bytes), stacked, pos_base + done, state, stream)
            state.seq_len += len(chunk)
        state.last_pair_key = pos_base + len(tokens) - 2
        if self.levers.prefill_profile:
            log.info("fed %d drafter rows in %.3f ms", len(tokens), 1e3 * (self._clock(stream) - started))

    def _write_chunk(
        self,
        b: CombinerBuffers,
        tokens: Sequence[int],
        source: DevicePtr,
        stacked: bool,
        position: int,
        state: MtpProposerState,
        stream: StreamLike,
    ) -> None:
        gpu, rows, row_bytes = self.gpu, len(tokens), self.h * BF16_BYTES
        for r, token in enumerate(tokens):
            table_row = self.embed_tokens.weight.offset(token * row_bytes)
            gpu.copy_d2d_async(table_row, b.embed.offset(r * row_bytes), row_bytes, stream)
        gpu.copy_h2d_async(np.arange(position, position + rows, dtype="<u4"), self.feed_positions, stream)
        slots = [self._slot(state, state.seq_len + r) for r in range(rows)]
        gpu.copy_h2d_async(np.array(slots, "<i8"), self.feed_slots, stream)
        self._combine(b, source, stacked, rows, stream)
        positions = self.feed_positions
        meta = AttnMetadataDev(
            positions, positions, positions, self.feed_slots, DevicePtr.NULL, DevicePtr.NULL, len(state.block_table),
            rows,
        )  # fmt: skip
        self.body.write_rows(b.streams, meta, stream)

    # ------------------------------------------------------------ pieces

    def _rms_norm(
        self, source: DevicePtr, weight: DenseWeight, output: DevicePtr, rows: int, stream: StreamLike
    ) -> None:
        rms_norm(self.gpu, self.rms_norm_k, source, weight, output, rows, self.h, self.eps, stream)

    def _warn_no_token(self, position: int) -> None:
        log.warning(
            "V4 MTP grammar mask allowed zero tokens at pos %d; returning 0 as pad-draft (will be rejected at verify).",
            position,
        )
