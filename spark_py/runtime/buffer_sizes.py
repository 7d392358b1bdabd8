# SPDX-License-Identifier: AGPL-3.0-only
"""BufferSizes: how many bytes each buffer of the arena has, for a model and its limits.

Twin of `buffers/sizes.rs`. `engine_sizes` is the engine's table. `drafter_floors` is what the draft heads write, which
the engine's table does not always cover; a buffer has the larger of the two.

Not in the table, since their sizes are not known: `moe_worklist`, `moe_worklist_total`, `moe_worklist_overflow`, and
the packed ternary buffers `q2_dequant_scratch` and `q2_act_q8`, which are off by default.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from .buffer_config import BufferConfig
from .decode_meta import DecodeMetaLayout
from .errors import InvalidArgumentError
from .launch import div_ceil
from .scratch import PROPOSE_MAX_ROWS, VERIFY_MAX_ROWS, ScratchRegion, scratch_size
from .sizes import align_up, count

__all__ = ["ENGINE_SM_COUNT", "BufferSizes", "drafter_floors", "engine_sizes"]

ENGINE_SM_COUNT = 48
"""Multiprocessors of the GPU that the engine's constant is for; split-K partials are one per multiprocessor."""
PLACEHOLDER = 256
"""Bytes of a buffer that the model has no use for."""
_MTP_BLOCK_SIZE = 16
_SELECT_TOKENS = 2048

_POSITIVE = ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_COUNTS = (
    "intermediate_size", "num_experts", "zero_expert_num", "num_experts_per_tok", "moe_intermediate_size",
    "shared_expert_intermediate_size", "moe_latent_size", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "o_groups",
    "o_lora_rank", "hc_mult", "hc_lowrank", "index_n_heads", "index_head_dim", "index_compress_ratio", "index_topk",
    "linear_key_head_dim", "linear_value_head_dim", "linear_num_value_heads", "mamba_num_heads", "ssm_state_size",
    "n_groups", "adapter_max_rank",
)  # fmt: skip
_DERIVED = ("moe_input_size", "ssm_qkvz_size", "ssm_ba_size", "mamba2_d_inner", "mamba2_in_proj_size", "mamba2_d_xbc")


@dataclass(frozen=True, slots=True)
class BufferSizes:
    """Bytes of each buffer, in the order of allocation; 0 means that the buffer is NULL."""

    hidden_states: int
    residual: int
    norm_output: int
    qkv_output: int
    attn_output: int
    gate_logits: int
    gate_logits_f32: int
    moe_router_in_f32: int
    moe_output: int
    logits: int
    ssm_qkvz: int
    ssm_ba: int
    ssm_deinterleaved: int
    ssm_gates: int
    ssm_conv_out_f32: int
    scratch: int
    expert_gate_out: int
    expert_up_out: int
    expert_down_out: int
    splitk_workspace: int
    gdn_fla_scratch: int
    ssd_scratch: int
    o_latent: int
    norm_unit_w: int
    hc_streams: int
    hc_post: int
    hc_comb: int
    hc_lowrank_scratch: int
    qsa_select_scratch: int
    token_ids: int
    ffn_act_q8: int
    ffn_act_a: int
    ffn_act_scale: int
    fp8_act: int
    fp8_act_scale: int
    lora_xa: int
    lora_delta: int
    lora_hact: int
    lora_seq_slot: int

    @classmethod
    def from_config(
        cls,
        config: BufferConfig,
        max_batch_tokens: int,
        max_seq_len: int,
        kv_block_size: int,
        max_batch_size: int,
        sm_count: int = ENGINE_SM_COUNT,
    ) -> BufferSizes:
        """Sizes for at most `max_batch_tokens` rows a step, `max_seq_len` tokens a sequence and `max_batch_size`
        sequences. `kv_block_size` 0 means 256 block-table entries a sequence. InvalidArgumentError names a field that
        is negative, or 0 where that cannot be."""
        _check_config(config)
        sizes = engine_sizes(config, max_batch_tokens, max_seq_len, kv_block_size, max_batch_size, sm_count)
        for name, floor in drafter_floors(config, max_batch_tokens, max_seq_len).items():
            sizes[name] = max(sizes[name], floor)
        return cls(**sizes)

    def items(self) -> tuple[tuple[str, int], ...]:
        """(name, bytes) of each buffer."""
        return tuple((field.name, getattr(self, field.name)) for field in fields(self))

    def total_bytes(self) -> int:
        """Sum over all buffers. The engine's own figure leaves out `o_latent` and `norm_unit_w`."""
        return sum(nbytes for _, nbytes in self.items())


