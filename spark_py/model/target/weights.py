# SPDX-License-Identifier: AGPL-3.0-only
"""TargetWeights: the tensors of a DecoderTarget, under their Hugging Face names.

Experts are one tensor a projection and expert, as published, or, of Qwen3-Next, two stacks a layer, as newer files have
them; a stack is uploaded whole, and its experts are addresses within it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ...ops.paged_decode import MAX_HEAD_DIM
from ...runtime.errors import InvalidArgumentError, UnsupportedError
from ...runtime.gpu import GpuBackend
from ...runtime.weights import WeightDtype, WeightStore
from ..config import FULL_ATTENTION, ModelConfig
from ..layers.mtp_head import HeadBody, SharedExpert
from ..weight_loader import WeightPlan, check_scales_applied, in_store, plan_for_device, upload_weights
from ..weight_loader import module_names as names
from ..weight_loader.mtp_names import PROJECTIONS, Named, ffn_tensor_shapes
from ..weight_loader.upload import insert
from ..weight_map import DenseExpertWeight, DenseWeight, F32Weight, MoeWeights

__all__ = ["LayerWeights", "TargetWeights", "check_offered", "load_target_weights", "target_tensor_names"]

log = logging.getLogger("spark_py.model")

_PREFIXES = ("model.", "model.language_model.")
"""Where the text model stands: alone, or within a model that also sees."""
_STACKED_GATE_UP, _STACKED_DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
_BF16 = 2  # bytes
_F32 = 4
_QUANTISABLE = ("_proj.weight", "lm_head.weight", *(f".{part}.weight" for part in ("w1", "w2", "w3")))
_CACHE_SCALES = (".k_scale", ".v_scale")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, BF16; h hidden_size, nq and nkv heads of hd. Norms [h]; `q_norm` and `k_norm` [hd], or of the vector
    of all heads, or none, as HeadBody says.

    `q_proj` [2 * nq * hd, h], each head's query and then its gate, or [nq * hd, h] without gates; `k_proj`, `v_proj`
    [nkv * hd, h]; `o_proj` [h, nq * hd]. `ffn` is a dense FFN of intermediate_size, or a mixture of experts of
    moe_intermediate_size, whose router's bias is FP32.
    """

    input_layernorm: DenseWeight
    q_proj: DenseWeight
    k_proj: DenseWeight
    v_proj: DenseWeight
    o_proj: DenseWeight
    q_norm: DenseWeight | None
    k_norm: DenseWeight | None
    post_attention_layernorm: DenseWeight
    ffn: DenseExpertWeight | MoeWeights[DenseExpertWeight]


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """A target, BF16: `embed_tokens` and `lm_head` [V, h], the final `norm` [h], and the layers.

    `vocab_size` counts the ids that are in the configuration, the embedding and the LM head: rows past it are padding,
    which is never read.
    """

    embed_tokens: DenseWeight
    layers: tuple[LayerWeights, ...]
    norm: DenseWeight
    lm_head: DenseWeight
    vocab_size: int


_ATTENTION = ("input_layernorm", "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")


def _attention_shapes(config: ModelConfig, prefix: str) -> Named:
    """Field of LayerWeights -> (name, shape), but for the FFN."""
    found = names.decoder_layer_shapes(config, prefix, sparse=False)
    fields = {field: found[field] for field in _ATTENTION if field in found}
    return fields | {"post_attention_layernorm": found["post_attn_layernorm"]}


def _ffn_shapes(config: ModelConfig, layer: int, prefix: str, store: WeightStore) -> dict[str, tuple[int, ...]]:
    """The names of a layer's FFN tensors and their shapes, but for the router's bias. `prefix` is the layer's."""
    h = config.hidden_size
    if not config.is_sparse_layer(layer):
        return _swiglu_shapes(f"{prefix}mlp.", config.intermediate_size, h)
    if HeadBody.of(config).shared_expert is not SharedExpert.GATED:
        router = names.decoder_layer_shapes(config, prefix, sparse=True)["moe_gate"]
        named = [*names.shared_expert_shapes(config, prefix).values()]
        named += [pair for expert in names.expert_shapes(config, prefix) for pair in expert.values()]
        return dict([router, *named])
    experts, inter = config.num_experts, config.moe_intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}mlp.gate.weight": (experts, h),
        f"{prefix}mlp.shared_expert_gate.weight": (1, h),
        **_swiglu_shapes(f"{prefix}mlp.shared_expert.", config.shared_expert_intermediate_size, h),
    }
    if any(prefix + name in store for name in (_STACKED_GATE_UP, _STACKED_DOWN)):
        return shapes | {
            prefix + _STACKED_GATE_UP: (experts, 2 * inter, h),
            prefix + _STACKED_DOWN: (experts, h, inter),
        }
    for expert in range(experts):
        shapes |= _swiglu_shapes(f"{prefix}mlp.experts.{expert}.", inter, h)
    return shapes


