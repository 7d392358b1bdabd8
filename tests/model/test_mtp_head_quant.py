# SPDX-License-Identifier: AGPL-3.0-only
"""MtpHead in every quantisation, dense and with experts, against the FP64 head of the weights that it really has, and
proof that the comparison would see a fault.

Bounds, relative L2 over 21 rows. A row passes about 20 roundings to BF16, each 2^-9 of a value at most and independent:
sqrt(20) * 2^-9 / sqrt(3) = 0.5 %; weights are exact, since the FP64 head has what the bytes say. A router makes errors
of shares of those of its logits, which are 3 in size here: up to half as much again. Over 60 seeds the largest was
0.8 %. In an FP8 pool, a K or V near the middle of two E4M3 values may be rounded the other way, by 2^-3 of it: FP64
rounds to E4M3 too, and about 6 % of the values lie near enough, which gives sqrt(0.06) * 2^-3 / sqrt(3) = 1.8 % of K
and V; the largest was 2.5 %, and 1.7 % of the logits. The faults below are at 3.5 % and more, and at
4.4 % with an FP8 pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spark_py.model.layers.mtp_head import MtpHead, MtpQuantization
from spark_py.model.levers import ModelLevers
from spark_py.model.weight_map import Fp8DenseWeight, Fp8ExpertWeight, QuantizedWeight
from spark_py.runtime.gpu import GpuBackend
from spark_py.runtime.kv_cache import KvCacheDtype
from tests.model.mtp_forms import F32, FORMS, FUSED, U8, Compared, Form, make_form, run, to_blocks
from tests.model.support import FFN, Array, Oracle, Rig, a_hidden, config, download, mtp_weights, random_weights

BOUND, FP8_KV_BOUND, FP8_POOL_BOUND = 0.0125, 0.025, 0.035
CLEAR, FP8_KV_CLEAR = 0.15, 0.5
"""Router logits are 3 in size; those of a row are off by a few times BOUND of that, and so are differences of them."""
NVFP4, FP8, BF16 = MtpQuantization.NVFP4, MtpQuantization.FP8, MtpQuantization.BF16


def compare(rig: Rig, exact: dict[str, Array], rng: np.random.Generator) -> Compared:
    """21 rows, which is more than a block, held to the bounds."""
    bound, pool, clear = (BOUND, BOUND, CLEAR) if rig.head.kv_bf16 else (FP8_KV_BOUND, FP8_POOL_BOUND, FP8_KV_CLEAR)
    found = run(rig, rng, Oracle.of(rig.config, exact, kv_e4m3=not rig.head.kv_bf16), 7, 3, clear)
    assert found.rows >= 6, "rows whose experts are clear"
    assert max(found.logits, found.hidden) < bound, found
    assert max(found.keys, found.values) < pool, found
    return found


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_head_of_every_form(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, form: Form
) -> None:
    rig, exact = make_form(gpu, rng, monkeypatch, form)
    compare(rig, exact, rng)
    assert rig.head.quant is form.quant


@pytest.mark.parametrize("form", [form for form in FORMS if form.moe], ids=str)
def test_shares_that_are_not_made_to_add_up_to_one(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, form: Form
) -> None:
    compare(*make_form(gpu, rng, monkeypatch, form, norm_topk_prob=False), rng)


@pytest.mark.parametrize("form", [Form(BF16, moe=True, hidden=FUSED), Form(NVFP4, moe=True)], ids=str)
@pytest.mark.parametrize("experts", [(1, 1), (2, 2), (40, 10)], ids=str)
def test_numbers_of_experts(
    gpu: GpuBackend,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    form: Form,
    experts: tuple[int, int],
) -> None:
    changes = {"num_experts": experts[0], "num_experts_per_tok": experts[1]}
    rig, exact = make_form(gpu, rng, monkeypatch, form, **changes)
    found = run(rig, rng, Oracle.of(rig.config, exact, kv_e4m3=not rig.head.kv_bf16), 4, 3, 0.0)
    # Of 40 experts, the tenth and the next are never far apart; one for the other changes a small share of a row.
    assert max(found.logits, found.hidden) < (FP8_KV_BOUND if experts[0] == experts[1] else 0.1)


@pytest.mark.parametrize("form", [form for form in FORMS if form.moe], ids=str)
def test_a_shared_expert_of_another_width(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, form: Form
) -> None:
    compare(*make_form(gpu, rng, monkeypatch, form, shared_expert_intermediate_size=128), rng)


def test_a_checkpoint_in_block_scaled_fp8(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its projections are used as they are, with more than one block of 128 in both directions; `fc` is BF16 there."""
    changes = {"hidden_size": 192, "intermediate_size": 160}
    arrays = random_weights(rng, config(**changes))
    weights = mtp_weights(gpu, arrays)
    given: dict[str, Any] = {}
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", *FFN):
        given[name], arrays[name] = to_blocks(gpu, rng, arrays[name])
    triple = Fp8ExpertWeight(*(given.pop(name) for name in FFN))
    weights = type(weights)(
        **{field: getattr(weights, field) for field in weights.__slots__} | given | {"dense_ffn": triple}
    )
    rig, exact = make_form(gpu, rng, monkeypatch, Form(FP8), weights=weights, arrays=arrays, **changes)
    assert rig.head.q_proj is given["q_proj"]
    assert isinstance(rig.head.fc, Fp8DenseWeight)
    np.testing.assert_array_equal(exact["q_proj"], arrays["q_proj"])
    compare(rig, exact, rng)


