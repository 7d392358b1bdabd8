# SPDX-License-Identifier: AGPL-3.0-only
"""TargetWeights: the tensors of a dense Qwen3-Next target, under their Hugging Face names."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from ...ops.paged_decode import MAX_HEAD_DIM
from ...runtime.errors import InvalidArgumentError, UnsupportedError
from ...runtime.gpu import GpuBackend
from ...runtime.weights import WeightDtype, WeightStore
from ..config import FULL_ATTENTION, ModelConfig
from ..weight_map import DenseWeight

__all__ = ["LayerWeights", "TargetWeights", "check_offered", "load_target_weights", "target_tensor_names"]

log = logging.getLogger("spark_py.model")

_PREFIXES = ("model.", "model.language_model.")
"""Where the text model stands: alone, or within a model that also sees."""
_TO_BF16: dict[WeightDtype | str, WeightDtype | str] = {WeightDtype.F32: WeightDtype.BF16}


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, BF16; h hidden_size, nq and nkv heads of hd, I FFN width. Norms [h], `q_norm` and `k_norm` [hd].

    `q_proj` [2 * nq * hd, h], each head's query and then its gate; `k_proj`, `v_proj` [nkv * hd, h]; `o_proj`
    [h, nq * hd]; `gate_proj`, `up_proj` [I, h]; `down_proj` [h, I].
    """

    input_layernorm: DenseWeight
    q_proj: DenseWeight
    k_proj: DenseWeight
    v_proj: DenseWeight
    o_proj: DenseWeight
    q_norm: DenseWeight
    k_norm: DenseWeight
    post_attention_layernorm: DenseWeight
    gate_proj: DenseWeight
    up_proj: DenseWeight
    down_proj: DenseWeight


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """A dense target, BF16: `embed_tokens` and `lm_head` [V, h], the final `norm` [h], and the layers.

    `vocab_size` counts the ids that are in the configuration, the embedding and the LM head: rows past it are padding,
    which is never read.
    """

    embed_tokens: DenseWeight
    layers: tuple[LayerWeights, ...]
    norm: DenseWeight
    lm_head: DenseWeight
    vocab_size: int


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Field of LayerWeights -> (name within the layer, shape)."""
    h, inter, hd = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * hd, config.num_key_value_heads * hd
    return {
        "input_layernorm": ("input_layernorm", (h,)),
        "q_proj": ("self_attn.q_proj", (2 * q, h)),
        "k_proj": ("self_attn.k_proj", (kv, h)),
        "v_proj": ("self_attn.v_proj", (kv, h)),
        "o_proj": ("self_attn.o_proj", (h, q)),
        "q_norm": ("self_attn.q_norm", (hd,)),
        "k_norm": ("self_attn.k_norm", (hd,)),
        "post_attention_layernorm": ("post_attention_layernorm", (h,)),
        "gate_proj": ("mlp.gate_proj", (inter, h)),
        "up_proj": ("mlp.up_proj", (inter, h)),
        "down_proj": ("mlp.down_proj", (h, inter)),
    }


def target_tensor_names(config: ModelConfig, store: WeightStore) -> Iterator[str]:
    """The names that `load_target_weights` reads."""
    prefix = _prefix(store)
    yield prefix + "embed_tokens.weight"
    yield prefix + "norm.weight"
    if not config.tie_word_embeddings:
        yield "lm_head.weight"
    for layer in range(config.num_hidden_layers):
        for name, _ in _layer_shapes(config).values():
            yield f"{prefix}layers.{layer}.{name}.weight"


def load_target_weights(store: WeightStore, config: ModelConfig, gpu: GpuBackend) -> TargetWeights:
    """Upload a target's tensors and check them; the store owns them. F32 becomes BF16.

    MissingWeightError lists every tensor that is not there; InvalidArgumentError names one of another shape;
    UnsupportedError one of another dtype. Nothing is left on the device after an error of the first kind.
    """
    check_offered(config)
    prefix = _prefix(store)
    store.load(gpu, target_tensor_names(config, store), convert=_TO_BF16)

    def dense(name: str) -> DenseWeight:
        tensor = store.get(name)
        if tensor.dtype is not WeightDtype.BF16:
            raise UnsupportedError(f"tensor {name!r} is {tensor.dtype}: a target takes BF16, or F32, which it rounds")
        return DenseWeight(tensor.ptr, tensor.shape)

    def shaped(name: str, *shape: int) -> DenseWeight:
        weight = dense(name)
        weight.check_shape(name, *shape)
        return weight

    h, shapes = config.hidden_size, _layer_shapes(config)
    embed_name = prefix + "embed_tokens.weight"
    head_name = embed_name if config.tie_word_embeddings else "lm_head.weight"
    embed, head = dense(embed_name), dense(head_name)
    vocab = min(config.vocab_size, embed.rows_of(embed_name, 0, h), head.rows_of(head_name, 0, h))
    if vocab < config.vocab_size:
        log.warning(
            "the configuration has %d token ids, the embedding %s, the LM head %s: ids from %d on are never picked",
            config.vocab_size, list(embed.shape), list(head.shape), vocab,
        )  # fmt: skip
    layers = tuple(
        LayerWeights(
            **{
                field: shaped(f"{prefix}layers.{layer}.{name}.weight", *shape)
                for field, (name, shape) in shapes.items()
            }
        )
        for layer in range(config.num_hidden_layers)
    )
    return TargetWeights(embed, layers, shaped(prefix + "norm.weight", h), head, vocab)


def check_offered(config: ModelConfig) -> None:
    """UnsupportedError unless every layer has gated full attention and a dense FFN, of sizes that the kernels take."""
    for layer, kind in enumerate(config.layer_types):
        if kind != FULL_ATTENTION:
            raise UnsupportedError(f"layer {layer} has {kind}: this target runs {FULL_ATTENTION} only")
        if config.is_sparse_layer(layer):
            raise UnsupportedError(f"layer {layer} has a mixture of experts: this target runs dense FFNs only")
    if not config.attn_gated:
        raise UnsupportedError("attn_output_gate is false: this target runs gated attention only")
    for name, step in (("hidden_size", 8), ("intermediate_size", 8), ("head_dim", 32)):
        if (value := getattr(config, name)) % step:
            raise InvalidArgumentError(name, value, f"a multiple of {step} is needed")
    if config.head_dim > MAX_HEAD_DIM:
        raise InvalidArgumentError("head_dim", config.head_dim, f"at most {MAX_HEAD_DIM}")


def _prefix(store: WeightStore) -> str:
    return next((prefix for prefix in _PREFIXES if prefix + "embed_tokens.weight" in store), _PREFIXES[0])
