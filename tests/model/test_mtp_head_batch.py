# SPDX-License-Identifier: AGPL-3.0-only
"""Batched proposes: those of each sequence alone, bit for bit or as near as sums in another order are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spark_py.model.layers.mtp_head import (
    HeadBody,
    NormConvention,
)
from spark_py.model.levers import ModelLevers
from spark_py.model.weight_map import Fp8ExpertWeight
from spark_py.runtime.errors import (
    CapacityError,
)
from spark_py.runtime.gpu import GpuBackend
from tests.model.mtp_forms import CLEAR_ID, FORMS, FUSED, Form, hide, make_form, to_blocks
from tests.model.mtp_head_batch_support import (
    DRAFTS,
    GEMM_BOUND,
    MANY,
    ONE_ULP,
    Pair,
    Q,
    agree,
    batch,
    batch_of,
    launched,
    long_states,
    near,
    one,
    pairs,
    row,
    same,
    tiled_rig,
    widen,
)
from tests.model.support import (
    FFN,
    config,
    make_rig,
    mtp_weights,
    random_weights,
)
from tests.thin import thinned

# ---------------------------------------------------------------- bit for bit


def widths(form: Form) -> Sequence[int]:
    """Numbers of sequences that differ by a kernel: NVFP4 has one for each, the others one for all up to 8."""
    return range(2, 9) if form == FORMS[0] or form.quant is Q.NVFP4 or form.nvfp4_lm_head else (2, 3, 8)


@pytest.mark.parametrize(
    ("form", "n"),
    [pytest.param(form, n, marks=() if n in (2, 8) else pytest.mark.deep) for form in FORMS for n in widths(form)],
    ids=str,
)
def test_a_batch_is_its_sequences_alone(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, form: Form, n: int
) -> None:
    rig, _ = make_form(gpu, rng, monkeypatch, form)
    assert rig.head.propose_batch_max(rig.ctx.buffers, rig.config) == 8
    assert agree(rig, rng, n)


@pytest.mark.parametrize("n", [2, 8])
def test_a_wide_nvfp4_batch_is_its_sequences_alone(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """Rows that are long enough for this project's own kernel."""
    form = Form(Q.NVFP4, moe=True, nvfp4_lm_head=True)
    rig, _ = make_form(gpu, rng, monkeypatch, form, hidden_size=256, num_attention_heads=4, head_dim=64)
    assert agree(rig, rng, n)


@pytest.mark.parametrize("form", [form for form in FORMS if form.quant is not Q.BF16], ids=str)
def test_many_sequences(gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, form: Form) -> None:
    """FP8 and NVFP4 heads are exact at every width, also where the LM head is BF16."""
    rig = widen(make_form(gpu, rng, monkeypatch, form)[0], 16)
    assert agree(rig, rng, MANY, steps=1)


LOOPS = [ModelLevers(kv_gemv_pinned=True), ModelLevers(small_m_tier=False, kv_gemv_pinned=True)]


@pytest.mark.parametrize("levers", LOOPS, ids=["pinned", "no small tier"])
@pytest.mark.parametrize("n", [3, MANY])
def test_levers_that_keep_to_the_gemv(gpu: GpuBackend, rng: np.random.Generator, levers: ModelLevers, n: int) -> None:
    """The projections of this head are all below 4096 outputs."""
    assert agree(widen(make_rig(gpu, rng, levers=levers), 16), rng, n, steps=1)


@pytest.mark.parametrize("levers", [ModelLevers(chain_postnorm=True), ModelLevers(gemv_sw=False)], ids=["chain", "sw"])
@pytest.mark.parametrize("norm", NormConvention)
def test_levers_and_norms(gpu: GpuBackend, rng: np.random.Generator, levers: ModelLevers, norm: NormConvention) -> None:
    assert agree(make_rig(gpu, rng, levers=levers, body=HeadBody(norm=norm)), rng, 4)


def test_plain_norms_without_the_fused_kernel(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, gpu, "spark_residual_add_rms_norm_vanilla")
    rig = make_rig(gpu, rng, body=HeadBody(norm=NormConvention.PLAIN))
    assert not rig.head.residual_add_rms_norm_k
    assert agree(rig, rng, 4, steps=1)


