# SPDX-License-Identifier: AGPL-3.0-only
"""The constructor half of `layers/deepseek_v4_mtp.rs`: what a DeepSeek-V4 draft head is made of."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ...ops.gemv import dense_gemv
from ...ops.spark_gemv_rows import Projection, spark_gemv_rows
from ...runtime.buffers import BufferArena
from ...runtime.errors import UnsupportedError
from ...runtime.gpu import DevicePtr, GpuBackend, StreamLike
from ...runtime.kv_cache import KvCacheConfig, KvCacheDtype, PagedKvCache
from ...runtime.sizes import count
from ..config import ModelConfig
from ..levers import ModelLevers
from ..weight_map import DenseWeight
from .deepseek_v4 import V4Attention, V4Ffn, V4HyperConnections, V4Layer, V4MtpWeights, V4Norm, V4Projection, V4Shapes
from .hidden_mode import HiddenMode
from .mtp_head.life import MtpHeadLife
from .mtp_head.new import BF16_BYTES, KV_BLOCK_SIZE

__all__ = ["FEED_CHUNK", "CombinerBuffers", "DeepseekV4MtpNew"]

log = logging.getLogger("spark_py.model.deepseek_v4_mtp")

FEED_CHUNK = 64
"""Rows that are fed in one pass."""
F32_BYTES = 4


@dataclass(frozen=True, slots=True)
class CombinerBuffers:
    """Where the rows of one pass are combined; S hc_mult. BF16: embed, normed_embed, h_in [rows, h]; normed_hidden,
    h_branch and spread [rows, S, h], of which the collapsed mode uses [rows, h]. FP32: streams [rows, S, h]."""

    embed: DevicePtr
    normed_embed: DevicePtr
    normed_hidden: DevicePtr
    h_in: DevicePtr
    h_branch: DevicePtr
    spread: DevicePtr
    streams: DevicePtr

    @staticmethod
    def of(buffers: BufferArena) -> CombinerBuffers:
        """The engine's choice for a row that drafts, all in the arena."""
        return CombinerBuffers(
            embed=buffers.ssm_qkvz(),
            normed_embed=buffers.ssm_deinterleaved(),
            normed_hidden=buffers.ssm_gates(),
            h_in=buffers.hidden_states(),
            h_branch=buffers.norm_output(),
            spread=buffers.ssm_ba(),
            streams=buffers.hc_streams(),
        )

    @staticmethod
    def sizes(rows: int, h: int, hc_mult: int) -> dict[str, int]:
        """Bytes of each, for `rows` rows in either mode."""
        row, stack = rows * h * BF16_BYTES, rows * hc_mult * h * BF16_BYTES
        return {
            "embed": row,
            "normed_embed": row,
            "normed_hidden": stack,
            "h_in": row,
            "h_branch": stack,
            "spread": stack,
            "streams": rows * hc_mult * h * F32_BYTES,
        }


