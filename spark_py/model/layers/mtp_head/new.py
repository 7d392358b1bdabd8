# SPDX-License-Identifier: AGPL-3.0-only
"""Twin of `layers/mtp_head/new.rs`: the constructor of the MTP head."""

from __future__ import annotations

import logging

from ....runtime.errors import InvalidArgumentError, UnsupportedError
from ....runtime.gpu import GpuBackend
from ....runtime.kv_cache import KvCacheConfig, KvCacheDtype, PagedKvCache
from ....runtime.sizes import count
from ...config import ModelConfig
from ...drafting.rows import PROPOSE_META_SEQS, propose_meta_stride
from ...levers import ModelLevers
from ...weight_map import DenseWeight, MtpWeights, QuantizedWeight
from .body import HeadBody, QkNorm
from .ffn_weights import build_ffn, ffn_widths
from .kernels import MtpHeadKernels
from .life import MtpHeadLife
from .quantize import Quantizer
from .types import MtpPrefillScratch, MtpQuantization, ProjectionWeight

__all__ = ["BF16_BYTES", "KV_BLOCK_SIZE", "PREFILL_CHUNK", "MtpHeadNew", "mtp_num_blocks"]

log = logging.getLogger("spark_py.model.mtp_head")

KV_BLOCK_SIZE = 16
"""Tokens in a block of the drafter's KV pool, whatever the target's block size."""
PREFILL_CHUNK = 512
"""Rows of one pass of the drafter prefill."""
BF16_BYTES = 2
_HEAD_STEP = 32
_PACKED_STEP = 16
_TILE = 128


def mtp_num_blocks(max_seq_len: int, mtp_max_seqs: int, main_kv_blocks: int) -> int:
    """Blocks of the drafter's pool: enough for each of `mtp_max_seqs` sequences at `max_seq_len`, but not more than the
    target's pool has, and enough for one sequence in any case. Blocks are compared by count, as in Rust, although the
    target's may hold another number of tokens."""
    per_seq = count("max_seq_len", max_seq_len) // KV_BLOCK_SIZE + 1
    return min(per_seq * count("mtp_max_seqs", mtp_max_seqs), max(count("main_kv_blocks", main_kv_blocks, 0), per_seq))