TIERS = "w4a16_gemv::w4a16_gemv_batch"
LACKING = {
    "no batched BF16 GEMV": (Form(Q.BF16), ("dense_gemv_bf16_batchm::",), MANY, 16),
    "no GEMM": (Form(Q.BF16), ("gemm::",), MANY, 16),
    "no batched FP8 GEMV": (Form(Q.FP8), ("gemv_fp8w::spark_",), MANY, 16),
    "no joint kernel for two rows": (Form(Q.NVFP4, moe=True), ("w4a16_gemv::w4a16_gemv_qg_batch2",), 5, 16),
    "no joint kernels": (Form(Q.NVFP4, moe=True), ("w4a16_gemv::w4a16_gemv_qg_batch",), 5, 16),
    "no tiers": (Form(Q.NVFP4, moe=True), (TIERS,), MANY, 16),
    "no wide tiers": (Form(Q.NVFP4, moe=True), (TIERS + "16", TIERS + "32"), MANY, 16),
    "no wide tiers, NVFP4 head": (Form(Q.NVFP4, moe=True, nvfp4_lm_head=True), (TIERS + "16", TIERS + "32"), 8, 8),
    "one tier, NVFP4 head": (
        Form(Q.BF16, nvfp4_lm_head=True), tuple(TIERS + each for each in ("5", "6", "7", "8", "16", "32")), 4, 4
    ),
    "no batched argmax": (Form(Q.FP8), ("argmax::argmax_bf16_batch",), 5, 16),
}  # fmt: skip


@pytest.mark.parametrize(
    ("form", "lacks", "n", "most"), thinned(LACKING.values(), keep=range(0, 10, 3), ids=[*LACKING])
)
def test_sets_that_lack_kernels(
    gpu: GpuBackend,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    form: Form,
    lacks: tuple[str, ...],
    n: int,
    most: int,
) -> None:
    """The bits are the same; only an NVFP4 LM head without a kernel bounds the batch."""
    for name in lacks:
        hide(monkeypatch, gpu, "nothing", function=name)
    rig = widen(make_form(gpu, rng, monkeypatch, form)[0], 16)
    assert rig.head.propose_batch_max(rig.ctx.buffers, rig.config) == most
    assert agree(rig, rng, n, steps=1)


def test_an_nvfp4_lm_head_without_batched_kernels(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, gpu, "nothing", function=TIERS)
    rig, _ = make_form(gpu, rng, monkeypatch, Form(Q.FP8, nvfp4_lm_head=True))
    assert rig.head.propose_batch_max(rig.ctx.buffers, rig.config) == 1
    assert not rig.head.can_propose_batch(2, rig.ctx.buffers)


