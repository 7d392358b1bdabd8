# SPDX-License-Identifier: AGPL-3.0-only
"""Buffer sizes, what draft heads need of them, and the arena's life.

Every number in a table was worked out by hand from the shape above it; none comes from the code under test.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_py.runtime import buffers
from spark_py.runtime.buffer_accessors import BufferAccessors
from spark_py.runtime.buffer_sizes import drafter_floors, engine_sizes
from spark_py.runtime.buffers import KEPT_BY_ZERO_ALL, PREFILL_ESSENTIALS, BufferArena, BufferConfig, BufferSizes
from spark_py.runtime.decode_meta import DECODE_BATCH_RUNGS, DecodeMetaLayout, max_blocks_for
from spark_py.runtime.errors import (
    CapacityError,
    InvalidArgumentError,
    OutOfBoundsError,
    OutOfDeviceMemoryError,
    ReleasedError,
)
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.runtime.scratch import ScratchRegion


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


@pytest.mark.parametrize(("shape", "limits", "expected", "raised"), MODELS)
def test_sizes_of_known_models(shape: Shape, limits: Limits, expected: dict[str, int], raised: dict[str, int]) -> None:
    assert engine_sizes(shape, *limits) == expected
    sizes = BufferSizes.from_config(shape, *limits)
    assert dict(sizes.items()) == {**expected, **raised}
    assert sizes.total_bytes() == sum({**expected, **raised}.values())


# One formula a row, where the models above leave a branch out.
@pytest.mark.parametrize(
    ("changes", "limits", "name", "expected"),
    [
        ({"intermediate_size": 100}, (3, 64, 16, 1), "ffn_act_q8", 1_051_648),  # 3 * 256 * 4 + 1 MiB
        ({"intermediate_size": 100}, (3, 64, 16, 1), "ffn_act_a", 300),
        ({"intermediate_size": 100}, (3, 64, 16, 1), "ffn_act_scale", 48),  # a part of a group has a scale too
        ({"intermediate_size": 100}, (2, 64, 16, 1), "expert_gate_out", 600),  # three rows at least
        ({"head_dim": 33}, (1, 64, 16, 1), "fp8_act_scale", 8),  # 132 / 128, rounded up
        ({}, (96, 64, 16, 1), "logits", 19_200),
        ({}, (97, 64, 16, 1), "logits", 19_200),  # a verify has at most 96 rows
        ({}, (200, 64, 16, 96), "logits", 19_400),  # one more than the metadata's 96
        ({"linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 128}, (64, 64, 16, 1),
         "gdn_fla_scratch", 0),
        ({"linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 64}, (64, 64, 16, 1),
         "gdn_fla_scratch", 0),
        ({"linear_num_value_heads": 1, "linear_key_head_dim": 128, "linear_value_head_dim": 128}, (65, 64, 16, 1),
         "gdn_fla_scratch", 1_479_168),  # 18 chunks
        ({"mamba_num_heads": 1, "ssm_state_size": 0}, (64, 64, 16, 1), "ssd_scratch", 0),
        ({"mamba_num_heads": 1, "ssm_state_size": 8}, (64, 64, 16, 1), "ssd_scratch", 33_792),  # a group at least
        ({"q_lora_rank": 4096, "qk_rope_head_dim": 512}, (8, 64, 16, 1), "ssm_ba", 256),  # not latent: no part in it
        ({"kv_lora_rank": 8, "qk_rope_head_dim": 512}, (8, 64, 16, 1), "ssm_ba", 8192),
        ({"kv_lora_rank": 8, "qk_rope_head_dim": 512}, (8, 64, 16, 1), "ssm_conv_out_f32", 32_768),
        ({"shared_expert_intermediate_size": 500}, (8, 64, 16, 1), "ssm_qkvz", 8000),
        ({"num_key_value_heads": 16}, (8, 64, 16, 1), "ssm_qkvz", 8192),  # contiguous K and V
        ({"hc_mult": 4, "hc_lowrank": 8}, (1, 64, 16, 1), "hc_lowrank_scratch", 1056),  # 264 FP32; 524 BF16 are 1048
        ({"hc_mult": 4, "hc_lowrank": 8}, (4096, 64, 16, 1), "hc_lowrank_scratch", 2_146_304),  # 2048 rows at most
        ({"index_n_heads": 1, "index_head_dim": 4, "index_compress_ratio": 4, "index_topk": 7}, (1, 65, 16, 1),
         "qsa_select_scratch", 212_992),  # 2048 * (16 + 16 + 17 * 4 + 4)
        ({"index_n_heads": 1, "index_head_dim": 4, "index_topk": 7}, (1, 65, 16, 1), "qsa_select_scratch", 256),
    ],
)  # fmt: skip
def test_formula(changes: dict[str, Any], limits: Limits, name: str, expected: int) -> None:
    assert engine_sizes(replace(Shape(), **changes), *limits)[name] == expected


@pytest.mark.parametrize(("sms", "expected"), [(48, 49_536), (132, 136_224), (1, 1032)])
def test_splitk_workspace_follows_the_device(sms: int, expected: int) -> None:
    assert BufferSizes.from_config(DENSE, *DENSE_LIMITS, sm_count=sms).splitk_workspace == expected


# What the engine's table leaves too small for a draft head: engine bytes, then bytes that the head writes.
@pytest.mark.parametrize(
    ("name", "changes", "limits", "engine", "needed"),
    [
        ("ssm_gates", {"hidden_size": 2048}, (8, 64, 16, 1), 256, 32_768),
        ("ssm_ba", {"hidden_size": 2048}, (8, 64, 16, 1), 256, 65_536),
        ("ssm_qkvz", {"hidden_size": 2048}, (8, 64, 16, 1), 1024, 32_768),  # K and V are 2 * 2 * 16
        ("ssm_deinterleaved", {"hidden_size": 2048}, (8, 64, 16, 1), 1024, 32_768),  # queries are 4 * 16
        ("ssm_gates", {"hidden_size": 2048, "linear_num_value_heads": 2}, (64, 64, 16, 1), 1024, 131_072),
        ("residual", {"hc_mult": 4}, (1, 64, 16, 1), 128, 512),
        ("norm_output", {"hc_mult": 4}, (1, 64, 16, 1), 128, 512),
        ("hidden_states", {"hc_mult": 4}, (3, 64, 16, 1), 384, 512),
        ("moe_output", {"hc_mult": 4}, (1, 64, 16, 1), 128, 512),
        ("ssm_gates", {"hc_mult": 4}, (1, 64, 16, 1), 256, 512),
        ("ssm_qkvz", {"hc_mult": 8}, (1, 64, 16, 1), 256, 2048),
        ("qkv_output", {}, (2, 64, 16, 1), 512, 768),  # queries with gates although the target has none
        ("attn_output", {"hidden_size": 2048}, (4, 64, 16, 1), 512, 16_384),  # embedding row, shared expert's output
        ("logits", {"vocab_size": 50}, (2, 64, 16, 1), 200, 512),  # the shared expert's gate row
        ("ssm_qkvz", {"intermediate_size": 8192}, (2, 64, 16, 1), 256, 32_768),  # the shared expert's up row
        ("expert_gate_out", {"moe_intermediate_size": 1024}, (4, 64, 16, 1), 1024, 8192),
        ("expert_up_out", {"num_experts": 8, "num_experts_per_tok": 2}, (4, 64, 16, 1), 1024, 2048),  # 128 wide each
        ("expert_down_out",
         {"num_experts": 8, "num_experts_per_tok": 2, "moe_input": 16}, (4, 64, 16, 1), 256, 1024),  # latent experts
        ("scratch", {}, (1, 1 << 20, 0, 1), 133_120, 311_556),  # a table of 65537 behind 49152 + 256
    ],
)  # fmt: skip
def test_a_draft_head_fits(name: str, changes: dict[str, Any], limits: Limits, engine: int, needed: int) -> None:
    shape = replace(Shape(), **changes)
    assert engine_sizes(shape, *limits)[name] == engine
    assert drafter_floors(shape, limits[0], limits[1])[name] == needed
    assert getattr(BufferSizes.from_config(shape, *limits), name) == needed


def test_floor_rows_stop_at_the_largest_propose() -> None:
    """A propose has at most 32 rows, so a long prefill does not make the drafter's buffers longer."""
    at_32 = BufferSizes.from_config(Shape(hidden_size=2048), 32, 64, 16, 1)
    at_4096 = BufferSizes.from_config(Shape(hidden_size=2048), 4096, 64, 16, 1)
    assert at_32.ssm_gates == at_4096.ssm_gates == 131_072
    assert at_32.ssm_ba == at_4096.ssm_ba == 262_144


