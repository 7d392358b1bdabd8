# SPDX-License-Identifier: AGPL-3.0-only
"""What the model tests share: a small random head on a backend, and the same head in FP64 NumPy.

The oracle is written from the formulas of the model and shares no code with the package: no reference kernel, no
launcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from spark_py.model.config import ModelConfig
from spark_py.model.layer import ForwardContext
from spark_py.model.layers.mtp_head import HeadBody, MtpHead, MtpProposerState, MtpQuantization
from spark_py.model.levers import ModelLevers
from spark_py.model.weight_map import DenseExpertWeight, DenseWeight, MtpWeights, QuantizedWeight
from spark_py.runtime.buffers import BufferArena
from spark_py.runtime.gpu import DevicePtr, GpuBackend

BF16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
Array: TypeAlias = "np.ndarray[Any, Any]"

RAW: dict[str, Any] = {
    "model_type": "qwen3_next",
    "hidden_size": 64,
    "vocab_size": 203,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "intermediate_size": 96,
    "layer_types": ["full_attention", "full_attention"],
    "mlp_only_layers": [0, 1],
}
"""A config.json whose dimensions all differ where they may, so that a mixed-up one shows."""


SPARSE: dict[str, Any] = {
    "mlp_only_layers": [],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
}
"""What makes of RAW a config with experts. Heads are given them by `random_weights(..., moe=True)`."""
FFN = ("gate_proj", "up_proj", "down_proj")


def config(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(RAW | changes)


def random_weights(rng: np.random.Generator, c: ModelConfig, moe: bool = False) -> dict[str, Array]:
    """BF16 tensors of a head and its tables, under the names of MtpWeights; those of experts are `experts[i].gate_proj`
    and so on. Norm weights are random too, and not small: one that is forgotten, doubled or taken for another must
    show."""
    h, nq, nkv, hd, inter = (
        c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.intermediate_size
    )  # fmt: skip

    def matrix(n: int, k: int) -> Array:
        return (rng.standard_normal((n, k)) / np.sqrt(k)).astype(BF16)

    def norm(n: int) -> Array:
        return (0.5 * rng.standard_normal(n)).astype(BF16)

    def ffn(prefix: str, width: int) -> dict[str, Array]:
        shapes = ((width, h), (width, h), (h, width))
        return {f"{prefix}{name}": matrix(*shape) for name, shape in zip(FFN, shapes, strict=True)}

    common = {
        "pre_fc_norm_embedding": norm(h),
        "pre_fc_norm_hidden": norm(h),
        "fc": matrix(h, 2 * h),
        "input_layernorm": norm(h),
        "q_proj": matrix(2 * nq * hd, h),
        "k_proj": matrix(nkv * hd, h),
        "v_proj": matrix(nkv * hd, h),
        "o_proj": matrix(h, nq * hd),
        "q_norm": norm(hd),
        "k_norm": norm(hd),
        "post_attn_layernorm": norm(h),
        "norm": norm(h),
        "embed_tokens": rng.standard_normal((c.vocab_size, h)).astype(BF16),
        "lm_head": matrix(c.vocab_size, h),
    }
    if not moe:
        return common | ffn("", inter)
    # Logits of the router that are well apart, so that few choices hang on a rounding.
    experts = {"moe_gate": (3 * matrix(c.num_experts, h)).astype(BF16), "shared_expert_gate": matrix(1, h)}
    for i in range(c.num_experts):
        experts |= ffn(f"experts[{i}].", c.moe_intermediate_size)
    return common | experts | ffn("shared_expert.", c.shared_expert_intermediate_size)


def upload(gpu: GpuBackend, array: Array) -> DevicePtr:
    data = np.ascontiguousarray(array)
    ptr = gpu.alloc(data.nbytes)
    gpu.copy_h2d(data.reshape(-1).view(np.uint8), ptr)
    return ptr


def download(gpu: GpuBackend, ptr: DevicePtr, shape: tuple[int, ...], dtype: np.dtype[Any] = BF16) -> Array:
    raw = np.empty(int(np.prod(shape)) * dtype.itemsize, np.uint8)
    gpu.copy_d2h(ptr, raw)
    return raw.view(dtype).reshape(shape)


def dense(gpu: GpuBackend, array: Array) -> DenseWeight:
    return DenseWeight(upload(gpu, array), array.shape)


def mtp_weights(gpu: GpuBackend, arrays: dict[str, Array]) -> MtpWeights:
    """The tensors of `random_weights` on the device: with a dense FFN, or with experts."""
    on_device = {name: dense(gpu, a) for name, a in arrays.items() if name not in ("embed_tokens", "lm_head")}

    def ffn(prefix: str) -> DenseExpertWeight:
        return DenseExpertWeight(*(on_device.pop(f"{prefix}{name}") for name in FFN))

    if "moe_gate" not in on_device:
        return MtpWeights(dense_ffn=ffn(""), **on_device)
    shared, count = ffn("shared_expert."), len(arrays["moe_gate"])
    experts = [ffn(f"experts[{i}].") for i in range(count)]
    return MtpWeights(**on_device, shared_expert=shared, experts=experts)


@dataclass
class Rig:
    """A head on a backend with everything a propose needs."""

    gpu: GpuBackend
    config: ModelConfig
    arrays: dict[str, Array]
    head: MtpHead
    ctx: ForwardContext
    stream: int
    hidden_ptrs: list[DevicePtr] = field(default_factory=list)

    def state(self) -> MtpProposerState:
        return self.head.alloc_state(self.gpu)

    def put(self, rows: Array) -> DevicePtr:
        """BF16 rows on the device."""
        return upload(self.gpu, rows.astype(BF16))

    def propose(
        self, state: MtpProposerState, token: int, hidden: Array, position: int, n: int, **more: Any
    ) -> list[int]:
        ptr = self.put(hidden)
        try:
            return self.head.propose(token, ptr, position, n, state, self.ctx, self.stream, **more)
        finally:
            self.gpu.free(ptr)

    def feed(
        self, state: MtpProposerState, tokens: Sequence[int], hidden: Array, row_base: int = 0, pos_base: int = 1
    ) -> int:
        ptr = self.put(hidden)
        try:
            return self.head.catchup_drafter(tokens, ptr, row_base, pos_base, state, self.ctx, self.stream)
        finally:
            self.gpu.free(ptr)

    def rows(self, state: MtpProposerState) -> tuple[Array, Array]:
        """K and V of the state's rows, [rows, nkv, hd] each in the pool's format, read through its block table."""
        self.gpu.synchronize(self.stream)
        kv, c = self.head.kv_cache, self.config
        shape = (kv.block_size(), c.num_key_value_heads, c.head_dim)
        sides = []
        for side in (0, 1):
            stored = BF16 if self.head.kv_bf16 else E4M3
            blocks = [kv.read_block(0, block)[side].view(stored).reshape(shape) for block in state.block_table]
            whole = np.concatenate(blocks) if blocks else np.empty((0, *shape[1:]), stored)
            sides.append(whole[: state.seq_len])
        return sides[0], sides[1]

    def logits(self) -> Array:
        """The last logits, FP64."""
        return download(self.gpu, self.ctx.buffers.logits(), (self.head.draft_vocab,)).astype(np.float64)

    def hidden(self) -> Array:
        """The drafter's last hidden row, FP64."""
        return download(self.gpu, self.ctx.buffers.hidden_states(), (self.config.hidden_size,)).astype(np.float64)


