# SPDX-License-Identifier: AGPL-3.0-only
"""TargetWeights: the tensors of a Qwen3-Next target, under their Hugging Face names.

Experts are one tensor a projection and expert, as published, or two stacks a layer, as newer files have them; a stack
is uploaded whole, and its experts are addresses within it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ...ops.paged_decode import MAX_HEAD_DIM
from ...runtime.errors import InvalidArgumentError, UnsupportedError
from ...runtime.gpu import GpuBackend
from ...runtime.weights import WeightDtype, WeightStore
from ..config import FULL_ATTENTION, ModelConfig
from ..weight_loader import WeightPlan, check_scales_applied, in_store, plan_for_device, upload_weights
from ..weight_map import DenseExpertWeight, DenseWeight, MoeWeights

__all__ = ["LayerWeights", "TargetWeights", "check_offered", "load_target_weights", "target_tensor_names"]

log = logging.getLogger("spark_py.model")

_PREFIXES = ("model.", "model.language_model.")
"""Where the text model stands: alone, or within a model that also sees."""
_STACKED_GATE_UP, _STACKED_DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
_BF16 = 2  # bytes
_QUANTISABLE = ("_proj.weight", "lm_head.weight")
_CACHE_SCALES = (".k_scale", ".v_scale")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, BF16; h hidden_size, nq and nkv heads of hd. Norms [h], `q_norm` and `k_norm` [hd].

    `q_proj` [2 * nq * hd, h], each head's query and then its gate; `k_proj`, `v_proj` [nkv * hd, h]; `o_proj`
    [h, nq * hd]. `ffn` is a dense FFN of intermediate_size, or a mixture of experts of moe_intermediate_size.
    """

    input_layernorm: DenseWeight
    q_proj: DenseWeight
    k_proj: DenseWeight
    v_proj: DenseWeight
    o_proj: DenseWeight
    q_norm: DenseWeight
    k_norm: DenseWeight
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


