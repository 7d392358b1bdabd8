# SPDX-License-Identifier: AGPL-3.0-only
"""The tensors of MiniMax-M2 and GLM-4.5: a decoder layer, and an MTP module, which is one more layer behind the last
with `enorm`, `hnorm`, `eh_proj` and a final norm of its own.

Names: those of the published files, which transformers 5.24 reads and writes. Nobody has published MiniMax-M2's
modules; theirs are put together from its layers' names and DeepSeek-V3's.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...runtime.errors import UnsupportedError
from ..config import ModelConfig
from ..layers.mtp_head.body import HeadBody, QkNorm
from .mtp_names import PROJECTIONS, Named, ffn_tensor_shapes

__all__ = [
    "FINAL_NORMS",
    "bias_shape",
    "decoder_layer_shapes",
    "expert_shapes",
    "module_prefix",
    "module_shapes",
    "shared_expert_shapes",
]

FINAL_NORMS = ("shared_head.norm.weight", "norm.weight")
"""What the norm before the LM head is called within a module: DeepSeek-V3's name, and a layer's own."""


@dataclass(frozen=True, slots=True)
class _Names:
    """Of a mixture within a layer. `parts`: what stands for gate_proj, up_proj and down_proj."""

    router: str
    bias: str
    experts: str
    parts: tuple[str, str, str]
    shared: str


_MIXTURES = {
    "minimax_m2": _Names(
        "block_sparse_moe.gate.weight", "block_sparse_moe.e_score_correction_bias", "block_sparse_moe.experts.",
        ("w1", "w3", "w2"), "block_sparse_moe.shared_experts.",
    ),
    "glm4_moe": _Names(
        "mlp.gate.weight", "mlp.gate.e_score_correction_bias", "mlp.experts.", PROJECTIONS, "mlp.shared_experts.",
    ),
}  # fmt: skip


def _mixture(config: ModelConfig) -> _Names:
    names = _MIXTURES.get(config.model_type)
    if names is None:
        raise UnsupportedError(
            f"no names are known of layers and MTP modules of {config.model_type!r}: of {', '.join(_MIXTURES)} they are"
        )
    return names


def module_prefix(config: ModelConfig, index: int) -> str:
    """What the tensors of module `index` begin with."""
    return f"model.layers.{config.num_hidden_layers + index}."


def decoder_layer_shapes(config: ModelConfig, prefix: str, sparse: bool) -> Named:
    """Fields of MtpWeights that a decoder layer has, but for its bias and its experts, the shared one too; with
    `sparse` the router is among them, else the dense FFN's projections are, under their own names."""
    body = HeadBody.of(config)
    h, hd = config.hidden_size, config.head_dim
    q, kv = config.num_attention_heads * hd, config.num_key_value_heads * hd
    attention = f"{prefix}self_attn."
    shapes: Named = {
        "input_layernorm": (f"{prefix}input_layernorm.weight", (h,)),
        "q_proj": (f"{attention}q_proj.weight", (q * (2 if body.gated else 1), h)),
        "k_proj": (f"{attention}k_proj.weight", (kv, h)),
        "v_proj": (f"{attention}v_proj.weight", (kv, h)),
        "o_proj": (f"{attention}o_proj.weight", (h, q)),
        "post_attn_layernorm": (f"{prefix}post_attention_layernorm.weight", (h,)),
    }
    if body.qk_norm is not QkNorm.NONE:
        whole = body.qk_norm is QkNorm.WHOLE
        shapes["q_norm"] = (f"{attention}q_norm.weight", (q if whole else hd,))
        shapes["k_norm"] = (f"{attention}k_norm.weight", (kv if whole else hd,))
    if body.qkv_bias:
        shapes |= {
            f"{part}_bias": (f"{attention}{part}_proj.bias", (n,)) for part, n in zip("qkv", (q, kv, kv), strict=True)
        }
    if sparse:
        return shapes | {"moe_gate": (f"{prefix}{_mixture(config).router}", (config.num_experts, h))}
    return shapes | ffn_tensor_shapes(f"{prefix}mlp.", config.intermediate_size, h)


def bias_shape(config: ModelConfig, prefix: str) -> Named:
    """`correction_bias` of a layer with experts, FP32; nothing where the routing has none."""
    if not config.use_routing_bias:
        return {}
    return {"correction_bias": (f"{prefix}{_mixture(config).bias}", (config.num_experts,))}


def expert_shapes(config: ModelConfig, prefix: str) -> list[Named]:
    """The routed experts of a layer: gate_proj, up_proj and down_proj of each."""
    names, h, inter = _mixture(config), config.hidden_size, config.moe_intermediate_size
    shapes = ((inter, h), (inter, h), (h, inter))

    def expert(number: int) -> Named:
        own = f"{prefix}{names.experts}{number}."
        parts = zip(PROJECTIONS, names.parts, shapes, strict=True)
        return {field: (f"{own}{part}.weight", shape) for field, part, shape in parts}

    return [expert(number) for number in range(config.num_experts)]


def shared_expert_shapes(config: ModelConfig, prefix: str) -> Named:
    """The shared expert of a layer; nothing where there is none."""
    width = config.shared_expert_intermediate_size
    return ffn_tensor_shapes(f"{prefix}{_mixture(config).shared}", width, config.hidden_size) if width else {}


def module_shapes(config: ModelConfig, index: int, norm: str = FINAL_NORMS[0]) -> Named:
    """`decoder_layer_shapes` of module `index`, and what a module has besides. norm: one of FINAL_NORMS."""
    prefix, h = module_prefix(config, index), config.hidden_size
    return {
        "pre_fc_norm_embedding": (f"{prefix}enorm.weight", (h,)),
        "pre_fc_norm_hidden": (f"{prefix}hnorm.weight", (h,)),
        "fc": (f"{prefix}eh_proj.weight", (h, 2 * h)),
        "norm": (f"{prefix}{norm}", (h,)),
        **decoder_layer_shapes(config, prefix, sparse=True),
    }
