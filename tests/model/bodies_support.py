# SPDX-License-Identifier: AGPL-3.0-only
"""Head bodies of every kind: their random weights, and the head in FP64, written from the formulas."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from spark_py.model.config import ModelConfig
from spark_py.model.layers.mtp_head import HeadBody, NormConvention, QkNorm, SharedExpert
from spark_py.model.weight_map import DenseExpertWeight, F32Weight, MtpWeights
from spark_py.runtime.gpu import GpuBackend
from tests.model.support import BF16, FFN, SPARSE, Array, Oracle, config, dense, random_weights, upload

TABLES = ("embed_tokens", "lm_head")
MINIMAX_BODY = HeadBody(False, QkNorm.WHOLE, NormConvention.PLAIN, SharedExpert.NONE)
GLM_BODY = HeadBody(False, QkNorm.PER_HEAD, NormConvention.PLAIN, SharedExpert.PLAIN, chain_after_norm=True)
SIGMOID: dict[str, Any] = {"scoring_func": "sigmoid"}
BIASED: dict[str, Any] = SIGMOID | {"use_routing_bias": True}
GROUPED: dict[str, Any] = BIASED | {
    "num_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A body, what its configuration has beside support.RAW, and whether the module has tables of its own."""

    body: HeadBody
    config: dict[str, Any] = field(default_factory=dict)
    moe: bool = False
    own_tables: bool = False

    def model_config(self) -> ModelConfig:
        c = config(**(SPARSE if self.moe else {}))
        shared = {"shared_expert_intermediate_size": 0} if self.body.shared_expert is SharedExpert.NONE else {}
        return replace(c, **shared | self.config)


KINDS = {
    "ungated": Kind(HeadBody(gated=False)),
    "norm over all heads": Kind(HeadBody(qk_norm=QkNorm.WHOLE)),
    "no norm of q and k": Kind(HeadBody(qk_norm=QkNorm.NONE)),
    "plain norm weights": Kind(HeadBody(norm=NormConvention.PLAIN)),
    "hidden row first": Kind(HeadBody(hidden_first=True)),
    "biases": Kind(HeadBody(gated=False, qkv_bias=True)),
    "chain after the norm": Kind(HeadBody(chain_after_norm=True)),
    "full RoPE": Kind(HeadBody(), {"rotary_dim_field": 32}),
    "own tables": Kind(HeadBody(), own_tables=True),
    "no shared expert": Kind(HeadBody(shared_expert=SharedExpert.NONE), moe=True),
    "plain shared expert": Kind(HeadBody(shared_expert=SharedExpert.PLAIN), moe=True),
    "sigmoid": Kind(HeadBody(), SIGMOID | {"norm_topk_prob": False}, moe=True),
    "biased": Kind(HeadBody(), BIASED, moe=True),
    "minimax_m2": Kind(MINIMAX_BODY, BIASED, moe=True),
    "glm4_moe": Kind(GLM_BODY, GROUPED | {"shared_expert_intermediate_size": 96}, moe=True),
}


def body_arrays(rng: np.random.Generator, kind: Kind) -> dict[str, Array]:
    """`random_weights` as the body has them; `correction_bias` is FP32. Own tables are `own.` ones."""
    c, body = kind.model_config(), kind.body
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    # Weights of a shared expert must have a width to be drawn.
    width = c.shared_expert_intermediate_size or c.moe_intermediate_size
    arrays = random_weights(rng, replace(c, shared_expert_intermediate_size=width), kind.moe)
    if not body.gated:
        arrays["q_proj"] = arrays["q_proj"][:q]
    for name, elements in (("q_norm", q), ("k_norm", kv)):
        if body.qk_norm is QkNorm.WHOLE:
            arrays[name] = (0.5 * rng.standard_normal(elements)).astype(BF16)
        elif body.qk_norm is QkNorm.NONE:
            del arrays[name]
    if body.qkv_bias:
        arrays |= {
            f"{part}_bias": rng.standard_normal(n).astype(BF16) for part, n in zip("qkv", (q, kv, kv), strict=True)
        }
    if body.shared_expert is not SharedExpert.GATED:
        arrays.pop("shared_expert_gate", None)
    if body.shared_expert is SharedExpert.NONE:
        arrays = {name: array for name, array in arrays.items() if not name.startswith("shared_expert.")}
    if c.use_routing_bias:
        # As wide as the scores where groups are to count, so that the bias does not decide alone; else wider.
        width = 1.0 if c.n_group == 1 else 0.3
        arrays["correction_bias"] = (width * rng.standard_normal(c.num_experts)).astype(np.float32)
    if kind.own_tables:
        arrays |= {f"own.{name}": random_weights(rng, c)[name] for name in TABLES}
    return arrays


def body_weights(gpu: GpuBackend, arrays: dict[str, Array]) -> MtpWeights:
    """The tensors of `body_arrays` on the device."""
    bias = arrays.get("correction_bias")
    there = {name: dense(gpu, a) for name, a in arrays.items() if name not in (*TABLES, "correction_bias")}

    def ffn(prefix: str) -> DenseExpertWeight:
        return DenseExpertWeight(*(there.pop(f"{prefix}{name}") for name in FFN))

    fields: dict[str, Any] = {"q_norm": None, "k_norm": None}
    fields |= {name: there.pop(f"own.{name}") for name in TABLES if f"own.{name}" in there}
    if "moe_gate" not in there:
        return MtpWeights(**fields | {"dense_ffn": ffn("")} | there)
    fields["experts"] = [ffn(f"experts[{i}].") for i in range(len(arrays["moe_gate"]))]
    fields["shared_expert"] = ffn("shared_expert.") if "shared_expert.gate_proj" in there else None
    fields["correction_bias"] = None if bias is None else F32Weight(upload(gpu, bias), bias.shape)
    return MtpWeights(**fields | there)