@given(
    h=st.integers(1, 8192),
    heads=st.integers(1, 96),
    kv=st.integers(1, 8),
    head_dim=st.sampled_from([16, 64, 128, 256]),
    ffn=st.integers(0, 20000),
    moe=st.integers(0, 2048),
    experts=st.integers(0, 16),
    hc=st.integers(0, 4),
    m=st.integers(1, 5000),
    seq=st.integers(1, 1 << 20),
    block=st.sampled_from([0, 1, 16, 64, 4096]),
)
def test_what_the_heads_write_fits(
    h: int, heads: int, kv: int, head_dim: int, ffn: int, moe: int, experts: int, hc: int, m: int, seq: int, block: int
) -> None:
    shape = Shape(
        hidden_size=h, num_attention_heads=heads, num_key_value_heads=kv, head_dim=head_dim, intermediate_size=ffn,
        moe_intermediate_size=moe, num_experts=experts, num_experts_per_tok=min(experts, 2), moe_input=h, hc_mult=hc,
    )  # fmt: skip
    sizes = BufferSizes.from_config(shape, m, seq, block, 8)
    for rows in {1, min(m, 8), min(m, 32)}:
        width = moe or ffn
        writes = {
            "ssm_qkvz": max(h, width),
            "ssm_deinterleaved": h,
            "ssm_gates": h,
            "ssm_ba": 2 * h,
            "hidden_states": h,
            "residual": h,
            "norm_output": h,
            "qkv_output": 2 * heads * head_dim + 2 * kv * head_dim,
            "attn_output": max(heads * head_dim, h),
            "moe_output": h,
            "logits": max(100, width),
            "expert_gate_out": max(1, min(experts, 2)) * width,
            "expert_down_out": max(1, min(experts, 2)) * h,
        }
        for name, elements in writes.items():
            assert getattr(sizes, name) >= rows * elements * 2, (name, rows)
    if hc:
        for name in ("hidden_states", "residual", "norm_output", "moe_output", "ssm_gates", "ssm_deinterleaved"):
            assert getattr(sizes, name) >= hc * h * 2, name
        assert sizes.hc_streams >= hc * h * 4
    assert sizes.scratch >= 49152 + 256 + 4 * (seq // 16 + 1)


@pytest.mark.parametrize(
    ("changes", "limits", "name"),
    [
        ({"hidden_size": 0}, (1, 1, 16, 1), "config.hidden_size"),
        ({"head_dim": -1}, (1, 1, 16, 1), "config.head_dim"),
        ({"num_experts": -1}, (1, 1, 16, 1), "config.num_experts"),
        ({"hc_mult": True}, (1, 1, 16, 1), "config.hc_mult"),
        ({"vocab_size": 10.0}, (1, 1, 16, 1), "config.vocab_size"),
        ({"qkvz": -5}, (1, 1, 16, 1), "config.ssm_qkvz_size()"),
        ({"attn_gated": 1}, (1, 1, 16, 1), "config.attn_gated"),
        ({"num_experts": 2, "num_experts_per_tok": 3}, (1, 1, 16, 1), "config.num_experts_per_tok"),
        ({}, (0, 1, 16, 1), "max_batch_tokens"),
        ({}, (1, 0, 16, 1), "max_seq_len"),
        ({}, (1, 1, -1, 1), "kv_block_size"),
        ({}, (1, 1, 16, 0), "max_batch_size"),
        ({}, (1, 1, 16, 129), "max_batch_size"),
        ({}, (None, 1, 16, 1), "max_batch_tokens"),
    ],
)
def test_bad_configurations_are_named(changes: dict[str, Any], limits: Limits, name: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        BufferSizes.from_config(replace(Shape(), **changes), *limits)
    assert error.value.name == name
    assert name in str(error.value)


# ---------------------------------------------------------------- decode metadata


@pytest.mark.parametrize(
    ("batch", "rows"),
    [(1, 32), (8, 32), (32, 32), (33, 48), (36, 48), (48, 48), (49, 64), (65, 96), (96, 96), (97, 128), (128, 128)],
)
def test_decode_metadata_has_the_rows_of_a_rung(batch: int, rows: int) -> None:
    assert DecodeMetaLayout.for_batch(batch).rows == rows
    assert rows in DECODE_BATCH_RUNGS


@pytest.mark.parametrize(
    ("rows", "offsets", "blocks", "nbytes"),
    [
        (32, (0, 128, 256, 512, 640, 768), 1025, 131_968),
        (48, (0, 192, 384, 768, 960, 1152), 1, 1344),
        (128, (0, 512, 1024, 2048, 2560, 3072), 0, 3072),
    ],
)
def test_decode_metadata_offsets(rows: int, offsets: tuple[int, ...], blocks: int, nbytes: int) -> None:
    meta = DecodeMetaLayout(rows)
    assert offsets == (
        meta.positions_off,
        meta.seq_slot_off,
        meta.slots_off,
        meta.seq_lens_off,
        meta.ssm_slots_off,
        meta.block_table_off,
    )
    assert meta.meta_bytes(blocks) == nbytes
    # Each array starts where the one before it ends, i64 slots on a multiple of 8.
    sizes = [4 * rows, 4 * rows, 8 * rows, 4 * rows, 4 * rows]
    assert list(np.cumsum(sizes)) == list(offsets[1:])
    assert meta.slots_off % 8 == 0


def test_decode_metadata_limits() -> None:
    with pytest.raises(CapacityError) as error:
        DecodeMetaLayout.for_batch(129)
    assert (error.value.name, error.value.value, error.value.capacity) == ("max_batch_size", 129, 128)
    for rows in (31, 33, 16, 0, 256):
        with pytest.raises(InvalidArgumentError, match="32, 48, 64, 96, 128"):
            DecodeMetaLayout(rows)
    with pytest.raises(CapacityError):
        DecodeMetaLayout(32).meta_bytes(1, rows=33)


@pytest.mark.parametrize(
    ("seq", "block", "entries"),
    [(1, 16, 1), (15, 16, 1), (16, 16, 2), (16384, 16, 1025), (131072, 16, 8193), (1000, 0, 256), (1 << 20, 64, 16385)],
)
def test_block_table_entries(seq: int, block: int, entries: int) -> None:
    assert max_blocks_for(seq, block) == entries


# ---------------------------------------------------------------- the arena


def arena_of(gpu: GpuBackend, shape: Shape | None = None, limits: Limits = (4, 256, 16, 2)) -> BufferArena:
    return BufferArena(shape or Shape(), *limits, gpu)


def test_each_buffer_is_one_labelled_allocation(gpu: GpuBackend) -> None:
    before = gpu.live_bytes()
    shape = Shape(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, moe_input=64, hc_mult=2)
    with arena_of(gpu, shape) as arena:
        assert gpu.live_bytes() - before == arena.total_bytes() == arena.sizes().total_bytes()
        for name, nbytes in arena.sizes().items():
            ptr = arena.pointer(name)
            if nbytes == 0:
                assert ptr == DevicePtr.NULL
                continue
            gpu.memset(ptr, 0x5A, nbytes)
            with pytest.raises(OutOfBoundsError, match=name):
                gpu.memset(ptr, 0x5A, nbytes + 1)
    assert gpu.live_bytes() == before


def test_total_bytes_counts_what_the_engine_forgets(gpu: GpuBackend) -> None:
    shape = Shape(o_groups=2, o_lora_rank=1024)
    with arena_of(gpu, shape) as arena:
        sizes = dict(arena.sizes().items())
        assert sizes["o_latent"] == 16_384
        assert sizes["norm_unit_w"] == 128
        rest = sum(nbytes for name, nbytes in sizes.items() if name not in ("o_latent", "norm_unit_w"))
        assert arena.total_bytes() == rest + 16_512


def test_every_buffer_has_an_accessor_of_its_name(gpu: GpuBackend) -> None:
    accessors = {name for name, _ in inspect.getmembers(BufferAccessors, inspect.isfunction)} - {"pointer"}
    assert accessors == {field.name for field in fields(BufferSizes)}
    with arena_of(gpu) as arena:
        seen = set()
        for name in accessors:
            ptr = getattr(arena, name)()
            assert ptr == arena.pointer(name)
            seen.add(ptr)
        assert len(seen - {DevicePtr.NULL}) == sum(nbytes > 0 for _, nbytes in arena.sizes().items())
        with pytest.raises(InvalidArgumentError, match="moe_worklist"):
            arena.pointer("moe_worklist")


def test_limits_and_byte_counts(gpu: GpuBackend) -> None:
    shape = Shape(adapter_max_rank=4)
    with BufferArena(shape, 4, 256, 16, 40, gpu, sm_count=7) as arena:
        assert arena.max_batch_tokens() == 4
        assert arena.max_seq_len() == 256
        assert arena.decode_meta().rows == 48
        assert arena.scratch_bytes() == 65_536
        assert arena.fp8_act_bytes() == 256
        assert (arena.lora_xa_bytes(), arena.lora_delta_bytes(), arena.lora_hact_bytes()) == (32, 1024, 1024)
        assert arena.sizes().splitk_workspace == 7 * 18 * 4
    with arena_of(gpu) as arena:
        assert arena.sizes().splitk_workspace == gpu.sm_count() * 18 * 4


def test_rows_and_lengths_beyond_the_arena_raise(gpu: GpuBackend) -> None:
    with arena_of(gpu) as arena:
        assert [arena.check_rows(n) for n in (1, 4)] == [1, 4]
        assert [arena.check_seq_len(n) for n in (0, 256)] == [0, 256]
        for check, value, name, capacity in (
            (arena.check_rows, 5, "rows", 4),
            (arena.check_seq_len, 257, "sequence length", 256),
        ):
            with pytest.raises(CapacityError) as error:
                check(value)
            assert (error.value.name, error.value.value, error.value.capacity) == (name, value, capacity)
            assert f"{value}" in str(error.value)
            assert f"{capacity}" in str(error.value)
        for check, value in ((arena.check_rows, 0), (arena.check_rows, True), (arena.check_seq_len, -1)):
            with pytest.raises(InvalidArgumentError):
                check(value)


def contents(gpu: GpuBackend, arena: BufferArena) -> dict[str, set[int]]:
    """Which byte values each buffer holds."""
    found = {}
    for name, nbytes in arena.sizes().items():
        host = np.full(nbytes, 0xEE, np.uint8)
        if nbytes:
            gpu.copy_d2h(arena.pointer(name), host)
        found[name] = set(np.unique(host).tolist())
    return found


FULL = Shape(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, moe_input=64, hc_mult=2, adapter_max_rank=4,
    linear_num_value_heads=1, linear_key_head_dim=128, linear_value_head_dim=128, mamba_num_heads=1, ssm_state_size=4,
    o_groups=2, o_lora_rank=32,
)  # fmt: skip


def test_norm_unit_w_is_zeros(gpu: GpuBackend) -> None:
    """The kernel scales by 1 + w: ones would double."""
    with arena_of(gpu, FULL) as arena:
        host = np.full(arena.sizes().norm_unit_w, 0xEE, np.uint8)
        gpu.copy_d2h(arena.norm_unit_w(), host)
        assert host.size == 128
        assert not host.any()


@pytest.mark.parametrize("which", ["prefill", "all"])
def test_zeroing(gpu: GpuBackend, which: str) -> None:
    with arena_of(gpu, FULL) as arena:
        for name, nbytes in arena.sizes().items():
            gpu.memset(arena.pointer(name), 0xFF, nbytes)
        if which == "prefill":
            arena.zero_prefill_essentials(gpu.default_stream())
            zeroed = set(PREFILL_ESSENTIALS)
        else:
            arena.zero_all(gpu.default_stream())
            zeroed = {field.name for field in fields(BufferSizes)} - set(KEPT_BY_ZERO_ALL)
        gpu.synchronize(gpu.default_stream())
        for name, values in contents(gpu, arena).items():
            if getattr(arena.sizes(), name):
                assert values == ({0} if name in zeroed else {0xFF}), name


def test_what_zeroing_covers() -> None:
    assert set(PREFILL_ESSENTIALS) == {
        "hidden_states", "residual", "gate_logits", "expert_gate_out", "expert_up_out", "expert_down_out", "moe_output",
    }  # fmt: skip
    assert {"token_ids", "hc_streams", "fp8_act", "gate_logits_f32", "lora_seq_slot"} <= set(KEPT_BY_ZERO_ALL)
    assert not {"scratch", "logits", "ssm_ba", *PREFILL_ESSENTIALS} & set(KEPT_BY_ZERO_ALL)
    assert set(KEPT_BY_ZERO_ALL) <= {field.name for field in fields(BufferSizes)}


@pytest.mark.parametrize("chunk", [64, 16 << 20])
def test_checksums(
    gpu: GpuBackend,
    rng: np.random.Generator,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    chunk: int,
) -> None:
    monkeypatch.setattr(buffers, "_CHECKSUM_CHUNK", chunk)
    # An odd vocabulary: 606 bytes are 151 lanes and half of one.
    with arena_of(gpu, Shape(vocab_size=101, intermediate_size=64), (3, 64, 16, 1)) as arena:
        for name, nbytes in arena.sizes().items():
            gpu.memset(arena.pointer(name), 0, nbytes)
        assert arena.sizes().logits == 606
        lanes = rng.standard_normal(151).astype(np.float32)
        lanes[7], lanes[8] = np.nan, np.inf
        gpu.copy_h2d(lanes, arena.logits())
        with caplog.at_level(logging.INFO, "spark_py.runtime"):
            sums = {s.name: s for s in arena.debug_buffer_checksum(gpu.default_stream(), "after verify")}
        finite = np.delete(lanes, [7, 8]).astype(np.float64)
        found = sums["logits"]
        # FP64 sums of 149 terms, in two orders.
        assert found.sum == pytest.approx(finite.sum(), rel=1e-12)
        assert found.sum_sq == pytest.approx((finite**2).sum(), rel=1e-12)
        assert found.sum_abs == pytest.approx(np.abs(finite).sum(), rel=1e-12)
        assert found.nonfinite == 2
        assert (sums["residual"].sum_abs, sums["residual"].nonfinite) == (0.0, 0)
        assert "lora_xa" not in sums  # NULL
        assert "after verify logits: sum" in caplog.text


def test_release(gpu: GpuBackend) -> None:
    before = gpu.live_bytes()
    arena = arena_of(gpu)
    lease = arena.lease(ScratchRegion.mtp_meta(4))
    assert lease.ptr == arena.scratch().offset(49_152)
    assert arena.scratch_map.live() == (lease.region,)
    arena.release()
    arena.release()
    assert gpu.live_bytes() == before
    with pytest.raises(ReleasedError):
        arena.lease(ScratchRegion.argmax())
    with pytest.raises(ReleasedError, match="hidden_states"):
        arena.hidden_states()
    with pytest.raises(ReleasedError):
        arena.zero_all(gpu.default_stream())


def test_a_failed_construction_leaves_nothing(gpu: GpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    before = gpu.live_bytes()
    alloc = gpu.alloc

    def failing(nbytes: int, label: str = "") -> DevicePtr:
        if label == "scratch":
            raise OutOfDeviceMemoryError(nbytes, 0, 0, "test")
        return alloc(nbytes, label)

    monkeypatch.setattr(gpu, "alloc", failing)
    with pytest.raises(OutOfDeviceMemoryError):
        arena_of(gpu)
    assert gpu.live_bytes() == before