def _biases(config: ModelConfig, store: WeightStore) -> dict[int, tuple[str, tuple[int, ...]]]:
    """Layer -> name and shape of its router's bias."""
    prefix = _prefix(store)
    sparse = [layer for layer in range(config.num_hidden_layers) if config.is_sparse_layer(layer)]
    found = {layer: names.bias_shape(config, f"{prefix}layers.{layer}.") for layer in sparse}
    return {layer: named["correction_bias"] for layer, named in found.items() if named}


def _swiglu_shapes(prefix: str, inter: int, h: int) -> dict[str, tuple[int, ...]]:
    return dict(ffn_tensor_shapes(prefix, inter, h).values())


def target_tensor_names(config: ModelConfig, store: WeightStore) -> Iterator[str]:
    """The names that `load_target_weights` reads."""
    prefix = _prefix(store)
    yield prefix + "embed_tokens.weight"
    yield prefix + "norm.weight"
    if not config.tie_word_embeddings:
        yield "lm_head.weight"
    for layer in range(config.num_hidden_layers):
        own = f"{prefix}layers.{layer}."
        yield from (name for name, _ in _attention_shapes(config, own).values())
        yield from _ffn_shapes(config, layer, own, store)
    yield from (name for name, _ in _biases(config, store).values())


def load_target_weights(store: WeightStore, config: ModelConfig, gpu: GpuBackend) -> TargetWeights:
    """Upload a target's tensors and check them; the store owns them. All become BF16: F32, and the projections and LM
    head of any format that `plan_weight` reads. But routers' biases are FP32.

    MissingWeightError lists every tensor that is not there; a WeightFormatError names a quantised one without its scale
    or with a wrong one, UnreadScaleError lists scales that belong to nothing, UnsupportedError names a tensor of
    another dtype. After these nothing is left on the device. InvalidArgumentError names a tensor of another shape.
    """
    check_offered(config)
    prefix = _prefix(store)
    wanted = list(target_tensor_names(config, store))
    store.load(gpu, [name for name in wanted if not in_store(store, name)])  # one error for all that are missing
    biases = _biases(config, store)
    wide = {name for name, _ in biases.values()}
    plans = {name: _plan(store, name, config) for name in wanted if name not in wide}
    for name, shape in biases.values():
        _check_bias(store, name, shape)
    _check_scales(store, plans.values(), prefix)
    upload_weights(store, gpu, plans.values(), reserve_bytes=_F32 * config.num_experts * len(biases))
    for name in wide:
        if not store.is_loaded(name):
            insert(store, gpu, name, store.read(name).astype(np.float32), WeightDtype.F32)

    def dense(name: str) -> DenseWeight:
        tensor = store.get(plans[name].name)
        return DenseWeight(tensor.ptr, tensor.shape)

    def shaped(name: str, *shape: int) -> DenseWeight:
        weight = dense(name)
        weight.check_shape(name, *shape)
        return weight

    def layer_weights(layer: int) -> LayerWeights:
        own = f"{prefix}layers.{layer}."
        fields: dict[str, DenseWeight | None] = {"q_norm": None, "k_norm": None}
        fields |= {field: shaped(name, *shape) for field, (name, shape) in _attention_shapes(config, own).items()}
        found = {name: shaped(name, *shape) for name, shape in _ffn_shapes(config, layer, own, store).items()}
        bias = None
        if layer in biases:
            name, shape = biases[layer]
            bias = F32Weight(store.get(name).ptr, shape)
        return LayerWeights(**fields, ffn=_ffn(config, layer, own, found, bias))  # type: ignore[arg-type]

    h = config.hidden_size
    embed_name = prefix + "embed_tokens.weight"
    head_name = embed_name if config.tie_word_embeddings else "lm_head.weight"
    embed, head = dense(embed_name), dense(head_name)
    vocab = min(config.vocab_size, embed.rows_of(embed_name, 0, h), head.rows_of(head_name, 0, h))
    if vocab < config.vocab_size:
        log.warning(
            "the configuration has %d token ids, the embedding %s, the LM head %s: ids from %d on are never picked",
            config.vocab_size, list(embed.shape), list(head.shape), vocab,
        )  # fmt: skip
    layers = tuple(layer_weights(layer) for layer in range(config.num_hidden_layers))
    return TargetWeights(embed, layers, shaped(prefix + "norm.weight", h), head, vocab)


def _plan(store: WeightStore, name: str, config: ModelConfig) -> WeightPlan:
    """How a tensor is stored; norms, gates, stacks and the embedding have to be BF16 or F32."""
    if not name.endswith(_QUANTISABLE) and not store.is_loaded(name):
        dtype = store.info(name).dtype
        if dtype not in (WeightDtype.BF16, WeightDtype.F32):
            raise UnsupportedError(f"tensor {name!r} is {dtype}: here a target takes BF16, or F32, which it rounds")
    return plan_for_device(store, name, config.ignore_modules)


