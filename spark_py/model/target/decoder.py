# SPDX-License-Identifier: AGPL-3.0-only
"""DecoderTarget: checkpoints whose layers all have full attention, and a dense FFN or a mixture of experts: Qwen3-Next,
MiniMax-M2, GLM-4.5. What differs between them a HeadBody says, as for their draft heads.

Every projection of a row is the sum that `gemv::dense_gemv_bf16` makes: rows go through the batched GEMV, which gives
each row the same bits, and never through a GEMM. Experts are one or several rows' GEMVs too (`MoeLayer`). Each row
attends as a sequence of its own over the paged cache, so that prefill, decode and verify are one computation.
"""

from __future__ import annotations

import math
from contextlib import ExitStack

import numpy as np

from ...ops.dense_gemv_bf16_batchm import MAX_ROWS
from ...ops.embed_from_argmax import batched_embed
from ...ops.moe_silu_mul import silu_mul
from ...ops.norm import residual_add_rms_norm, rms_norm
from ...ops.paged_decode import paged_decode_attn
from ...ops.reshape_and_cache import reshape_and_cache
from ...ops.residual_add import residual_add, sigmoid_gate_mul
from ...ops.rope import rope
from ...ops.ssm_preprocess import deinterleave_qg
from ...runtime.buffers import BufferArena
from ...runtime.gpu import DevicePtr, GpuBackend, StreamLike
from ...runtime.kv_cache import KvCacheConfig
from ..config import ModelConfig
from ..layer import AttnMetadataDev, ForwardContext
from ..layers.moe import MoeLayer
from ..layers.mtp_head import HeadBody, NormConvention, QkNorm
from ..levers import ModelLevers
from ..weight_map import DenseExpertWeight, DenseWeight, MoeWeights
from .base import TargetState
from .paged import BLOCK_SIZE, PagedTarget
from .weights import LayerWeights, TargetWeights

__all__ = ["DecoderTarget"]

_BF16 = 2  # bytes