def make_rig(
    gpu: GpuBackend,
    rng: np.random.Generator,
    *,
    head_class: type[MtpHead] = MtpHead,
    levers: ModelLevers | None = None,
    body: HeadBody | None = None,
    mtp_vocab_size: int = 0,
    max_seq_len: int = 256,
    main_kv_blocks: int = 1 << 20,
    arrays: dict[str, Array] | None = None,
    quant: MtpQuantization = MtpQuantization.BF16,
    lm_head: DenseWeight | QuantizedWeight | None = None,
    weights: MtpWeights | None = None,
    made: ModelConfig | None = None,
    **changes: Any,
) -> Rig:
    """A head of `arrays`, random ones by default. `weights` and `lm_head` take the place of what is made of them,
    `made` that of the config."""
    c = made or config(**changes)
    levers = levers or ModelLevers()
    arrays = arrays or random_weights(rng, c)
    buffers = BufferArena(c, 8, max_seq_len, 16, 4, gpu)
    for name, nbytes in buffers.sizes().items():
        if nbytes:
            gpu.memset(buffers.pointer(name), 0xFF, nbytes)  # NaN, where nobody wrote
    head = head_class(
        weights or mtp_weights(gpu, arrays),
        dense(gpu, arrays["embed_tokens"]),
        lm_head or dense(gpu, arrays["lm_head"]),
        None,
        c,
        gpu,
        quant,
        mtp_vocab_size,
        max_seq_len,
        main_kv_blocks,
        levers,
        body=body,
    )
    for pool in (head.kv_cache.k_pool_ptr(0), head.kv_cache.v_pool_ptr(0)):
        gpu.memset(pool, 0xFF, head.kv_cache.total_bytes() // 2)
    return Rig(gpu, c, arrays, head, ForwardContext(buffers, gpu, c, levers), gpu.default_stream())


# ---------------------------------------------------------------- the oracle


@dataclass
class Oracle:
    """One head in FP64: `step` is one row through it, rows being kept in `keys` and `values`. No store is rounded."""

    c: ModelConfig
    w: dict[str, Array]
    one_plus_w: bool = True
    keys: list[Array] = field(default_factory=list)
    values: list[Array] = field(default_factory=list)
    kv_e4m3: bool = False
    router_gap: float = np.inf
    """By how much the last chosen expert's logit was above the first that was not, in the last step."""

    @classmethod
    def of(cls, c: ModelConfig, arrays: dict[str, Array], one_plus_w: bool = True, kv_e4m3: bool = False) -> Oracle:
        return cls(c, {name: a.astype(np.float64) for name, a in arrays.items()}, one_plus_w, kv_e4m3=kv_e4m3)

    def stored(self, x: Array) -> Array:
        """K or V as the pool keeps it: FP64, or E4M3 saturating at 448."""
        return np.clip(x, -448, 448).astype(E4M3).astype(np.float64) if self.kv_e4m3 else x

    def copy(self) -> Oracle:
        return replace(self, keys=list(self.keys), values=list(self.values))

    def rms(self, x: Array, name: str) -> Array:
        weight = self.w[name] + 1.0 if self.one_plus_w else self.w[name]
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.c.rms_norm_eps) * weight

    def turn(self, x: Array, position: int) -> Array:
        """Rotary embedding of [heads, hd]: element i < rot / 2 pairs with i + rot / 2, as a complex number."""
        half = self.c.rotary_dim() // 2
        angle = position / self.c.rope_theta ** (np.arange(half) / half)
        pair = (x[:, :half] + 1j * x[:, half : 2 * half]) * np.exp(1j * angle)
        return np.concatenate([pair.real, pair.imag, x[:, 2 * half :]], axis=1)

    def body_input(self, token: int, hidden: Array) -> tuple[Array, Array]:
        e = self.rms(self.w["embed_tokens"][token], "pre_fc_norm_embedding")
        u = self.rms(hidden, "pre_fc_norm_hidden")
        x = self.w["fc"][:, : self.c.hidden_size] @ e + self.w["fc"][:, self.c.hidden_size :] @ u
        return x, self.rms(x, "input_layernorm")

    def append(self, normed: Array, position: int) -> None:
        shape = (self.c.num_key_value_heads, self.c.head_dim)
        k = self.rms((self.w["k_proj"] @ normed).reshape(shape), "k_norm")
        self.keys.append(self.stored(self.turn(k, position)))
        self.values.append(self.stored((self.w["v_proj"] @ normed).reshape(shape)))

    def feed(self, tokens: Sequence[int], hidden: Array, pos_base: int = 1) -> None:
        """Rows for the pairs (tokens[r + 1], hidden[r]) at pos_base + r."""
        for r, token in enumerate(tokens[1:]):
            self.append(self.body_input(token, hidden[r])[1], pos_base + r)

    def swiglu(self, n: Array, prefix: str = "") -> Array:
        gate, up = self.w[f"{prefix}gate_proj"] @ n, self.w[f"{prefix}up_proj"] @ n
        return self.w[f"{prefix}down_proj"] @ (gate / (1.0 + np.exp(-gate)) * up)

    def ffn(self, n: Array) -> Array:
        """The dense FFN, or the experts that the router likes best, and the shared one."""
        if "moe_gate" not in self.w:
            return self.swiglu(n)
        logits = self.w["moe_gate"] @ n
        order = np.argsort(-logits, kind="stable")
        chosen = order[: self.c.num_experts_per_tok]
        if len(chosen) < len(order):
            self.router_gap = float(logits[chosen[-1]] - logits[order[len(chosen)]])
        share = np.exp(logits - logits.max())
        share /= share[chosen].sum() if self.c.norm_topk_prob else share.sum()
        routed = sum(share[e] * self.swiglu(n, f"experts[{e}].") for e in chosen)
        seen = 1.0 / (1.0 + np.exp(-(self.w["shared_expert_gate"] @ n)))
        return routed + seen * self.swiglu(n, "shared_expert.")

    def step(self, token: int, hidden: Array, position: int) -> tuple[Array, Array]:
        """(logits, hidden row for the next draft)."""
        c = self.c
        x, normed = self.body_input(token, hidden)
        self.append(normed, position)
        q_and_gate = (self.w["q_proj"] @ normed).reshape(c.num_attention_heads, 2, c.head_dim)
        q = self.turn(self.rms(q_and_gate[:, 0], "q_norm"), position)
        k, v = np.stack(self.keys, axis=1), np.stack(self.values, axis=1)
        share = c.num_attention_heads // c.num_key_value_heads
        heads = []
        for i in range(c.num_attention_heads):
            scores = k[i // share] @ q[i] / np.sqrt(c.head_dim)
            weights = np.exp(scores - scores.max())
            heads.append(weights @ v[i // share] / weights.sum())
        gated = np.stack(heads) / (1.0 + np.exp(-q_and_gate[:, 1]))
        x = x + self.w["o_proj"] @ gated.reshape(-1)
        x = x + self.ffn(self.rms(x, "post_attn_layernorm"))
        return self.w["lm_head"] @ self.rms(x, "norm"), x


def relative_l2(found: Array, wanted: Array) -> float:
    return float(np.linalg.norm(found.astype(np.float64) - wanted) / np.linalg.norm(wanted))


def a_hidden(rig: Rig, rng: np.random.Generator) -> Array:
    """A random hidden row, BF16 [h]."""
    return rng.standard_normal(rig.config.hidden_size).astype(BF16)
