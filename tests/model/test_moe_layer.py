# SPDX-License-Identifier: AGPL-3.0-only
"""MoeLayer: every format against FP64, rows against single rows, captures, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from spark_py.model.layers.moe import MoeLayer
from spark_py.model.layers.moe_formats import expert_format
from spark_py.model.weight_map import DenseWeight, F32Weight, Fp8ExpertWeight, Fp8Weight
from spark_py.runtime.buffers import BufferArena
from spark_py.runtime.errors import (
    CapacityError,
    FunctionNotFoundError,
    InvalidArgumentError,
    ReleasedError,
    ScratchOverlapError,
    UnsupportedError,
)
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.runtime.scratch import ScratchRegion
from spark_py.testing import assert_same_bits

from .moe_support import KINDS, Kind, MoeRig, moe_rig
from .support import BF16, Array, dense, download, upload

each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)

# Gate and up are rounded to BF16, half an ulp of 2^-9 each; silu makes up to 3 of that (gates above -4), so that an
# activation is off by 4 * 2^-9 at most, and by another one where a shared expert of its own width rounds it too. The
# experts' outputs and their sum round once more each.
BOUND = 7 * 2.0**-9


def rows_of(rng: np.random.Generator, rig: MoeRig, rows: int) -> Array:
    return rng.standard_normal((rows, rig.config.hidden_size)).astype(BF16)


def assert_close(rig: MoeRig, x: Array, got: Array, logits: Array) -> None:
    exact = rig.router @ x.astype(np.float64)
    lost = 2.0**-8 * np.abs(exact) + 2.0**-20 * (np.abs(rig.router) @ np.abs(x.astype(np.float64)))
    assert (np.abs(logits.astype(np.float64) - exact) <= lost).all()
    expected, terms = rig.expected(x, logits)
    off = np.abs(got.astype(np.float64) - expected)
    assert (off <= BOUND * terms).all()
    # Roundings are of either sign: over the row they stay far below that.
    assert np.linalg.norm(off) <= 2.0**-7 * np.linalg.norm(expected)


@each_kind
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_topk_prob": False},
        {"gated": False},
        {"missing": (0, 4)},
        {"shared_expert_intermediate_size": 80},
        {"shared_expert_intermediate_size": 16},
        {"shared_expert_intermediate_size": 0},
        {"num_experts": 1, "num_experts_per_tok": 1},
        {"num_experts_per_tok": 7},
        {"hidden_size": 256, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "missing": (0, 4)},
        {"hidden_size": 256, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 0, "gated": False},
    ],
    ids=str,
)
def test_a_row_is_the_mixture_of_its_experts(
    gpu: GpuBackend, rng: np.random.Generator, kind: Kind, changes: dict[str, Any]
) -> None:
    rig = moe_rig(gpu, rng, kind, **changes)
    with rig.layer() as layer:
        for x in rows_of(rng, rig, 3):
            got = rig.run(layer, x)
            assert_close(rig, x, got, rig.logits(1)[0])


@each_kind
@pytest.mark.parametrize(("hidden", "inter", "shared"), [(64, 48, 48), (64, 48, 80), (256, 64, 64)])
def test_rows_have_the_bits_that_they_have_alone(
    gpu: GpuBackend, rng: np.random.Generator, kind: Kind, hidden: int, inter: int, shared: int
) -> None:
    # More rows than the router's kernel takes at once, and a tie among the logits of the last.
    widths = {"hidden_size": hidden, "moe_intermediate_size": inter, "shared_expert_intermediate_size": shared}
    rig = moe_rig(gpu, rng, kind, rows=19, **widths)
    x = rows_of(rng, rig, 19)
    x[-1] = 0.0
    with rig.layer() as layer:
        assert layer.rows_in_one_pass
        together = rig.run(layer, x)
        logits = rig.logits(19)
        for row in range(19):
            assert_same_bits(together[row], rig.run(layer, x[row]), f"row {row}")
            assert_close(rig, x[row], together[row], logits[row])
        assert_same_bits(rig.run(layer, x[3:8]), together[3:8], "five of the rows")


@each_kind
def test_a_set_without_kernels_for_several_rows_loops(gpu: GpuBackend, rng: np.random.Generator, kind: Kind) -> None:
    rig = moe_rig(gpu, rng, kind)
    x = rows_of(rng, rig, 4)
    with rig.layer() as layer:
        together = rig.run(layer, x)
    for module, function in (
        ("spark_moe_rows", "spark_moe_weighted_sum_blend_rows"),
        ("moe_topk", "moe_topk_softmax_batched"),
        expert_format(rig.weights.experts).gate_up_rows_k,
    ):
        with rig.layer() as layer:
            # Handles are looked up when a layer is built, so one is taken away from it here.
            names = [f"{m}::{f}" for m, f in [(module, function)]]
            layer._rows_k = [k if k.name not in names else type(k)(0, 0, k.name) for k in layer._rows_k]
            if layer.router.rows_kernel.name in names:
                layer.router.rows_kernel = type(layer.router.rows_kernel)(0)
            assert not layer.rows_in_one_pass
            assert_same_bits(rig.run(layer, x), together, function)


def test_two_launches_where_their_kernels_do(gpu: GpuBackend, rng: np.random.Generator) -> None:
    def two(kind: str, inter: int, shared: int) -> bool:
        widths = {"hidden_size": 256, "moe_intermediate_size": inter, "shared_expert_intermediate_size": shared}
        with moe_rig(gpu, rng, KINDS[kind], **widths).layer() as layer:
            return bool(layer._step_k)

    assert [two("bf16", 48, shared) for shared in (48, 0, 80)] == [True, True, False]
    assert [two("nvfp4", inter, inter) for inter in (64, 48)] == [True, False]
    assert not two("fp8", 64, 64)
    # Activations in FP32 that would not fit where the experts' outputs go.
    assert not two("bf16", 104, 104)


@pytest.mark.parametrize(("kind", "several"), [("bf16", False), ("nvfp4", True)])
def test_two_launches_take_several_rows_where_they_are_the_quicker_ones(
    gpu: GpuBackend, rng: np.random.Generator, kind: str, several: bool
) -> None:
    widths = {"hidden_size": 256, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    rig = moe_rig(gpu, rng, KINDS[kind], **widths)
    x = rows_of(rng, rig, 3)
    with rig.layer() as layer:
        for rows, two in ((x[0], True), (x, several)):
            with gpu.trace() as trace:
                rig.run(layer, rows)
            assert (f"spark_moe_step_{kind}" in str(trace.steps)) == two, len(rows)


@each_kind
def test_a_captured_pass_replays_with_new_rows(gpu: GpuBackend, rng: np.random.Generator, kind: Kind) -> None:
    rig = moe_rig(gpu, rng, kind, shared_expert_intermediate_size=64)
    first, second = rows_of(rng, rig, 3), rows_of(rng, rig, 3)
    stream = gpu.create_stream()
    with rig.layer() as layer:
        expected = rig.run(layer, second)
        at = rig.put(first)
        gpu.synchronize(gpu.default_stream())
        gpu.begin_capture(stream)
        out = layer.forward_rows(at, 3, rig.ctx, stream)
        graph = gpu.end_capture(stream)
        rig.put(second)
        gpu.memset(out, 0xA5, second.nbytes)
        gpu.launch_graph(graph, stream)
        gpu.synchronize(stream)
        assert_same_bits(download(gpu, out, second.shape), expected, "replay")
        gpu.destroy_graph(graph)
    gpu.destroy_stream(stream)


@each_kind
@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"num_experts": 8}, "experts"),
        ({"num_experts_per_tok": 8}, "num_experts_per_tok"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ({"num_experts": 513}, "num_experts"),
        ({"num_experts_per_tok": 33, "num_experts": 40}, "num_experts_per_tok"),
        ({"moe_intermediate_size": 44}, "moe_intermediate_size"),
        ({"shared_expert_intermediate_size": 20}, "shared_expert_intermediate_size"),
        ({"hidden_size": 60}, "hidden_size"),
        ({"moe_intermediate_size": 64}, "experts.0.gate_proj"),
        ({"shared_expert_intermediate_size": 64}, "shared_expert.gate_proj"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert"),
        ({"hidden_size": 128}, "gate"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_name(
    gpu: GpuBackend, rng: np.random.Generator, kind: Kind, changes: dict[str, Any], name: str
) -> None:
    rig = moe_rig(gpu, rng, kind)
    before = gpu.live_bytes()
    with pytest.raises(InvalidArgumentError) as error:
        MoeLayer(rig.weights, dataclasses.replace(rig.config, **changes), gpu)
    assert name in error.value.name
    assert gpu.live_bytes() == before


@each_kind
def test_half_an_expert_is_refused(gpu: GpuBackend, rng: np.random.Generator, kind: Kind) -> None:
    rig = moe_rig(gpu, rng, kind)
    broken = dataclasses.replace(rig.weights.experts[2], up_proj=kind.null())
    experts = [*rig.weights.experts[:2], broken, *rig.weights.experts[3:]]
    with pytest.raises(InvalidArgumentError, match=r"experts\.2\.up_proj"):
        MoeLayer(dataclasses.replace(rig.weights, experts=experts), rig.config, gpu)


def test_formats_that_no_kernel_takes_are_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig, other = moe_rig(gpu, rng, KINDS["bf16"]), moe_rig(gpu, rng, KINDS["fp8"])
    mixed = dataclasses.replace(rig.weights, shared_expert=other.weights.shared_expert)
    with pytest.raises(InvalidArgumentError, match="one format"):
        MoeLayer(mixed, rig.config, gpu)
    blocks = Fp8ExpertWeight(*[Fp8Weight(DevicePtr.NULL, DevicePtr.NULL, 0, 0)] * 3)
    with pytest.raises(UnsupportedError, match="Fp8ExpertWeight"):
        MoeLayer(dataclasses.replace(rig.weights, experts=[blocks] * 7, shared_expert=blocks), rig.config, gpu)
    with pytest.raises(InvalidArgumentError):
        expert_format([])


@pytest.mark.parametrize("groups", [1, 4])
def test_sigmoid_routing_chooses_by_the_bias_and_weighs_without(
    gpu: GpuBackend, rng: np.random.Generator, groups: int
) -> None:
    """Against FP64, and rows in one pass as rows alone. No shared expert."""
    rig = moe_rig(gpu, rng, KINDS["bf16"], num_experts=8, shared_expert_intermediate_size=0)
    rig.config = dataclasses.replace(
        rig.config, scoring_func="sigmoid", use_routing_bias=True, n_group=groups, topk_group=max(1, groups // 2),
        routed_scaling_factor=2.5,
    )  # fmt: skip
    bias = (0.3 * rng.standard_normal(8)).astype(np.float32)
    rig.weights = dataclasses.replace(rig.weights, correction_bias=F32Weight(upload(gpu, bias), (8,)))
    x = rows_of(rng, rig, 6)
    with rig.layer() as layer:
        assert layer.rows_in_one_pass
        together = rig.run(layer, x)
        logits = rig.logits(6).astype(np.float64)
        for row, alone in enumerate(x):
            assert rig.run(layer, alone).tobytes() == together[row].tobytes()
    for row, out in enumerate(together):
        scores = 1 / (1 + np.exp(-logits[row]))
        choice = scores + bias
        worth = np.sort(choice.reshape(groups, -1), axis=1)[:, -2:].sum(axis=1)
        closed = np.argsort(-worth)[max(1, groups // 2) :]
        choice[np.isin(np.arange(8) // (8 // groups), closed)] = -np.inf
        chosen = np.argsort(-choice)[:3]
        value = np.zeros(rig.config.hidden_size)
        for e in chosen:
            gate, up, down = rig.experts[e] or ()
            g = gate @ x[row].astype(np.float64)
            value += (
                2.5 * scores[e] / scores[chosen].sum() * (down @ (g / (1 + np.exp(-g)) * (up @ x[row].astype(float))))
            )
        assert np.linalg.norm(out.astype(np.float64) - value) < 0.02 * np.linalg.norm(value)


def test_routers_of_another_kind_are_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = moe_rig(gpu, rng, KINDS["bf16"])
    extra = dense(gpu, np.zeros(64, BF16))
    with pytest.raises(UnsupportedError, match="router_pre_norm"):
        MoeLayer(dataclasses.replace(rig.weights, router_pre_norm=extra), rig.config, gpu)
    bias = F32Weight(extra.weight, (7,))
    with pytest.raises(InvalidArgumentError, match=r"correction_bias .*None: the routing has none"):
        MoeLayer(dataclasses.replace(rig.weights, correction_bias=bias), rig.config, gpu)
    wrong = dataclasses.replace(rig.weights, shared_expert_gate=DenseWeight(extra.weight, (64,)))
    with pytest.raises(InvalidArgumentError, match="shared_expert_gate"):
        MoeLayer(wrong, rig.config, gpu)


def test_an_arena_that_is_too_small_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = moe_rig(gpu, rng, KINDS["bf16"])
    stream = gpu.default_stream()
    small = BufferArena(dataclasses.replace(rig.config, num_experts_per_tok=1), 2, 64, 16, 1, gpu)
    with rig.layer() as layer:
        with pytest.raises(CapacityError, match="writes to expert_"):
            layer.forward_rows(small.norm_output(), 2, dataclasses.replace(rig.ctx, buffers=small), stream)
        with pytest.raises(CapacityError):
            layer.forward_rows(rig.ctx.buffers.norm_output(), 9, rig.ctx, stream)
        with pytest.raises(InvalidArgumentError) as error:
            layer.forward_rows(rig.ctx.buffers.norm_output(), 0, rig.ctx, stream)
        assert error.value.name == "rows"


def test_input_that_the_pass_would_overwrite_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = moe_rig(gpu, rng, KINDS["bf16"])
    buffers = rig.ctx.buffers
    with rig.layer() as layer:
        for name in ("attn_output", "logits", "moe_output", "scratch"):
            with pytest.raises(InvalidArgumentError, match=name):
                layer.forward(buffers.pointer(name), rig.ctx, gpu.default_stream())


def test_routing_does_not_run_into_what_others_hold(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = moe_rig(gpu, rng, KINDS["bf16"])
    with rig.layer() as layer, rig.ctx.buffers.lease(ScratchRegion.argmax()), pytest.raises(ScratchOverlapError):
        layer.forward(rig.ctx.buffers.norm_output(), rig.ctx, gpu.default_stream())


def test_tables_are_freed_and_weights_are_not(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = moe_rig(gpu, rng, KINDS["nvfp4"])
    before = gpu.live_bytes()
    layer = rig.layer()
    assert gpu.live_bytes() == before + 3 * 7 * (8 + 8 + 4)
    layer.release()
    layer.release()
    assert gpu.live_bytes() == before
    with pytest.raises(ReleasedError):
        layer.forward(rig.ctx.buffers.norm_output(), rig.ctx, gpu.default_stream())
    with rig.layer() as again:
        rig.run(again, rows_of(rng, rig, 1)[0])


@pytest.mark.host_only("takes kernels out of the set, which the CPU backends alone can")
@each_kind
def test_a_set_that_lacks_the_kernels_does_not_offer_the_layer(
    gpu: GpuBackend, rng: np.random.Generator, kind: Kind
) -> None:
    rig = moe_rig(gpu, rng, kind)
    module, function = expert_format(rig.weights.experts).down_k
    gpu.fail_lookup(module, function)  # type: ignore[attr-defined]
    assert not MoeLayer.offered(gpu, rig.weights.experts)
    assert all(
        MoeLayer.offered(gpu, moe_rig(gpu, rng, each).weights.experts) for each in KINDS.values() if each is not kind
    )
    with pytest.raises(FunctionNotFoundError, match=function):
        rig.layer()