def _check_scales(store: WeightStore, plans: Iterable[WeightPlan], prefix: str) -> None:
    """No scale of the layers is left; those of an FP8 cache (`k_scale`, `v_scale`) say nothing about weights."""
    cache = [name for name in store.names() if name.endswith(_CACHE_SCALES)]
    check_scales_applied(store, [*cache, *(scale for plan in plans for scale in plan.accounted)], f"{prefix}layers.")


def _check_bias(store: WeightStore, name: str, shape: tuple[int, ...]) -> None:
    found = store.get(name) if store.is_loaded(name) else store.info(name)
    if found.dtype not in (WeightDtype.F32, WeightDtype.BF16):
        raise UnsupportedError(f"tensor {name!r} is {found.dtype}: a router's bias is F32, or BF16, which is widened")
    if found.shape != shape:
        raise InvalidArgumentError(f"shape of {name}", found.shape, f"{shape} is needed by the configuration")


def _ffn(
    config: ModelConfig, layer: int, prefix: str, found: dict[str, DenseWeight], bias: F32Weight | None
) -> DenseExpertWeight | MoeWeights[DenseExpertWeight]:
    """A layer's FFN from its tensors. `prefix` is the layer's."""

    def expert(named: Named) -> DenseExpertWeight:
        return DenseExpertWeight(*(found[named[part][0]] for part in PROJECTIONS))

    def swiglu(within: str) -> DenseExpertWeight:
        return DenseExpertWeight(*(found[f"{prefix}{within}{part}.weight"] for part in PROJECTIONS))

    if not config.is_sparse_layer(layer):
        return swiglu("mlp.")
    if HeadBody.of(config).shared_expert is not SharedExpert.GATED:
        router, _ = names.decoder_layer_shapes(config, prefix, sparse=True)["moe_gate"]
        shared = names.shared_expert_shapes(config, prefix)
        return MoeWeights(
            found[router],
            expert(shared) if shared else DenseExpertWeight.null(),
            DenseWeight.null(),
            [expert(named) for named in names.expert_shapes(config, prefix)],
            correction_bias=bias,
        )
    count = range(config.num_experts)
    if prefix + _STACKED_DOWN in found:
        experts = [_of_stack(found[prefix + _STACKED_GATE_UP], found[prefix + _STACKED_DOWN], i) for i in count]
    else:
        experts = [swiglu(f"mlp.experts.{i}.") for i in count]
    shared_gate = found[f"{prefix}mlp.shared_expert_gate.weight"]
    return MoeWeights(found[f"{prefix}mlp.gate.weight"], swiglu("mlp.shared_expert."), shared_gate, experts)


def _of_stack(joint: DenseWeight, down: DenseWeight, expert: int) -> DenseExpertWeight:
    """An expert's projections within the stacks [E, 2I, h], gate rows first, and [E, h, I]."""
    _, h, inter = down.shape
    size = _BF16 * inter * h
    at = joint.weight.offset(2 * size * expert)
    return DenseExpertWeight(
        DenseWeight(at, (inter, h)),
        DenseWeight(at.offset(size), (inter, h)),
        DenseWeight(down.weight.offset(size * expert), (h, inter)),
    )


def check_offered(config: ModelConfig) -> None:
    """UnsupportedError unless every layer has full attention without biases, InvalidArgumentError for sizes that the
    kernels do not take."""
    for layer, kind in enumerate(config.layer_types):
        if kind != FULL_ATTENTION:
            raise UnsupportedError(f"layer {layer} has {kind}: this target runs {FULL_ATTENTION} only")
    if config.attention_bias:
        raise UnsupportedError("attention_bias is true: this target's projections have no biases, a draft head's may")
    steps = {"hidden_size": 8, "head_dim": 32}
    sparse = [config.is_sparse_layer(layer) for layer in range(config.num_hidden_layers)]
    if not all(sparse):
        steps["intermediate_size"] = 8
    if any(sparse):
        steps["moe_intermediate_size"] = 8
        if HeadBody.of(config).shared_expert is SharedExpert.GATED and not config.shared_expert_intermediate_size:
            raise UnsupportedError(
                f"shared_expert_intermediate_size is 0: {config.model_type} has experts beside a shared one"
            )
    for name, step in steps.items():
        if (value := getattr(config, name)) % step:
            raise InvalidArgumentError(name, value, f"a multiple of {step} is needed")
    if config.head_dim > MAX_HEAD_DIM:
        raise InvalidArgumentError("head_dim", config.head_dim, f"at most {MAX_HEAD_DIM}")


def _prefix(store: WeightStore) -> str:
    return next((prefix for prefix in _PREFIXES if prefix + "embed_tokens.weight" in store), _PREFIXES[0])
