# SPDX-License-Identifier: AGPL-3.0-only
"""Heads of every body: each option against the head in FP64, in batches and graphs, in every quantisation, and proof
that an option that is read wrongly would be seen.

Bound: that of test_mtp_head_forward, 2.5 % of the logits, the hidden row, K and V. A row whose last chosen expert, or
group, is closer than CLEAR to the first that was not is left out: a rounding may choose another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spark_py.model.layers.moe_routing import MoeRouter
from spark_py.model.layers.mtp_head import HeadBody, MtpHead, MtpQuantization, NormConvention, QkNorm, SharedExpert
from spark_py.model.levers import ModelLevers
from spark_py.ops.residual_add import sigmoid_gate_mul
from spark_py.runtime.errors import InvalidArgumentError, UnsupportedError
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from tests.model.bodies_support import KINDS, TABLES, BodyOracle, Kind, body_arrays, body_weights
from tests.model.mtp_forms import FUSED, Form, make_form
from tests.model.support import BF16, Array, Rig, a_hidden, dense, download, make_rig, relative_l2

BOUND, CLEAR = 0.025, 0.02
BF16_MOE, FP8_MOE, NVFP4_MOE = (Form(quant, moe=True) for quant in (
    MtpQuantization.BF16, MtpQuantization.FP8, MtpQuantization.NVFP4
))  # fmt: skip
GENERIC = [Form(MtpQuantization.BF16, moe=True, hidden=FUSED), Form(MtpQuantization.FP8, moe=True, hidden=FUSED)]
each_kind = pytest.mark.parametrize("name", KINDS)


def rig_of(
    gpu: GpuBackend, rng: np.random.Generator, kind: Kind, levers: ModelLevers | None = None,
    arrays: dict[str, Array] | None = None,
) -> Rig:  # fmt: skip
    arrays = arrays or body_arrays(rng, kind)
    return make_rig(
        gpu, rng, arrays=arrays, weights=body_weights(gpu, arrays), body=kind.body, made=kind.model_config(),
        levers=levers,
    )  # fmt: skip


def check(
    rig: Rig, rng: np.random.Generator, oracle: BodyOracle, prompt: int = 9, bound: float = BOUND, chains: int = 2
) -> None:
    """Feed a prompt where rows can be fed, draft 3 tokens `chains` times, and hold each row against the oracle, which
    is given the head's own ids and hidden rows."""
    head, state, c = rig.head, rig.state(), rig.config
    tokens = [int(t) for t in rng.integers(0, c.vocab_size, prompt + 1)]
    hidden = (2 * rng.standard_normal((prompt, c.hidden_size))).astype(BF16)
    if head.supports_drafter_prefill:
        assert rig.feed(state, tokens[:-1], hidden) == prompt - 1
        oracle.feed(tokens[:-1], hidden.astype(np.float64))
    found: list[tuple[Array, Array, Array, Array]] = []
    position, picked = prompt, tokens[-1]
    for _ in range(chains):
        own = (2 * rng.standard_normal(c.hidden_size)).astype(BF16)
        place = rig.put(own)
        for j in range(3):
            wanted, wanted_row = oracle.step(picked, own.astype(np.float64), position + j)
            picked = head.forward_one(picked, place, position + j, state, rig.ctx, rig.stream)
            place = head.output_row(rig.ctx)
            own = download(rig.gpu, place, (c.hidden_size,))
            if oracle.router_gap > CLEAR:
                found.append((rig.logits(), wanted, own, wanted_row))
        position += 3
    assert len(found) >= 2
    logits, wanted, rows, wanted_rows = (np.concatenate(each) for each in zip(*found, strict=True))
    assert relative_l2(logits, wanted) < bound, "logits"
    assert relative_l2(rows, wanted_rows) < bound, "hidden rows"
    keys, values = rig.rows(state)
    assert relative_l2(keys, np.stack(oracle.keys)) < bound, "keys"
    assert relative_l2(values, np.stack(oracle.values)) < bound, "values"


@each_kind
def test_each_option_is_the_definition(gpu: GpuBackend, rng: np.random.Generator, name: str) -> None:
    kind = KINDS[name]
    rig = rig_of(gpu, rng, kind)
    check(rig, rng, BodyOracle.of_kind(kind, rig.arrays))


