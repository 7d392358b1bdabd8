# SPDX-License-Identifier: AGPL-3.0-only
"""Small folders of DeepSeek-V4 as published: its names, dtypes and shapes of scales, in shards with an index.

The tensors are listed here by hand from the published repository; nothing of the package says which there are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from spark_py.model.config import ModelConfig
from spark_py.runtime.weights import WeightDtype
from spark_py.testing import BF16, F32, Array, f64
from tests.model.v4_ffn_support import Bf16, Expert, Fp8, HostFfn, Matrix, Mxfp4
from tests.model.v4_hyper_support import Site
from tests.runtime.weights_support import write, write_index

D = WeightDtype
Tensors = dict[str, tuple[Array, WeightDtype]]
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": 300,
    "hidden_size": 160,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 48,
    "o_lora_rank": 16,
    "o_groups": 4,
    "sliding_window": 12,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_hash_layers": 1,
    "swiglu_limit": 1.5,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 3,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32},
    "compress_ratios": [0, 0, 0],
    "max_position_embeddings": 256,
    "expert_dtype": "fp4",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""The published file's fields, with sizes that have a second, smaller block of 128 in rows and in columns."""
HYPER = ("fn", "base", "scale")


def _listed(c: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...], str]]:
    """Leaf, shape and form of every tensor of a block, with a learned router's bias; "tid2eid" stands for its table."""
    h, q = c["hidden_size"], c["num_attention_heads"] * c["head_dim"]
    out, inter, hc = c["o_groups"] * c["o_lora_rank"], c["moe_intermediate_size"], c["hc_mult"]
    rank, d, experts = c["q_lora_rank"], c["head_dim"], c["n_routed_experts"]
    mix = ((2 + hc) * hc, hc * h)
    return [
        ("attn_norm.weight", (h,), "bf16"),
        ("ffn_norm.weight", (h,), "bf16"),
        *((f"hc_{site}_fn", mix, "f32") for site in ("attn", "ffn")),
        *((f"hc_{site}_base", mix[:1], "f32") for site in ("attn", "ffn")),
        *((f"hc_{site}_scale", (3,), "f32") for site in ("attn", "ffn")),
        ("attn.wq_a.weight", (rank, h), "fp8"),
        ("attn.q_norm.weight", (rank,), "bf16"),
        ("attn.wq_b.weight", (q, rank), "fp8"),
        ("attn.wkv.weight", (d, h), "fp8"),
        ("attn.kv_norm.weight", (d,), "bf16"),
        ("attn.wo_a.weight", (out, q // c["o_groups"]), "fp8"),
        ("attn.wo_b.weight", (h, out), "fp8"),
        ("attn.attn_sink", (c["num_attention_heads"],), "f32"),
        ("ffn.gate.weight", (experts, h), "bf16"),
        ("ffn.gate.bias", (experts,), "f32"),
        *((f"ffn.shared_experts.{w}.weight", (inter, h), "fp8") for w in ("w1", "w3")),
        ("ffn.shared_experts.w2.weight", (h, inter), "fp8"),
        *((f"ffn.experts.{e}.{w}.weight", (inter, h), "fp4") for e in range(experts) for w in ("w1", "w3")),
        *((f"ffn.experts.{e}.w2.weight", (h, inter), "fp4") for e in range(experts)),
    ]


def listed_mtp(c: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...], str]]:
    """Name, shape in elements and form of every weight under mtp.0., scales left out."""
    h, hc = c["hidden_size"], c["hc_mult"]
    around = [
        *((f"{name}.weight", (h,), "bf16") for name in ("enorm", "hnorm", "norm")),
        *((f"{name}.weight", (h, h), "fp8") for name in ("e_proj", "h_proj")),
        ("hc_head_fn", (hc, hc * h), "f32"),
        ("hc_head_base", (hc,), "f32"),
        ("hc_head_scale", (1,), "f32"),
    ]
    return [(f"mtp.0.{name}", shape, form) for name, shape, form in (*around, *_listed(c))]


