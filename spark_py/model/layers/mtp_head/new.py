# SPDX-License-Identifier: AGPL-3.0-only
"""Twin of `layers/mtp_head/new.rs`: the constructor of the MTP head, and the end of its life."""

from __future__ import annotations

import logging
import threading
import weakref
from types import TracebackType
from typing import TypeVar

from ....runtime.buffers import BufferArena
from ....runtime.errors import CapacityError, InvalidArgumentError, SparkError, UnsupportedError
from ....runtime.gpu import DevicePtr, GpuBackend, KernelHandle
from ....runtime.kv_cache import KvCacheConfig, KvCacheDtype, PagedKvCache
from ....runtime.sizes import count
from ...config import ModelConfig
from ...levers import ModelLevers
from ...weight_map import DenseWeight, Fp8Weight, MtpWeights, QuantizedWeight
from .types import MtpPrefillScratch, MtpProposerState, MtpQuantization, NormConvention, ProjectionWeight

__all__ = ["KV_BLOCK_SIZE", "PREFILL_CHUNK", "MtpHeadNew", "mtp_num_blocks"]

log = logging.getLogger("spark_py.model.mtp_head")

KV_BLOCK_SIZE = 16
"""Tokens in a block of the drafter's KV pool, whatever the target's block size."""
PREFILL_CHUNK = 512
"""Rows of one pass of the drafter prefill."""
BF16_BYTES = 2
_VECTOR = 8
_HEAD_STEP = 32

_Self = TypeVar("_Self", bound="MtpHeadNew")


def mtp_num_blocks(max_seq_len: int, mtp_max_seqs: int, main_kv_blocks: int) -> int:
    """Blocks of the drafter's pool: enough for each of `mtp_max_seqs` sequences at `max_seq_len`, but not more than the
    target's pool has, and enough for one sequence in any case. Blocks are compared by count, as in Rust, although the
    target's may hold another number of tokens."""
    per_seq = count("max_seq_len", max_seq_len) // KV_BLOCK_SIZE + 1
    return min(per_seq * count("mtp_max_seqs", mtp_max_seqs), max(count("main_kv_blocks", main_kv_blocks, 0), per_seq))