def _attention_shapes(config: ModelConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Field of LayerWeights -> (name within the layer, shape), but for the FFN."""
    h, hd = config.hidden_size, config.head_dim
    q, kv = config.num_attention_heads * hd, config.num_key_value_heads * hd
    return {
        "input_layernorm": ("input_layernorm.weight", (h,)),
        "q_proj": ("self_attn.q_proj.weight", (2 * q, h)),
        "k_proj": ("self_attn.k_proj.weight", (kv, h)),
        "v_proj": ("self_attn.v_proj.weight", (kv, h)),
        "o_proj": ("self_attn.o_proj.weight", (h, q)),
        "q_norm": ("self_attn.q_norm.weight", (hd,)),
        "k_norm": ("self_attn.k_norm.weight", (hd,)),
        "post_attention_layernorm": ("post_attention_layernorm.weight", (h,)),
    }


def _ffn_shapes(config: ModelConfig, layer: int, prefix: str, store: WeightStore) -> dict[str, tuple[int, ...]]:
    """The names of a layer's FFN tensors, within the layer, and their shapes. `prefix` is the layer's."""
    h = config.hidden_size
    if not config.is_sparse_layer(layer):
        return _swiglu_shapes("mlp.", config.intermediate_size, h)
    experts, inter = config.num_experts, config.moe_intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "mlp.gate.weight": (experts, h),
        "mlp.shared_expert_gate.weight": (1, h),
        **_swiglu_shapes("mlp.shared_expert.", config.shared_expert_intermediate_size, h),
    }
    if any(prefix + name in store for name in (_STACKED_GATE_UP, _STACKED_DOWN)):
        return shapes | {_STACKED_GATE_UP: (experts, 2 * inter, h), _STACKED_DOWN: (experts, h, inter)}
    for expert in range(experts):
        shapes |= _swiglu_shapes(f"mlp.experts.{expert}.", inter, h)
    return shapes


def _swiglu_shapes(prefix: str, inter: int, h: int) -> dict[str, tuple[int, ...]]:
    names = [f"{prefix}{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")]
    return dict(zip(names, ((inter, h), (inter, h), (h, inter)), strict=True))


def target_tensor_names(config: ModelConfig, store: WeightStore) -> Iterator[str]:
    """The names that `load_target_weights` reads."""
    prefix = _prefix(store)
    yield prefix + "embed_tokens.weight"
    yield prefix + "norm.weight"
    if not config.tie_word_embeddings:
        yield "lm_head.weight"
    for layer in range(config.num_hidden_layers):
        own = f"{prefix}layers.{layer}."
        for name, _ in _attention_shapes(config).values():
            yield own + name
        for name in _ffn_shapes(config, layer, own, store):
            yield own + name


def load_target_weights(store: WeightStore, config: ModelConfig, gpu: GpuBackend) -> TargetWeights:
    """Upload a target's tensors and check them; the store owns them. All become BF16: F32, and the projections and LM
    head of any format that `plan_weight` reads.

    MissingWeightError lists every tensor that is not there; a WeightFormatError names a quantised one without its scale
    or with a wrong one, UnreadScaleError lists scales that belong to nothing, UnsupportedError names a tensor of
    another dtype. After these nothing is left on the device. InvalidArgumentError names a tensor of another shape.
    """
    check_offered(config)
    prefix = _prefix(store)
    names = list(target_tensor_names(config, store))
    store.load(gpu, [name for name in names if not in_store(store, name)])  # one error for all that are missing
    plans = {name: _plan(store, name, config) for name in names}
    _check_scales(store, plans.values(), prefix)
    upload_weights(store, gpu, plans.values())

    def dense(name: str) -> DenseWeight:
        tensor = store.get(plans[name].name)
        return DenseWeight(tensor.ptr, tensor.shape)

    def shaped(name: str, *shape: int) -> DenseWeight:
        weight = dense(name)
        weight.check_shape(name, *shape)
        return weight

    def layer_weights(layer: int) -> LayerWeights:
        own = f"{prefix}layers.{layer}."
        fields = {field: shaped(own + name, *shape) for field, (name, shape) in _attention_shapes(config).items()}
        found = {name: shaped(own + name, *shape) for name, shape in _ffn_shapes(config, layer, own, store).items()}
        return LayerWeights(**fields, ffn=_ffn(config, layer, found))

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


def _ffn(
    config: ModelConfig, layer: int, found: dict[str, DenseWeight]
) -> DenseExpertWeight | MoeWeights[DenseExpertWeight]:
    """A layer's FFN from its tensors, by their names within the layer."""

    def swiglu(prefix: str) -> DenseExpertWeight:
        gate, up, down = (found[f"{prefix}{name}.weight"] for name in ("gate_proj", "up_proj", "down_proj"))
        return DenseExpertWeight(gate, up, down)

    if not config.is_sparse_layer(layer):
        return swiglu("mlp.")
    count = range(config.num_experts)
    if _STACKED_DOWN in found:
        experts = [_of_stack(found, expert) for expert in count]
    else:
        experts = [swiglu(f"mlp.experts.{expert}.") for expert in count]
    shared, gate = swiglu("mlp.shared_expert."), found["mlp.shared_expert_gate.weight"]
    return MoeWeights(found["mlp.gate.weight"], shared, gate, experts)


def _of_stack(found: dict[str, DenseWeight], expert: int) -> DenseExpertWeight:
    """An expert's projections within the stacks [E, 2I, h], gate rows first, and [E, h, I]."""
    joint, down = found[_STACKED_GATE_UP], found[_STACKED_DOWN]
    _, h, inter = down.shape
    size = _BF16 * inter * h
    at = joint.weight.offset(2 * size * expert)
    return DenseExpertWeight(
        DenseWeight(at, (inter, h)),
        DenseWeight(at.offset(size), (inter, h)),
        DenseWeight(down.weight.offset(size * expert), (h, inter)),
    )


def check_offered(config: ModelConfig) -> None:
    """UnsupportedError unless every layer has gated full attention, InvalidArgumentError for sizes that the kernels do
    not take."""
    for layer, kind in enumerate(config.layer_types):
        if kind != FULL_ATTENTION:
            raise UnsupportedError(f"layer {layer} has {kind}: this target runs {FULL_ATTENTION} only")
    if not config.attn_gated:
        raise UnsupportedError("attn_output_gate is false: this target runs gated attention only")
    steps = {"hidden_size": 8, "head_dim": 32}
    sparse = [config.is_sparse_layer(layer) for layer in range(config.num_hidden_layers)]
    if not all(sparse):
        steps["intermediate_size"] = 8
    if any(sparse):
        steps["moe_intermediate_size"] = 8
        if not config.shared_expert_intermediate_size:
            raise UnsupportedError("shared_expert_intermediate_size is 0: this target runs experts beside a shared one")
    for name, step in steps.items():
        if (value := getattr(config, name)) % step:
            raise InvalidArgumentError(name, value, f"a multiple of {step} is needed")
    if config.head_dim > MAX_HEAD_DIM:
        raise InvalidArgumentError("head_dim", config.head_dim, f"at most {MAX_HEAD_DIM}")


def _prefix(store: WeightStore) -> str:
    return next((prefix for prefix in _PREFIXES if prefix + "embed_tokens.weight" in store), _PREFIXES[0])
