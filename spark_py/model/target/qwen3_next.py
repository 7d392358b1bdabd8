# SPDX-License-Identifier: AGPL-3.0-only
"""Qwen3NextTarget: checkpoints of the Qwen3-Next family whose layers all have gated full attention, and a dense FFN
or a mixture of experts.

Every projection of a row is the sum that `gemv::dense_gemv_bf16` makes: rows go through the batched GEMV, which gives
each row the same bits, and never through a GEMM. Experts are one or several rows' GEMVs too (`MoeLayer`). Each row
attends as a sequence of its own over the paged cache, so that prefill, decode and verify are one computation.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np

from ...ops.argmax import argmax_bf16, argmax_bf16_batch
from ...ops.dense_gemv_bf16_batchm import MAX_ROWS, dense_gemv_batchm
from ...ops.embed_from_argmax import batched_embed
from ...ops.gemv import dense_gemv
from ...ops.moe_silu_mul import silu_mul
from ...ops.norm import residual_add_rms_norm, rms_norm
from ...ops.paged_decode import paged_decode_attn
from ...ops.reshape_and_cache import reshape_and_cache
from ...ops.residual_add import residual_add, sigmoid_gate_mul
from ...ops.rope import rope
from ...ops.ssm_preprocess import deinterleave_qg
from ...runtime.buffers import BufferArena
from ...runtime.gpu import DevicePtr, GpuBackend, StreamLike
from ...runtime.kv_cache import KvCacheConfig, PagedKvCache
from ...runtime.launch import div_ceil
from ...runtime.scratch import ScratchRegion
from ...runtime.sizes import count
from ..config import ModelConfig
from ..layer import ForwardContext
from ..layers.moe import MoeLayer
from ..levers import ModelLevers
from ..weight_map import DenseExpertWeight, MoeWeights
from .base import Target, TargetRows, TargetState
from .weights import LayerWeights, TargetWeights

__all__ = ["BLOCK_SIZE", "Qwen3NextTarget"]

log = logging.getLogger("spark_py.model")

BLOCK_SIZE = 16
"""Tokens in a KV block."""
_SLOTS_AT, _SEQ_LENS_AT, _TABLE_AT = 768, 1536, 2048  # within the verify metadata; positions are at 0
_BF16 = 2  # bytes


class Qwen3NextTarget(Target):
    """The target over weights that somebody else owns; it owns its KV pool, the arena's `hidden_states` and `logits`
    while it computes, and each state's memory.

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
        super().__init__(gpu, buffers, config, weights.vocab_size)
        self.weights = weights
        self._rms_norm_k = gpu.kernel("norm", "rms_norm")
        self._add_norm_k = gpu.kernel("norm", "residual_add_rms_norm")
        self._residual_add_k = gpu.kernel("residual_add", "bf16_residual_add")
        self._gate_k = gpu.kernel("residual_add", "sigmoid_gate_mul")
        self._gemv_k = gpu.kernel("gemv", "dense_gemv_bf16")
        self._gemv_batchm_k = gpu.try_kernel("dense_gemv_bf16_batchm", "dense_gemv_bf16_batchm")
        self._deinterleave_k = gpu.kernel("ssm_preprocess", "deinterleave_qg")
        self._rope_k = gpu.kernel("rope", "rope_forward")
        self._cache_k = gpu.kernel("reshape_and_cache", "reshape_and_cache_flash")
        self._attention_k = gpu.kernel("paged_decode", "paged_decode_attn")
        self._silu_k = gpu.kernel("moe_silu_mul", "moe_silu_mul")
        self._embed_k = gpu.kernel("embed_from_argmax", "batched_embed")
        self._argmax_k = gpu.kernel("argmax", "argmax_bf16")
        self._argmax_batch_k = gpu.try_kernel("argmax", "argmax_bf16_batch")

        # The rows of a chunk are split into queries and gates as one row, which waits in shared memory.
        row = 2 * _BF16 * config.num_attention_heads * config.head_dim
        self.chunk_rows = max(1, min(MAX_ROWS, buffers.max_batch_tokens(), gpu.limits.max_shared_optin // row))
        self._ctx = ForwardContext(buffers, gpu, config, ModelLevers())
        per_seq = div_ceil(self.max_seq_len, BLOCK_SIZE)
        shape = KvCacheConfig(BLOCK_SIZE, config.num_key_value_heads, config.head_dim, config.num_hidden_layers)
        blocks = count("max_seqs", max_seqs) * per_seq if num_blocks is None else num_blocks
        with ExitStack() as made:
            self._experts: dict[int, MoeLayer] = {}
            for index, layer in enumerate(weights.layers):
                if isinstance(layer.ffn, MoeWeights):
                    experts = MoeLayer(layer.ffn, config, gpu, f"target.layers.{index}.mlp")
                    self._experts[index] = made.enter_context(experts)
                    experts.check_buffers(buffers, self.chunk_rows)
            self.kv_cache = PagedKvCache(shape, blocks, gpu, "target.kv")
            made.callback(self.kv_cache.release)
            self._made = made.pop_all()

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
        """Free the KV pool and the experts' tables; a second call does nothing."""
        self._made.close()

    def __enter__(self) -> Qwen3NextTarget:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    # ------------------------------------------------------------ forward

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
                picked += self._pick(len(chunk), wanted, stream)
                if keep_logits:
                    logits.append(self._read_logits(wanted, stream))
        state.tokens += ids
        return TargetRows(tuple(picked), state.hidden_row(start), np.concatenate(logits) if logits else None)

    def _layers(self, ids: list[int], start: int, state: TargetState, stream: StreamLike) -> None:
        """Embedding and all layers over `ids` at positions `start` on: hidden rows into the state, KV into the pool."""
        gpu, buf, cfg, m = self.gpu, self.buffers, self.config, len(ids)
        h, eps, layers = cfg.hidden_size, cfg.rms_norm_eps, self.weights.layers
        hidden, normed = buf.hidden_states(), buf.norm_output()
        region = ScratchRegion.verify_meta(m, len(state.block_table))
        gpu.copy_h2d_async(np.array(ids, np.uint32), buf.token_ids(), stream)
        batched_embed(gpu, self._embed_k, buf.token_ids(), self.weights.embed_tokens, hidden, m, h, stream)
        rms_norm(gpu, self._rms_norm_k, hidden, layers[0].input_layernorm, normed, m, h, eps, stream)
        with buf.lease(region) as meta:
            gpu.copy_h2d_async(self._meta(start, m, state.block_table, region.nbytes), meta.ptr, stream)
            for index, layer in enumerate(layers):
                self._attention(index, layer, m, meta.ptr, len(state.block_table), stream)
                residual_add_rms_norm(
                    gpu, self._add_norm_k, hidden, normed, layer.post_attention_layernorm, normed, buf.residual(),
                    m, h, eps, stream,
                )  # fmt: skip
                ffn = self._ffn(index, layer, m, stream)
                if index + 1 < len(layers):
                    following = layers[index + 1].input_layernorm
                    residual_add_rms_norm(
                        gpu, self._add_norm_k, hidden, ffn, following, normed, buf.residual(), m, h, eps, stream
                    )
                else:
                    residual_add(gpu, self._residual_add_k, hidden, ffn, m * h, stream)
        gpu.copy_d2d_async(hidden, state.hidden.offset(_BF16 * start * h), _BF16 * m * h, stream)

    def _attention(
        self, index: int, layer: LayerWeights, m: int, meta: DevicePtr, entries: int, stream: StreamLike
    ) -> None:
        """norm_output [m, h] through gated attention, back into norm_output. `entries` is the block table's length."""
        gpu, buf, cfg = self.gpu, self.buffers, self.config
        nq, nkv, hd, h, eps = (
            cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim, cfg.hidden_size, cfg.rms_norm_eps
        )  # fmt: skip
        normed, out = buf.norm_output(), buf.attn_output()
        q = buf.qkv_output()
        gate, k = q.offset(_BF16 * m * nq * hd), q.offset(_BF16 * 2 * m * nq * hd)
        v = k.offset(_BF16 * m * nkv * hd)

        self._project(normed, layer.q_proj, q, m, 2 * nq * hd, h, stream)
        self._project(normed, layer.k_proj, k, m, nkv * hd, h, stream)
        self._project(normed, layer.v_proj, v, m, nkv * hd, h, stream)
        # All rows as one row of m * nq heads: [every query | every gate], each contiguous.
        deinterleave_qg(gpu, self._deinterleave_k, q, 1, m * nq, hd, 2 * m * nq * hd, stream)
        rms_norm(gpu, self._rms_norm_k, q, layer.q_norm, q, m * nq, hd, eps, stream)
        rms_norm(gpu, self._rms_norm_k, k, layer.k_norm, k, m * nkv, hd, eps, stream)
        rope(gpu, self._rope_k, q, k, meta, m, nq, nkv, hd, cfg.rotary_dim(), cfg.rope_theta, stream)

        k_pool, v_pool = self.kv_cache.k_pool_ptr(index), self.kv_cache.v_pool_ptr(index)
        row = nkv * hd
        slots, seq_lens, table = (meta.offset(at) for at in (_SLOTS_AT, _SEQ_LENS_AT, _TABLE_AT))
        reshape_and_cache(
            gpu, self._cache_k, k, v, k_pool, v_pool, slots, m, nkv, hd, BLOCK_SIZE, row, row, stream
        )  # fmt: skip
        paged_decode_attn(
            gpu, self._attention_k, q, k_pool, v_pool, out, table, seq_lens, entries, m, nq, nkv, hd, BLOCK_SIZE,
            1.0 / math.sqrt(hd), nq * hd, 0, stream,
        )  # fmt: skip
        sigmoid_gate_mul(gpu, self._gate_k, out, gate, out, m * nq * hd, stream)
        self._project(out, layer.o_proj, normed, m, h, nq * hd, stream)

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

    def _pick(self, rows: int, wanted: int, stream: StreamLike) -> list[int]:
        """Final norm, LM head and argmax of the last `wanted` of `rows` hidden rows; logits stay in the arena."""
        gpu, buf, cfg, vocab = self.gpu, self.buffers, self.config, self.vocab_size
        h, normed, logits = cfg.hidden_size, buf.norm_output(), buf.logits()
        last = buf.hidden_states().offset(_BF16 * (rows - wanted) * h)
        rms_norm(gpu, self._rms_norm_k, last, self.weights.norm, normed, wanted, h, cfg.rms_norm_eps, stream)
        self._project(normed, self.weights.lm_head, logits, wanted, vocab, h, stream)
        picks = np.empty(wanted, np.uint32)
        with buf.lease(ScratchRegion.propose_ids(wanted)) as ids:
            if self._argmax_batch_k:
                argmax_bf16_batch(gpu, self._argmax_batch_k, logits, ids.ptr, wanted, vocab, vocab, stream)
            else:
                for row in range(wanted):
                    at, to = logits.offset(_BF16 * row * vocab), ids.ptr.offset(4 * row)
                    argmax_bf16(gpu, self._argmax_k, at, to, vocab, stream)
            gpu.copy_d2h_on_stream(ids.ptr, picks, stream)
        return [int(pick) for pick in picks]

    def _read_logits(self, rows: int, stream: StreamLike) -> np.ndarray[Any, Any]:
        logits = np.empty((rows, self.vocab_size), ml_dtypes.bfloat16)
        self.gpu.copy_d2h_on_stream(self.buffers.logits(), logits.view(np.uint8), stream)
        return logits

    def _project(self, x: DevicePtr, weight: Any, out: DevicePtr, m: int, n: int, k: int, stream: StreamLike) -> None:
        """out [m, n] = x [m, k] . weight [n, k] transposed; a row has the same bits for every m."""
        if m > 1 and self._gemv_batchm_k:
            dense_gemv_batchm(self.gpu, self._gemv_batchm_k, x, weight, out, m, n, k, n, stream)
            return
        for row in range(m):
            at, to = x.offset(_BF16 * row * k), out.offset(_BF16 * row * n)
            dense_gemv(self.gpu, self._gemv_k, at, weight, to, n, k, stream)

    def _meta(self, start: int, m: int, table: list[int], nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Metadata of rows at positions `start` on, in the layout of `ScratchRegion.verify_meta`."""
        meta = np.zeros(nbytes, np.uint8)
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
        return meta
