# SPDX-License-Identifier: AGPL-3.0-only
"""Sizes of the engine's buffers by formula and for known models, those that a draft head needs, decode metadata."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_py.runtime.buffer_sizes import drafter_floors, engine_sizes
from spark_py.runtime.buffers import BufferSizes
from spark_py.runtime.decode_meta import DECODE_BATCH_RUNGS, DecodeMetaLayout, max_blocks_for
from spark_py.runtime.errors import (
    CapacityError,
    InvalidArgumentError,
)
from tests.runtime.buffer_shapes import DENSE, DENSE_LIMITS, MODELS, Limits, Shape


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