class MtpHeadNew:
    """The fields of the head. The parameters are Rust's, in Rust's order; `norm` is new.

    weights, embed_tokens [V, h] and lm_head [V, h] stay the caller's and must outlive the head. Tables may be padded:
    the draft vocabulary is the smallest of mtp_vocab_size (0: no limit), config.vocab_size and the rows of both tables.
    lm_head_nvfp4_t, the transposed twin of an NVFP4 head, goes with that form alone. max_seq_len: tokens of a sequence.
    main_kv_blocks: blocks of the target's pool.

    UnsupportedError for what is not offered (FP8 and NVFP4, experts, attention without gate), InvalidArgumentError for
    a tensor or number that does not fit, a KernelSetError for a missing kernel. Nothing stays allocated after an error.
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
        norm: NormConvention = NormConvention.ONE_PLUS_W,
    ) -> None:
        quant.require_offered()
        if isinstance(lm_head, QuantizedWeight) or lm_head_nvfp4_t is not None:
            raise UnsupportedError("an NVFP4 LM head is not offered for a BF16 MTP head: pass the target's BF16 head")
        if weights.dense_ffn is None:
            raise UnsupportedError("an MTP head with experts is not offered: its FFN must be dense")
        if not config.attn_gated:
            raise UnsupportedError("an MTP head whose attention has no output gate is not offered")

        h, nq = config.hidden_size, config.num_attention_heads
        nkv, hd = config.num_key_value_heads, config.head_dim
        # Rust sizes the weights with moe_intermediate_size and runs a dense FFN with intermediate_size. One value here.
        inter = config.intermediate_size
        _check_dimensions(h, nq, nkv, hd, inter)

        self.gpu, self.config, self.levers = gpu, config, levers
        self.quant, self.norm_convention = quant, norm
        self.h, self.nq, self.nkv, self.hd, self.inter = h, nq, nkv, hd, inter
        self.eps, self.rotary_dim, self.rope_theta = config.rms_norm_eps, config.rotary_dim(), config.rope_theta
        self.max_seq_len = count("max_seq_len", max_seq_len)

        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "input_layernorm", "post_attn_layernorm", "norm"):
            getattr(weights, name).check_shape(f"mtp {name}", h)
        for name in ("q_norm", "k_norm"):
            getattr(weights, name).check_shape(f"mtp {name}", hd)
        self.pre_fc_norm_embedding = weights.pre_fc_norm_embedding
        self.pre_fc_norm_hidden = weights.pre_fc_norm_hidden
        self.input_layernorm = weights.input_layernorm
        self.post_attn_layernorm = weights.post_attn_layernorm
        self.norm = weights.norm
        self.q_norm, self.k_norm = weights.q_norm, weights.k_norm

        q = self.quantize_proj
        self.fc = q("fc", weights.fc, h, h * 2)
        self.q_proj = q("q_proj", weights.q_proj, nq * hd * 2, h)
        self.k_proj = q("k_proj", weights.k_proj, nkv * hd, h)
        self.v_proj = q("v_proj", weights.v_proj, nkv * hd, h)
        self.o_proj = q("o_proj", weights.o_proj, h, nq * hd)
        self.dense_ffn_generic = (
            q("gate_proj", weights.dense_ffn.gate_proj, inter, h),
            q("up_proj", weights.dense_ffn.up_proj, inter, h),
            q("down_proj", weights.dense_ffn.down_proj, h, inter),
        )

        self.mtp_vocab_size = count("mtp_vocab_size", mtp_vocab_size, 0)
        self.embed_tokens, self.lm_head = embed_tokens, lm_head
        self.embed_rows = embed_tokens.rows_of("embed_tokens", config.vocab_size, h)
        lm_head_rows = lm_head.rows_of("lm_head", config.vocab_size, h)
        full = min(config.vocab_size, self.embed_rows, lm_head_rows)
        self.draft_vocab = min(self.mtp_vocab_size or full, full)

        self._resolve_kernels()

        self.attn_layer_idx = 0
        self.last_conf = 1.0
        self._deferred = False
        self._states: weakref.WeakSet[MtpProposerState] = weakref.WeakSet()
        self._warned_masks = self._warned_prefill = False
        self._checked: weakref.ref[BufferArena] | None = None
        self._released = False
        self._kv_lock = threading.RLock()
        self.draft_token_id_dev = DevicePtr.NULL
        self.prefill_scratch: MtpPrefillScratch | None = None
        # 1 attention layer. BF16, since FP8 with unit scales saturates where a deep layer's K and V are large.
        kv_config = KvCacheConfig(
            block_size=KV_BLOCK_SIZE, num_kv_heads=nkv, head_dim=hd, num_layers=1, dtype=KvCacheDtype.BF16
        )
        # For every sequence that drafts at the same time, not for one. Whoever sizes the target's pool subtracts it.
        num_blocks = mtp_num_blocks(self.max_seq_len, levers.mtp_max_seqs, main_kv_blocks)
        self.kv_cache = PagedKvCache(kv_config, num_blocks, gpu, "mtp_head.kv")
        self._owned: list[DevicePtr] = []
        try:
            self.draft_token_id_dev = self._alloc("draft_token_id", 4)
            if levers.feeds_drafter:
                sizes = MtpPrefillScratch.sizes(PREFILL_CHUNK, h, nq, nkv, hd)
                scratch = {name: self._alloc(f"prefill.{name}", nbytes) for name, nbytes in sizes.items()}
                self.prefill_scratch = MtpPrefillScratch(**scratch)
                # RoPE rotates it with K although nobody reads the result.
                gpu.memset(self.prefill_scratch.q_scratch, 0, sizes["q_scratch"])
        except BaseException:
            self.release()
            raise
        log.info(
            "MTP head: quant=%s, fc=[%d,%d], attn Q=[%d,%d], ffn=dense FFN, vocab=%d/%d (LM head %.1f MB), "
            "KV pool %d blocks of %d",
            quant.value, h, h * 2, nq * hd * 2, h, self.draft_vocab, config.vocab_size,
            self.draft_vocab * h * BF16_BYTES / 2**20, num_blocks, KV_BLOCK_SIZE,
        )  # fmt: skip

    def quantize_proj(self, name: str, weight: DenseWeight | Fp8Weight, n: int, k: int) -> ProjectionWeight:
        """A projection [n, k] in the head's quantisation; BF16 is the checkpoint's own tensor, not a copy."""
        weight.check_shape(f"mtp {name}", n, k)
        if isinstance(weight, Fp8Weight):
            raise UnsupportedError(f"mtp {name} is FP8: a BF16 head takes BF16")
        return weight

    def _resolve_kernels(self) -> None:
        """Handles of what this quantisation and LM head run; an optional one that the set lacks is handle 0."""
        gpu = self.gpu
        if self.norm_convention is NormConvention.ONE_PLUS_W:
            self.rms_norm_k = gpu.kernel("norm", "rms_norm")
            self.residual_add_rms_norm_k = gpu.kernel("norm", "residual_add_rms_norm")
        else:
            self.rms_norm_k = gpu.kernel("rms_norm_vanilla", "rms_norm_vanilla")
            self.residual_add_rms_norm_k = KernelHandle(0)
        self.rope_k = gpu.kernel("rope", "rope_forward")
        self.reshape_cache_k = gpu.kernel("reshape_and_cache", "reshape_and_cache_flash")
        self.paged_decode_k = gpu.kernel("paged_decode", "paged_decode_attn")
        self.residual_add_k = gpu.kernel("residual_add", "bf16_residual_add")
        self.sigmoid_gate_mul_k = gpu.kernel("residual_add", "sigmoid_gate_mul")
        self.bf16_concat_k = gpu.kernel("residual_add", "bf16_concat")
        self.argmax_k = gpu.kernel("argmax", "argmax_bf16")
        self.embed_from_argmax_k = gpu.kernel("embed_from_argmax", "embed_from_argmax")
        self.dense_gemv_k = gpu.kernel("gemv", "dense_gemv_bf16")
        self.deinterleave_qg_k = gpu.kernel("ssm_preprocess", "deinterleave_qg")
        self.moe_silu_mul_k = gpu.kernel("moe_silu_mul", "moe_silu_mul")
        # Batched row writers; without them rows are fed one at a time, or (the GEMM) not at all.
        self.dense_gemm_k = gpu.try_kernel("gemm", "dense_gemm_bf16")
        self.dense_gemv_batchm_k = gpu.try_kernel("dense_gemv_bf16_batchm", "dense_gemv_bf16_batchm")

    def _alloc(self, name: str, nbytes: int) -> DevicePtr:
        ptr = self.gpu.alloc(nbytes, f"mtp_head.{name}")
        self._owned.append(ptr)
        return ptr

    def check_buffers(self, buffers: BufferArena) -> None:
        """CapacityError where a buffer of the arena is too small for one row of this head. An arena is checked once."""
        if self._checked is not None and self._checked() is buffers:
            return
        h, q, kv = self.h, self.nq * self.hd, self.nkv * self.hd
        need = {
            "ssm_qkvz": h,
            "ssm_deinterleaved": h,
            "ssm_gates": h,
            "ssm_ba": 2 * h,
            "hidden_states": h,
            "residual": h,
            "norm_output": h,
            "qkv_output": 2 * q + 2 * kv,
            "attn_output": q,
            "expert_gate_out": self.inter,
            "expert_up_out": self.inter,
            "moe_output": h,
            "logits": self.draft_vocab,
        }
        for name, elements in need.items():
            have = getattr(buffers.sizes(), name)
            if (nbytes := elements * BF16_BYTES) > have:
                raise CapacityError(f"bytes that the MTP head writes to {name}", nbytes, have, "the arena's buffer")
        self._checked = weakref.ref(buffers)

    # ------------------------------------------------------------ life

    def release(self) -> None:
        """Free the KV pool and the head's own buffers; a second call does nothing. Weights stay. All are tried, then
        the first error is raised."""
        if self._released:
            return
        self._released = True
        first: SparkError | None = None
        try:
            self.kv_cache.release()
        except SparkError as error:
            first = error
        # A backend that was closed before has freed everything itself.
        for ptr in () if self.gpu.closed else self._owned:
            try:
                self.gpu.free(ptr)
            except SparkError as error:
                first = first or error
        self._owned.clear()
        if first is not None:
            raise first

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


def _check_dimensions(h: int, nq: int, nkv: int, hd: int, inter: int) -> None:
    """What the kernels ask of the shapes, said by the name of the config's field."""
    for name, value in (("hidden_size", h), ("intermediate_size", inter), ("num_attention_heads * head_dim", nq * hd)):
        if count(name, value) % _VECTOR:
            raise InvalidArgumentError(
                name, value, f"a multiple of {_VECTOR} is needed: rows are read 16 bytes at a time"
            )
    if hd % _HEAD_STEP:
        raise InvalidArgumentError("head_dim", hd, f"a multiple of {_HEAD_STEP} is needed by the attention kernel")
    if nq % nkv:
        raise InvalidArgumentError("num_attention_heads", nq, f"a multiple of num_key_value_heads = {nkv} is needed")