@dataclass
class BodyOracle(Oracle):
    """A head of any body in FP64."""

    body: HeadBody = field(default_factory=HeadBody)

    @classmethod
    def of_kind(cls, kind: Kind, arrays: dict[str, Array], kv_e4m3: bool = False) -> BodyOracle:
        exact = {name: array.astype(np.float64) for name, array in arrays.items()}
        exact |= {name: exact.pop(f"own.{name}") for name in TABLES if f"own.{name}" in exact}
        one = kind.body.norm is NormConvention.ONE_PLUS_W
        return cls(kind.model_config(), exact, one, kv_e4m3=kv_e4m3, body=kind.body)

    def body_input(self, token: int, hidden: Array) -> tuple[Array, Array]:
        parts = [
            self.rms(self.w["embed_tokens"][token], "pre_fc_norm_embedding"),
            self.rms(hidden, "pre_fc_norm_hidden"),
        ]
        x = self.w["fc"] @ np.concatenate(parts[::-1] if self.body.hidden_first else parts)
        return x, self.rms(x, "input_layernorm")

    def heads(self, x: Array, name: str, number: int) -> Array:
        """Queries or keys [number, hd], normed."""
        shape = (number, self.c.head_dim)
        match self.body.qk_norm:
            case QkNorm.NONE:
                return x.reshape(shape)
            case QkNorm.WHOLE:
                return self.rms(x.reshape(-1), name).reshape(shape)
            case QkNorm.PER_HEAD:
                return self.rms(x.reshape(shape), name)

    def append(self, normed: Array, position: int) -> None:
        nkv = self.c.num_key_value_heads
        k = self.heads(self.project("k", normed), "k_norm", nkv)
        self.keys.append(self.stored(self.turn(k, position)))
        self.values.append(self.stored(self.project("v", normed).reshape(nkv, self.c.head_dim)))

    def project(self, part: str, normed: Array) -> Array:
        return self.w[f"{part}_proj"] @ normed + (self.w[f"{part}_bias"] if self.body.qkv_bias else 0.0)

    def choose(self, logits: Array) -> tuple[Array, Array]:
        """(experts, weights): by softmax, or by sigmoid with the bias in the choice and not in the weights."""
        c, experts = self.c, len(logits)
        if c.scoring_func == "softmax":
            share = np.exp(logits - logits.max())
            scores = choice = share / share.sum()
        else:
            scores = 1.0 / (1.0 + np.exp(-logits))
            choice = scores + self.w["correction_bias"] if c.use_routing_bias else scores
        gaps = []
        if c.n_group > 1:
            worth = np.sort(choice.reshape(c.n_group, -1), axis=1)[:, -2:].sum(axis=1)
            best = np.argsort(-worth)
            gaps.append(worth[best[c.topk_group - 1]] - worth[best[c.topk_group]])
            open_ = np.isin(np.arange(experts) // (experts // c.n_group), best[: c.topk_group])
            choice = np.where(open_, choice, -np.inf)
        order = np.argsort(-choice, kind="stable")
        chosen = order[: c.num_experts_per_tok]
        if len(chosen) < experts:
            gaps.append(choice[chosen[-1]] - choice[order[len(chosen)]])
        self.router_gap = float(min(gaps, default=np.inf))
        weights = scores[chosen]
        return chosen, weights / (weights.sum() if c.norm_topk_prob else 1.0) * c.routed_scaling_factor

    def ffn(self, n: Array) -> Array:
        if "moe_gate" not in self.w:
            return self.swiglu(n)
        chosen, weights = self.choose(self.w["moe_gate"] @ n)
        routed = sum(weight * self.swiglu(n, f"experts[{e}].") for e, weight in zip(chosen, weights, strict=True))
        if self.body.shared_expert is SharedExpert.NONE:
            return np.asarray(routed)
        gate = 1.0
        if self.body.shared_expert is SharedExpert.GATED:
            gate = 1.0 / (1.0 + np.exp(-(self.w["shared_expert_gate"] @ n)))
        return routed + gate * self.swiglu(n, "shared_expert.")

    def step(self, token: int, hidden: Array, position: int) -> tuple[Array, Array]:
        c, nq = self.c, self.c.num_attention_heads
        x, normed = self.body_input(token, hidden)
        self.append(normed, position)
        projected = self.project("q", normed).reshape(nq, -1, c.head_dim)
        q = self.turn(self.heads(projected[:, 0], "q_norm", nq), position)
        k, v = np.stack(self.keys, axis=1), np.stack(self.values, axis=1)
        out = []
        for i in range(nq):
            of = i // (nq // c.num_key_value_heads)
            scores = k[of] @ q[i] / np.sqrt(c.head_dim)
            weights = np.exp(scores - scores.max())
            out.append(weights @ v[of] / weights.sum())
        attended = np.stack(out)
        if self.body.gated:
            attended = attended / (1.0 + np.exp(-projected[:, 1]))
        x = x + self.w["o_proj"] @ attended.reshape(-1)
        x = x + self.ffn(self.rms(x, "post_attn_layernorm"))
        last = self.rms(x, "norm")
        return self.w["lm_head"] @ last, last if self.body.chain_after_norm else x