def check_bits(graph: Rig, steps: Rig, rng: np.random.Generator) -> None:
    """Three proposes by a head that captures, in a batch, and draft by draft: the same ids and rows."""
    mine, other, batched = graph.state(), steps.state(), [steps.state() for _ in range(2)]
    for turn in range(3):
        token, position, hidden = int(rng.integers(203)), 3 + 3 * turn, a_hidden(steps, rng)
        wanted = steps.propose(other, token, hidden, position, 2)
        assert graph.propose(mine, token, hidden, position, 2) == wanted
        places = [steps.put(hidden) for _ in batched]
        found = steps.head.propose_batch([token] * 2, places, [position] * 2, 2, batched, steps.ctx, steps.stream)
        assert found == [wanted, wanted]
        for rig, state in ((graph, mine), *((steps, state) for state in (other, *batched))):
            rig.head.after_verify(turn, state, rig.stream)
    rows = [side.tobytes() for side in steps.rows(other)]
    for rig, state in ((graph, mine), *((steps, state) for state in batched)):
        assert [side.tobytes() for side in rig.rows(state)] == rows


@each_kind
def test_batches_and_graphs_give_the_same_bits(gpu: GpuBackend, rng: np.random.Generator, name: str) -> None:
    kind = KINDS[name]
    graph = rig_of(gpu, rng, kind)
    check_bits(graph, rig_of(gpu, rng, kind, ModelLevers(propose_graph=False), graph.arrays), rng)
    assert len(graph.head.propose_graphs) > 0


@pytest.mark.parametrize("graph", [True, False])
def test_the_embedding_for_the_verify_is_the_targets(gpu: GpuBackend, rng: np.random.Generator, graph: bool) -> None:
    """Whatever table the module drafts with; and no id is drafted that the target's lacks."""
    kind = KINDS["own tables"]
    arrays = body_arrays(rng, kind)
    arrays["embed_tokens"] = arrays["embed_tokens"][:150]
    rig = rig_of(gpu, rng, kind, ModelLevers(propose_graph=graph), arrays)
    assert (rig.head.embed_rows, rig.head.draft_vocab) == (203, 150)
    staged, state = gpu.alloc(2 * rig.head.h), rig.state()
    for turn in range(3):
        assert rig.propose(state, 7, a_hidden(rig, rng), 5 + turn, 1, draft_embed_target=staged) == [0]
        token = rig.head.read_deferred_draft_token(gpu)
        assert download(gpu, staged, (rig.head.h,)).tobytes() == arrays["embed_tokens"][token].tobytes()
        rig.head.after_verify(0, state, rig.stream)


@pytest.mark.parametrize("form", [BF16_MOE, FP8_MOE, NVFP4_MOE, *GENERIC], ids=str)
@pytest.mark.parametrize("name", ["minimax_m2", "glm4_moe"])
def test_every_quantisation(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, form: Form, name: str
) -> None:
    kind = KINDS[name]
    arrays = body_arrays(rng, kind)
    rig, exact = make_form(
        gpu, rng, monkeypatch, form, arrays=arrays, weights=body_weights(gpu, arrays), body=kind.body,
        made=kind.model_config(), levers=ModelLevers(propose_graph=False),
    )  # fmt: skip
    oracle = BodyOracle.of_kind(kind, exact, kv_e4m3=form.quant is MtpQuantization.NVFP4)
    # E4M3 keys and values are roundings of 2^-4, so that one may fall on the other side.
    check(rig, rng, oracle, bound=2 * BOUND if form.quant is MtpQuantization.NVFP4 else BOUND)
    check_bits(rig, rig, rng)


# ---------------------------------------------------------------- options that are read wrongly


def _body(**changes: Any) -> Callable[[Rig], None]:
    def apply(rig: Rig) -> None:
        rig.head.body = replace(rig.head.body, **changes)

    return apply


def _router(**changes: Any) -> Callable[[Rig], None]:
    def apply(rig: Rig) -> None:
        router = _router_of(rig.head)
        router.routing = replace(router.routing, **changes)

    return apply


def _router_of(head: MtpHead) -> MoeRouter:
    assert head.moe_fused is not None
    return head.moe_fused.router


