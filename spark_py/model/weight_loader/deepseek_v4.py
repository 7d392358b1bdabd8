# SPDX-License-Identifier: AGPL-3.0-only
"""Twin of `weight_loader/deepseek_v4`: DeepSeek-V4's MTP module, and a target of layers without a compressor.

Names, and what a tensor becomes on the device, are those of `deepseek_v4_names`; the dtype of each tensor decides how
it is read, not the configuration. Nothing but what is asked for is read from the files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...runtime.errors import MissingWeightError, UnsupportedError
from ...runtime.gpu import DevicePtr, GpuBackend
from ...runtime.weights import WeightStore
from .._config_deepseek_v4 import SLIDING_ATTENTION
from ..config import ModelConfig
from ..layers.deepseek_v4 import (
    V4AttentionWeights,
    V4BlockWeights,
    V4ExpertWeights,
    V4FfnWeights,
    V4HyperWeights,
    V4LayerWeights,
    V4MtpWeights,
    V4RouterWeights,
    V4Shapes,
    V4TargetWeights,
)
from ..weight_map import DenseWeight
from . import deepseek_v4_names as names
from .deepseek_v4_upload import V4Loaded, V4Plans
from .dequant_plan import check_scales_applied

__all__ = ["has_v4_mtp", "load_v4_mtp_weights", "load_v4_target_weights"]

_BF16 = 2  # bytes
_DSPARK = re.compile(r"(model\.)?mtp\.\d+\.(main_proj|markov_head)\b")
_MTP_HINT = "the checkpoint lacks (part of) its MTP module: take one that was saved with it, or decode without drafts"
_LISTED = 12


def has_v4_mtp(store: WeightStore, config: ModelConfig) -> bool:
    """Whether the checkpoint has an MTP module, by the engine's rule: one is configured, and its enorm is there.
    UnsupportedError where the tensors under its prefix are a DSpark drafter's."""
    _refuse_dspark(store)
    enorm = next(
        tensor for tensor in names.mtp_tensors(V4Shapes.of(config)) if tensor.name == f"{names.MTP}enorm.weight"
    )
    return config.num_mtp_modules > 0 and bool(names.found_names(store, [enorm]))


def load_v4_mtp_weights(store: WeightStore, config: ModelConfig, gpu: GpuBackend) -> V4MtpWeights:
    """Upload and check the tensors under `mtp.0.`; the store owns them. Nothing is uploaded first and refused then.

    Block-scaled E4M3 projections and MXFP4 experts stay so; all else that is no F32 parameter becomes BF16, exactly,
    wo_a too where o_lora_rank is no multiple of 16. The router is always learned: a table under the module's prefix is
    refused.

    MissingWeightError lists every tensor that is not there. UnsupportedError names a DSpark drafter, more modules than
    one, and tensors under the prefix that a module cannot take into account; a WeightFormatError a quantised tensor
    whose scale is missing or does not fit; InvalidArgumentError a tensor of another shape.
    """
    _refuse_dspark(store)
    if config.num_mtp_modules > 1:
        raise UnsupportedError(f"{config.num_mtp_modules} MTP modules are configured: this head has one")
    shapes = V4Shapes.of(config)
    tensors, stacked = _block(store, shapes, names.MTP, hashed=False)
    loaded = _load(store, gpu, config, [names.mtp_tensors(shapes), tensors], "mtp.", _MTP_HINT)
    weights = V4MtpWeights(
        block=_block_weights(loaded, shapes, names.MTP, hashed=False, stacked=stacked),
        enorm=loaded.dense(f"{names.MTP}enorm.weight"),
        hnorm=loaded.dense(f"{names.MTP}hnorm.weight"),
        e_proj=loaded.matrix(f"{names.MTP}e_proj.weight"),
        h_proj=loaded.matrix(f"{names.MTP}h_proj.weight"),
        norm=loaded.dense(f"{names.MTP}norm.weight"),
        hc_head=_hyper(loaded, f"{names.MTP}hc_head"),
    )
    weights.check(shapes, "mtp.0")
    return weights


def load_v4_target_weights(store: WeightStore, config: ModelConfig, gpu: GpuBackend) -> V4TargetWeights:
    """Upload and check a target's tensors, in all the forms of `load_v4_mtp_weights`; the store owns them.

    The first num_hash_layers layers route by a table, the others are learned. Errors as `load_v4_mtp_weights`, and
    UnsupportedError for a layer with a compressor.
    """
    for layer, kind in enumerate(config.layer_types):
        if kind != SLIDING_ATTENTION:
            raise UnsupportedError(f"layer {layer} has {kind}: {SLIDING_ATTENTION}, without a compressor, is offered")
    shapes, count = V4Shapes.of(config), range(config.num_hidden_layers)
    prefixes = [f"layers.{layer}." for layer in count]
    hashed = [layer < config.num_hash_layers for layer in count]
    blocks = [_block(store, shapes, prefix, hash_) for prefix, hash_ in zip(prefixes, hashed, strict=True)]
    tops = names.tops(shapes, config.vocab_size, config.tie_word_embeddings)
    loaded = _load(store, gpu, config, [tops, *(tensors for tensors, _ in blocks)], "layers.")
    embed = loaded.dense("embed.weight")
    weights = V4TargetWeights(
        embed=embed,
        blocks=tuple(
            _block_weights(loaded, shapes, prefix, hash_, stacked)
            for prefix, hash_, (_, stacked) in zip(prefixes, hashed, blocks, strict=True)
        ),
        hc_head=_hyper(loaded, "hc_head"),
        norm=loaded.dense("norm.weight"),
        head=embed if config.tie_word_embeddings else loaded.dense("head.weight"),
    )
    for prefix, block in zip(prefixes, weights.blocks, strict=True):
        block.check(shapes, prefix.rstrip("."))
    return weights


