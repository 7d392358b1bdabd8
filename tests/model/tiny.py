# SPDX-License-Identifier: AGPL-3.0-only
"""A small random checkpoint in Hugging Face names, every parameter random, and its forward pass in FP64.

The oracle is written from the model's formulas and shares no code with the package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from spark_py.model.config import ModelConfig
from spark_py.model.target import DecoderTarget, load_target_weights
from spark_py.runtime.buffers import BufferArena
from spark_py.runtime.gpu import GpuBackend
from spark_py.runtime.weights import WeightStore

BF16 = np.dtype(ml_dtypes.bfloat16)
Array = np.ndarray[Any, Any]
T = TypeVar("T")

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "dtype": "bfloat16",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "tie_word_embeddings": False,
    "layer_types": ["full_attention", "full_attention"],
    "mlp_only_layers": [0, 1],
    "num_experts": 0,
    "num_mtp_modules": 1,
    "eos_token_id": 0,
}

MOE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 40,
    "norm_topk_prob": True,
}
"""Overrides of CONFIG: experts in the first and the last layer, and in the MTP module."""
ROUTER_WIDTH = 3.0
"""Standard deviation of router logits, so that few choices are close."""


def layer_tensors(rng: np.random.Generator, prefix: str, c: dict[str, Any], sparse: bool) -> dict[str, Array]:
    """One gated attention layer with a dense FFN, or with experts."""
    h, hd = c["hidden_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * hd, c["num_key_value_heads"] * hd
    shapes = {
        "input_layernorm": (h,),
        "post_attention_layernorm": (h,),
        "self_attn.q_proj": (2 * q, h),
        "self_attn.k_proj": (kv, h),
        "self_attn.v_proj": (kv, h),
        "self_attn.o_proj": (h, q),
        "self_attn.q_norm": (hd,),
        "self_attn.k_norm": (hd,),
    }
    if sparse:
        shapes |= {"mlp.gate": (c["num_experts"], h), "mlp.shared_expert_gate": (1, h)}
        shapes |= ffn_shapes("mlp.shared_expert.", c["shared_expert_intermediate_size"], h)
        for expert in range(c["num_experts"]):
            shapes |= ffn_shapes(f"mlp.experts.{expert}.", c["moe_intermediate_size"], h)
    else:
        shapes |= ffn_shapes("mlp.", c["intermediate_size"], h)
    found = {f"{prefix}{name}.weight": tensor(rng, *shape) for name, shape in shapes.items()}
    if sparse:
        router = f"{prefix}mlp.gate.weight"
        found[router] = (found[router].astype(np.float32) * ROUTER_WIDTH).astype(BF16)
    return found


def ffn_shapes(prefix: str, inter: int, h: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}gate_proj": (inter, h), f"{prefix}up_proj": (inter, h), f"{prefix}down_proj": (h, inter)}


def tensor(rng: np.random.Generator, *shape: int) -> Array:
    """A norm's weight around 0 (used as 1 + w), or a projection that keeps the size of its input."""
    scale = 0.3 if len(shape) == 1 else shape[-1] ** -0.5
    return (rng.standard_normal(shape) * scale).astype(BF16)