def _no_bias(rig: Rig) -> None:
    _router_of(rig.head).bias = None


def _bias_in_the_weights(rig: Rig) -> None:
    """s + bias in place of s, normalised."""
    router, gpu = _router_of(rig.head), rig.gpu
    route, bias, k = router.route, rig.arrays["correction_bias"], router.top_k

    def biased(logits: Any, ids: Any, weights: Any, stream: Any) -> None:
        route(logits, ids, weights, stream)
        gpu.synchronize(stream)
        chosen = download(gpu, ids, (k,), np.dtype(np.uint32))
        values = download(gpu, logits, (router.num_experts,)).astype(np.float32)[chosen]
        scores = 1 / (1 + np.exp(-values)) + bias[chosen]
        gpu.copy_h2d((scores / scores.sum()).astype(np.float32).view(np.uint8), weights)

    router.route = biased  # type: ignore[method-assign]


def _norm_of_nothing(rig: Rig) -> None:
    ones = dense(rig.gpu, np.zeros(rig.config.head_dim, BF16))
    rig.head.q_norm = rig.head.k_norm = ones
    rig.head.body = replace(rig.head.body, qk_norm=QkNorm.PER_HEAD)


def _one_plus_w(rig: Rig) -> None:
    rig.head.rms_norm_k = rig.gpu.kernel("norm", "rms_norm")


def _keys_for_gates(rig: Rig) -> None:
    """The attention's output times sigmoid of what lies behind the queries."""
    head, kernel = rig.head, rig.gpu.kernel("residual_add", "sigmoid_gate_mul")
    n = head.nq * head.hd

    def gate(queries: DevicePtr, output: DevicePtr, stream: Any) -> None:
        sigmoid_gate_mul(rig.gpu, kernel, output, queries.offset(2 * n), output, n, stream)

    head.split_attention = None
    head._apply_gate = gate  # type: ignore[method-assign]


def _half_a_gate(rig: Rig) -> None:
    """Zeros for the gate's weight: the shared expert counts half."""
    layer = rig.head.moe_fused
    assert layer is not None
    layer.weights = replace(layer.weights, shared_expert_gate=dense(rig.gpu, np.zeros((1, rig.head.h), BF16)))


def _without(name: str) -> Callable[[Rig], None]:
    return lambda rig: setattr(rig.head, name, None)


def _targets_tables(rig: Rig) -> None:
    rig.head.embed_tokens, rig.head.lm_head = (dense(rig.gpu, rig.arrays[name]) for name in TABLES)