def _refuse_dspark(store: WeightStore) -> None:
    if found := [name for name in store.names() if _DSPARK.match(name)]:
        raise UnsupportedError(f"a DSpark drafter, which is no MTP module, stands under its prefix: {_listed(found)}")


def _block(store: WeightStore, shapes: V4Shapes, prefix: str, hashed: bool) -> tuple[list[names.V4Tensor], bool]:
    """The tensors of a block, and whether its routed experts are two stacks: where the store has one of them."""
    stacks = names.stacks(shapes, prefix)
    stacked = bool(names.found_names(store, stacks))
    experts = stacks if stacked else names.expert_tensors(shapes, prefix)
    return [*names.block_tensors(shapes, prefix, hashed), *experts], stacked


def _load(
    store: WeightStore,
    gpu: GpuBackend,
    config: ModelConfig,
    groups: Sequence[Sequence[names.V4Tensor]],
    prefix: str,
    hint: str = "",
) -> V4Loaded:
    """Upload the tensors, after all that the headers tell has been checked: all of them are there, each fits, and no
    other tensor stands under `prefix`."""
    tensors = [tensor for group in groups for tensor in group]
    found = names.found_names(store, tensors)
    if missing := [tensor.name for tensor in tensors if tensor.name not in found]:
        raise MissingWeightError(missing, {}, str(store.source), hint)
    plans = V4Plans.of(store, [(tensor, found[tensor.name]) for tensor in tensors], config)
    accounted = plans.accounted()
    for each in (prefix, f"model.{prefix}"):
        check_scales_applied(store, accounted, each)
        if rest := [name for name in store.names() if name.startswith(each) and name not in accounted]:
            raise UnsupportedError(f"tensors under {each!r} that nothing here takes into account: {_listed(rest)}")
    return plans.upload(gpu)


def _block_weights(loaded: V4Loaded, shapes: V4Shapes, prefix: str, hashed: bool, stacked: bool) -> V4BlockWeights:
    def dense(leaf: str) -> DenseWeight:
        return loaded.dense(prefix + leaf)

    def expert(leaf: str) -> V4ExpertWeights:
        return V4ExpertWeights(*(loaded.matrix(f"{prefix}{leaf}.{part}.weight") for part in ("w1", "w3", "w2")))

    bias = DevicePtr.NULL if hashed else loaded.address(f"{prefix}ffn.gate.bias")
    table = loaded.address(f"{prefix}ffn.gate.tid2eid") if hashed else DevicePtr.NULL
    router = V4RouterWeights(dense("ffn.gate.weight"), bias, table)
    experts = (
        _of_stacks(*(loaded.dense(stack.name) for stack in names.stacks(shapes, prefix)))
        if stacked
        else [expert(f"ffn.experts.{number}") for number in range(shapes.ffn.num_experts)]
    )
    return V4BlockWeights(
        layer=V4LayerWeights(
            hc_attn=_hyper(loaded, f"{prefix}hc_attn"),
            attn_norm=dense("attn_norm.weight"),
            hc_ffn=_hyper(loaded, f"{prefix}hc_ffn"),
            ffn_norm=dense("ffn_norm.weight"),
        ),
        attention=V4AttentionWeights(
            wq_a=loaded.matrix(f"{prefix}attn.wq_a.weight"),
            q_norm=dense("attn.q_norm.weight"),
            wq_b=loaded.matrix(f"{prefix}attn.wq_b.weight"),
            wkv=loaded.matrix(f"{prefix}attn.wkv.weight"),
            kv_norm=dense("attn.kv_norm.weight"),
            wo_a=loaded.grouped(f"{prefix}attn.wo_a.weight"),
            wo_b=loaded.matrix(f"{prefix}attn.wo_b.weight"),
            attn_sink=loaded.address(f"{prefix}attn.attn_sink"),
        ),
        ffn=V4FfnWeights(router, experts, expert("ffn.shared_experts")),
    )


def _hyper(loaded: V4Loaded, name: str) -> V4HyperWeights:
    return V4HyperWeights(*(loaded.address(f"{name}_{part}") for part in ("fn", "scale", "base")))


def _of_stacks(joint: DenseWeight, down: DenseWeight) -> list[V4ExpertWeights]:
    """The experts within [E, 2 I, h], w1 rows first, and [E, h, I]."""
    experts, h, inter = down.shape
    size = _BF16 * inter * h

    def expert(number: int) -> V4ExpertWeights:
        at = joint.weight.offset(2 * size * number)
        w2 = DenseWeight(down.weight.offset(size * number), (h, inter))
        return V4ExpertWeights(DenseWeight(at, (inter, h)), DenseWeight(at.offset(size), (inter, h)), w2)

    return [expert(number) for number in range(experts)]


def _listed(found: Sequence[str]) -> str:
    rest = len(found) - _LISTED
    return ", ".join(map(repr, found[:_LISTED])) + (f" and {rest} more" if rest > 0 else "")