def listed_target(c: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...], str]]:
    """As `listed_mtp`, of the target."""
    h, hc, vocab = c["hidden_size"], c["hc_mult"], c["vocab_size"]
    found: list[tuple[str, tuple[int, ...], str]] = [
        ("embed.weight", (vocab, h), "bf16"),
        ("head.weight", (vocab, h), "bf16"),
        ("norm.weight", (h,), "bf16"),
        ("hc_head_fn", (hc, hc * h), "f32"),
        ("hc_head_base", (hc,), "f32"),
        ("hc_head_scale", (1,), "f32"),
    ]
    for layer in range(c["num_hidden_layers"]):
        for leaf, shape, form in _listed(c):
            if leaf == "ffn.gate.bias" and layer < c["num_hash_layers"]:
                leaf, shape, form = "ffn.gate.tid2eid", (vocab, c["num_experts_per_tok"]), "table"
            found.append((f"layers.{layer}.{leaf}", shape, form))
    return found


def draw(rng: np.random.Generator, name: str, shape: tuple[int, ...], form: str, c: Mapping[str, Any]) -> Tensors:
    """A random tensor with its scale, if it has one."""
    leaf = name.rpartition(".")[0] + "."
    if form == "fp8":
        fp8 = Fp8.draw(rng, *shape)
        scales = fp8.scales.view(ml_dtypes.float8_e8m0fnu)
        return {name: (fp8.codes, D.F8_E4M3), f"{leaf}scale": (scales, D.F8_E8M0)}
    if form == "fp4":
        fp4 = Mxfp4.draw(rng, *shape)
        scales = fp4.scales.view(ml_dtypes.float8_e8m0fnu)
        return {name: (fp4.codes.view(np.int8), D.I8), f"{leaf}scale": (scales, D.F8_E8M0)}
    if form == "table":
        rows = [rng.permutation(c["n_routed_experts"])[: shape[1]] for _ in range(shape[0])]
        return {name: (np.stack(rows).astype(np.int64), D.I64)}
    if form == "f32":
        width = shape[-1] ** -0.5 if "fn" in name.rpartition("_")[2] else 0.5
        values = (rng.standard_normal(shape) * width + (1.0 if name.endswith("scale") else 0.0)).astype(F32)
        return {name: (values, D.F32)}
    values = rng.standard_normal(shape)
    if name.endswith("norm.weight"):
        return {name: ((1 + 0.3 * values).astype(BF16), D.BF16)}
    return {name: ((values * (2 if "gate" in name else 1) * shape[-1] ** -0.5).astype(BF16), D.BF16)}


def published(rng: np.random.Generator, c: Mapping[str, Any] = CONFIG, *, target: bool = True) -> Tensors:
    """All tensors of a checkpoint, or those of its MTP module alone."""
    found: Tensors = {}
    for name, shape, form in [*(listed_target(c) if target else []), *listed_mtp(c)]:
        found |= draw(rng, name, shape, form, c)
    return found