FAULTS: dict[str, tuple[str, Callable[[Rig], None]]] = {
    "keys for gates": ("ungated", _keys_for_gates),
    "gates in the ungated head of minimax": ("minimax_m2", _keys_for_gates),
    "norm over a head instead of all": ("norm over all heads", _body(qk_norm=QkNorm.PER_HEAD)),
    "norm of what has none": ("no norm of q and k", _norm_of_nothing),
    "1 + w for w": ("plain norm weights", _one_plus_w),
    "concat order": ("hidden row first", _body(hidden_first=False)),
    "concat order of Qwen": ("full RoPE", _body(hidden_first=True)),
    "chain before the norm": ("chain after the norm", _body(chain_after_norm=False)),
    "chain after the norm": ("ungated", _body(chain_after_norm=True)),
    "half the RoPE": ("full RoPE", lambda rig: setattr(rig.head, "rotary_dim", 16)),
    "no bias of queries": ("biases", _without("q_bias")),
    "no bias of keys": ("biases", _without("k_bias")),
    "no bias of values": ("biases", _without("v_bias")),
    "the target's tables": ("own tables", _targets_tables),
    "gate of a shared expert without": ("plain shared expert", _half_a_gate),
    "softmax for sigmoid": ("sigmoid", _router(sigmoid=False)),
    "weights normalised that are not": ("sigmoid", _router(normalize=True)),
    "bias not in the choice": ("biased", _no_bias),
    "bias in the weights": ("biased", _bias_in_the_weights),
    "weights not normalised": ("minimax_m2", _router(normalize=False)),
    "groups ignored": ("glm4_moe", _router(n_group=1, topk_group=1)),
    "one group too many": ("glm4_moe", _router(topk_group=3)),
    "scale missing": ("glm4_moe", _router(scaling_factor=1.0)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(gpu: GpuBackend, rng: np.random.Generator, fault: str) -> None:
    name, apply = FAULTS[fault]
    rig = rig_of(gpu, rng, KINDS[name], ModelLevers(propose_graph=False))
    if "softmax" in fault:
        router = _router_of(rig.head)
        router.kernel = gpu.kernel("moe_topk", "moe_topk_softmax")
    apply(rig)
    with pytest.raises(AssertionError):
        # Whether groups are closed shows where an expert of another would have been chosen.
        check(rig, rng, BodyOracle.of_kind(KINDS[name], rig.arrays), chains=10 if "group" in fault else 2)


# ---------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("ungated", {"body": HeadBody()}, r"mtp q_proj is \(128, 64\)"),
        ("norm over all heads", {"body": HeadBody()}, r"mtp q_norm is \(128,\)"),
        ("no norm of q and k", {"body": HeadBody()}, "mtp q_norm is None: needed"),
        ("full RoPE", {"body": HeadBody(qk_norm=QkNorm.NONE)}, "mtp q_norm .*None: the body has no such part"),
        ("plain shared expert", {"body": HeadBody(shared_expert=SharedExpert.NONE)}, "mtp shared_expert .*is none"),
        ("no shared expert", {"body": HeadBody()}, "mtp shared_expert is None"),
        ("sigmoid", {"body": HeadBody(shared_expert=SharedExpert.PLAIN)}, "mtp shared_expert_gate .*is plain"),
        ("biased", {"config": {"use_routing_bias": False}}, "correction_bias .*the routing has none"),
        ("sigmoid", {"config": {"use_routing_bias": True}}, "correction_bias is None: the routing has one"),
        ("biases", {"body": HeadBody(gated=False)}, "mtp q_bias .*None: the body has no such part"),
        ("ungated", {"body": HeadBody(gated=False, qkv_bias=True)}, "mtp q_bias is None: needed by the body"),
        ("sigmoid", {"config": {"n_group": 4}}, "n_group is 4"),
        ("glm4_moe", {"config": {"topk_group": 5}}, "topk_group is 5"),
    ],
)
def test_weights_of_another_body_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, name: str, changes: dict[str, Any], words: str
) -> None:
    kind = KINDS[name]
    arrays = body_arrays(rng, kind)
    c = replace(kind.model_config(), **changes.get("config", {}))
    before = gpu.live_bytes()
    weights = body_weights(gpu, arrays)
    with pytest.raises(InvalidArgumentError, match=words):
        make_rig(gpu, rng, arrays=arrays, weights=weights, body=changes.get("body", kind.body), made=c)
    assert before <= gpu.live_bytes()


def test_a_bias_of_another_shape_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    kind = KINDS["biased"]
    arrays = body_arrays(rng, kind) | {"correction_bias": np.zeros(5, np.float32)}
    with pytest.raises(InvalidArgumentError, match=r"correction_bias is \(5,\)"):
        rig_of(gpu, rng, kind, arrays=arrays)


def test_biases_beside_gates_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="gates"):
        HeadBody(qkv_bias=True)


def test_none_takes_the_familys_body(gpu: GpuBackend, rng: np.random.Generator) -> None:
    kind = KINDS["minimax_m2"]
    arrays = body_arrays(rng, kind)
    c = replace(kind.model_config(), model_type="minimax_m2", attn_gated=False, qk_norm_type="per_layer")
    rig = make_rig(gpu, rng, arrays=arrays, weights=body_weights(gpu, arrays), made=c)
    assert rig.head.body == kind.body
    assert rig.head.body.norm is NormConvention.PLAIN
    check(rig, rng, BodyOracle.of_kind(kind, rig.arrays))


def test_the_kernels_of_gates_are_not_asked_for_without_gates(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = rig_of(gpu, rng, KINDS["minimax_m2"])
    assert not rig.head.sigmoid_gate_mul_k
    assert not rig.head.deinterleave_qg_k
    assert rig.head.row_bytes()["qkv_output"] == 2 * (128 + 2 * 64)