def tensors(rng: np.random.Generator, c: dict[str, Any]) -> dict[str, Array]:
    """A whole checkpoint: target, and MTP module with experts if any layer has them."""
    h, vocab = c["hidden_size"], c["vocab_size"]
    found = {
        "model.embed_tokens.weight": (rng.standard_normal((vocab, h))).astype(BF16),
        "model.norm.weight": tensor(rng, h),
        "lm_head.weight": tensor(rng, vocab, h),
        "mtp.pre_fc_norm_embedding.weight": tensor(rng, h),
        "mtp.pre_fc_norm_hidden.weight": tensor(rng, h),
        "mtp.norm.weight": tensor(rng, h),
        "mtp.fc.weight": tensor(rng, h, 2 * h),
    }
    sparse = [bool(c["num_experts"]) and i not in c["mlp_only_layers"] for i in range(c["num_hidden_layers"])]
    for layer, experts in enumerate(sparse):
        found |= layer_tensors(rng, f"model.layers.{layer}.", c, experts)
    return found | layer_tensors(rng, "mtp.layers.0.", c, any(sparse))


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: token 0 ends a text, token 1 + b is byte b."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|endoftext|>": 0} | {letter: i + 1 for i, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


@dataclass
class Tiny:
    """A checkpoint folder and what is in it."""

    folder: Path
    raw: dict[str, Any]
    weights: dict[str, Array] = field(repr=False)

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.from_file(self.folder)

    def save(self) -> None:
        """Write config.json and model.safetensors again, as they are now."""
        (self.folder / "config.json").write_text(json.dumps(self.raw))
        save_file(self.weights, self.folder / "model.safetensors", metadata={"format": "pt"})


def write_tiny(folder: Path, rng: np.random.Generator, **overrides: Any) -> Tiny:
    """A fresh random checkpoint in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    layers = overrides.get("num_hidden_layers", CONFIG["num_hidden_layers"])
    raw = CONFIG | {"layer_types": ["full_attention"] * layers, "mlp_only_layers": list(range(layers))} | overrides
    tiny = Tiny(folder, raw, tensors(rng, raw))
    tiny.save()
    write_tokenizer(folder)
    return tiny


def target_opener(
    load: Callable[[WeightStore, ModelConfig, GpuBackend], Any], kind: Callable[..., AbstractContextManager[T]]
) -> Callable[..., AbstractContextManager[T]]:
    """A context manager that opens the target of a checkpoint, of weights that `load` reads; at the end everything is
    given back."""

    @contextmanager
    def opened(
        gpu: GpuBackend,
        tiny: Tiny,
        max_seq_len: int = 64,
        max_batch_tokens: int = 32,
        max_seqs: int = 4,
        num_blocks: int | None = None,
    ) -> Iterator[T]:
        config = tiny.config
        with (
            WeightStore.open(tiny.folder) as store,
            BufferArena(config, max_batch_tokens, max_seq_len, 16, max_seqs, gpu) as buffers,
        ):
            weights = load(store, config, gpu)
            with kind(weights, config, gpu, buffers, max_seqs, num_blocks) as target:
                yield target

    return opened


open_target = target_opener(load_target_weights, DecoderTarget)


# ---------------------------------------------------------------- the forward pass in FP64


def oracle(tiny: Tiny, tokens: Sequence[int], gaps: list[Array] | None = None) -> tuple[Array, Array]:
    """(logits [n, vocab], raw residual hidden [n, h]) in FP64, without any rounding of activations.

    `gaps` gets, for each layer with experts, how far the router's last chosen logit is above the next one, [n].
    """
    c, w = tiny.raw, {name: value.astype(np.float64) for name, value in tiny.weights.items()}
    x = w["model.embed_tokens.weight"][list(tokens)]
    for layer in range(c["num_hidden_layers"]):
        x = oracle_layer(c, w, f"model.layers.{layer}.", x, np.arange(len(tokens)), gaps)
    return oracle_norm(x, w["model.norm.weight"], c) @ w["lm_head.weight"].T, x


def oracle_norm(x: Array, weight: Array, c: dict[str, Any]) -> Array:
    """RMS norm over the last axis, weight 1 + w."""
    normed: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + c["rms_norm_eps"]) * (1 + weight)
    return normed


def oracle_rope(x: Array, positions: Array, c: dict[str, Any]) -> Array:
    """x [n, heads, hd]: pairs (i, i + rot / 2) turned by position / theta^(2 i / rot); the rest passes."""
    rot = int(c["head_dim"] * c["partial_rotary_factor"])
    angle = positions[:, None] * c["rope_theta"] ** (-np.arange(0, rot, 2) / rot)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b, rest = x[..., : rot // 2], x[..., rot // 2 : rot], x[..., rot:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def oracle_layer(
    c: dict[str, Any], w: dict[str, Array], prefix: str, x: Array, positions: Array, gaps: list[Array] | None = None
) -> Array:
    """One layer over all rows at once, under a causal mask."""
    n, hd, nq, nkv = len(x), c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]

    def get(name: str) -> Array:
        return w[f"{prefix}{name}.weight"]

    normed = oracle_norm(x, get("input_layernorm"), c)
    joint = (normed @ get("self_attn.q_proj").T).reshape(n, nq, 2, hd)
    query, gate = joint[:, :, 0], joint[:, :, 1]
    key = (normed @ get("self_attn.k_proj").T).reshape(n, nkv, hd)
    value = (normed @ get("self_attn.v_proj").T).reshape(n, nkv, hd)
    query = oracle_rope(oracle_norm(query, get("self_attn.q_norm"), c), positions, c)
    key = oracle_rope(oracle_norm(key, get("self_attn.k_norm"), c), positions, c)
    key, value = (np.repeat(t, nq // nkv, 1) for t in (key, value))
    scores = np.einsum("ihd,jhd->hij", query, key) / np.sqrt(hd)
    scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = np.einsum("hij,jhd->ihd", weights, value) / (1 + np.exp(-gate))
    x = x + mixed.reshape(n, -1) @ get("self_attn.o_proj").T
    normed = oracle_norm(x, get("post_attention_layernorm"), c)
    if f"{prefix}mlp.gate.weight" in w:
        out = oracle_experts(c, w, f"{prefix}mlp.", normed, gaps)
    else:
        out = oracle_ffn(w, f"{prefix}mlp.", normed)
    hidden: Array = x + out
    return hidden


def oracle_ffn(w: dict[str, Array], prefix: str, x: Array) -> Array:
    g, up = (x @ w[f"{prefix}{name}_proj.weight"].T for name in ("gate", "up"))
    out: Array = (g / (1 + np.exp(-g)) * up) @ w[f"{prefix}down_proj.weight"].T
    return out


def oracle_experts(c: dict[str, Any], w: dict[str, Array], prefix: str, x: Array, gaps: list[Array] | None) -> Array:
    """Row by row: the best experts' outputs, weighted by a softmax over all experts (made to sum to 1 where the
    configuration says so), and the shared expert's times the sigmoid of its gate."""
    top = c["num_experts_per_tok"]
    logits = x @ w[f"{prefix}gate.weight"].T
    ranks = np.argsort(-logits, axis=1, kind="stable")
    if gaps is not None and top < c["num_experts"]:
        gaps.append(np.array([row[rank[top - 1]] - row[rank[top]] for row, rank in zip(logits, ranks, strict=True)]))
    out = oracle_ffn(w, f"{prefix}shared_expert.", x) / (1 + np.exp(-x @ w[f"{prefix}shared_expert_gate.weight"].T))
    for i, (row, rank) in enumerate(zip(logits, ranks, strict=True)):
        odds = np.exp(row - row.max())
        odds /= odds[rank[:top]].sum() if c["norm_topk_prob"] else odds.sum()
        for e in rank[:top]:
            out[i] += odds[e] * oracle_ffn(w, f"{prefix}experts.{e}.", x[i])
    return out


def clear_tokens(tiny: Tiny, rng: np.random.Generator, count: int, margin: float = 0.3) -> list[int]:
    """Random tokens at whose rows every router's choice is clear: BF16 activations, which move a router's logits by a
    few hundredths, give the same experts."""
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.append(int(rng.integers(0, tiny.raw["vocab_size"])))
        gaps: list[Array] = []
        oracle(tiny, tokens, gaps)
        if any(gap[-1] < margin for gap in gaps):
            tokens.pop()
    return tokens