@pytest.mark.parametrize("n", [3, MANY])
def test_block_scaled_fp8(gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    changes = {"hidden_size": 192, "intermediate_size": 160}
    arrays = random_weights(rng, config(**changes))
    weights = mtp_weights(gpu, arrays)
    given: dict[str, Any] = {}
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", *FFN):
        given[name], arrays[name] = to_blocks(gpu, rng, arrays[name])
    triple = Fp8ExpertWeight(*(given.pop(name) for name in FFN))
    weights = replace(weights, **given, dense_ffn=triple)
    rig, _ = make_form(gpu, rng, monkeypatch, Form(Q.FP8), weights=weights, arrays=arrays, **changes)
    assert agree(widen(rig, 16), rng, n, steps=1)


@pytest.mark.parametrize("form", [Form(Q.BF16), Form(Q.FP8, moe=True, hidden=FUSED)], ids=str)
def test_hidden_rows_in_the_buffer_that_drafting_overwrites(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, form: Form
) -> None:
    """As a verify leaves them, in another order than the sequences'."""
    rig, n = make_form(gpu, rng, monkeypatch, form)[0], 5
    sequences, tokens = pairs(rig, rng, n), [one(rig, rng) for _ in range(n)]
    rows = [row(rig, rng) for _ in range(n)]
    h, at = 2 * rig.config.hidden_size, [3, 2, 4, 0, 1]
    hidden_states = rig.ctx.buffers.hidden_states()
    for i in range(n):
        gpu.copy_h2d(rows[i].view(np.uint8), hidden_states.offset(at[i] * h))
    found = rig.head.propose_batch(
        tokens, [hidden_states.offset(i * h) for i in at], [pair.length for pair in sequences], DRAFTS,
        [pair.batch for pair in sequences], rig.ctx, rig.stream,
    )  # fmt: skip
    assert found == [rig.propose(p.alone, tokens[i], rows[i], p.length, DRAFTS) for i, p in enumerate(sequences)]
    assert all(same(rig, pair) for pair in sequences)


# ---------------------------------------------------------------- kernels whose sums have another order


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_many_sequences_of_a_bf16_head(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, moe: bool
) -> None:
    """More rows than the batched GEMV is used for go through the GEMM."""
    rig = widen(make_form(gpu, rng, monkeypatch, Form(Q.BF16, moe=moe))[0], 16)
    with gpu.trace() as trace:
        batch_of(rig, rng, MANY)
    projections = 6 if moe else 9
    assert launched(trace, "gemm::dense_gemm_bf16_pipelined") == projections * DRAFTS
    found = [near(rig, rng, MANY, lambda logits: CLEAR_ID) for _ in range(3)]
    unclear, differ, rows = (float(np.mean(each)) for each in zip(*found, strict=True))
    print(f"of the drafts {unclear:.1%} are not clear, {differ:.1%} differ; K and V by {rows:.2%}")
    # A router whose choice hangs on a rounding changes a row as a whole.
    assert rows < (0.2 if moe else GEMM_BOUND)
    assert unclear < 0.7, "some drafts say something"


@pytest.mark.parametrize("n", [4, 5, 8])
@pytest.mark.parametrize("tiled", [True, False])
def test_the_tiled_lm_head(gpu: GpuBackend, rng: np.random.Generator, n: int, tiled: bool) -> None:
    """From 5 rows on, unless its lever is off. Rows of K and V are the same as long as the ids are."""
    arrays = random_weights(rng, config())
    rig, twin = tiled_rig(gpu, rng, arrays, tiled)
    with gpu.trace() as trace:
        batch_of(rig, rng, n)
    assert launched(trace, "w4a16::") == (DRAFTS if tiled and n >= 5 else 0)
    unclear, differ, rows = near(rig, rng, n, lambda logits: 2 * ONE_ULP * float(np.abs(logits).max()))
    print(f"of the drafts {unclear:.1%} are not clear, {differ:.1%} differ")
    assert rows == 0
    assert unclear < 0.5
    for ptr in (twin.weight, twin.weight_scale):
        gpu.free(ptr)


# ---------------------------------------------------------------- long sequences


def test_sequences_longer_than_a_slab_of_the_original_size(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng, max_seq_len=8192)
    states = long_states(rig, 4)
    tokens, rows = [one(rig, rng), one(rig, rng)], [row(rig, rng), row(rig, rng)]
    found = batch(rig, tokens, rows, [7500, 7600], states[:2], 2)
    assert found == [rig.propose(states[2 + i], tokens[i], rows[i], 7500 + 100 * i, 2) for i in range(2)]
    for i in range(2):
        assert same(rig, Pair(states[i], states[2 + i], 0))


def test_a_stride_that_is_too_small_is_said(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """Before anything is launched, and the states stay as they were."""
    rig = make_rig(gpu, rng, max_seq_len=8192, levers=ModelLevers(propose_meta_stride=2048))
    states = long_states(rig, 2)
    before, free = [state.snapshot() for state in states], rig.head.kv_cache.num_free_blocks()
    with gpu.trace() as trace, pytest.raises(CapacityError, match="entries of the MTP block table"):
        batch(rig, [1, 2], [row(rig, rng), row(rig, rng)], [7500, 7600], states)
    assert launched(trace, "") == 0
    assert [state.snapshot() for state in states] == before
    assert rig.head.kv_cache.num_free_blocks() == free