@pytest.mark.parametrize("form", [Form(FP8), Form(NVFP4, moe=True)], ids=str)
def test_only_bf16_heads_are_fed(
    gpu: GpuBackend,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    form: Form,
) -> None:
    rig, _ = make_form(gpu, rng, monkeypatch, form)
    state = rig.state()
    for _ in range(2):
        assert rig.feed(state, [1, 2, 3], rng.standard_normal((2, rig.config.hidden_size))) == 0
    assert not rig.head.supports_drafter_prefill
    assert (state.seq_len, state.block_table) == (0, [])
    assert caplog.text.count(f"its projections are in {form.quant.value}") == 1


# ---------------------------------------------------------------- which kernels run


def launched(rig: Rig, rng: np.random.Generator) -> list[str]:
    """The kernels of one draft, in order."""
    with rig.gpu.trace() as trace:
        rig.propose(rig.state(), 3, a_hidden(rig, rng), 1, 1)
    return [entry.name for step in trace.steps for entry in step if entry.kind == "launch"]


@pytest.mark.parametrize("single_warp", [True, False])
def test_nvfp4_kernels(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, single_warp: bool
) -> None:
    form = Form(NVFP4, moe=True, nvfp4_lm_head=True)
    rig, exact = make_form(gpu, rng, monkeypatch, form, levers=ModelLevers(gemv_sw=single_warp))
    names = launched(rig, rng)
    gemv, other = ("w4a16_gemv_sw", "w4a16_gemv") if single_warp else ("w4a16_gemv", "w4a16_gemv_sw")
    assert names.count(f"w4a16_gemv::{gemv}") >= 3, "fc, o_proj and the LM head"
    assert f"w4a16_gemv::{other}" not in names
    assert names.count("w4a16_gemv::w4a16_gemv_qg") == 1
    assert names.count("w4a16_gemv_fused::w4a16_gemv_dual") == 1
    assert "spark_qk_norm_rope_cache::spark_qk_norm_rope_cache_fp8" in names
    assert "paged_decode_fp8::paged_decode_attn_fp8" in names
    compare(rig, exact, rng)


def test_nvfp4_rows_of_whole_stripes_run_the_kernel_for_rows(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = Form(NVFP4, moe=True, nvfp4_lm_head=True)
    wide = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64}
    rig, exact = make_form(gpu, rng, monkeypatch, form, **wide)
    names = launched(rig, rng)
    assert names.count("spark_w4a16_gemv_rows::spark_w4a16_gemv_rows") == 3, "fc, Q and K and V, o_proj"
    assert names.count("spark_w4a16_gemv_rows::spark_w4a16_gemv_rows_argmax") == 1
    assert not any(name.startswith("w4a16_gemv") for name in names)
    compare(rig, exact, rng)


