# SPDX-License-Identifier: AGPL-3.0-only
"""A small random DeepSeek-V4 checkpoint under the published names, every parameter random, and its forward pass in
FP64.

The oracle is written from the model's formulas: it shares those of attention and connections with the tests of these,
and no code with the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spark_py.model.layers.deepseek_v4 import V4HyperShape
from spark_py.model.target import DeepseekV4Target
from spark_py.model.weight_loader import load_v4_target_weights
from spark_py.testing import BF16, F32, Array, f64
from tests.kernels import v4_oracle
from tests.model.tiny import Tiny, target_opener, write_tokenizer
from tests.model.v4_hyper_support import Site, head_of, post_of, pre_of

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "dtype": "bfloat16",
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 24,
    "o_lora_rank": 12,
    "o_groups": 2,
    "sliding_window": 12,
    "rope_theta": 10000.0,
    "layer_types": ["sliding_attention"] * 2,
    "mlp_layer_types": ["hash_moe", "moe"],
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "swiglu_limit": 1.5,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 3,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
    "num_nextn_predict_layers": 1,
    "bos_token_id": None,
    "eos_token_id": 0,
}
"""The limit is one that activations exceed; three column steps, since more would hide the order of rows and columns."""
ROUTER_WIDTH = 3.0
"""Standard deviation of router logits, so that few choices are close."""


def matrix(rng: np.random.Generator, n: int, k: int, scale: float = 1.0) -> Array:
    """A projection that keeps the size of its input, times `scale`."""
    found: Array = (rng.standard_normal((n, k)) * scale * k**-0.5).astype(BF16)
    return found


def norm(rng: np.random.Generator, size: int) -> Array:
    """A norm's weight, used as it is."""
    found: Array = (1 + 0.3 * rng.standard_normal(size)).astype(BF16)
    return found


def hyper_shape(c: dict[str, Any]) -> V4HyperShape:
    return V4HyperShape(c["hidden_size"], c["hc_mult"], c["hc_sinkhorn_iters"], c["rms_norm_eps"], c["hc_eps"])


def site_tensors(rng: np.random.Generator, prefix: str, c: dict[str, Any], head: bool = False) -> dict[str, Array]:
    site = Site.draw(rng, head, hyper_shape(c))
    return {f"{prefix}_fn": site.fn, f"{prefix}_base": site.base, f"{prefix}_scale": site.scale}