class MtpHeadNew(MtpHeadKernels, MtpHeadLife):
    """The fields of the head. The parameters are Rust's, in Rust's order; `body` is new: None takes the one that
    belongs to the configuration, Qwen3-Next's for its models.

    weights, embed_tokens [V, h] and lm_head [V, h] stay the caller's and must outlive the head; of what it quantises
    the head has copies, so that in FP8 and NVFP4 it needs only the norms, the router and the shared gate of `weights`.
    A table of the module's own in `weights` takes the place of the one that is passed.
    Tables may be padded: the draft vocabulary is the smallest of mtp_vocab_size (0: no limit), config.vocab_size and
    the rows of both tables. lm_head: BF16, or NVFP4 for any quantisation of the head; lm_head_nvfp4_t: the transposed
    twin of an NVFP4 LM head that is the target's own, and its row length; `lm_head_tgemm` off drops it. max_seq_len:
    tokens of a sequence. main_kv_blocks: blocks of the target's pool.

    UnsupportedError for what is not offered (a dense FFN in NVFP4, latent attention), InvalidArgumentError for a tensor
    or number that does not fit, a KernelSetError for a missing kernel. Nothing stays allocated after an error.
    """

    def __init__(
        self,
        weights: MtpWeights,
        embed_tokens: DenseWeight,
        lm_head: DenseWeight | QuantizedWeight,
        lm_head_nvfp4_t: tuple[QuantizedWeight, int] | None,
        config: ModelConfig,
        gpu: GpuBackend,
        quant: MtpQuantization,
        mtp_vocab_size: int,
        max_seq_len: int,
        main_kv_blocks: int,
        levers: ModelLevers,
        *,
        body: HeadBody | None = None,
    ) -> None:
        body = HeadBody.of(config) if body is None else body
        if quant is MtpQuantization.NVFP4 and weights.dense_ffn is not None:
            raise UnsupportedError(
                "MTP NVFP4 mode is not supported for MTP heads with a dense FFN: use --mtp-quantization fp8 or bf16"
            )
        h, nq = config.hidden_size, config.num_attention_heads
        nkv, hd = config.num_key_value_heads, config.head_dim
        inter, shared_inter = ffn_widths(config, weights.dense_ffn is not None, body)
        # The verify reads the last draft's embedding from the target's table, whatever table the drafts are made with.
        self.target_embed_tokens = embed_tokens
        embed_tokens, lm_head = weights.embed_tokens or embed_tokens, weights.lm_head or lm_head
        _check_dimensions(h, nq, nkv, hd, (inter, shared_inter), quant, lm_head)

        self.gpu, self.config, self.levers = gpu, config, levers
        self.quant, self.body = quant, body
        self.h, self.nq, self.nkv, self.hd = h, nq, nkv, hd
        # Elements of a row of the query projection: queries, and a gate for each where there are any.
        self.q_width = nq * hd * (2 if body.gated else 1)
        self.inter, self.shared_inter, self.experts_per_token = inter, shared_inter, config.num_experts_per_tok
        self.eps, self.rotary_dim, self.rope_theta = config.rms_norm_eps, config.rotary_dim(), config.rope_theta
        self.max_seq_len = count("max_seq_len", max_seq_len)

        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "input_layernorm", "post_attn_layernorm", "norm"):
            getattr(weights, name).check_shape(f"mtp {name}", h)
        norm_of = {QkNorm.PER_HEAD: (hd, hd), QkNorm.WHOLE: (nq * hd, nkv * hd), QkNorm.NONE: (0, 0)}[body.qk_norm]
        biases = (nq * hd, nkv * hd, nkv * hd) if body.qkv_bias else (0, 0, 0)
        for name, n in zip(("q_norm", "k_norm", "q_bias", "k_bias", "v_bias"), (*norm_of, *biases), strict=True):
            _check_optional(f"mtp {name}", getattr(weights, name), n)
        self.pre_fc_norm_embedding = weights.pre_fc_norm_embedding
        self.pre_fc_norm_hidden = weights.pre_fc_norm_hidden
        self.input_layernorm = weights.input_layernorm
        self.post_attn_layernorm = weights.post_attn_layernorm
        self.norm = weights.norm
        self.q_norm, self.k_norm = weights.q_norm, weights.k_norm
        self.q_bias, self.k_bias, self.v_bias = weights.q_bias, weights.k_bias, weights.v_bias
        self.moe_gate = weights.moe_gate
        self.shared_expert_gate = weights.shared_expert_gate or DenseWeight.null()

        self.mtp_vocab_size = count("mtp_vocab_size", mtp_vocab_size, 0)
        self.embed_tokens, self.lm_head = embed_tokens, lm_head
        self.embed_rows = embed_tokens.rows_of("embed_tokens", config.vocab_size, h)
        lm_head_rows = lm_head.rows_of("lm_head", config.vocab_size, h)
        target_rows = self.target_embed_tokens.rows_of("the target's embed_tokens", config.vocab_size, h)
        full = min(config.vocab_size, self.embed_rows, target_rows, lm_head_rows)
        self.draft_vocab = min(self.mtp_vocab_size or full, full)
        # Decided once, so that a captured propose never sees another kernel than the next.
        self.gemv_sw = levers.gemv_sw
        twin = _checked_twin(lm_head_nvfp4_t, lm_head, self.draft_vocab)
        self.lm_head_nvfp4_t = twin if levers.lm_head_tgemm else None

        self.attn_layer_idx = 0
        self.kv_bf16 = quant.kv_dtype() is KvCacheDtype.BF16
        self._begin()
        try:
            self._build(weights, main_kv_blocks)
        except BaseException:
            self.release()
            raise

    def _build(self, weights: MtpWeights, main_kv_blocks: int) -> None:
        """What takes device memory."""
        gpu, config, quant, levers = self.gpu, self.config, self.quant, self.levers
        h, nq, nkv, hd = self.h, self.nq, self.nkv, self.hd
        quantizer = Quantizer(gpu, quant, gpu.default_stream())
        self._stack.callback(quantizer.release)
        q = quantizer.proj
        self.fc = q("fc", weights.fc, h, h * 2)
        self.q_proj = q("q_proj", weights.q_proj, self.q_width, h)
        self.k_proj = q("k_proj", weights.k_proj, nkv * hd, h)
        self.v_proj = q("v_proj", weights.v_proj, nkv * hd, h)
        self.o_proj = q("o_proj", weights.o_proj, h, nq * hd)
        ffn = build_ffn(weights, quantizer, config, gpu, levers, self.body)
        for layer in (ffn.moe_nvfp4, ffn.moe_fused):
            if layer is not None:
                self._stack.callback(layer.release)
        self.dense_ffn_generic = ffn.dense_ffn_generic
        self.moe_nvfp4, self.moe_fused = ffn.moe_nvfp4, ffn.moe_fused
        self.moe_experts_generic, self.moe_shared_generic = ffn.moe_experts_generic, ffn.moe_shared_generic
        self.router = ffn.router

        routes = ffn.moe_experts_generic is not None
        used: list[ProjectionWeight] = [self.fc, self.q_proj, self.k_proj, self.v_proj, self.o_proj, self.lm_head]
        for triple in (ffn.dense_ffn_generic, ffn.moe_shared_generic, *(ffn.moe_experts_generic or ())):
            used += triple or ()
        if routes and self.moe_gate is not None:
            used.append(self.moe_gate)
        self._resolve_kernels(
            gpu, quant, self.body, {type(weight) for weight in used},
            silu=routes or ffn.dense_ffn_generic is not None, routes=routes, tiles=self.lm_head_nvfp4_t is not None,
        )  # fmt: skip

        # 1 attention layer.
        kv_config = KvCacheConfig(
            block_size=KV_BLOCK_SIZE, num_kv_heads=nkv, head_dim=hd, num_layers=1, dtype=quant.kv_dtype()
        )
        # For every sequence that drafts at the same time, not for one. Whoever sizes the target's pool subtracts it.
        num_blocks = mtp_num_blocks(self.max_seq_len, levers.mtp_max_seqs, main_kv_blocks)
        self.kv_cache = PagedKvCache(kv_config, num_blocks, gpu, "mtp_head.kv")
        self._stack.callback(self.kv_cache.release)
        self.draft_token_id_dev = self._alloc("draft_token_id", 4)
        # Memory of its own, not a part of the scratch that others write. A stride of the same block size as the pool.
        self.propose_meta_stride = propose_meta_stride(self.max_seq_len, KV_BLOCK_SIZE, levers.propose_meta_stride)
        self.propose_meta = self._alloc("propose_meta", PROPOSE_META_SEQS * self.propose_meta_stride)
        self.prefill_scratch: MtpPrefillScratch | None = None
        if levers.feeds_drafter and quant.supports_drafter_prefill():
            sizes = MtpPrefillScratch.sizes(PREFILL_CHUNK, h, nq, nkv, hd)
            scratch = {name: self._alloc(f"prefill.{name}", nbytes) for name, nbytes in sizes.items()}
            self.prefill_scratch = MtpPrefillScratch(**scratch)
            # RoPE rotates it with K although nobody reads the result.
            gpu.memset(self.prefill_scratch.q_scratch, 0, sizes["q_scratch"])

        lm_head_bytes = self.draft_vocab * h // 2 * (1 if isinstance(self.lm_head, QuantizedWeight) else 2 * BF16_BYTES)
        log.info(
            "MTP head: quant=%s, fc=[%d,%d], attn Q=[%d,%d], ffn=%s, %d experts, vocab=%d/%d (LM head %.1f MB), "
            "KV pool %d blocks of %d",
            quant.value, h, h * 2, self.q_width, h, ffn.kind(), config.num_experts if weights.dense_ffn is None else 0,
            self.draft_vocab, config.vocab_size, lm_head_bytes / 2**20, num_blocks, KV_BLOCK_SIZE,
        )  # fmt: skip

    def row_bytes(self) -> dict[str, int]:
        """Bytes that one row of this head writes to each buffer of the arena."""
        h, q, kv, inter = self.h, self.nq * self.hd, self.nkv * self.hd, self.inter
        need = {
            "ssm_qkvz": h,
            "ssm_deinterleaved": h,
            "ssm_gates": h,
            "ssm_ba": 2 * h,
            "hidden_states": h,
            "residual": h,
            "norm_output": h,
            "qkv_output": self.q_width + 2 * kv,
            "attn_output": q,
            "expert_gate_out": inter,
            "expert_up_out": inter,
            "moe_output": h,
            "logits": self.draft_vocab,
        }
        if self.dense_ffn_generic is None:
            # One slot an expert of a token; the shared expert uses buffers whose content is no longer needed.
            slots = self.experts_per_token
            need |= {
                "gate_logits": self.config.num_experts,
                "expert_gate_out": slots * inter,
                "expert_up_out": slots * inter,
                "expert_down_out": slots * h,
                "ssm_qkvz": max(h, self.shared_inter),
                "attn_output": max(q, h),
                "logits": max(self.draft_vocab, self.shared_inter),
            }
        return {name: elements * BF16_BYTES for name, elements in need.items()}


