# SPDX-License-Identifier: AGPL-3.0-only
"""Twin of `layers/mtp_head/forward_batch.rs`: one row of each of several sequences through the head in one pass.

The maths, the stores and their rounding are those of `forward`. Weights are read once for all rows, or once for as many
as a kernel takes; what depends on a sequence's own cache runs sequence by sequence. Each row has the bits that it has
alone, but for two: a BF16 projection that `drafter_row_kernel` gives to the tensor-core GEMM, and the tiled LM head.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from ....ops.argmax import argmax_bf16, argmax_bf16_batch, argmax_bf16_batch_lp
from ....ops.gemm import dense_gemm_pipelined
from ....ops.moe_silu_mul import silu_mul
from ....ops.ssm_preprocess import deinterleave_qg
from ....ops.w4a16_gemm_t import w4a16_gemm_n128_ldb
from ....ops.w4a16_gemv import w4a16_gemv_qg
from ....ops.w4a16_gemv_joint_batch import w4a16_gemv_qg_batch
from ....runtime.gpu import DevicePtr, StreamLike
from ....runtime.scratch import LP_SCRATCH_OFF, ScratchRegion
from ...drafting.rows import RowKernel, drafter_row_kernel
from ...layer import AttnMetadataDev, ForwardContext
from ...weight_map import DenseWeight, QuantizedWeight
from ..mtp_meta import mtp_attn_meta, pack_mtp_attn_meta
from .new import BF16_BYTES
from .prefill import MtpHeadPrefill
from .types import FfnProjections, MtpProposerState, ProjectionWeight

__all__ = ["MtpHeadForwardBatch"]

TILE_LM_HEAD_ROWS = 5
"""Rows from which on the tiled LM head is used, where there is one."""


class MtpHeadForwardBatch(MtpHeadPrefill):
    """The batched forward pass. Row i of a buffer is sequence i's; `qkv_output` holds [n, Q | gate], then K [n], then
    V [n]; rows of `logits` are the draft vocabulary apart."""

    def forward_batch_position(
        self,
        tokens: Sequence[int],
        hiddens: Sequence[DevicePtr],
        positions: Sequence[int],
        states: Sequence[MtpProposerState],
        ctx: ForwardContext,
        stream: StreamLike,
        *,
        log_probs: bool,
        tables: bool,
    ) -> tuple[list[int], list[float]]:
        """As `forward_one` for each sequence, whose blocks it has: the ids, and ln of their probabilities, or nothing
        where they are not wanted or the set cannot say them. The rows count from here on.

        hiddens: BF16 [h] each, anywhere but in `ssm_gates`. tables: whether block tables have changed since the last
        position. Of an error, the states know nothing.
        """
        n = len(states)
        metas = self._upload_batch_meta(positions, states, stream, tables)

        # 1. Hidden rows first: they may lie in a buffer that is written later.
        row_bytes = self.h * BF16_BYTES
        self._copy_rows(hiddens, ctx.buffers.ssm_gates(), row_bytes, stream)
        rows = [self.embed_tokens.weight.offset(token * row_bytes) for token in tokens]
        self._copy_rows(rows, ctx.buffers.ssm_qkvz(), row_bytes, stream)

        # 2 to 12.
        self._forward_batch_rows(n, metas, ctx, stream)
        self._lm_head_rows(ctx.buffers.norm_output(), ctx.buffers.logits(), n, stream)

        # 13. Pick.
        found = self._select_batch(n, log_probs and bool(self.argmax_batch_lp_k), ctx, stream)
        if self.levers.draft_conf_tau > 0.0:
            for row in range(n):
                self._measure_confidence(self._logits_row(row, ctx), stream)

        # 14. Nothing counts before all are read back.
        self._count_rows(positions, states)
        return found

    def _count_rows(self, positions: Sequence[int], states: Sequence[MtpProposerState]) -> None:
        for position, state in zip(positions, states, strict=True):
            state.seq_len += 1
            state.last_pair_key = position - 1
            state.last_num_drafted += 1

    # ------------------------------------------------------------ what differs from step to step

    def _upload_batch_meta(
        self, positions: Sequence[int], states: Sequence[MtpProposerState], stream: StreamLike, tables: bool = True
    ) -> list[AttnMetadataDev]:
        """Each sequence's slab at `propose_meta`, one stride after the other; without `tables` the headers alone.
        CapacityError, before anything is queued, for a table that is too long for the stride."""
        packed = [
            pack_mtp_attn_meta(
                position, self._slot(state, state.seq_len), state.seq_len + 1, state.block_table if tables else (),
                self.propose_meta_stride,
            )
            for position, state in zip(positions, states, strict=True)
        ]  # fmt: skip
        bases = [self.propose_meta.offset(i * self.propose_meta_stride) for i in range(len(states))]
        for slab, base in zip(packed, bases, strict=True):
            self.gpu.copy_h2d_async(slab, base, stream)
        return [mtp_attn_meta(base, len(state.block_table)) for base, state in zip(bases, states, strict=True)]

    def _copy_rows(self, sources: Sequence[DevicePtr], target: DevicePtr, row_bytes: int, stream: StreamLike) -> None:
        """Rows from anywhere to rows of `target`. One copy each: rows at neighbouring addresses need not be of one
        allocation, and a copy may not leave its own."""
        for i, source in enumerate(sources):
            self.gpu.copy_d2d_async(source, target.offset(i * row_bytes), row_bytes, stream)

    # ------------------------------------------------------------ the pass

    def _forward_batch_rows(
        self, n: int, metas: Sequence[AttnMetadataDev], ctx: ForwardContext, stream: StreamLike
    ) -> None:
        """Steps 2 to 11 for n rows, from `ssm_qkvz` (embeddings) and `ssm_gates` (hidden rows) to
        `norm_output`: launches and copies on the device alone, unless `ffn_reads_back`."""
        buf = ctx.buffers
        h, hd, nkv = self.h, self.hd, self.nkv
        hidden, norm_output = buf.hidden_states(), buf.norm_output()

        # 2. Norms of both inputs.  3. [embedding | hidden].  4. fc.
        # 5. The residual is first read after step 9, which writes it.
        concat = self._norm_inputs(buf.ssm_qkvz(), buf.ssm_gates(), n, ctx, stream)
        self.project_rows(concat, self.fc, hidden, n, h, 2 * h, stream)

        # 6. Input norm.
        self._rms_norm(hidden, self.input_layernorm, norm_output, n, h, stream)

        # 7. Projections.
        q_elements, kv_elements = self.nq * hd, nkv * hd
        qg = buf.qkv_output()
        k = qg.offset(n * self.q_width * BF16_BYTES)
        v = k.offset(n * kv_elements * BF16_BYTES)
        if self._in_one_launch((self.q_proj, self.k_proj, self.v_proj), n, self.q_width):
            self._project_qkv(norm_output, qg, k, v, stream, n)
        else:
            self._project_qg_rows(norm_output, qg, n, stream)
            self.project_rows(norm_output, self.k_proj, k, n, kv_elements, h, stream)
            self.project_rows(norm_output, self.v_proj, v, n, kv_elements, h, stream)
            self._add_biases(qg, k, v, n, stream)

        # 8. Norms of Q and K, RoPE, the KV write and attention, each sequence over its own rows.
        attn_output = buf.attn_output()
        self._attend(qg, k, v, metas, attn_output, stream)

        # 9. Output projection, residual, post-attention norm.
        self.project_rows(attn_output, self.o_proj, norm_output, n, h, q_elements, stream)
        post, residual = self.post_attn_layernorm, buf.residual()
        self._residual_add_rms_norm(hidden, norm_output, post, norm_output, residual, stream, n)

        # 10. FFN and residual.  11. Final norm.
        moe_output = self.ffn_rows(norm_output, n, ctx, stream)
        self._add_then_norm(hidden, moe_output, self.norm, norm_output, stream, n)

    def project_rows(
        self,
        input: DevicePtr,  # noqa: A002 - the engine's name
        proj: ProjectionWeight,
        output: DevicePtr,
        m: int,
        n: int,
        k: int,
        stream: StreamLike,
    ) -> None:
        """output [m, n] = input [m, k] . proj [n, k] transposed, BF16, by the engine's choice of a kernel for BF16
        weights, and with the bits of `gemv` for others."""
        if isinstance(proj, DenseWeight):
            chosen = self._row_kernel(m, n, k)
            if chosen is RowKernel.PIPELINED and self.dense_gemm_pipelined_k:
                dense_gemm_pipelined(self.gpu, self.dense_gemm_pipelined_k, input, proj, output, m, n, k, stream)
                return
            if chosen is RowKernel.GEMV_LOOP and not self.spark_gemv_rows_k:
                for row in range(m):
                    a, c = input.offset(row * k * BF16_BYTES), output.offset(row * n * BF16_BYTES)
                    self.gemv(a, proj, c, n, k, stream)
                return
        self.gemv_rows(input, proj, output, m, n, k, stream)

    def _row_kernel(self, m: int, n: int, k: int) -> RowKernel:
        ready = bool(self.dense_gemv_batchm_k or self.spark_gemv_rows_k)
        return drafter_row_kernel(m, n, k, ready, self.levers.kv_gemv_pinned, self.levers.small_m_tier)

    def _in_one_launch(self, weights: Sequence[ProjectionWeight], m: int, n: int) -> bool:
        """Whether m rows [h] go through these weights together, the first of n outputs: where one launch takes them,
        and not where `project_rows` gives BF16 weights to the GEMM."""
        tiled = isinstance(weights[0], DenseWeight) and bool(self.dense_gemm_pipelined_k)
        if tiled and self._row_kernel(m, n, self.h) is RowKernel.PIPELINED:
            return False
        return self._takes(weights, self.h)

    def _project_qg_rows(self, normed: DevicePtr, output: DevicePtr, m: int, stream: StreamLike) -> None:
        """output BF16 [m, 2, nq, hd]: of each row the queries of all heads, then the gates of all heads. Without gates
        [m, nq, hd]."""
        gpu, n, h, nq, hd = self.gpu, self.q_width, self.h, self.nq, self.hd
        if not self.body.gated:
            self.project_rows(normed, self.q_proj, output, m, n, h, stream)
            return
        if not isinstance(self.q_proj, QuantizedWeight):
            self.project_rows(normed, self.q_proj, output, m, n, h, stream)
            deinterleave_qg(gpu, self.deinterleave_qg_k, output, m, nq, hd, n, stream)
            return
        # The joint kernels sum in an order of their own, which the GEMVs of `w4a16_batchm` have not.
        row = 0
        while row < m:
            a, c = normed.offset(row * h * BF16_BYTES), output.offset(row * n * BF16_BYTES)
            rows = max((rows for rows in self.w4a16_gemv_qg_batch if rows <= m - row), default=1)
            if rows == 1:
                w4a16_gemv_qg(gpu, self.w4a16_gemv_qg_k, a, self.q_proj, c, n, h, nq, hd, stream)
            else:
                w4a16_gemv_qg_batch(gpu, self.w4a16_gemv_qg_batch[rows], a, self.q_proj, c, n, h, nq, hd, stream)
            row += rows

    def _in_tiles(self, n: int) -> bool:
        """Whether the LM head's transposed twin takes n rows."""
        return n >= TILE_LM_HEAD_ROWS and bool(self.w4a16_gemm_t_k) and self.lm_head_nvfp4_t is not None

    def _lm_head_rows(self, normed: DevicePtr, logits: DevicePtr, n: int, stream: StreamLike) -> None:
        """logits BF16 [n, draft_vocab]. Which kernel is a matter of n alone, so that a captured pass stays true."""
        vocab, h, twin = self.draft_vocab, self.h, self.lm_head_nvfp4_t
        if twin is not None and self._in_tiles(n):
            weight, ldb = twin
            w4a16_gemm_n128_ldb(self.gpu, self.w4a16_gemm_t_k, normed, weight, logits, n, vocab, h, ldb, stream)
            return
        self.project_rows(normed, self.lm_head, logits, n, vocab, h, stream)

    # ------------------------------------------------------------ FFN

    def ffn_rows(self, normed: DevicePtr, n: int, ctx: ForwardContext, stream: StreamLike) -> DevicePtr:
        """`ffn` of BF16 [n, h]: the address of [n, h], `moe_output`."""
        if self.dense_ffn_generic is not None:
            return self._dense_ffn_rows(normed, self.dense_ffn_generic, n, ctx, stream)
        if (moe := self.moe_nvfp4 or self.moe_fused) is not None:
            return moe.forward_rows(normed, n, ctx, stream)
        for row in range(n):
            self.moe_forward_generic(normed.offset(row * self.h * BF16_BYTES), ctx, stream, row)
        return ctx.buffers.moe_output()

    def _dense_ffn_rows(
        self, normed: DevicePtr, ffn: FfnProjections, n: int, ctx: ForwardContext, stream: StreamLike
    ) -> DevicePtr:
        gate, up, output = ctx.buffers.expert_gate_out(), ctx.buffers.expert_up_out(), ctx.buffers.moe_output()
        gate_proj, up_proj, down_proj = ffn
        if self._in_one_launch((gate_proj, up_proj), n, self.inter):
            self._project_gate_up(normed, gate_proj, up_proj, gate, up, self.inter, stream, n)
        else:
            self.project_rows(normed, gate_proj, gate, n, self.inter, self.h, stream)
            self.project_rows(normed, up_proj, up, n, self.inter, self.h, stream)
        silu_mul(self.gpu, self.moe_silu_mul_k, gate, up, gate, n * self.inter, stream)
        self.project_rows(gate, down_proj, output, n, self.h, self.inter, stream)
        return output

    # ------------------------------------------------------------ the pick

    def _logits_row(self, row: int, ctx: ForwardContext) -> DevicePtr:
        return ctx.buffers.logits().offset(row * self.draft_vocab * BF16_BYTES)

    def _select_batch(
        self, n: int, log_probs: bool, ctx: ForwardContext, stream: StreamLike
    ) -> tuple[list[int], list[float]]:
        """The id of each row's largest logit, as `_select` has it, and with `log_probs` ln of its probability, NaN for
        a row without a distribution. One copy to the host."""
        with ExitStack() as held:
            ids = held.enter_context(ctx.buffers.lease(ScratchRegion.propose_ids(n))).ptr
            certain = None
            if log_probs:
                certain = held.enter_context(ctx.buffers.lease(ScratchRegion.propose_logprobs(n))).ptr
            self._argmax_rows(n, ids, certain, ctx, stream)
            raw = np.empty(4 * n if certain is None else LP_SCRATCH_OFF + 4 * n, np.uint8)
            self.gpu.copy_d2h_on_stream(ids, raw, stream)
        picked = [int(token) for token in raw[: 4 * n].view("<u4")]
        return picked, [] if certain is None else [float(p) for p in raw[LP_SCRATCH_OFF:].view("<f4")]

    def _argmax_rows(
        self, n: int, ids: DevicePtr, log_probs: DevicePtr | None, ctx: ForwardContext, stream: StreamLike
    ) -> None:
        """ids u32 [n] and log_probs FP32 [n] of the rows of `logits`: launches alone."""
        gpu, vocab, logits = self.gpu, self.draft_vocab, ctx.buffers.logits()
        if log_probs is not None:
            argmax_bf16_batch_lp(gpu, self.argmax_batch_lp_k, logits, ids, log_probs, n, vocab, vocab, stream)
        elif self.argmax_batch_k:
            argmax_bf16_batch(gpu, self.argmax_batch_k, logits, ids, n, vocab, vocab, stream)
        else:
            for row in range(n):
                argmax_bf16(gpu, self.argmax_k, self._logits_row(row, ctx), ids.offset(4 * row), vocab, stream)