@pytest.mark.parametrize("quant", [BF16, FP8])
@pytest.mark.parametrize("fused", [True, False])
def test_experts_are_fused_where_the_kernels_are_there(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, quant: MtpQuantization, fused: bool
) -> None:
    """Then nothing of the draft is copied to the host; else the ids of the experts and its own are, and both agree."""
    rig, exact = make_form(gpu, rng, monkeypatch, Form(quant, moe=True, hidden=() if fused else FUSED))
    assert (rig.head.moe_fused is not None, rig.head.moe_experts_generic is None) == (fused, fused)
    assert rig.head.ffn_reads_back is not fused
    reads = []
    real = type(gpu).copy_d2h_on_stream

    def read(self: GpuBackend, source: Any, *rest: Any) -> Any:
        reads.append(source)
        return real(self, source, *rest)

    monkeypatch.setattr(type(gpu), "copy_d2h_on_stream", read)
    names = launched(rig, rng)
    assert len(reads) == (0 if fused else 2)
    gemv = "spark_gemv_rows::spark_gemv_rows" if quant is BF16 else "spark_fp8_gemv_rows::spark_fp8_gemv_rows"
    # Attention has 5 projections, an expert, shared or one of the two of a token, has 3; those of one input go in one
    # launch.
    assert names.count(gemv) >= 3 + 6 or fused
    assert names.count("moe_silu_mul::moe_silu_mul") == (0 if fused else 3)
    compare(rig, exact, rng)


