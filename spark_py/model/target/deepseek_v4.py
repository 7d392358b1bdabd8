# SPDX-License-Identifier: AGPL-3.0-only
"""DeepseekV4Target: checkpoints of DeepSeek-V4 whose layers all have sliding-window attention without a compressor.

An embedding becomes hc_mult equal FP32 streams, which the layers mix and the model's head collapses to one row; its
norm and the LM head make the logits. The streams of every token, from before they are collapsed, stay in the state: an
MTP module reads them. Layers are those of `layers.deepseek_v4`, which the module's body is too; the first
`num_hash_layers` of them choose experts by the token id.
"""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from ...ops.embed_from_argmax import batched_embed
from ...runtime.buffers import BufferArena
from ...runtime.errors import UnsupportedError
from ...runtime.gpu import GpuBackend, StreamLike
from ...runtime.kv_cache import KvCacheConfig, KvCacheDtype
from .._config_deepseek_v4 import SLIDING_ATTENTION
from ..config import ModelConfig
from ..layers.deepseek_v4 import V4Attention, V4Ffn, V4HyperConnections, V4Layer, V4Shapes, V4TargetWeights
from .base import TargetState
from .paged import BLOCK_SIZE, PagedTarget

__all__ = ["DeepseekV4Target", "check_v4_offered"]


def check_v4_offered(config: ModelConfig) -> None:
    """UnsupportedError for a layer whose attention has a compressor."""
    for layer, kind in enumerate(config.layer_types):
        if kind != SLIDING_ATTENTION:
            raise UnsupportedError(f"layer {layer} has {kind}: this target runs {SLIDING_ATTENTION} only")


class DeepseekV4Target(PagedTarget):
    """The target over weights that somebody else owns, as PagedTarget says; `hidden_states` of the arena has the
    embeddings and `token_ids` the ids of the rows in work.

    `num_blocks` is the size of the KV pool, enough for `max_seqs` sequences of the arena's max_seq_len unless given;
    the pool has one latent row a token and layer, in BF16. UnsupportedError names a layer that is not offered,
    InvalidArgumentError a tensor that does not fit.
    """

    keeps_streams = True

    def __init__(
        self,
        weights: V4TargetWeights,
        config: ModelConfig,
        gpu: GpuBackend,
        buffers: BufferArena,
        max_seqs: int = 1,
        num_blocks: int | None = None,
    ) -> None:
        check_v4_offered(config)
        shapes, h = V4Shapes.of(config), config.hidden_size
        tables = (("embed", weights.embed), ("head", weights.head))
        vocab = min(config.vocab_size, *(table.rows_of(name, config.vocab_size, h) for name, table in tables))
        norm_k = ("rms_norm_vanilla", "rms_norm_vanilla")
        super().__init__(gpu, buffers, config, vocab, weights.norm, weights.head, norm_k)
        weights.norm.check_shape("norm", h)
        weights.hc_head.check("hc_head")
        self.weights = weights
        self._embed_k = gpu.kernel("embed_from_argmax", "batched_embed")
        layers = len(weights.blocks)
        shape = KvCacheConfig(BLOCK_SIZE, 1, config.head_dim, layers, KvCacheDtype.BF16, shared_kv=True)
        with ExitStack() as made:
            self.kv_cache = self._pool(shape, max_seqs, num_blocks)
            made.callback(self.kv_cache.release)
            rows = self.chunk_rows
            self._connections = made.enter_context(V4HyperConnections(shapes.hyper, gpu, rows, "target.hc"))
            self._blocks: list[V4Layer] = []
            for index, block in enumerate(weights.blocks):
                name = f"target.layers.{index}"
                attention = made.enter_context(
                    V4Attention(block.attention, shapes.attention, self.kv_cache, gpu, rows, index, f"{name}.attn")
                )
                ffn = made.enter_context(V4Ffn(block.ffn, shapes.ffn, gpu, rows, buffers.token_ids(), f"{name}.ffn"))
                self._blocks.append(V4Layer(block.layer, attention, ffn, self._connections, name))
            self._made = made.pop_all()

    # ------------------------------------------------------------ states

    def alloc_state(self) -> TargetState:
        state = super().alloc_state()
        state.stream_bytes = self._connections.shape.stream_bytes
        try:
            state.streams = self.gpu.alloc(self.max_seq_len * state.stream_bytes, "target.streams")
        except BaseException:
            self.free_state(state)
            raise
        return state

    def free_state(self, state: TargetState) -> None:
        if not state.freed:
            self.gpu.free(state.streams)
        super().free_state(state)

    # ------------------------------------------------------------ forward

    def _layers(self, ids: list[int], start: int, state: TargetState, stream: StreamLike) -> None:
        gpu, buf, h, m = self.gpu, self.buffers, self.config.hidden_size, len(ids)
        streams = state.streams.offset(start * state.stream_bytes)
        gpu.copy_h2d_async(np.array(ids, np.uint32), buf.token_ids(), stream)
        batched_embed(gpu, self._embed_k, buf.token_ids(), self.weights.embed, buf.hidden_states(), m, h, stream)
        self._connections.expand(buf.hidden_states(), streams, m, stream)
        with self._row_metadata(start, m, state.block_table, stream) as meta:
            for layer in self._blocks:
                layer.decode(streams, meta, stream)
        hidden = state.hidden.offset(2 * start * h)
        self._connections.collapse(self.weights.hc_head, streams, hidden, m, stream)
