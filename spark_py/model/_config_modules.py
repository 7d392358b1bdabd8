# SPDX-License-Identifier: AGPL-3.0-only
"""What config.json says of MiniMax-M2 and GLM-4.5 alone: models with MTP modules behind their layers. Sources: the
files of MiniMax-M2 and GLM-4.5, `MiniMaxM2Config` and `Glm4MoeConfig` of transformers 5.24."""

from __future__ import annotations

from typing import Any

from ._config_qwen import FULL_ATTENTION
from ._config_reader import ConfigReader

__all__ = ["LATENT_ATTENTION", "glm4_moe_fields", "minimax_m2_fields"]

LATENT_ATTENTION = {
    "deepseek_v3": "its multi-head latent attention is not offered, neither in a target nor in a draft head: keys and "
    "values of each head are made from the latent row, while DeepSeek-V4's attention, which is offered, has one latent "
    "row a token that is key and value of all heads"
}
"""model_type -> why it is refused."""
_SCORES = ("softmax", "sigmoid")
_NORMS = ("per_head", "per_layer")


def minimax_m2_fields(r: ConfigReader) -> dict[str, Any]:
    """The fields of ModelConfig that other families have under other names, or not at all. Every layer has experts,
    whose width is intermediate_size. Files that transformers wrote lack what its code takes for granted: sigmoid
    scores with a bias, and norms of queries and keys over all heads."""
    if (layers := r.positive("mtp_transformer_layers", 1)) != 1:
        raise r.bad("mtp_transformer_layers", layers, "1 is needed: an MTP module is one layer")
    kinds = r.integers("attn_type_list", ())
    if 0 in kinds:
        raise r.bad("attn_type_list", list(kinds), "1 alone is needed: linear attention is not offered")
    width = r.positive("intermediate_size")
    return {
        **_attention(r, 1.0),
        "rotary_dim_field": r.count("rotary_dim", 0),
        "use_qk_norm": r.flag("use_qk_norm", True),
        "qk_norm_type": _one_of(r, "qk_norm_type", _NORMS, "per_layer"),
        "intermediate_size": width,
        "num_experts": r.first_count(("num_local_experts", "num_experts"), 0) or r.positive("num_local_experts"),
        "num_experts_per_tok": r.positive("num_experts_per_tok"),
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": r.count("shared_intermediate_size", 0),
        "scoring_func": _one_of(r, "scoring_func", _SCORES, "sigmoid"),
        "use_routing_bias": r.flag("use_routing_bias", True),
    }


def glm4_moe_fields(r: ConfigReader) -> dict[str, Any]:
    """The fields of ModelConfig that other families have under other names, or not at all. The first
    first_k_dense_replace layers have a dense FFN; the shared expert is n_shared_experts times as wide as a routed
    one."""
    if (method := r.text("topk_method", "noaux_tc")) != "noaux_tc":
        raise r.bad("topk_method", method, "only noaux_tc is offered")
    layers, dense = r.positive("num_hidden_layers"), r.count("first_k_dense_replace", 1)
    inter = r.positive("moe_intermediate_size")
    return {
        **_attention(r, 0.5),
        "use_qk_norm": r.flag("use_qk_norm", False),
        "intermediate_size": r.positive("intermediate_size") if dense else r.count("intermediate_size", 0),
        "mlp_only_layers": tuple(range(min(dense, layers))),
        "num_experts": r.positive("n_routed_experts"),
        "num_experts_per_tok": r.positive("num_experts_per_tok"),
        "moe_intermediate_size": inter,
        "shared_expert_intermediate_size": r.count("n_shared_experts", 1) * inter,
        "scoring_func": _one_of(r, "scoring_func", ("sigmoid",), "sigmoid"),
        "use_routing_bias": True,
        "routed_scaling_factor": r.number("routed_scaling_factor", least=0.0, above=True, default=1.0),
        "n_group": r.positive("n_group", 1),
        "topk_group": r.positive("topk_group", 1),
    }


def _attention(r: ConfigReader, rotary_factor: float) -> dict[str, Any]:
    """Ungated full attention in every layer, with unscaled RoPE; `rotary_factor` where the file has none."""
    layers, kinds = r.positive("num_hidden_layers"), r.texts("layer_types", None)
    if kinds is not None and (len(kinds) != layers or set(kinds) != {FULL_ATTENTION}):
        raise r.bad("layer_types", list(kinds), f"{FULL_ATTENTION} for each of the {layers} layers is needed")
    nested, scaling = r.table("rope_parameters") or {}, r.table("rope_scaling") or {}
    for name, table in (("rope_parameters", nested), ("rope_scaling", scaling)):
        if (kind := table.get("rope_type", table.get("type", "default"))) != "default":
            raise r.bad(f"{name}.rope_type", kind, "only unscaled RoPE (default) is offered")
    where = ("rope_parameters", nested)
    return {
        "attn_gated": False,
        "layer_types": (FULL_ATTENTION,) * layers,
        "rope_theta": r.number("rope_theta", least=0.0, nested=where, above=True),
        "partial_rotary_factor": r.number(
            "partial_rotary_factor", least=0.0, nested=where, above=True, default=rotary_factor
        ),
        "mtp_hidden_states_first": r.flag("mtp_hidden_states_first", False),
    }


def _one_of(r: ConfigReader, name: str, words: tuple[str, ...], default: str) -> str:
    if (word := r.text(name, default)) not in words:
        raise r.bad(name, word, f"one of {', '.join(words)} is needed")
    return word
