# SPDX-License-Identifier: AGPL-3.0-only
"""Rows of a batched propose: strides, caps and kernels, by the engine's worked numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_py.model.drafting.rows import (
    LM_HEAD_WIDTHS,
    PROPOSE_META_SEQS,
    RowKernel,
    drafter_row_kernel,
    lm_head_batch_width,
    propose_batch_cap,
    propose_meta_stride,
    propose_meta_stride_override,
)
from spark_py.model.layers.mtp_meta import pack_mtp_attn_meta
from spark_py.runtime.buffers import BufferSizes
from spark_py.runtime.errors import CapacityError, InvalidArgumentError
from spark_py.runtime.sizes import align_up
from tests.model.support import config

# ---------------------------------------------------------------- stride


@pytest.mark.parametrize(
    ("max_seq", "stride", "all_slabs"),
    [
        (1, 2048, 65_536),
        (7167, 2048, 65_536),
        (7168, 2056, 65_792),
        (8192, 2312, 73_984),
        (16384, 4360, 139_520),
        (32768, 8456, 270_592),
        (131_072, 33_032, 1_057_024),
        (262_144, 65_800, 2_105_600),
        (1_048_576, 262_408, 8_397_056),
        (1 << 40, 1 << 24, 1 << 29),
    ],
)
def test_stride_of_the_metadata(max_seq: int, stride: int, all_slabs: int) -> None:
    assert propose_meta_stride(max_seq, 16) == stride
    assert stride * PROPOSE_META_SEQS == all_slabs


@pytest.mark.parametrize("max_seq", [15, 16, 7151, 7167, 7168, 7183, 7184, 16384])
def test_a_full_sequence_fits_its_slab(max_seq: int) -> None:
    """The table of a sequence at max_seq_len, and where the stride is not the floor, not 3 entries more."""
    stride, entries = propose_meta_stride(max_seq, 16), max_seq // 16 + 1
    assert len(pack_mtp_attn_meta(1, 1, 1, [0] * entries, stride)) <= stride
    if stride > 2048:
        with pytest.raises(CapacityError):
            pack_mtp_attn_meta(1, 1, 1, [0] * (entries + 2), stride)


@pytest.mark.parametrize(
    ("asked", "stride"), [(100, 2048), (0, 2048), (2049, 2056), (4096, 4096), (10**12, 16_777_216), (2**64, 1 << 24)]
)
def test_a_stride_that_is_asked_for(asked: int, stride: int) -> None:
    assert propose_meta_stride_override(asked) == stride
    assert propose_meta_stride(1 << 20, 16, stride) == stride, "whatever the table needs"


@pytest.mark.parametrize("stride", [0, 100, 2040, 2049, (1 << 24) + 8, True, 4096.0])
def test_strides_that_are_refused(stride: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="propose_meta_stride"):
        propose_meta_stride(100, 16, stride)


# ---------------------------------------------------------------- cap


def sizes(h: int, nv: int, m: int, **changes: int) -> BufferSizes:
    """A model with recurrent layers of nv value heads, by the engine's formulas; buffers that do not bind are ample."""
    whole = BufferSizes.from_config(config(), m, 64, 16, 4, 1)
    ample = dict.fromkeys(("ssm_qkvz", "ssm_deinterleaved", "hidden_states", "residual", "norm_output"), 1 << 40)
    return replace(whole, **(ample | {"ssm_ba": 4 * m * nv, "ssm_gates": 8 * m * nv} | changes))


@pytest.mark.parametrize(
    ("m", "nv", "h", "by_ba", "by_gates", "cap"),
    [
        (8192, 48, 5120, 76, 307, 32),
        (2048, 48, 5120, 19, 76, 19),
        (512, 48, 5120, 4, 19, 4),
        (256, 32, 2048, 4, 16, 4),
        (16, 32, 2048, 0, 1, 1),
    ],
)
def test_sequences_of_a_batched_propose(m: int, nv: int, h: int, by_ba: int, by_gates: int, cap: int) -> None:
    found = sizes(h, nv, m)
    assert (found.ssm_ba // (4 * h), found.ssm_gates // (2 * h)) == (by_ba, by_gates)
    assert propose_batch_cap(found, h, m) == cap


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("ssm_ba", 4), ("ssm_gates", 2), ("ssm_qkvz", 2), ("ssm_deinterleaved", 2), ("hidden_states", 2),
        ("residual", 2), ("norm_output", 2),
    ],
)  # fmt: skip
def test_each_buffer_bounds_the_batch(name: str, row: int) -> None:
    h = 64
    ample = sizes(h, 1 << 20, 512)
    assert propose_batch_cap(ample, h, 512) == 32
    for rows in (2, 7, 31):
        assert propose_batch_cap(replace(ample, **{name: rows * row * h}), h, 512) == rows
        assert propose_batch_cap(replace(ample, **{name: rows * row * h - 1}), h, 512) == max(rows - 1, 1)
    assert propose_batch_cap(ample, h, 5) == 5