class DeepseekV4MtpNew(MtpHeadLife):
    """The fields of the head. The parameters are Rust's, in Rust's order; levers and what follows are new.

    module, embed_tokens [V, h] and lm_head [V, h], BF16 both, stay the caller's and must outlive the head. The draft
    vocabulary is the smallest of mtp_vocab_size (0: no limit), config.vocab_size and the rows of both tables.

    The KV pool: one layer, one latent row of head_dim elements a token, key and value at once, with room for
    `levers.mtp_max_seqs` sequences of max_seq_len tokens. kv_dtype BF16, or FP8 with a scale of 1. Rust's pool has
    num_hidden_layers + 1 layers on two sides, of which it uses the last, and blocks for one sequence.

    hidden_mode: what `reads_streams` asks of the decoding loop. Each call is in the mode of what it is given.

    UnsupportedError for an NVFP4 pool or a module with a hash router, InvalidArgumentError for a tensor or number that
    does not fit, a KernelSetError for a missing kernel. Nothing stays allocated after an error.
    """

    owner = "deepseek_v4_mtp"
    title = "V4 MTP head"

    def __init__(
        self,
        module: V4MtpWeights,
        embed_tokens: DenseWeight,
        lm_head: DenseWeight,
        config: ModelConfig,
        gpu: GpuBackend,
        mtp_vocab_size: int,
        max_seq_len: int,
        levers: ModelLevers,
        *,
        kv_dtype: KvCacheDtype = KvCacheDtype.BF16,
        hidden_mode: HiddenMode = HiddenMode.REFERENCE,
    ) -> None:
        shapes = V4Shapes.of(config)
        module.check(shapes, "mtp")
        if kv_dtype is KvCacheDtype.NVFP4:
            raise UnsupportedError("an nvfp4 cache of latent rows is not offered: take bf16 or fp8")
        self.gpu, self.config, self.levers, self.shapes = gpu, config, levers, shapes
        self.module, self.embed_tokens, self.lm_head = module, embed_tokens, lm_head
        # The module has no table of its own: drafts and the verify embed by the target's.
        self.target_embed_tokens = embed_tokens
        self.hidden_mode, self.kv_dtype = hidden_mode, kv_dtype
        self.h, self.hc_mult, self.eps = shapes.hyper.hidden_size, shapes.hyper.hc_mult, shapes.hyper.norm_eps
        self.max_seq_len = count("max_seq_len", max_seq_len)

        self.mtp_vocab_size = count("mtp_vocab_size", mtp_vocab_size, 0)
        self.embed_rows = embed_tokens.rows_of("embed_tokens", config.vocab_size, self.h)
        full = min(config.vocab_size, self.embed_rows, lm_head.rows_of("lm_head", config.vocab_size, self.h))
        self.draft_vocab = min(self.mtp_vocab_size or full, full)

        self._begin()
        try:
            self._build()
        except BaseException:
            self.release()
            raise

    def _build(self) -> None:
        """Kernels, and what takes device memory."""
        gpu, shapes, module, block = self.gpu, self.shapes, self.module, self.module.block
        # V4 ships plain norm weights: the kernel of weights minus one would apply 1 + w.
        self.rms_norm_k = gpu.kernel("rms_norm_vanilla", "rms_norm_vanilla")
        self.norm = V4Norm(module.norm, self.eps, self.rms_norm_k)
        self.stream_norm_k = gpu.kernel("spark_rms_norm_f32", "spark_rms_norm_f32")
        self.norm_both_k = gpu.try_kernel("spark_rms_norm_f32", "spark_rms_norm_both")
        self.dense_gemv_k = gpu.kernel("gemv", "dense_gemv_bf16")
        self.spark_gemv_rows_k = gpu.try_kernel("spark_gemv_rows", "spark_gemv_rows")
        self.residual_add_k = gpu.kernel("residual_add", "bf16_residual_add")
        self.argmax_k = gpu.kernel("argmax", "argmax_bf16")
        self.embed_from_argmax_k = gpu.kernel("embed_from_argmax", "embed_from_argmax")
        self.e_proj = V4Projection(module.e_proj, self.h, self.h, gpu, "mtp.e_proj")
        self.h_proj = V4Projection(module.h_proj, self.h, self.h, gpu, "mtp.h_proj")

        kv_config = KvCacheConfig(
            block_size=KV_BLOCK_SIZE, num_kv_heads=1, head_dim=shapes.attention.head_dim, num_layers=1,
            dtype=self.kv_dtype, shared_kv=True,
        )  # fmt: skip
        num_blocks = (self.max_seq_len // KV_BLOCK_SIZE + 1) * self.levers.mtp_max_seqs
        self.kv_cache = PagedKvCache(kv_config, num_blocks, gpu, f"{self.owner}.kv")
        self._stack.callback(self.kv_cache.release)
        self.draft_token_id_dev = self._alloc("draft_token_id", 4)

        # The body is built without the engine's layer index: what it decides there is said here. It neither expands
        # nor collapses streams, has no compressor, and routes by learned weights.
        rows = FEED_CHUNK if self.levers.feeds_drafter else 1
        owner = self.owner
        attention = V4Attention(block.attention, shapes.attention, self.kv_cache, gpu, rows, 0, f"{owner}.attn")
        self._stack.callback(attention.release)
        ffn = V4Ffn(block.ffn, shapes.ffn, gpu, 1, name=f"{owner}.ffn")
        self._stack.callback(ffn.release)
        self.connections = V4HyperConnections(shapes.hyper, gpu, rows, f"{owner}.hc")
        self._stack.callback(self.connections.release)
        self.body = V4Layer(block.layer, attention, ffn, self.connections, owner)

        self.feed_buffers: CombinerBuffers | None = None
        if self.levers.feeds_drafter:
            sizes = CombinerBuffers.sizes(rows, self.h, self.hc_mult)
            self.feed_buffers = CombinerBuffers(**{name: self._alloc(f"feed.{name}", n) for name, n in sizes.items()})
            self.feed_positions = self._alloc("feed.positions", 4 * rows)
            self.feed_slots = self._alloc("feed.slots", 8 * rows)
        log.info(
            "V4 MTP head: hidden=%d, %d streams, mode=%s, %d experts, vocab=%d/%d, KV pool %d blocks of %d in %s",
            self.h, self.hc_mult, self.hidden_mode.value, shapes.ffn.num_experts, self.draft_vocab,
            self.config.vocab_size, num_blocks, KV_BLOCK_SIZE, self.kv_dtype.value,
        )  # fmt: skip

    def _lm_head(self, normed: DevicePtr, logits: DevicePtr, stream: StreamLike) -> None:
        """logits BF16 [draft_vocab], the first rows of the head: padding behind them is never read."""
        if self.spark_gemv_rows_k:
            head = Projection(self.lm_head, logits, self.draft_vocab, self.draft_vocab)
            spark_gemv_rows(self.gpu, self.spark_gemv_rows_k, normed, [head], 1, self.h, stream)
            return
        dense_gemv(self.gpu, self.dense_gemv_k, normed, self.lm_head, logits, self.draft_vocab, self.h, stream)

    def row_bytes(self) -> dict[str, int]:
        """Bytes that one row of this head writes to each buffer of the arena, in either mode."""
        row, stack = self.h * BF16_BYTES, self.hc_mult * self.h * BF16_BYTES
        return {
            "ssm_qkvz": row,
            "ssm_deinterleaved": row,
            "ssm_gates": stack,
            "hidden_states": row,
            "norm_output": stack,
            "ssm_ba": stack,
            "hc_streams": self.shapes.hyper.stream_bytes,
            "logits": self.draft_vocab * BF16_BYTES,
        }
