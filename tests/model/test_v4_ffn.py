# SPDX-License-Identifier: AGPL-3.0-only
"""V4Ffn against the model's mixture in FP64: learned and hash routing, experts in MXFP4 and BF16, a shared expert in
each format, and what misreadings of the model or of its formats would give."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from spark_py.model.layers.deepseek_v4 import V4Ffn, V4FfnShape
from spark_py.model.weight_map import DenseWeight, Fp8Weight
from spark_py.runtime.errors import (
    CapacityError,
    InvalidArgumentError,
    KernelSetError,
    ReleasedError,
    UnsupportedError,
)
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.testing import U32, Array, Output, assert_same_bits, normal, relative_l2, upload
from tests.model.mtp_forms import hide
from tests.model.v4_ffn_support import FFN, Bf16, Fp8, HostFfn, Mxfp4

H, ROWS = FFN.hidden_size, 3
# Logits, both projections, the activation, each expert's output and the sum are rounded to BF16: six roundings of 2^-9
# of an element at most, those of the logits by the slope of the score.
NEAR = 2.0**-7


def outputs(
    gpu: GpuBackend,
    host: HostFfn,
    rows: Array,
    tokens: Array | None = None,
    *,
    together: bool = True,
    kind: type[V4Ffn] = V4Ffn,
) -> Array:
    """BF16 [rows, h], all rows in a call or each in its own."""
    at = upload(gpu, np.zeros(len(rows), U32))
    out = Output(gpu, rows.shape)
    x, stream = upload(gpu, rows), gpu.default_stream()
    with kind(host.to_device(gpu), host.shape, gpu, len(rows), at) as ffn:
        if tokens is not None and together:
            gpu.copy_h2d(tokens.view(np.uint8), at)
        if together:
            ffn(x, out.ptr, len(rows), stream)
            return out.read()
        for row in range(len(rows)):
            if tokens is not None:
                gpu.copy_h2d(tokens[row : row + 1].view(np.uint8), at)
            ffn(x.offset(row * H * 2), out.ptr.offset(row * H * 2), 1, stream)
            gpu.synchronize(stream)
    return out.read()


@pytest.mark.parametrize(
    ("routed", "shared"),
    [(Mxfp4, (Fp8, Fp8, Fp8)), (Bf16, (Bf16, Bf16, Bf16)), (Bf16, (Mxfp4, Fp8, Bf16))],
    ids=["mxfp4", "bf16", "mixed"],
)
def test_output_is_the_models(gpu: GpuBackend, rng: np.random.Generator, routed: Any, shared: Any) -> None:
    host = HostFfn.draw(rng, routed, shared)
    rows = host.rows(rng, ROWS)
    for row, got in zip(rows, outputs(gpu, host, rows), strict=True):
        assert relative_l2(got, host.output(row)) < NEAR


def test_a_table_routes_by_the_token_of_each_row(gpu: GpuBackend, rng: np.random.Generator) -> None:
    host = HostFfn.draw(rng, hashed=True)
    rows, tokens = normal(rng, ROWS, H), rng.permutation(FFN.vocab_size)[:ROWS].astype(U32)
    tokens[0] = FFN.vocab_size - 1
    got = outputs(gpu, host, rows, tokens)
    for row, token, output in zip(rows, tokens, got, strict=True):
        assert relative_l2(output, host.output(row, token)) < NEAR
        assert relative_l2(output, host.output(row, (token + 1) % FFN.vocab_size)) > 8 * NEAR
    assert_same_bits(got, outputs(gpu, host, rows, tokens, together=False))


@pytest.mark.parametrize("routed", [Mxfp4, Bf16])
def test_rows_have_the_same_bits_alone_and_together(gpu: GpuBackend, rng: np.random.Generator, routed: Any) -> None:
    """More rows than the quantised products take at once."""
    host = HostFfn.draw(rng, routed)
    rows = normal(rng, 9, H)
    assert_same_bits(outputs(gpu, host, rows), outputs(gpu, host, rows, together=False))


MISREAD: dict[str, Callable[[HostFfn, Array], Array]] = {
    "bias in the weights": lambda host, row: host.output(row, bias_in_weights=True),
    "no bias": lambda host, row: replace(host, bias=None).output(row),
    "without routed_scaling": lambda host, row: host.output(row, scaling=1.0),
    "weights that are not normalised": lambda host, row: host.output(row, normalise=False),
    "sigmoid scores": lambda host, row: host.output(row, sigmoid=True),
    "gate bounded from below": lambda host, row: host.output(row, gate_below=True),
    "routed experts without a limit": lambda host, row: host.output(row, limits=(np.inf, FFN.swiglu_limit)),
    "shared expert without a limit": lambda host, row: host.output(row, limits=(FFN.swiglu_limit, np.inf)),
    "w1 and w3 exchanged": lambda host, row: replace(
        host, experts=tuple(replace(e, w1=e.w3, w3=e.w1) for e in host.experts)
    ).output(row),
    "the high half of a byte first": lambda host, row: replace(
        host, experts=tuple(e.misread(high_first=True) for e in host.experts)
    ).output(row),
    "E8M0 as a number": lambda host, row: replace(
        host, experts=tuple(e.misread(scale_as_number=True) for e in host.experts)
    ).output(row),
    "E8M0 of E4M3 as a number": lambda host, row: replace(
        host, shared=host.shared.misread(scale_as_number=True)
    ).output(row),
}


def test_misreadings_of_the_model_are_far_off(gpu: GpuBackend, rng: np.random.Generator) -> None:
    host = HostFfn.draw(rng)
    rows = host.rows(rng, ROWS)
    got = outputs(gpu, host, rows)
    for name, misread in MISREAD.items():
        wrong = np.stack([misread(host, row) for row in rows])
        assert relative_l2(got, wrong) > 8 * NEAR, name


def test_nothing_is_read_back(gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostFfn.draw(rng)
    rows, out = upload(gpu, host.rows(rng, 2)), Output(gpu, (2, H))
    with V4Ffn(host.to_device(gpu), FFN, gpu, 2) as ffn:
        for name in ("copy_d2h", "synchronize"):
            monkeypatch.setattr(gpu, name, lambda *_, name=name: pytest.fail(f"{name} was called"))
        ffn(rows, out.ptr, 2, gpu.default_stream())
        monkeypatch.undo()
    out.read()


@pytest.mark.parametrize(
    ("module", "routed"),
    [
        ("gemv", Mxfp4), ("w8a16_gemv", Mxfp4), ("moe_topk_sqrt", Mxfp4), ("spark_moe_silu_mul_clamped", Mxfp4),
        ("spark_moe_expert_mxfp4", Mxfp4), ("spark_moe_rows", Mxfp4), ("spark_moe_rows", Bf16),
        ("spark_moe_expert_silu_down_clamped_bf16", Bf16),
    ],
)  # fmt: skip
def test_a_missing_kernel_is_an_error_and_nothing_stays(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, module: str, routed: Any
) -> None:
    weights = HostFfn.draw(rng, routed).to_device(gpu)
    before = gpu.live_bytes()
    hide(monkeypatch, gpu, module, "spark_mxfp4_experts")  # in whose place the ordered kernels are
    with pytest.raises(KernelSetError, match=module):
        V4Ffn(weights, FFN, gpu)
    assert gpu.live_bytes() == before


def test_what_does_not_fit_is_named_and_nothing_stays(gpu: GpuBackend, rng: np.random.Generator) -> None:
    weights = HostFfn.draw(rng).to_device(gpu)
    router, expert = weights.router, weights.experts[4]
    short: Any = replace(expert.w2, n=H - 1)
    before = gpu.live_bytes()

    def experts(changed: Any) -> Any:
        return [changed if number == 4 else each for number, each in enumerate(weights.experts)]

    wrong: dict[str, Any] = {
        r"mtp\.ffn\.gate\.weight": replace(
            weights, router=replace(router, gate=DenseWeight(router.gate.weight, (1, H)))
        ),
        r"mtp\.ffn\.gate\.bias and": replace(weights, router=replace(router, bias=DevicePtr.NULL)),
        r"gate\.tid2eid": replace(weights, router=replace(router, tid2eid=router.bias)),
        r"mtp\.ffn\.experts\.4\.w2": replace(weights, experts=experts(replace(expert, w2=short))),
        r"mtp\.ffn\.experts is 8": replace(weights, experts=weights.experts[1:]),
        r"mtp\.ffn\.shared_experts\.w1": replace(weights, shared=replace(weights.shared, w1=weights.shared.w2)),
    }
    for message, broken in wrong.items():
        with pytest.raises(InvalidArgumentError, match=message):
            V4Ffn(broken, FFN, gpu, name="mtp.ffn")
    fp8: Any = replace(expert, w1=Fp8Weight(expert.w1.weight, expert.w1.weight, FFN.inter, H))
    with pytest.raises(UnsupportedError, match=r"mtp\.ffn\.experts as Fp8Weight, Mxfp4Weight"):
        V4Ffn(replace(weights, experts=experts(fp8)), FFN, gpu, name="mtp.ffn")
    assert gpu.live_bytes() == before


def test_a_hash_router_needs_token_ids(gpu: GpuBackend, rng: np.random.Generator) -> None:
    with pytest.raises(InvalidArgumentError, match="token_ids"):
        V4Ffn(HostFfn.draw(rng, hashed=True).to_device(gpu), FFN, gpu)


@pytest.mark.parametrize("routed", [Mxfp4, Bf16])
def test_more_rows_than_there_is_scratch_for_and_use_after_release_raise(
    gpu: GpuBackend, rng: np.random.Generator, routed: Any
) -> None:
    weights, x = HostFfn.draw(rng, routed).to_device(gpu), upload(gpu, normal(rng, 2, H))
    before = gpu.live_bytes()
    ffn = V4Ffn(weights, FFN, gpu)
    with pytest.raises(CapacityError, match="rows is 2"):
        ffn(x, x, 2, gpu.default_stream())
    ffn.release()
    ffn.release()
    assert gpu.live_bytes() == before
    with pytest.raises(ReleasedError):
        ffn(x, x, 1, gpu.default_stream())


@pytest.mark.parametrize(
    "wrong",
    [{"hidden_size": 60}, {"inter": 4}, {"num_experts": 513}, {"top_k": 10}, {"swiglu_limit": 0.0},
     {"routed_scaling": float("nan")}],
)  # fmt: skip
def test_sizes_that_the_kernels_do_not_take_raise(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        replace(FFN, **wrong)


def test_mxfp4_experts_need_whole_groups(gpu: GpuBackend, rng: np.random.Generator) -> None:
    weights, shape = HostFfn.draw(rng).to_device(gpu), V4FfnShape(hidden_size=64, num_experts=1, top_k=1, inter=40)
    expert: Any = replace(weights.experts[0], w1=replace(weights.experts[0].w1, n=40))
    expert = replace(expert, w3=expert.w1, w2=replace(expert.w2, k=40))
    gate = DenseWeight(weights.router.gate.weight, (1, 64))
    broken = replace(weights, router=replace(weights.router, gate=gate), experts=[expert], shared=expert)
    with pytest.raises(InvalidArgumentError, match="inter is 40"):
        V4Ffn(broken, shape, gpu)


# Mutants: module, what is changed in it, and what the mixture is that shows it.
MUTANTS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "weights not normalised": ("ffn", "rows, experts, k, shape.norm_topk_prob", "rows, experts, k, False", {}),
    "without routed_scaling": ("ffn", "\n                shape.routed_scaling, stream", "1.0, stream", {}),
    "hash routing without routed_scaling": (
        "ffn", "k, shape.norm_topk_prob, shape.routed_scaling, stream", "k, shape.norm_topk_prob, 1.0, stream",
        {"hashed": True},
    ),
    "the first row's token for all": (
        "ffn", "self._token_ids.offset(row * _U32)", "self._token_ids", {"hashed": True}
    ),
    "the first row's logits for all": ("ffn", "logits.offset(row * experts * _BF16)", "logits", {"hashed": True}),
    "shared expert without a limit": ("ffn_shared", "shape.inter, shape.swiglu_limit", "shape.inter, 1e30", {}),
    "shared expert left out": (
        "ffn", "self._shared.run(x, shared_out, rows, stream)",
        "self.gpu.memset(shared_out, 0, rows * shape.hidden_size * 2)", {},
    ),
    "shared w3 for w1": ("ffn_shared", "self._w1.run_with(", "self._w3.run_with(", {}),
    "shared activations of the first row alone": ("ffn_shared", "rows * self._inter,", "self._inter,", {}),
    "routed MXFP4 without a limit": (
        "ffn_experts", "ids, h, inter, k, shape.swiglu_limit", "ids, h, inter, k, 1e30", {}
    ),
    "BF16 without a limit": (
        "ffn_experts", "\n            shape.swiglu_limit, stream", "1e30, stream", {"routed": Bf16}
    ),
    "BF16 without the shared expert": (
        "ffn_experts", "self._shared_parts = shared if self.with_shared else", "self._shared_parts =",
        {"routed": Bf16, "shared": (Bf16, Bf16, Bf16)},
    ),
    "w3 for w1": ("ffn_experts", '_PARTS = ("w1", "w3", "w2")', '_PARTS = ("w3", "w1", "w2")', {}),
    "one expert's scales for all": (
        "ffn_experts", "for expert in experts]\n",
        "for expert in (experts if column == 'weight' else experts[:1] * len(experts))]\n", {},
    ),
}  # fmt: skip
_ROOM = "spark_py.model.layers.deepseek_v4"


def mutant(module: str, old: str, new: str) -> type[V4Ffn]:
    """V4Ffn with one of its modules edited."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ffn_shared", "ffn_experts", "ffn"):
            source = Path(str(sys.modules[f"{_ROOM}.{name}"].__file__)).read_text()
            if name == module:
                assert source.count(old) == 1, f"the mutant's place {old!r} is {source.count(old)} times in {name}.py"
                source = source.replace(old, new)
            copy = ModuleType(f"{_ROOM}.{name}")
            copy.__package__ = _ROOM
            patch.setitem(sys.modules, copy.__name__, copy)
            exec(compile(source, f"{name} (mutant)", "exec"), copy.__dict__)
    made: type[V4Ffn] = copy.V4Ffn
    return made


@pytest.mark.host_only("what is mutated is Python")
@pytest.mark.parametrize("name", [None, *MUTANTS])
def test_a_mutant_is_far_off(gpu: GpuBackend, rng: np.random.Generator, name: str | None) -> None:
    module, old, new, draw = MUTANTS[name] if name else ("", "", "", {})
    host = HostFfn.draw(rng, **draw)
    rows, tokens = host.rows(rng, 2), np.array([3, 17], U32)
    got = outputs(gpu, host, rows, tokens, kind=mutant(module, old, new))
    wanted = np.stack([host.output(row, token) for row, token in zip(rows, tokens, strict=True)])
    if name:
        assert not relative_l2(got, wanted) < 4 * NEAR
    else:
        assert relative_l2(got, wanted) < NEAR
