# SPDX-License-Identifier: AGPL-3.0-only
"""The FFN part of `layers/mtp_head/new.rs`: which flavour a head has, its weights in the head's quantisation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ....runtime.errors import InvalidArgumentError
from ....runtime.gpu import GpuBackend
from ...config import ModelConfig
from ...levers import ModelLevers
from ...weight_map import (
    DenseExpertWeight,
    DenseWeight,
    ExpertWeight,
    Fp8DenseExpertWeight,
    Fp8DenseWeight,
    MoeWeights,
    MtpWeights,
    QuantizedWeight,
)
from ..moe import MoeLayer
from ..moe_routing import MoeRouter, MoeRouting
from .body import HeadBody, SharedExpert
from .quantize import Quantizer
from .types import FfnProjections, MtpQuantization, ProjectionWeight

__all__ = ["HeadFfn", "build_ffn", "ffn_widths"]


@dataclass(frozen=True, slots=True)
class HeadFfn:
    """The FFN of a head, one of four: dense; experts in NVFP4, fused; experts in another format, fused; experts in any
    format but NVFP4 that run one after the other, with their router, and the shared one beside them, if there is one.

    `moe_fused` is not in Rust's constructor. It needs no expert ids on the host.
    """

    dense_ffn_generic: FfnProjections | None = None
    moe_nvfp4: MoeLayer | None = None
    moe_fused: MoeLayer | None = None
    moe_experts_generic: list[FfnProjections] | None = None
    moe_shared_generic: FfnProjections | None = None
    router: MoeRouter | None = None

    def kind(self) -> str:
        """What the log calls it."""
        if self.dense_ffn_generic is not None:
            return "dense FFN"
        if self.moe_nvfp4 is not None:
            return "MoE (NVFP4 fused)"
        return "MoE (per-expert)" if self.moe_fused is None else "MoE (fused)"


def ffn_widths(config: ModelConfig, dense: bool, body: HeadBody) -> tuple[int, int]:
    """I, the width of a dense FFN or of each expert, and the width of the shared expert, 0 without one.

    Rust sizes a dense FFN with moe_intermediate_size, where there is one, and runs it with intermediate_size. Here it
    is intermediate_size in both places. It also takes I for the shared expert, whatever the config says.
    """
    if dense:
        return config.intermediate_size, config.intermediate_size
    inter = config.moe_intermediate_size or config.intermediate_size
    if body.shared_expert is SharedExpert.NONE:
        return inter, 0
    return inter, config.shared_expert_intermediate_size or inter


def build_ffn(
    weights: MtpWeights,
    quantizer: Quantizer,
    config: ModelConfig,
    gpu: GpuBackend,
    levers: ModelLevers,
    body: HeadBody,
) -> HeadFfn:
    """Quantise the FFN of `weights`, which has a dense one (not in NVFP4) or experts. InvalidArgumentError for a tensor
    that is missing or does not fit."""
    h, dense = config.hidden_size, weights.dense_ffn
    inter, shared_inter = ffn_widths(config, dense is not None, body)
    if dense is not None:
        return HeadFfn(dense_ffn_generic=quantizer.ffn("", dense, inter, h))
    return _experts(weights, quantizer, config, gpu, levers, body, inter, shared_inter)


def _experts(
    weights: MtpWeights,
    q: Quantizer,
    config: ModelConfig,
    gpu: GpuBackend,
    levers: ModelLevers,
    body: HeadBody,
    inter: int,
    shared_inter: int,
) -> HeadFfn:
    _check_parts(weights, body.shared_expert)
    gate, shared, shared_gate = weights.moe_gate, weights.shared_expert, weights.shared_expert_gate
    assert gate is not None
    h, num_experts, top_k = config.hidden_size, config.num_experts, config.num_experts_per_tok
    router = MoeRouter(MoeRouting.of(config), num_experts, top_k, weights.correction_bias, gpu, "mtp", rows=False)
    if len(weights.experts) != num_experts:
        raise InvalidArgumentError("mtp experts", len(weights.experts), f"the config has {num_experts}")
    gate.check_shape("mtp moe_gate", num_experts, h)
    if shared_gate is not None:
        shared_gate.check_shape("mtp shared_expert_gate", 1, h)
    # Router and shared gate stay BF16 in every quantisation.
    experts = q.experts(weights.experts, inter, h)
    shared_expert = None if shared is None else q.ffn("shared_expert.", shared, shared_inter, h)
    packed = q.quant is MtpQuantization.NVFP4
    form = _fused_form([*experts, *([] if shared_expert is None else [shared_expert])])
    if form is not None and (levers.bf16_moe_fused or q.quant is not MtpQuantization.BF16):
        moe = MoeWeights(
            gate,
            form.null() if shared_expert is None else form(*shared_expert),
            shared_gate or DenseWeight.null(),
            [form(*expert) for expert in experts],
            correction_bias=weights.correction_bias,
        )
        if packed or MoeLayer.offered(gpu, moe.experts):
            widths = replace(config, moe_intermediate_size=inter, shared_expert_intermediate_size=shared_inter)
            layer = MoeLayer(moe, widths, gpu, "mtp_head.moe")
            return HeadFfn(moe_nvfp4=layer) if packed else HeadFfn(moe_fused=layer)
    return HeadFfn(moe_experts_generic=experts, moe_shared_generic=shared_expert, router=router)


def _check_parts(weights: MtpWeights, shared: SharedExpert) -> None:
    """InvalidArgumentError for a part of a mixture that is missing, or that the body has not."""
    there = shared is not SharedExpert.NONE
    for name, part, needed in (
        ("moe_gate", weights.moe_gate, True),
        ("shared_expert", weights.shared_expert, there),
        ("shared_expert_gate", weights.shared_expert_gate, shared is SharedExpert.GATED),
    ):
        if (part is not None) is not needed:
            wanted = "needed by a head without a dense FFN" if needed else f"None: the body's is {shared.value}"
            raise InvalidArgumentError(f"mtp {name}", part, wanted)


_FUSED: tuple[tuple[type[ProjectionWeight], type[Any]], ...] = (
    (QuantizedWeight, ExpertWeight),
    (DenseWeight, DenseExpertWeight),
    (Fp8DenseWeight, Fp8DenseExpertWeight),
)


def _fused_form(experts: list[FfnProjections]) -> type[Any] | None:
    """What makes an expert of a layer of three projections; None where the formats differ, and for block-scaled FP8."""
    projections = [projection for expert in experts for projection in expert]
    return next((form for kind, form in _FUSED if all(isinstance(each, kind) for each in projections)), None)