def test_the_lever_that_runs_bf16_experts_one_after_the_other(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, _ = make_form(gpu, rng, monkeypatch, Form(BF16, moe=True), levers=ModelLevers(bf16_moe_fused=False))
    assert rig.head.moe_fused is None
    rig, _ = make_form(gpu, rng, monkeypatch, Form(FP8, moe=True), levers=ModelLevers(bf16_moe_fused=False))
    assert rig.head.moe_fused is not None


# ---------------------------------------------------------------- faults that the comparison must see

NVFP4_MOE, FP8_DENSE = Form(NVFP4, moe=True), Form(FP8)
GENERIC = Form(BF16, moe=True, hidden=FUSED)


class NormOverGates(MtpHead):
    """The norm of the queries runs over the packed row, gates and all."""

    def _rms_norm(self, source: Any, weight: Any, output: Any, rows: int, width: int, stream: Any) -> None:
        super()._rms_norm(source, weight, output, 2 * rows if weight is self.q_norm else rows, width, stream)


class QueriesAndGatesLeftTogether(MtpHead):
    """NVFP4 by the plain GEMV, whose row is each head's query and then its gate."""

    def _project_qg(self, normed: Any, output: Any, stream: Any) -> None:
        self.gemv(normed, self.q_proj, output, 2 * self.nq * self.hd, self.h, stream)


class WrongExperts(MtpHead):
    def _read_ids(self, *args: Any) -> list[int]:
        return super()._read_ids(*args)[::-1]


def nibbles_swapped(rig: Rig) -> None:
    weight = rig.head.fc
    assert isinstance(weight, QuantizedWeight)
    packed = download(rig.gpu, weight.weight, (weight.shape[0], weight.shape[1] // 2), U8)
    rig.gpu.copy_h2d((packed >> 4 | packed << 4).reshape(-1), weight.weight)


def factor_as_divisor(rig: Rig) -> None:
    weight = rig.head.fc
    assert isinstance(weight, QuantizedWeight)
    rig.head.fc = replace(weight, weight_scale_2=1.0 / weight.weight_scale_2)


def row_scale_as_divisor(rig: Rig) -> None:
    weight = rig.head.fc
    assert isinstance(weight, Fp8DenseWeight)
    scales = download(rig.gpu, weight.row_scale, (weight.n,), F32)
    rig.gpu.copy_h2d((1 / scales).view(np.uint8), weight.row_scale)


def row_scale_of_the_row_before(rig: Rig) -> None:
    weight = rig.head.o_proj
    assert isinstance(weight, Fp8DenseWeight)
    scales = download(rig.gpu, weight.row_scale, (weight.n,), F32)
    rig.gpu.copy_h2d(np.roll(scales, 1).view(np.uint8), weight.row_scale)


def keys_and_values_swapped(rig: Rig) -> None:
    rig.head.k_proj, rig.head.v_proj = rig.head.v_proj, rig.head.k_proj


def no_shared_gate(rig: Rig) -> None:
    assert rig.head.shared_expert_gate is not None
    rig.gpu.memset(rig.head.shared_expert_gate.weight, 0, 2 * rig.head.h)


def shares_not_normalised(rig: Rig) -> None:
    assert rig.head.router is not None
    rig.head.router.routing = replace(rig.head.router.routing, normalize=False)


def shared_expert_is_an_expert(rig: Rig) -> None:
    assert rig.head.moe_experts_generic is not None
    rig.head.moe_shared_generic = rig.head.moe_experts_generic[0]


FAULTS: list[tuple[Form, type[MtpHead] | Callable[[Rig], None]]] = [
    (replace(NVFP4_MOE, hidden=("spark_qk_norm_rope_cache",)), NormOverGates),
    (replace(FP8_DENSE, hidden=("spark_qk_norm_rope_cache",)), NormOverGates),
    (NVFP4_MOE, QueriesAndGatesLeftTogether),
    (NVFP4_MOE, nibbles_swapped),
    (NVFP4_MOE, factor_as_divisor),
    (NVFP4_MOE, keys_and_values_swapped),
    (FP8_DENSE, row_scale_as_divisor),
    (FP8_DENSE, row_scale_of_the_row_before),
    (FP8_DENSE, keys_and_values_swapped),
    (GENERIC, WrongExperts),
    (GENERIC, no_shared_gate),
    (GENERIC, shares_not_normalised),
    (GENERIC, shared_expert_is_an_expert),
]


@pytest.mark.parametrize(("form", "fault"), FAULTS, ids=lambda each: getattr(each, "__name__", str(each)))
def test_a_fault_is_seen(
    gpu: GpuBackend,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    form: Form,
    fault: type[MtpHead] | Callable[[Rig], None],
) -> None:
    head_class = fault if isinstance(fault, type) else MtpHead
    rig, exact = make_form(gpu, rng, monkeypatch, form, head_class=head_class)
    if not isinstance(fault, type):
        fault(rig)
    with pytest.raises(AssertionError):
        compare(rig, exact, rng)


@pytest.mark.parametrize("saturates", [False, True])
def test_large_values_need_a_bf16_pool(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, saturates: bool
) -> None:
    """V is about 1000, as in a deep layer of a large model: an FP8 pool with unit scales holds 448. That is why FP8
    heads have a BF16 pool; with the other, the comparison fails."""
    arrays = random_weights(rng, config())
    arrays["v_proj"] = (arrays["v_proj"].astype(np.float32) * 1000).astype(arrays["v_proj"].dtype)
    arrays["o_proj"] = (arrays["o_proj"].astype(np.float32) / 1000).astype(arrays["o_proj"].dtype)
    if saturates:
        monkeypatch.setattr(MtpQuantization, "kv_dtype", lambda self: KvCacheDtype.FP8)
    rig, exact = make_form(gpu, rng, monkeypatch, FP8_DENSE, arrays=arrays)

    def check() -> None:
        found = run(rig, rng, Oracle.of(rig.config, exact), 7, 3, CLEAR)
        assert max(found.logits, found.hidden, found.keys, found.values) < BOUND, found

    if saturates:
        with pytest.raises(AssertionError):
            check()
    else:
        check()
