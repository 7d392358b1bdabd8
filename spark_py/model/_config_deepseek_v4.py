# SPDX-License-Identifier: AGPL-3.0-only
"""What config.json says of DeepSeek-V4 alone. Sources: the file of DeepSeek-V4-Flash, and `DeepseekV4Config` of
transformers 5.24, whose own files have layer_types and mlp_layer_types where DeepSeek's has compress_ratios and
num_hash_layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._config_reader import ConfigReader

__all__ = ["COMPRESSED_ATTENTION", "SLIDING_ATTENTION", "deepseek_v4_fields"]

SLIDING_ATTENTION = "sliding_attention"
COMPRESSED_ATTENTION = ("compressed_sparse_attention", "heavily_compressed_attention")
_KIND_OF_RATIO = {0: SLIDING_ATTENTION, 4: COMPRESSED_ATTENTION[0], 128: COMPRESSED_ATTENTION[1]}
_HASH_MOE, _MOE = "hash_moe", "moe"


def deepseek_v4_fields(r: ConfigReader) -> dict[str, Any]:
    """The fields of ModelConfig that other families have under other names, or not at all.

    rope_theta is that of layers without a compressor. kv_lora_rank, which no file has, is the width of a latent row,
    head_dim; the shared expert is n_shared_experts times as wide as a routed one.
    """
    layers, head_dim = r.positive("num_hidden_layers"), r.positive("head_dim")
    inter = r.positive("moe_intermediate_size")
    rope_dim, rotary_factor = _rotary(r, head_dim)
    fields = {
        "rope_theta": r.number("rope_theta", least=0.0, nested=("rope_parameters.main", _main_rope(r)), above=True),
        "partial_rotary_factor": rotary_factor,
        "qk_rope_head_dim": rope_dim,
        "attn_gated": False,
        "layer_types": _layer_types(r, layers),
        "sliding_window": r.positive("sliding_window"),
        "kv_lora_rank": head_dim,
        "q_lora_rank": r.positive("q_lora_rank"),
        "o_groups": r.positive("o_groups"),
        "o_lora_rank": r.positive("o_lora_rank"),
        "num_experts": r.positive("n_routed_experts"),
        "num_experts_per_tok": r.positive("num_experts_per_tok"),
        "moe_intermediate_size": inter,
        "shared_expert_intermediate_size": r.count("n_shared_experts", 1) * inter,
        "num_hash_layers": _hash_layers(r, layers),
        "routed_scaling_factor": r.number("routed_scaling_factor", least=0.0, above=True),
        "swiglu_limit": r.number("swiglu_limit", least=0.0, above=True),
        "hc_mult": r.positive("hc_mult"),
        "hc_sinkhorn_iters": r.positive("hc_sinkhorn_iters"),
        "hc_eps": r.number("hc_eps", least=0.0, above=True),
    }
    _refuse_other_forms(r)
    return fields


def _rotary(r: ConfigReader, head_dim: int) -> tuple[int, float]:
    """(qk_rope_head_dim, partial_rotary_factor): one follows from the other where the file has one."""
    rope_dim, factor = r.count("qk_rope_head_dim", 0), r.table("rope_parameters") or {}
    main = factor.get("main")
    if rope_dim == 0:
        nested = main if isinstance(main, Mapping) else {}
        share = r.number("partial_rotary_factor", least=0.0, nested=("rope_parameters.main", nested), above=True)
        return int(share * head_dim), share
    share = r.number("partial_rotary_factor", least=0.0, above=True, default=rope_dim / head_dim)
    if int(share * head_dim) != rope_dim:
        raise r.bad(
            "partial_rotary_factor", share, f"qk_rope_head_dim {rope_dim} of head_dim {head_dim} says otherwise"
        )
    return rope_dim, share


def _main_rope(r: ConfigReader) -> Mapping[str, Any]:
    """RoPE of layers without a compressor, in the form of transformers; that of the others, and rope_scaling, which is
    theirs too, say nothing about these."""
    main = (r.table("rope_parameters") or {}).get("main", {})
    if not isinstance(main, Mapping):
        raise r.bad("rope_parameters.main", main, "an object is needed")
    if (kind := main.get("rope_type", "default")) != "default":
        raise r.bad("rope_parameters.main.rope_type", kind, "only unscaled RoPE (default) is offered")
    r.table("rope_scaling")
    return main


def _layer_types(r: ConfigReader, layers: int) -> tuple[str, ...]:
    """The kind of each layer of the target: from layer_types or compress_ratios, which goes on with the MTP modules."""
    ratios = r.integers("compress_ratios", ())
    kinds = r.texts("layer_types", None)
    if kinds is None:
        if not ratios:
            raise r.missing("layer_types", "compress_ratios")
        if len(ratios) < layers:
            raise r.bad("compress_ratios", len(ratios), f"one for each of the {layers} layers is needed")
        for ratio in ratios:
            if ratio not in _KIND_OF_RATIO:
                raise r.bad("compress_ratios", ratio, f"one of {', '.join(map(str, _KIND_OF_RATIO))} is needed")
        return tuple(_KIND_OF_RATIO[ratio] for ratio in ratios[:layers])
    if len(kinds) != layers:
        raise r.bad("layer_types", len(kinds), f"one for each of the {layers} layers is needed")
    for kind in kinds:
        if kind not in _KIND_OF_RATIO.values():
            raise r.bad("layer_types", kind, f"one of {', '.join(_KIND_OF_RATIO.values())} is needed")
    return kinds


def _hash_layers(r: ConfigReader, layers: int) -> int:
    """How many of the first layers take their experts from a table: of mlp_layer_types or num_hash_layers."""
    number = r.count("num_hash_layers", 0)
    kinds = r.texts("mlp_layer_types", None)
    if kinds is None:
        r.count("num_hash_layers")
        return number
    if len(kinds) != layers:
        raise r.bad("mlp_layer_types", len(kinds), f"one for each of the {layers} layers is needed")
    found = kinds.count(_HASH_MOE)
    for layer, kind in enumerate(kinds):
        if kind != (_HASH_MOE if layer < found else _MOE):
            raise r.bad("mlp_layer_types", list(kinds), f"{_HASH_MOE} first, then {_MOE}, is needed")
    return found


def _refuse_other_forms(r: ConfigReader) -> None:
    """ConfigError for what another model of the kind might have and this one's code does not do."""
    for name, wanted in (("scoring_func", "sqrtsoftplus"), ("topk_method", "noaux_tc")):
        if (found := r.text(name, wanted)) != wanted:
            raise r.bad(name, found, f"only {wanted} is offered")
    if (groups := r.positive("n_group", 1)) != 1:
        raise r.bad("n_group", groups, "routing by groups of experts is not offered")
    if (heads := r.positive("num_key_value_heads")) != 1:
        raise r.bad("num_key_value_heads", heads, "1 is needed: all heads read one latent row a token")
    if r.flag("mlp_bias", False):
        raise r.bad("mlp_bias", True, "projections with a bias are not offered")