def _check_config(config: BufferConfig) -> None:
    for name in _POSITIVE:
        count(f"config.{name}", getattr(config, name))
    for name in _COUNTS:
        count(f"config.{name}", getattr(config, name), 0)
    for name in _DERIVED:
        count(f"config.{name}()", getattr(config, name)(), 0)
    for name in ("attn_gated", "mrope_interleaved"):
        if not isinstance(value := getattr(config, name), bool):
            raise InvalidArgumentError(f"config.{name}", value, "True or False")
    if 0 < config.num_experts < config.num_experts_per_tok - config.zero_expert_num:
        limit = f"at most the {config.num_experts + config.zero_expert_num} experts there are"
        raise InvalidArgumentError("config.num_experts_per_tok", config.num_experts_per_tok, limit)


def engine_sizes(
    config: BufferConfig,
    max_batch_tokens: int,
    max_seq_len: int,
    kv_block_size: int,
    max_batch_size: int,
    sm_count: int = ENGINE_SM_COUNT,
) -> dict[str, int]:
    """The engine's table, name to bytes."""
    c = config
    m = count("max_batch_tokens", max_batch_tokens)
    max_seq_len = count("max_seq_len", max_seq_len)
    sms = count("sm_count", sm_count)
    rows = DecodeMetaLayout.for_batch(max_batch_size).rows

    h, q, kv, hd, k = (
        c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.num_experts_per_tok
    )  # fmt: skip
    inter, moe_inter, d_in, hc = c.intermediate_size, c.moe_intermediate_size, c.mamba2_d_inner(), c.hc_mult
    gate = 2 if c.attn_gated else 1
    moe = c.num_experts > 0
    routed = c.num_experts + c.zero_expert_num
    mla = c.kv_lora_rank > 0
    # Width of a latent row, and of the rotated part of all query heads; 0 where attention is not latent.
    latent = (c.kv_lora_rank + c.qk_rope_head_dim) if mla else 0
    rope, q_lora = (c.qk_rope_head_dim, c.q_lora_rank) if mla else (0, 0)
    expert_rows = max(m, 3)
    expert_width = max(k * moe_inter, inter) if moe else inter
    fp8_width = max(h, q * hd, d_in)
    dense_width = 0 if moe else max(h, inter)
    rank = c.adapter_max_rank

    return {
        "hidden_states": m * h * 2,
        "residual": m * h * 2,
        "norm_output": m * max(h, d_in) * 2,
        "qkv_output": m * (q * gate + 2 * kv) * hd * 2,
        "attn_output": m * max(q * hd, d_in, q * latent) * 2,
        "gate_logits": m * routed * 2 if moe else PLACEHOLDER,
        "gate_logits_f32": m * routed * 4 if moe else PLACEHOLDER,
        "moe_router_in_f32": m * h * 4 if moe else PLACEHOLDER,
        "moe_output": m * h * 2,
        "logits": min(m, max(VERIFY_MAX_ROWS, rows + 1)) * c.vocab_size * 2,
        "ssm_qkvz": max(
            m * max(c.ssm_qkvz_size(), c.mamba2_in_proj_size(), 2 * kv * hd, c.shared_expert_intermediate_size) * 2,
            PLACEHOLDER,
        ),
        "ssm_ba": max(m * max(c.ssm_ba_size(), c.moe_latent_size, rope, q_lora) * 2, PLACEHOLDER),
        "ssm_deinterleaved": max(m * max(c.ssm_qkvz_size(), c.mamba2_d_xbc(), q * hd, q * latent) * 2, PLACEHOLDER),
        "ssm_gates": max(m * c.linear_num_value_heads * 2 * 4, PLACEHOLDER),
        "ssm_conv_out_f32": max(m * c.ssm_qkvz_size() * 4, m * q * rope * 2, PLACEHOLDER),
        "scratch": scratch_size(m, k, max_seq_len, kv_block_size, max_batch_size, mrope=c.mrope_interleaved),
        "expert_gate_out": expert_rows * expert_width * 2,
        "expert_up_out": expert_rows * expert_width * 2,
        "expert_down_out": expert_rows * (k * c.moe_input_size() if moe else h) * 2,
        "splitk_workspace": sms * (hd + 2) * 4,
        "gdn_fla_scratch": _gdn_bytes(c, m),
        "ssd_scratch": _ssd_bytes(c, m),
        "o_latent": max(m * c.o_groups * c.o_lora_rank * 2, PLACEHOLDER),
        "norm_unit_w": max(h, d_in) * 2,
        "hc_streams": m * hc * h * 4 if hc else PLACEHOLDER,
        "hc_post": max(m * hc * 4, PLACEHOLDER),
        "hc_comb": max(m * hc * hc * 4, PLACEHOLDER),
        "hc_lowrank_scratch": _hc_lowrank_bytes(c, m),
        "qsa_select_scratch": _select_bytes(c, max_seq_len),
        "token_ids": max(m * 4, PLACEHOLDER),
        "ffn_act_q8": m * align_up(dense_width, 256) * 4 + (1 << 20) if dense_width else 0,
        "ffn_act_a": m * dense_width,
        "ffn_act_scale": m * div_ceil(dense_width, 32) * 4,
        "fp8_act": m * fp8_width,
        "fp8_act_scale": m * div_ceil(fp8_width, 128) * 4,
        "lora_xa": m * rank * 2,
        "lora_delta": m * max(h, inter, gate * q * hd) * 2 if rank else 0,
        "lora_hact": m * inter * 2 if rank else 0,
        "lora_seq_slot": m * 4 if rank else 0,
    }


