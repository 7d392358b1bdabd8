# SPDX-License-Identifier: AGPL-3.0-only
"""Shapes of known models for the tests of buffers, and the bytes that each buffer of theirs has."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from spark_py.runtime.buffers import BufferConfig


@dataclass(frozen=True)
class Shape:
    """A BufferConfig of plain numbers; the derived ones are given, not derived."""

    hidden_size: int = 64
    vocab_size: int = 100
    intermediate_size: int = 128
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    attn_gated: bool = False
    mrope_interleaved: bool = False
    num_experts: int = 0
    zero_expert_num: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    moe_latent_size: int = 0
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    o_groups: int = 0
    o_lora_rank: int = 0
    hc_mult: int = 0
    hc_lowrank: int = 0
    index_n_heads: int = 0
    index_head_dim: int = 0
    index_compress_ratio: int = 0
    index_topk: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_num_value_heads: int = 0
    mamba_num_heads: int = 0
    ssm_state_size: int = 0
    n_groups: int = 0
    adapter_max_rank: int = 0
    moe_input: int = 0
    qkvz: int = 0
    ba: int = 0
    d_inner: int = 0
    in_proj: int = 0
    d_xbc: int = 0

    def moe_input_size(self) -> int:
        return self.moe_input

    def ssm_qkvz_size(self) -> int:
        return self.qkvz

    def ssm_ba_size(self) -> int:
        return self.ba

    def mamba2_d_inner(self) -> int:
        return self.d_inner

    def mamba2_in_proj_size(self) -> int:
        return self.in_proj

    def mamba2_d_xbc(self) -> int:
        return self.d_xbc


TINY: BufferConfig = Shape()
# 27 B dense with linear attention: 16 key heads and 48 value heads of 128.
DENSE = Shape(
    hidden_size=5120, vocab_size=248320, intermediate_size=17408, num_attention_heads=24, num_key_value_heads=4,
    head_dim=256, attn_gated=True, linear_key_head_dim=128, linear_value_head_dim=128, linear_num_value_heads=48,
    qkvz=16384, ba=96,
)  # fmt: skip
DENSE_LIMITS = (1024, 16384, 16, 8)
DENSE_BYTES = {
    "hidden_states": 10_485_760,
    "residual": 10_485_760,
    "norm_output": 10_485_760,
    "qkv_output": 29_360_128,  # 24 heads twice and 2 * 4 are 56 * 256 = 14336 a row
    "attn_output": 12_582_912,
    "gate_logits": 256,
    "gate_logits_f32": 256,
    "moe_router_in_f32": 256,
    "moe_output": 10_485_760,
    "logits": 47_677_440,  # 96 rows
    "ssm_qkvz": 33_554_432,
    "ssm_ba": 196_608,
    "ssm_deinterleaved": 33_554_432,
    "ssm_gates": 393_216,
    "ssm_conv_out_f32": 67_108_864,
    "scratch": 428_416,  # verify: 32768 + 2048 + 96 * 1025 * 4
    "expert_gate_out": 35_651_584,
    "expert_up_out": 35_651_584,
    "expert_down_out": 10_485_760,
    "splitk_workspace": 49_536,
    "gdn_fla_scratch": 126_222_336,  # 32 chunks * 48 heads * (3 * 16384 + 32768 + 256)
    "ssd_scratch": 0,
    "o_latent": 256,
    "norm_unit_w": 10_240,
    "hc_streams": 256,
    "hc_post": 256,
    "hc_comb": 256,
    "hc_lowrank_scratch": 256,
    "qsa_select_scratch": 256,
    "token_ids": 4096,
    "ffn_act_q8": 72_351_744,  # 1024 * 17408 * 4 + 1 MiB
    "ffn_act_a": 17_825_792,
    "ffn_act_scale": 2_228_224,
    "fp8_act": 6_291_456,
    "fp8_act_scale": 196_608,
    "lora_xa": 0,
    "lora_delta": 0,
    "lora_hact": 0,
    "lora_seq_slot": 0,
}
DENSE_RAISED = {"ssm_ba": 655_360}  # 32 rows of 2 * 5120 BF16
# 512 experts, ten a token, adapters of rank 16; 40 sequences pad to 48 rows of metadata.
MOE = Shape(
    hidden_size=2048, vocab_size=151936, intermediate_size=5120, num_attention_heads=16, num_key_value_heads=2,
    head_dim=256, attn_gated=True, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=768,
    shared_expert_intermediate_size=512, moe_input=2048, linear_key_head_dim=128, linear_value_head_dim=128,
    linear_num_value_heads=32, qkvz=12288, ba=64, adapter_max_rank=16,
)  # fmt: skip
MOE_LIMITS = (8, 131072, 16, 40)
MOE_BYTES = {
    "hidden_states": 32_768,
    "residual": 32_768,
    "norm_output": 32_768,
    "qkv_output": 147_456,
    "attn_output": 65_536,
    "gate_logits": 8192,
    "gate_logits_f32": 16_384,
    "moe_router_in_f32": 65_536,
    "moe_output": 32_768,
    "logits": 2_430_976,  # no more rows than tokens: 8
    "ssm_qkvz": 196_608,
    "ssm_ba": 1024,
    "ssm_deinterleaved": 196_608,
    "ssm_gates": 2048,
    "ssm_conv_out_f32": 393_216,
    "scratch": 3_180_928,  # verify: 34816 + 96 * 8193 * 4
    "expert_gate_out": 122_880,
    "expert_up_out": 122_880,
    "expert_down_out": 327_680,
    "splitk_workspace": 49_536,
    "gdn_fla_scratch": 44_703_744,  # 17 chunks * 32 heads * 82176
    "ssd_scratch": 0,
    "o_latent": 256,
    "norm_unit_w": 4096,
    "hc_streams": 256,
    "hc_post": 256,
    "hc_comb": 256,
    "hc_lowrank_scratch": 256,
    "qsa_select_scratch": 256,
    "token_ids": 256,
    "ffn_act_q8": 0,
    "ffn_act_a": 0,
    "ffn_act_scale": 0,
    "fp8_act": 32_768,
    "fp8_act_scale": 1024,
    "lora_xa": 256,
    "lora_delta": 131_072,  # queries with their gates are widest: 8192
    "lora_hact": 81_920,
    "lora_seq_slot": 32,
}
MOE_RAISED = {"ssm_ba": 65_536, "ssm_gates": 32_768}
# Latent attention, four streams and an indexer; fewer rows than streams.
V4 = Shape(
    hidden_size=4096, vocab_size=129280, intermediate_size=0, num_attention_heads=64, num_key_value_heads=1,
    head_dim=512, num_experts=256, num_experts_per_tok=6, moe_intermediate_size=2048,
    shared_expert_intermediate_size=2048, moe_input=4096, kv_lora_rank=512, q_lora_rank=1024, qk_rope_head_dim=64,
    o_groups=8, o_lora_rank=1024, hc_mult=4, index_n_heads=64, index_head_dim=128, index_compress_ratio=4,
    index_topk=512,
)  # fmt: skip
V4_LIMITS = (2, 4096, 64, 1)
V4_BYTES = {
    "hidden_states": 16_384,
    "residual": 16_384,
    "norm_output": 16_384,
    "qkv_output": 135_168,
    "attn_output": 147_456,  # 64 latent rows of 576
    "gate_logits": 1024,
    "gate_logits_f32": 2048,
    "moe_router_in_f32": 32_768,
    "moe_output": 16_384,
    "logits": 517_120,
    "ssm_qkvz": 8192,
    "ssm_ba": 4096,
    "ssm_deinterleaved": 147_456,
    "ssm_gates": 256,
    "ssm_conv_out_f32": 16_384,
    "scratch": 65_536,
    "expert_gate_out": 73_728,  # three rows at least
    "expert_up_out": 73_728,
    "expert_down_out": 147_456,
    "splitk_workspace": 98_688,
    "gdn_fla_scratch": 0,
    "ssd_scratch": 0,
    "o_latent": 32_768,
    "norm_unit_w": 8192,
    "hc_streams": 131_072,
    "hc_post": 256,
    "hc_comb": 256,
    "hc_lowrank_scratch": 256,
    "qsa_select_scratch": 110_624_768,  # 2048 * (16640 + 32768 + 4096 + 512)
    "token_ids": 256,
    "ffn_act_q8": 0,
    "ffn_act_a": 0,
    "ffn_act_scale": 0,
    "fp8_act": 65_536,
    "fp8_act_scale": 2048,
    "lora_xa": 0,
    "lora_delta": 0,
    "lora_hact": 0,
    "lora_seq_slot": 0,
}
V4_RAISED = {
    "hidden_states": 32_768,  # four rows, one per stream, here and below
    "residual": 32_768,
    "norm_output": 32_768,
    "moe_output": 32_768,
    "qkv_output": 532_480,
    "attn_output": 262_144,
    "ssm_qkvz": 32_768,
    "ssm_ba": 65_536,
    "ssm_gates": 32_768,
    "expert_gate_out": 98_304,
    "expert_up_out": 98_304,
    "expert_down_out": 196_608,
}
# Mamba-2 with latent experts, experts that copy, M-RoPE, low-rank streams, no paging, the largest batch.
HYBRID = Shape(
    hidden_size=768, vocab_size=1000, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=2,
    head_dim=64, mrope_interleaved=True, num_experts=16, zero_expert_num=4, num_experts_per_tok=2,
    moe_intermediate_size=256, moe_latent_size=384, moe_input=384, hc_mult=2, hc_lowrank=32, mamba_num_heads=24,
    ssm_state_size=128, n_groups=8, d_inner=1536, in_proj=3360, d_xbc=1792,
)  # fmt: skip
HYBRID_LIMITS = (200, 1000, 0, 128)
HYBRID_BYTES = {
    "hidden_states": 307_200,
    "residual": 307_200,
    "norm_output": 614_400,
    "qkv_output": 307_200,
    "attn_output": 614_400,
    "gate_logits": 8000,
    "gate_logits_f32": 16_000,
    "moe_router_in_f32": 614_400,
    "moe_output": 307_200,
    "logits": 258_000,  # 129 rows
    "ssm_qkvz": 1_344_000,
    "ssm_ba": 153_600,
    "ssm_deinterleaved": 716_800,
    "ssm_gates": 256,
    "ssm_conv_out_f32": 256,
    "scratch": 166_912,  # decode: 32768 + 24 * 128 + 128 * 256 * 4
    "expert_gate_out": 409_600,
    "expert_up_out": 409_600,
    "expert_down_out": 307_200,
    "splitk_workspace": 12_672,
    "gdn_fla_scratch": 0,
    "ssd_scratch": 716_800,  # 5 chunks: 2 * 24 * 5 * 256 + 5 * 8 * 16384
    "o_latent": 256,
    "norm_unit_w": 3072,
    "hc_streams": 1_228_800,
    "hc_post": 1600,
    "hc_comb": 3200,
    "hc_lowrank_scratch": 1_242_400,  # 200 * (3072 + 34) * 2 against 64 * 1568 * 4
    "qsa_select_scratch": 256,
    "token_ids": 800,
    "ffn_act_q8": 0,
    "ffn_act_a": 0,
    "ffn_act_scale": 0,
    "fp8_act": 307_200,
    "fp8_act_scale": 9600,
    "lora_xa": 0,
    "lora_delta": 0,
    "lora_hact": 0,
    "lora_seq_slot": 0,
}
HYBRID_RAISED = {"ssm_gates": 49_152}
MODELS = [
    pytest.param(DENSE, DENSE_LIMITS, DENSE_BYTES, DENSE_RAISED, id="dense"),
    pytest.param(MOE, MOE_LIMITS, MOE_BYTES, MOE_RAISED, id="moe"),
    pytest.param(V4, V4_LIMITS, V4_BYTES, V4_RAISED, id="v4"),
    pytest.param(HYBRID, HYBRID_LIMITS, HYBRID_BYTES, HYBRID_RAISED, id="hybrid"),
]
Limits = tuple[int, int, int, int]