def block_tensors(rng: np.random.Generator, prefix: str, c: dict[str, Any], hashed: bool) -> dict[str, Array]:
    """One decoder layer. Sinks that dominate and that vanish are among them."""
    h, d, heads, rank = c["hidden_size"], c["head_dim"], c["num_attention_heads"], c["q_lora_rank"]
    out, inter, experts = c["o_groups"] * c["o_lora_rank"], c["moe_intermediate_size"], c["n_routed_experts"]
    sinks = rng.standard_normal(heads).astype(F32)
    sinks[:2] = 8.0, -30.0
    found = {
        "attn.wq_a.weight": matrix(rng, rank, h),
        "attn.q_norm.weight": norm(rng, rank),
        "attn.wq_b.weight": matrix(rng, heads * d, rank),
        "attn.wkv.weight": matrix(rng, d, h),
        "attn.kv_norm.weight": norm(rng, d),
        "attn.wo_a.weight": matrix(rng, out, heads * d // c["o_groups"]),
        "attn.wo_b.weight": matrix(rng, h, out),
        "attn.attn_sink": sinks,
        "attn_norm.weight": norm(rng, h),
        "ffn_norm.weight": norm(rng, h),
        "ffn.gate.weight": matrix(rng, experts, h, ROUTER_WIDTH),
    }
    if hashed:
        table = [rng.permutation(experts)[: c["num_experts_per_tok"]] for _ in range(c["vocab_size"])]
        found["ffn.gate.tid2eid"] = np.array(table, np.int64)
    else:
        found["ffn.gate.bias"] = rng.standard_normal(experts).astype(F32)
    for name in ("shared_experts", *(f"experts.{e}" for e in range(experts))):
        for part, (n, k) in {"w1": (inter, h), "w3": (inter, h), "w2": (h, inter)}.items():
            found[f"ffn.{name}.{part}.weight"] = matrix(rng, n, k)
    found |= site_tensors(rng, "hc_attn", c) | site_tensors(rng, "hc_ffn", c)
    return {prefix + name: value for name, value in found.items()}


def tensors(rng: np.random.Generator, c: dict[str, Any]) -> dict[str, Array]:
    """A whole checkpoint: target and MTP module."""
    h, vocab = c["hidden_size"], c["vocab_size"]
    found: dict[str, Array] = {
        "embed.weight": rng.standard_normal((vocab, h)).astype(BF16),
        "norm.weight": norm(rng, h),
        "head.weight": matrix(rng, vocab, h),
        **site_tensors(rng, "hc_head", c, head=True),
        **{f"mtp.0.{name}.weight": norm(rng, h) for name in ("enorm", "hnorm", "norm")},
        **{f"mtp.0.{name}.weight": matrix(rng, h, h) for name in ("e_proj", "h_proj")},
        **site_tensors(rng, "mtp.0.hc_head", c, head=True),
    }
    for layer, kind in enumerate(c["mlp_layer_types"]):
        found |= block_tensors(rng, f"layers.{layer}.", c, kind == "hash_moe")
    return found | block_tensors(rng, "mtp.0.", c, hashed=False)


def write_v4_tiny(folder: Path, rng: np.random.Generator, **overrides: Any) -> Tiny:
    """A fresh random checkpoint in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = CONFIG | overrides
    tiny = Tiny(folder, raw, tensors(rng, raw))
    tiny.save()
    write_tokenizer(folder)
    return tiny


def write_drafting_v4(folder: Path, rng: np.random.Generator, **overrides: Any) -> Tiny:
    """A checkpoint whose head is right about as often as it is wrong: layers add little to the streams, so that the
    next token follows mostly from the last one, and the module passes the embedding on."""
    found = write_v4_tiny(folder, rng, **overrides)
    h = found.raw["hidden_size"]
    for name, value in found.weights.items():
        if name.endswith(("attn.wo_b.weight", "w2.weight")):
            found.weights[name] = (value.astype(F32) * 0.25).astype(BF16)
    found.weights["mtp.0.e_proj.weight"] = np.eye(h).astype(BF16)
    found.weights["mtp.0.h_proj.weight"] = (found.weights["mtp.0.h_proj.weight"].astype(F32) * 0.1).astype(BF16)
    found.weights["mtp.0.enorm.weight"] = np.ones(h, BF16)
    found.weights["mtp.0.norm.weight"] = found.weights["norm.weight"]
    found.save()
    return found


open_v4_target = target_opener(load_v4_target_weights, DeepseekV4Target)


# ---------------------------------------------------------------- the forward pass in FP64


def oracle(tiny: Tiny, tokens: Sequence[int], gaps: list[Array] | None = None) -> tuple[Array, Array, Array]:
    """(logits [n, vocab], collapsed hidden [n, h], streams [n, S, h]) in FP64, no activation rounded.

    `gaps` gets, for each learned router, how far the last choice is above the next one, [n].
    """
    c, w = tiny.raw, {name: f64(value) for name, value in tiny.weights.items()}
    embedded = w["embed.weight"][list(tokens)]
    streams = np.repeat(embedded[:, None], c["hc_mult"], 1)
    for layer in range(c["num_hidden_layers"]):
        streams = oracle_block(c, w, f"layers.{layer}.", streams, tokens, gaps)
    head = site_of(w, "hc_head")
    hidden = np.stack([head_of(x, head, hyper_shape(c)) for x in streams])
    return v4_oracle.rms(hidden, c["rms_norm_eps"], w["norm.weight"]) @ w["head.weight"].T, hidden, streams


def site_of(w: dict[str, Array], prefix: str) -> Site:
    return Site(w[f"{prefix}_fn"], w[f"{prefix}_scale"], w[f"{prefix}_base"])


def oracle_block(
    c: dict[str, Any],
    w: dict[str, Array],
    prefix: str,
    streams: Array,
    tokens: Sequence[int],
    gaps: list[Array] | None = None,
) -> Array:
    """One layer over all rows at once; row i is at position i."""
    shape, eps = hyper_shape(c), c["rms_norm_eps"]

    def around(site: Site, streams: Array, weight: Array, sublayer: Any) -> Array:
        mixed = [pre_of(x, site, shape) for x in streams]
        outputs = sublayer(v4_oracle.rms(np.stack([y for y, _, _ in mixed]), eps, weight))
        rows = zip(outputs, streams, mixed, strict=True)
        return np.stack([post_of(o, x, post, comb) for o, x, (_, post, comb) in rows])

    def attend(x: Array) -> Array:
        return oracle_attention(c, {name.removeprefix(prefix): value for name, value in w.items()}, x)

    def feed(x: Array) -> Array:
        return oracle_ffn(c, w, f"{prefix}ffn.", x, tokens, gaps)

    streams = around(site_of(w, f"{prefix}hc_attn"), streams, w[f"{prefix}attn_norm.weight"], attend)
    return around(site_of(w, f"{prefix}hc_ffn"), streams, w[f"{prefix}ffn_norm.weight"], feed)


def oracle_attention(c: dict[str, Any], w: dict[str, Array], x: Array) -> Array:
    """Every row of x [n, h] over those up to it, within the window; w has the names within the layer."""
    eps, theta, rope_dim, positions = c["rms_norm_eps"], c["rope_theta"], c["qk_rope_head_dim"], np.arange(len(x))
    latent = v4_oracle.rms(x @ w["attn.wq_a.weight"].T, eps, w["attn.q_norm.weight"])
    q = (latent @ w["attn.wq_b.weight"].T).reshape(len(x), c["num_attention_heads"], c["head_dim"])
    q = v4_oracle.rope(v4_oracle.rms(q, eps), positions, theta, rope_dim)
    kv = v4_oracle.rms(x @ w["attn.wkv.weight"].T, eps, w["attn.kv_norm.weight"])
    kv = v4_oracle.rope(kv, positions, theta, rope_dim)
    o = np.stack([v4_oracle.attention(q[i], kv[: i + 1], w["attn.attn_sink"], c["sliding_window"]) for i in positions])
    o = v4_oracle.rope(o, positions, theta, rope_dim, inverse=True)
    grouped = [v4_oracle.grouped(row.reshape(-1), w["attn.wo_a.weight"], c["o_groups"]) for row in o]
    result: Array = np.stack(grouped) @ w["attn.wo_b.weight"].T
    return result


def oracle_ffn(
    c: dict[str, Any],
    w: dict[str, Array],
    prefix: str,
    x: Array,
    tokens: Sequence[int],
    gaps: list[Array] | None = None,
) -> Array:
    """Row by row: the chosen experts' outputs, weighted, and the shared expert's."""
    top, limit = c["num_experts_per_tok"], c["swiglu_limit"]

    def expert(name: str, row: Array) -> Array:
        g, u = (w[f"{prefix}{name}.{part}.weight"] @ row for part in ("w1", "w3"))
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
        found: Array = w[f"{prefix}{name}.w2.weight"] @ (g / (1 + np.exp(-g)) * u)
        return found

    scores = np.sqrt(np.logaddexp(0, x @ w[f"{prefix}gate.weight"].T))
    table = w.get(f"{prefix}gate.tid2eid")
    if table is None:
        ranked = scores + w[f"{prefix}gate.bias"]
        order = np.argsort(-ranked, axis=1, kind="stable")
        if gaps is not None:
            gaps.append(
                np.array([row[rank[top - 1]] - row[rank[top]] for row, rank in zip(ranked, order, strict=True)])
            )
        chosen = order[:, :top]
    else:
        chosen = table[list(tokens)].astype(int)
    out = []
    for row, score, ids in zip(x, scores, chosen, strict=True):
        share = score[ids] / score[ids].sum() * c["routed_scaling_factor"]
        out.append(sum(s * expert(f"experts.{e}", row) for s, e in zip(share, ids, strict=True)))
    return np.stack(out) + np.stack([expert("shared_experts", row) for row in x])


def clear_tokens(tiny: Tiny, rng: np.random.Generator, count: int, margin: float = 0.1) -> list[int]:
    """Random tokens at whose rows every learned router's choice is clear: BF16 activations, which move a score by
    about a hundredth, give the same experts."""
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.append(int(rng.integers(0, tiny.raw["vocab_size"])))
        gaps: list[Array] = []
        oracle(tiny, tokens, gaps)
        if any(gap[-1] < margin for gap in gaps):
            tokens.pop()
    return tokens