@pytest.mark.parametrize(
    ("widths", "cap"),
    [((), 1), ((4,), 4), ((4, 5, 6, 7, 8), 8), ((4, 8, 16), 16), ((32,), 32), ((5, 6, 7), 7), (None, 32)],
)
def test_a_batch_has_a_kernel_for_its_lm_head(widths: tuple[int, ...] | None, cap: int) -> None:
    assert propose_batch_cap(sizes(64, 1 << 20, 512), 64, 512, widths) == cap
    if widths == (5, 6, 7):
        assert propose_batch_cap(sizes(64, 1 << 20, 512), 64, 512, widths, exact_m_tiers=False) == 1


@pytest.mark.parametrize(
    ("rows", "exact", "older"),
    [(1, 4, 4), (4, 4, 4), (5, 5, 8), (6, 6, 8), (7, 7, 8), (8, 8, 8), (9, 16, 16), (16, 16, 16), (17, 32, 32),
     (32, 32, 32), (33, None, None)],
)  # fmt: skip
def test_width_of_the_lm_head(rows: int, exact: int | None, older: int | None) -> None:
    assert lm_head_batch_width(rows, LM_HEAD_WIDTHS) == exact
    assert lm_head_batch_width(rows, LM_HEAD_WIDTHS, exact_m_tiers=False) == older
    assert lm_head_batch_width(rows, (4, 8, 16, 32)) == older
    assert lm_head_batch_width(rows, ()) is None


# ---------------------------------------------------------------- kernels

BATCHM, PIPELINED, LOOP = RowKernel.BATCHM, RowKernel.PIPELINED, RowKernel.GEMV_LOOP


@pytest.mark.parametrize(
    ("m", "n", "k", "ready", "pinned", "tier", "kernel"),
    [
        # The drafter of a 27B model: wide projections, and K and V of 1024 columns.
        (4, 5120, 10240, True, False, True, BATCHM),
        (8, 17408, 5120, True, False, True, BATCHM),
        (9, 17408, 5120, True, False, True, PIPELINED),
        (2, 1024, 5120, True, False, True, BATCHM),
        (1, 5120, 10240, True, False, True, PIPELINED),
        (1, 1024, 5120, True, False, True, LOOP),
        # Pinned: K and V stay with the GEMV, at every number of rows; wide ones do not care.
        (4, 1024, 5120, True, True, True, LOOP),
        (9, 1024, 5120, True, True, True, LOOP),
        (4, 5120, 10240, True, True, True, BATCHM),
        # Without the batched GEMV, or with its tier off.
        (4, 5120, 10240, False, False, True, PIPELINED),
        (4, 5120, 10240, True, False, False, PIPELINED),
        (7, 1024, 5120, False, False, True, LOOP),
        (8, 1024, 5120, False, False, True, PIPELINED),
        (8, 1024, 5120, True, False, False, PIPELINED),
        (8, 1024, 5120, False, True, True, LOOP),
        (9, 1024, 5120, True, False, True, PIPELINED),
        # 4096 columns are wide.
        (7, 4095, 5120, False, False, True, LOOP),
        (7, 4096, 5120, False, False, True, PIPELINED),
        (4, 4096, 5120, True, True, True, BATCHM),
        # Rows of K that are no multiple of 8 are only for the GEMV.
        (4, 5120, 10244, True, False, True, LOOP),
        (16, 5120, 4, True, False, True, LOOP),
    ],
)
def test_kernel_of_a_projection(
    m: int, n: int, k: int, ready: bool, pinned: bool, tier: bool, kernel: RowKernel
) -> None:
    assert drafter_row_kernel(m, n, k, ready, pinned, tier) is kernel


@given(st.integers(1, 40), st.integers(1, 9000), st.integers(1, 64), st.booleans(), st.booleans(), st.booleans())
def test_what_no_branch_may_break(m: int, n: int, k: int, ready: bool, pinned: bool, tier: bool) -> None:
    kernel = drafter_row_kernel(m, n, k, ready, pinned, tier)
    if kernel is BATCHM:
        assert ready
        assert tier
        assert 2 <= m <= 8
    if k % 8:
        assert kernel is LOOP
    if pinned and n < 4096:
        assert kernel is LOOP
    for other in range(2, 9):
        if pinned and n < 4096:
            assert drafter_row_kernel(other, n, k, ready, pinned, tier) is kernel, "bits depend on no row count"


@pytest.mark.parametrize("wrong", [{"rows": 0}, {"n": 0}, {"k": -8}, {"rows": True}, {"n": 1.5}])
def test_shapes_that_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        drafter_row_kernel(**({"rows": 2, "n": 8, "k": 8, "batchm_ready": True, "kv_gemv_pinned": False} | wrong))


def test_the_leading_dimension_of_a_transposed_head() -> None:
    """Rows of an odd vocabulary would be misaligned: they are padded to 128."""
    assert align_up(248_077, 128) == 248_192
