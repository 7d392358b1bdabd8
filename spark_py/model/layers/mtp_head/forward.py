# SPDX-License-Identifier: AGPL-3.0-only
"""Twin of `layers/mtp_head/forward.rs`: one row through the head, from a token and a hidden row to the next token."""

from __future__ import annotations

from collections.abc import Callable

from ....ops.residual_add import residual_add
from ....runtime.gpu import DevicePtr, StreamLike
from ....runtime.scratch import ScratchRegion
from ...layer import AttnMetadataDev, ForwardContext
from .attention import MtpHeadAttention
from .grammar import MaskWords
from .new import BF16_BYTES
from .pick import MtpHeadPick
from .types import MtpProposerState

__all__ = ["MtpHeadForward"]


class MtpHeadForward(MtpHeadAttention, MtpHeadPick):
    """The forward pass. Buffers are the arena's, under the names of its accessors."""

    def forward_one(
        self,
        token: int,
        target_hidden: DevicePtr,
        position: int,
        state: MtpProposerState,
        ctx: ForwardContext,
        stream: StreamLike,
        draft_embed_target: DevicePtr | None = None,
        grammar_bitmask: MaskWords | None = None,
    ) -> int:
        """Write pair key `position - 1` and give the guess for token `position + 1`.

        token: an id of the embedding table, the token at `position`. target_hidden: BF16 [h], the hidden row of the
        token before it; may be `output_row`, which holds this row's own on return: the next draft's hidden. With a
        draft_embed_target and no mask the result is PLACEHOLDER and the id stays in `draft_token_id_dev`.
        """
        # 1 to 12.
        self._run_row(self._forward_row, token, target_hidden, position, state, ctx, stream)

        # 13. Pick.
        if self.levers.draft_conf_tau > 0.0:
            self._measure_confidence(ctx.buffers.logits(), stream)
        picked = self._select(ctx, stream, position, draft_embed_target, grammar_bitmask)

        # 14. The row counts from here on.
        state.seq_len += 1
        state.last_pair_key = position - 1
        return picked

    def write_row(
        self,
        token: int,
        target_hidden: DevicePtr,
        position: int,
        state: MtpProposerState,
        ctx: ForwardContext,
        stream: StreamLike,
    ) -> None:
        """`forward_one` without a guess, steps 1 to 10 and 14: the row and `output_row`, with the same bits. For rows
        whose output another module reads."""
        self._run_row(self._forward_body, token, target_hidden, position, state, ctx, stream)
        if self.body.chain_after_norm:
            self._final_norm(ctx, stream)
        state.seq_len += 1
        state.last_pair_key = position - 1

    def _run_row(
        self,
        steps: Callable[[DevicePtr, DevicePtr, AttnMetadataDev, ForwardContext, StreamLike], None],
        token: int,
        target_hidden: DevicePtr,
        position: int,
        state: MtpProposerState,
        ctx: ForwardContext,
        stream: StreamLike,
    ) -> None:
        """Step 1 and then `steps`, for the next row of the state, which does not count yet."""
        # 1. Embedding row.
        buf, row_bytes = ctx.buffers, self.h * BF16_BYTES
        source = self.embed_tokens.weight.offset(token * row_bytes)
        self.gpu.copy_d2d_async(source, buf.ssm_qkvz(), row_bytes, stream)

        # The row's metadata is uploaded before all that follows, so that no launch needs anything of the host.
        self.reserve_rows(state, state.seq_len + 1)
        with buf.lease(ScratchRegion.mtp_meta(len(state.block_table))) as lease:
            meta = self._upload_meta(lease.ptr, lease.region.nbytes, position, state, stream)
            steps(buf.ssm_qkvz(), target_hidden, meta, ctx, stream)

    def _forward_row(
        self, embed: DevicePtr, target_hidden: DevicePtr, meta: AttnMetadataDev, ctx: ForwardContext, stream: StreamLike
    ) -> None:
        """Steps 2 to 12, from the embedding row to `logits`: launches and copies on the device alone, unless
        `ffn_reads_back`. What differs from row to row lies behind `embed`, `target_hidden` and `meta`."""
        self._forward_to_norm(embed, target_hidden, meta, ctx, stream)
        # 12. LM head.
        self._lm_head(ctx.buffers.norm_output(), ctx.buffers.logits(), stream)

    def _forward_to_norm(
        self, embed: DevicePtr, target_hidden: DevicePtr, meta: AttnMetadataDev, ctx: ForwardContext, stream: StreamLike
    ) -> None:
        """Steps 2 to 11, to `norm_output`."""
        moe_output = self._forward_to_ffn(embed, target_hidden, meta, ctx, stream)
        # 10. Residual.  11. Final norm.
        self._add_then_norm(ctx.buffers.hidden_states(), moe_output, self.norm, ctx.buffers.norm_output(), stream)

    def _final_norm(self, ctx: ForwardContext, stream: StreamLike) -> None:
        buf = ctx.buffers
        self._rms_norm(buf.hidden_states(), self.norm, buf.norm_output(), 1, self.h, stream)

    def _forward_body(
        self, embed: DevicePtr, target_hidden: DevicePtr, meta: AttnMetadataDev, ctx: ForwardContext, stream: StreamLike
    ) -> None:
        """Steps 2 to 10, from the embedding row to `hidden_states`."""
        moe_output = self._forward_to_ffn(embed, target_hidden, meta, ctx, stream)
        residual_add(self.gpu, self.residual_add_k, ctx.buffers.hidden_states(), moe_output, self.h, stream)

    def _forward_to_ffn(
        self, embed: DevicePtr, target_hidden: DevicePtr, meta: AttnMetadataDev, ctx: ForwardContext, stream: StreamLike
    ) -> DevicePtr:
        """Steps 2 to 10 but for the last addition: the address of what is to be added to `hidden_states`."""
        buf = ctx.buffers
        h, hd, nq, nkv = self.h, self.hd, self.nq, self.nkv
        hidden, residual, norm_output = buf.hidden_states(), buf.residual(), buf.norm_output()

        # 2. Norms of both inputs; from here on target_hidden is not read again.  3. [embedding | hidden], or the other
        # way round.  4. fc.  5. The residual is first read after step 9, which writes it.
        concat = self._norm_inputs(embed, target_hidden, 1, ctx, stream)
        self.gemv(concat, self.fc, hidden, h, 2 * h, stream)

        # 6. Input norm.
        self._rms_norm(hidden, self.input_layernorm, norm_output, 1, h, stream)

        # 7. Projections: [Q | gate | K | V], [Q | K | V] without gates.
        q_elements, kv_elements = nq * hd, nkv * hd
        q = buf.qkv_output()
        k = q.offset(self.q_width * BF16_BYTES)
        v = k.offset(kv_elements * BF16_BYTES)
        self._project_qkv(norm_output, q, k, v, stream)

        # 8. Norms of Q and K, RoPE, the KV write and attention over the drafter's own rows.
        attn_output = buf.attn_output()
        self._attend(q, k, v, [meta], attn_output, stream)

        # 9. Output projection, residual, post-attention norm.
        self.gemv(attn_output, self.o_proj, norm_output, h, q_elements, stream)
        self._residual_add_rms_norm(hidden, norm_output, self.post_attn_layernorm, norm_output, residual, stream)

        # 10. FFN.
        return self.ffn(norm_output, ctx, stream)

    # ------------------------------------------------------------ pieces

    def output_row(self, ctx: ForwardContext) -> DevicePtr:
        """BF16 [h], where a row's draft leaves what the next draft or module goes on from: `hidden_states`, or
        `norm_output` where the body chains behind the final norm."""
        return ctx.buffers.norm_output() if self.body.chain_after_norm else ctx.buffers.hidden_states()