class DecoderTarget(PagedTarget):
    """The target over weights that somebody else owns, as PagedTarget says; `body` is that of the configuration.

    `num_blocks` is the size of the KV pool, enough for `max_seqs` sequences of the arena's max_seq_len unless given.
    """

    def __init__(
        self,
        weights: TargetWeights,
        config: ModelConfig,
        gpu: GpuBackend,
        buffers: BufferArena,
        max_seqs: int = 1,
        num_blocks: int | None = None,
    ) -> None:
        self.body = body = HeadBody.of(config)
        most = MAX_ROWS
        if body.gated:
            # The rows of a chunk are split into queries and gates as one row, which waits in shared memory.
            most = gpu.limits.max_shared_optin // (2 * _BF16 * config.num_attention_heads * config.head_dim)
        plain = body.norm is NormConvention.PLAIN
        norm_k = ("rms_norm_vanilla", "rms_norm_vanilla") if plain else ("norm", "rms_norm")
        super().__init__(gpu, buffers, config, weights.vocab_size, weights.norm, weights.lm_head, norm_k, most)
        self.weights = weights
        fused = "spark_residual_add_rms_norm_vanilla"
        self._add_norm_k = gpu.try_kernel(fused, fused) if plain else gpu.kernel("norm", "residual_add_rms_norm")
        self._residual_add_k = gpu.kernel("residual_add", "bf16_residual_add")
        if body.gated:
            self._gate_k = gpu.kernel("residual_add", "sigmoid_gate_mul")
            self._deinterleave_k = gpu.kernel("ssm_preprocess", "deinterleave_qg")
        self._rope_k = gpu.kernel("rope", "rope_forward")
        self._cache_k = gpu.kernel("reshape_and_cache", "reshape_and_cache_flash")
        self._attention_k = gpu.kernel("paged_decode", "paged_decode_attn")
        self._silu_k = gpu.kernel("moe_silu_mul", "moe_silu_mul")
        self._embed_k = gpu.kernel("embed_from_argmax", "batched_embed")
        self._ctx = ForwardContext(buffers, gpu, config, ModelLevers())
        shape = KvCacheConfig(BLOCK_SIZE, config.num_key_value_heads, config.head_dim, config.num_hidden_layers)
        with ExitStack() as made:
            self._experts: dict[int, MoeLayer] = {}
            for index, layer in enumerate(weights.layers):
                if isinstance(layer.ffn, MoeWeights):
                    experts = MoeLayer(layer.ffn, config, gpu, f"target.layers.{index}.mlp")
                    self._experts[index] = made.enter_context(experts)
                    experts.check_buffers(buffers, self.chunk_rows)
            self.kv_cache = self._pool(shape, max_seqs, num_blocks)
            made.callback(self.kv_cache.release)
            self._made = made.pop_all()

    # ------------------------------------------------------------ forward

    def _layers(self, ids: list[int], start: int, state: TargetState, stream: StreamLike) -> None:
        """Embedding and all layers over `ids` at positions `start` on: hidden rows into the state, KV into the pool."""
        gpu, buf, cfg, m = self.gpu, self.buffers, self.config, len(ids)
        h, eps, layers = cfg.hidden_size, cfg.rms_norm_eps, self.weights.layers
        hidden, normed = buf.hidden_states(), buf.norm_output()
        gpu.copy_h2d_async(np.array(ids, np.uint32), buf.token_ids(), stream)
        batched_embed(gpu, self._embed_k, buf.token_ids(), self.weights.embed_tokens, hidden, m, h, stream)
        rms_norm(gpu, self._rms_norm_k, hidden, layers[0].input_layernorm, normed, m, h, eps, stream)
        with self._row_metadata(start, m, state.block_table, stream) as meta:
            for index, layer in enumerate(layers):
                self._attention(index, layer, meta, stream)
                self._add_norm(normed, layer.post_attention_layernorm, m, stream)
                ffn = self._ffn(index, layer, m, stream)
                if index + 1 < len(layers):
                    self._add_norm(ffn, layers[index + 1].input_layernorm, m, stream)
                else:
                    residual_add(gpu, self._residual_add_k, hidden, ffn, m * h, stream)
        # Drafters go on from what the modules of the family were trained on.
        rows = super()._final_norm(hidden, m, stream) if self.body.chain_after_norm else hidden
        gpu.copy_d2d_async(rows, state.hidden.offset(_BF16 * start * h), _BF16 * m * h, stream)

    def _final_norm(self, hidden: DevicePtr, rows: int, stream: StreamLike) -> DevicePtr:
        if self.body.chain_after_norm:
            return hidden  # a state's rows have it behind them
        return super()._final_norm(hidden, rows, stream)

    def _add_norm(self, src: DevicePtr, weight: DenseWeight, m: int, stream: StreamLike) -> None:
        """hidden_states += src; norm_output = their norm. BF16 [m, h] each."""
        gpu, buf, h, eps = self.gpu, self.buffers, self.config.hidden_size, self.config.rms_norm_eps
        hidden, normed = buf.hidden_states(), buf.norm_output()
        if kernel := self._add_norm_k:
            residual_add_rms_norm(gpu, kernel, hidden, src, weight, normed, buf.residual(), m, h, eps, stream)
            return
        # A set without the fused kernel for plain weights, whose mean square is of the sums before rounding; here of
        # those after.
        residual_add(gpu, self._residual_add_k, hidden, src, m * h, stream)
        rms_norm(gpu, self._rms_norm_k, hidden, weight, normed, m, h, eps, stream)

    def _attention(self, index: int, layer: LayerWeights, meta: AttnMetadataDev, stream: StreamLike) -> None:
        """norm_output [rows, h] through attention, back into norm_output."""
        gpu, buf, cfg, m = self.gpu, self.buffers, self.config, meta.num_seqs
        nq, nkv, hd, h = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim, cfg.hidden_size
        normed, out = buf.norm_output(), buf.attn_output()
        q, width = buf.qkv_output(), (1 + self.body.gated) * nq * hd
        gate, k = q.offset(_BF16 * m * nq * hd), q.offset(_BF16 * m * width)
        v = k.offset(_BF16 * m * nkv * hd)

        self._project(normed, layer.q_proj, q, m, width, h, stream)
        self._project(normed, layer.k_proj, k, m, nkv * hd, h, stream)
        self._project(normed, layer.v_proj, v, m, nkv * hd, h, stream)
        if self.body.gated:
            # All rows as one row of m * nq heads: [every query | every gate], each contiguous.
            deinterleave_qg(gpu, self._deinterleave_k, q, 1, m * nq, hd, 2 * m * nq * hd, stream)
        self._norm_heads(q, layer.q_norm, m, nq, stream)
        self._norm_heads(k, layer.k_norm, m, nkv, stream)
        rope(gpu, self._rope_k, q, k, meta.positions, m, nq, nkv, hd, cfg.rotary_dim(), cfg.rope_theta, stream)

        k_pool, v_pool = self.kv_cache.k_pool_ptr(index), self.kv_cache.v_pool_ptr(index)
        row = nkv * hd
        reshape_and_cache(
            gpu, self._cache_k, k, v, k_pool, v_pool, meta.slot, m, nkv, hd, BLOCK_SIZE, row, row, stream
        )  # fmt: skip
        paged_decode_attn(
            gpu, self._attention_k, q, k_pool, v_pool, out, meta.block_table, meta.seq_len, meta.max_blocks_per_seq,
            m, nq, nkv, hd, BLOCK_SIZE, 1.0 / math.sqrt(hd), nq * hd, 0, stream,
        )  # fmt: skip
        if self.body.gated:
            sigmoid_gate_mul(gpu, self._gate_k, out, gate, out, m * nq * hd, stream)
        self._project(out, layer.o_proj, normed, m, h, nq * hd, stream)

    def _norm_heads(self, x: DevicePtr, weight: DenseWeight | None, m: int, heads: int, stream: StreamLike) -> None:
        """The norm of BF16 [m, heads, hd] in place: of each head, of each row, or none."""
        if weight is None:
            return
        gpu, hd, eps = self.gpu, self.config.head_dim, self.config.rms_norm_eps
        rows, width = (m, heads * hd) if self.body.qk_norm is QkNorm.WHOLE else (m * heads, hd)
        rms_norm(gpu, self._rms_norm_k, x, weight, x, rows, width, eps, stream)

    def _ffn(self, index: int, layer: LayerWeights, m: int, stream: StreamLike) -> DevicePtr:
        """Where norm_output [m, h] is after the layer's FFN: in moe_output."""
        experts = self._experts.get(index)
        if experts is not None:
            return experts.forward_rows(self.buffers.norm_output(), m, self._ctx, stream)
        assert isinstance(layer.ffn, DenseExpertWeight)
        return self._dense_ffn(layer.ffn, m, stream)

    def _dense_ffn(self, ffn: DenseExpertWeight, m: int, stream: StreamLike) -> DevicePtr:
        buf, h, inter = self.buffers, self.config.hidden_size, self.config.intermediate_size
        gate, up = buf.expert_gate_out(), buf.expert_up_out()
        self._project(buf.norm_output(), ffn.gate_proj, gate, m, inter, h, stream)
        self._project(buf.norm_output(), ffn.up_proj, up, m, inter, h, stream)
        silu_mul(self.gpu, self._silu_k, gate, up, gate, m * inter, stream)
        self._project(gate, ffn.down_proj, buf.moe_output(), m, h, inter, stream)
        return buf.moe_output()