def _gdn_bytes(c: BufferConfig, m: int) -> int:
    """Chunked prefill of gated delta nets, for head dims of 128: W, U, S, uc in BF16 and gc in FP32, chunks of 64."""
    heads, kd, vd = c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
    if heads == 0 or kd != 128 or vd != 128:
        return 0
    per_chunk = 64 * kd * 2 + 64 * vd * 2 + kd * vd * 2 + 64 * vd * 2 + 64 * 4
    return (div_ceil(m, 64) + 16) * heads * per_chunk


def _ssd_bytes(c: BufferConfig, m: int) -> int:
    """Chunked Mamba-2 prefill in FP32: dt and cumulative dA per head, C Bᵀ per group, chunks of 64."""
    if c.mamba_num_heads == 0 or c.ssm_state_size == 0:
        return 0
    chunks = div_ceil(m, 64) + 1
    return 2 * c.mamba_num_heads * chunks * 64 * 4 + chunks * max(c.n_groups, 1) * 64 * 64 * 4


def _hc_lowrank_bytes(c: BufferConfig, m: int) -> int:
    """Low-rank hyper-connections: an FP32 layout of up to 64 tokens and a BF16 one of up to 2048, never both."""
    hc, h, rank = c.hc_mult, c.hidden_size, c.hc_lowrank
    if hc == 0 or rank == 0:
        return PLACEHOLDER
    return max(min(m, 64) * (hc * h + rank) * 4, min(m, 2048) * (2 * hc * h + rank + hc) * 2)


def _select_bytes(c: BufferConfig, max_seq_len: int) -> int:
    """Indexer selection of 2048 tokens: queries and key in BF16, queries in FP32, scores and picks of 4 bytes."""
    n, dim, ratio = c.index_n_heads, c.index_head_dim, c.index_compress_ratio
    if n == 0 or dim == 0 or ratio == 0:
        return PLACEHOLDER
    per_token = (n + 1) * dim * 2 + n * dim * 4 + div_ceil(max_seq_len, ratio) * 4 + c.index_topk // ratio * 4
    return _SELECT_TOKENS * per_token


def drafter_floors(config: BufferConfig, max_batch_tokens: int, max_seq_len: int) -> dict[str, int]:
    """Bytes that the draft heads write into shared buffers, by name; no buffer is smaller than this.

    The rule: `rows` is the most rows that a propose handles, min(max_batch_tokens, 32), and at least `hc_mult`, since
    the DeepSeek-V4 head normalises and projects one row per stream. Per row:

    - embedding, normed embedding and normed hidden (`ssm_qkvz`, `ssm_deinterleaved`, `ssm_gates`) are h wide and their
      concatenation (`ssm_ba`) 2h, where models without linear attention have 256 bytes in all;
    - `hidden_states`, `residual`, `norm_output` and `moe_output` hold h per row even where max_batch_tokens < hc_mult;
    - `qkv_output` holds gated queries even where the target's attention has no gate, and `attn_output` is also used for
      embedding rows and for the shared expert's output, both h wide;
    - the head's FFN is as wide as moe_intermediate_size or intermediate_size, whichever it uses, and so is its shared
      expert, gate in `logits` and up in `ssm_qkvz`; expert outputs are h wide also in a model with latent experts;
    - `scratch` has room for the slab at 49152 with a block table for max_seq_len in blocks of 16, whatever the target's
      block size.
    """
    c = config
    h, q, kv, hd = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim
    rows = max(min(count("max_batch_tokens", max_batch_tokens), PROPOSE_MAX_ROWS), c.hc_mult)
    ffn = max(c.intermediate_size, c.moe_intermediate_size)
    experts = c.num_experts_per_tok
    row = rows * h * 2
    # A head without a width for its experts gives each the dense width.
    expert_rows = rows * max(experts * (c.moe_intermediate_size or c.intermediate_size), ffn) * 2
    return {
        "hidden_states": row,
        "residual": row,
        "norm_output": row,
        "moe_output": row,
        "ssm_deinterleaved": row,
        "ssm_gates": row,
        "ssm_ba": 2 * row,
        "ssm_qkvz": rows * max(h, ffn, c.shared_expert_intermediate_size) * 2,
        "qkv_output": rows * (2 * q + 2 * kv) * hd * 2,
        "attn_output": rows * max(h, q * hd) * 2,
        "logits": rows * max(ffn, c.shared_expert_intermediate_size) * 2,
        "expert_gate_out": expert_rows,
        "expert_up_out": expert_rows,
        "expert_down_out": rows * max(experts, 1) * h * 2,
        "scratch": ScratchRegion.mtp_meta(count("max_seq_len", max_seq_len) // _MTP_BLOCK_SIZE + 1).end,
    }