def write_folder(folder: Path, tensors: Tensors, c: Mapping[str, Any] = CONFIG, shards: int = 3) -> Path:
    """config.json, `shards` files and their index; as published, the MTP module is in the last one alone."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(c)))
    files = [f"model-{number + 1:05}-of-{shards:05}.safetensors" for number in range(shards)]
    main = [name for name in tensors if not name.startswith("mtp.")]
    parts: list[Sequence[str]] = [main[number :: shards - 1] for number in range(shards - 1)]
    parts.append([name for name in tensors if name.startswith("mtp.")])
    for file, names in zip(files, parts, strict=True):
        write(folder / file, {name: tensors[name] for name in names})
    write_index(folder, {name: file for file, names in zip(files, parts, strict=True) for name in names})
    return folder


def config(c: Mapping[str, Any] = CONFIG, **changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(dict(c) | changes)


def in_bf16(tensors: Tensors) -> Tensors:
    """The same weights without a quantised one, as a small checkpoint for transformers has them."""
    found: Tensors = {}
    for name, (array, dtype) in tensors.items():
        if name.endswith(".scale"):
            continue
        if dtype in (D.F8_E4M3, D.I8):
            array, dtype = matrix_of(tensors, name).values().astype(BF16), D.BF16
        found[name] = (array, dtype)
    return found


def renamed(tensors: Tensors, rename: Callable[[str], str]) -> Tensors:
    return {rename(name): stored for name, stored in tensors.items()}


def matrix_of(tensors: Tensors, name: str) -> Matrix:
    """The matrix under `name` as the tests of the mixture read it."""
    array, dtype = tensors[name]
    if dtype is D.BF16:
        return Bf16(array)
    scales = tensors[name.removesuffix("weight") + "scale"][0].view(np.uint8)
    return Fp8(array, scales) if dtype is D.F8_E4M3 else Mxfp4(array.view(np.uint8), scales)


def site_of(tensors: Tensors, prefix: str) -> Site:
    """Hyper-connections `prefix`_fn, _base, _scale."""
    fn, base, scale = (tensors[f"{prefix}_{part}"][0] for part in HYPER)
    return Site(fn, scale, base)


def ffn_of(tensors: Tensors, prefix: str, c: ModelConfig, shape: Any) -> HostFfn:
    """The mixture under `prefix`."""

    def expert(name: str) -> Expert:
        return Expert(*(matrix_of(tensors, f"{prefix}ffn.{name}.{part}.weight") for part in ("w1", "w3", "w2")))

    bias, table = (tensors.get(f"{prefix}ffn.gate.{name}", (None, None))[0] for name in ("bias", "tid2eid"))
    return HostFfn(
        tensors[f"{prefix}ffn.gate.weight"][0], bias, table,
        tuple(expert(f"experts.{number}") for number in range(c.num_experts)), expert("shared_experts"), shape,
    )  # fmt: skip


def attention_host(tensors: Tensors, prefix: str) -> dict[str, Array]:
    """The attention under `prefix`, matrices in FP64."""
    host = {
        part: matrix_of(tensors, f"{prefix}attn.{part}.weight").values()
        for part in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")
    }
    host |= {part: f64(tensors[f"{prefix}attn.{part}.weight"][0]) for part in ("q_norm", "kv_norm")}
    return host | {"attn_sink": tensors[f"{prefix}attn.attn_sink"][0]}


_MODULES = (
    (".attn.", ".self_attn."), (".ffn.", ".mlp."), (".attn_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."), (".hc_attn_", ".attn_hc."), (".hc_ffn_", ".ffn_hc."),
    (".attn_sink", ".sinks"), (".wq_a.", ".q_a_proj."), (".wq_b.", ".q_b_proj."), (".wkv.", ".kv_proj."),
    (".wo_a.", ".o_a_proj."), (".wo_b.", ".o_b_proj."), (".q_norm.", ".q_a_norm."),
    (".gate.bias", ".gate.e_score_correction_bias"), (".shared_experts.w1.", ".shared_experts.gate_proj."),
    (".shared_experts.w3.", ".shared_experts.up_proj."), (".shared_experts.w2.", ".shared_experts.down_proj."),
)  # fmt: skip


def module_name(name: str) -> str:
    """The name of transformers 5.24 for a published one, but for experts, which it stacks."""
    if ".experts." in name:
        return name
    if name == "head.weight":
        return "lm_head.weight"
    for old, new in _MODULES:
        name = name.replace(old, new)
    return "model." + name.replace("hc_head_", "hc_head.hc_").replace("embed.", "embed_tokens.")


def saved_name(name: str) -> str:
    """The name under which transformers 5.24 saves the tensor: most are turned back, some are not."""
    if name == "head.weight":
        return name
    name = name.replace("hc_head_", "hc_head.hc_").replace("embed.", "embed_tokens.")
    return "model." + name.replace(".attn.kv_norm.", ".attn.norm.")


def stacked(tensors: Tensors) -> Tensors:
    """BF16 tensors under the names of transformers' modules, routed experts in two stacks a block."""
    found = {module_name(name): stored for name, stored in tensors.items() if ".ffn.experts." not in name}
    for prefix in sorted({name.partition("ffn.experts.")[0] for name in tensors if ".ffn.experts." in name}):
        count = len(
            {name.split(".experts.")[1].split(".")[0] for name in tensors if name.startswith(f"{prefix}ffn.exp")}
        )
        w1, w3, w2 = (
            np.stack([tensors[f"{prefix}ffn.experts.{number}.{part}.weight"][0] for number in range(count)])
            for part in ("w1", "w3", "w2")
        )
        found[f"model.{prefix}mlp.experts.gate_up_proj"] = np.concatenate([w1, w3], axis=1), D.BF16
        found[f"model.{prefix}mlp.experts.down_proj"] = w2, D.BF16
    return found
