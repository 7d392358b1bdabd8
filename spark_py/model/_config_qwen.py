# SPDX-License-Identifier: AGPL-3.0-only
"""What config.json says of Qwen3-Next, Qwen3.5 and Qwen3.6 alone. Source: `Qwen3NextConfig` and `Qwen3_5TextConfig` of
transformers."""

from __future__ import annotations

from typing import Any

from ._config_reader import ConfigReader

__all__ = ["FULL_ATTENTION", "LINEAR_ATTENTION", "qwen_fields"]

FULL_ATTENTION = "full_attention"
LINEAR_ATTENTION = "linear_attention"


def qwen_fields(r: ConfigReader) -> dict[str, Any]:
    """The fields of ModelConfig that other families have under other names, or not at all."""
    layers = r.positive("num_hidden_layers")
    layer_types = _layer_types(r, layers)
    linear = LINEAR_ATTENTION in layer_types
    linear_field = r.positive if linear else r.count
    sparse_step = r.positive("decoder_sparse_step", 1)
    mlp_only = r.integers("mlp_only_layers", ())
    # Layers that have experts, if there are any; then the file must say how many.
    may = [i for i in range(layers) if r.family != "qwen3_5" and i not in mlp_only and (i + 1) % sparse_step == 0]
    experts = r.count("num_experts") if may else 0
    sparse = may if experts else []
    # A field of a part that the model has must be there; of one that it has not, it may stay.
    expert_field = r.positive if sparse else r.count
    intermediate = r.positive("intermediate_size") if len(sparse) < layers else r.count("intermediate_size", 0)
    theta, rotary_factor, interleaved = _rope(r)
    return {
        "rope_theta": theta,
        "partial_rotary_factor": rotary_factor,
        "rotary_dim_field": r.count("rotary_dim", 0),
        "mrope_interleaved": interleaved,
        "intermediate_size": intermediate,
        "attn_gated": r.flag("attn_output_gate", True),
        "layer_types": layer_types,
        "mlp_only_layers": mlp_only,
        "decoder_sparse_step": sparse_step,
        "num_experts": experts,
        "num_experts_per_tok": expert_field("num_experts_per_tok", *(() if sparse else (0,))),
        "moe_intermediate_size": expert_field("moe_intermediate_size", *(() if sparse else (0,))),
        "shared_expert_intermediate_size": r.count("shared_expert_intermediate_size", 0),
        "linear_num_key_heads": linear_field("linear_num_key_heads", *(() if linear else (0,))),
        "linear_num_value_heads": linear_field("linear_num_value_heads", *(() if linear else (0,))),
        "linear_key_head_dim": linear_field("linear_key_head_dim", *(() if linear else (0,))),
        "linear_value_head_dim": linear_field("linear_value_head_dim", *(() if linear else (0,))),
        "linear_conv_kernel_dim": linear_field("linear_conv_kernel_dim", *(() if linear else (0,))),
    }


def _layer_types(r: ConfigReader, layers: int) -> tuple[str, ...]:
    """The kind of each layer; from full_attention_interval where the file does not list them."""
    interval = r.count("full_attention_interval", 0)
    kinds = r.texts("layer_types", None)
    if kinds is None:
        if interval == 0:
            raise r.missing("layer_types", "full_attention_interval")
        kinds = tuple(LINEAR_ATTENTION if (i + 1) % interval else FULL_ATTENTION for i in range(layers))
    if len(kinds) != layers:
        raise r.bad("layer_types", len(kinds), f"one for each of the {layers} layers is needed")
    for kind in kinds:
        if kind not in (FULL_ATTENTION, LINEAR_ATTENTION):
            raise r.bad("layer_types", kind, f"{FULL_ATTENTION} or {LINEAR_ATTENTION} is needed")
    return kinds


def _rope(r: ConfigReader) -> tuple[float, float, bool]:
    """(rope_theta, partial_rotary_factor, mrope_interleaved), from rope_parameters or from the fields of older
    files."""
    nested = r.table("rope_parameters") or {}
    scaling = r.table("rope_scaling") or {}
    for name, table in (("rope_parameters", nested), ("rope_scaling", scaling)):
        kind = table.get("rope_type", table.get("type", "default"))
        if kind not in ("default", "mrope"):
            raise r.bad(f"{name}.rope_type", kind, "only unscaled RoPE (default) is offered")
    theta = r.number("rope_theta", least=0.0, nested=("rope_parameters", nested), above=True)
    factor = r.number("partial_rotary_factor", least=0.0, nested=("rope_parameters", nested), above=True)
    interleaved = nested.get("mrope_interleaved", scaling.get("mrope_interleaved", False))
    if not isinstance(interleaved, bool):
        raise r.bad("mrope_interleaved", interleaved, "true or false is needed")
    return theta, factor, interleaved