def _check_dimensions(
    h: int,
    nq: int,
    nkv: int,
    hd: int,
    widths: tuple[int, int],
    quant: MtpQuantization,
    lm_head: DenseWeight | QuantizedWeight,
) -> None:
    """What the kernels ask of the shapes, said by the name of the config's field."""
    step = quant.k_step()
    wide = max(step, _PACKED_STEP) if isinstance(lm_head, QuantizedWeight) else step
    for name, value, needed in (
        ("hidden_size", h, wide), ("FFN width", widths[0], step), ("shared expert's width", widths[1] or step, step),
        ("num_attention_heads * head_dim", nq * hd, step),
    ):  # fmt: skip
        if count(name, value) % needed:
            raise InvalidArgumentError(
                name, value, f"a multiple of {needed} is needed: rows are read in groups, or 16 bytes at a time"
            )
    if hd % _HEAD_STEP:
        raise InvalidArgumentError("head_dim", hd, f"a multiple of {_HEAD_STEP} is needed by the attention kernel")
    if nq % nkv:
        raise InvalidArgumentError("num_attention_heads", nq, f"a multiple of num_key_value_heads = {nkv} is needed")


def _check_optional(name: str, weight: DenseWeight | None, n: int) -> None:
    """InvalidArgumentError unless the weight is one of n elements; n 0: unless there is none, as the body has it."""
    if (weight is not None) is not (n > 0):
        raise InvalidArgumentError(name, weight, "needed by the body" if n else "None: the body has no such part")
    if weight is not None:
        weight.check_shape(name, n)


def _checked_twin(
    twin: tuple[QuantizedWeight, int] | None, lm_head: DenseWeight | QuantizedWeight, draft_vocab: int
) -> tuple[QuantizedWeight, int] | None:
    """The transposed LM head, whose rows hold the draft vocabulary and end on a tile."""
    if twin is None:
        return None
    weight, ldb = twin
    if not isinstance(lm_head, QuantizedWeight):
        raise InvalidArgumentError("lm_head_nvfp4_t", twin, "None where the LM head is not NVFP4: it would be another")
    for name, ptr in (("lm_head_nvfp4_t", weight.weight), ("weight_scale of lm_head_nvfp4_t", weight.weight_scale)):
        if ptr.is_null:
            raise InvalidArgumentError(name, ptr, "a tensor on the device is needed")
    if count("row length of lm_head_nvfp4_t", ldb) < draft_vocab or ldb % _TILE:
        limit = f"a multiple of {_TILE}, and at least the draft vocabulary, {draft_vocab}"
        raise InvalidArgumentError("row length of lm_head_nvfp4_t", ldb, limit)
    if weight.weight_scale_2 != lm_head.weight_scale_2:
        limit = f"the LM head's own, {lm_head.weight_scale_2}: the twin is the same weight"
        raise InvalidArgumentError("weight_scale_2 of lm_head_nvfp4_t", weight.weight_scale_2, limit)
    return weight, ldb
