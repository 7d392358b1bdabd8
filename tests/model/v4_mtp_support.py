# SPDX-License-Identifier: AGPL-3.0-only
"""A small random DeepSeek-V4 draft head on a backend, the same in FP64, and the sequence that it drafts for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spark_py.model.config import ModelConfig
from spark_py.model.layer import ForwardContext
from spark_py.model.layers.deepseek_v4 import (
    V4AttentionWeights,
    V4BlockWeights,
    V4ExpertWeights,
    V4FfnWeights,
    V4HyperWeights,
    V4LayerWeights,
    V4MtpWeights,
    V4RouterWeights,
)
from spark_py.model.layers.deepseek_v4_mtp import DeepseekV4MtpHead
from spark_py.model.layers.hidden_mode import HiddenMode
from spark_py.model.layers.mtp_head import MtpProposerState
from spark_py.model.levers import ModelLevers
from spark_py.model.row_policy import catchup_range
from spark_py.model.weight_map import DenseWeight
from spark_py.runtime.buffers import BufferArena
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.runtime.kv_cache import KvCacheDtype
from spark_py.testing import BF16, F32, Array, download, f64, upload
from tests.kernels import v4_oracle
from tests.model import v4_tiny
from tests.model.v4_hyper_support import head_of

BLOCK = 16
RAW: dict[str, Any] = v4_tiny.CONFIG | {
    "vocab_size": 203,
    "num_hidden_layers": 1,
    "layer_types": ["sliding_attention"],
    "mlp_layer_types": ["moe"],
    "sliding_window": 20,
}
"""A window that is no multiple of a block, in a vocabulary that is no multiple of 32."""
MODES = list(HiddenMode)


def mtp_tensors(rng: np.random.Generator, raw: dict[str, Any]) -> dict[str, Array]:
    """Those of mtp.0 without its prefix, and the tables."""
    found = v4_tiny.tensors(rng, raw)
    tables = {name: found[name] for name in ("embed.weight", "head.weight")}
    return tables | {name.removeprefix("mtp.0."): value for name, value in found.items() if name.startswith("mtp.0.")}


def to_device(gpu: GpuBackend, w: dict[str, Array], experts: int) -> V4MtpWeights:
    """The module, all matrices BF16."""

    def dense(name: str) -> DenseWeight:
        return DenseWeight(upload(gpu, w[f"{name}.weight"]), w[f"{name}.weight"].shape)

    def hyper(name: str) -> V4HyperWeights:
        return V4HyperWeights(*(upload(gpu, w[f"{name}_{part}"]) for part in ("fn", "scale", "base")))

    def expert(name: str) -> V4ExpertWeights:
        return V4ExpertWeights(*(dense(f"ffn.{name}.{part}") for part in ("w1", "w3", "w2")))

    names = ("wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "wo_a", "wo_b")
    attention = V4AttentionWeights(
        **{name: dense(f"attn.{name}") for name in names}, attn_sink=upload(gpu, w["attn.attn_sink"])
    )
    layer = V4LayerWeights(hyper("hc_attn"), dense("attn_norm"), hyper("hc_ffn"), dense("ffn_norm"))
    router = V4RouterWeights(dense("ffn.gate"), upload(gpu, w["ffn.gate.bias"]))
    ffn = V4FfnWeights(router, [expert(f"experts.{e}") for e in range(experts)], expert("shared_experts"))
    around = {name: dense(name) for name in ("enorm", "hnorm", "e_proj", "h_proj", "norm")}
    return V4MtpWeights(V4BlockWeights(layer, attention, ffn), **around, hc_head=hyper("hc_head"))


@dataclass
class Rig:
    """A head with everything that a propose needs. `raw` and `arrays` are what it was made of."""

    gpu: GpuBackend
    raw: dict[str, Any]
    config: ModelConfig
    arrays: dict[str, Array]
    head: DeepseekV4MtpHead
    ctx: ForwardContext
    stream: int
    stacked: bool

    def state(self) -> MtpProposerState:
        return self.head.alloc_state(self.gpu)

    def a_stack(self, rng: np.random.Generator) -> Array:
        """Random streams of one token, FP32 [S, h]."""
        found: Array = rng.standard_normal((self.raw["hc_mult"], self.raw["hidden_size"])).astype(F32)
        return found

    def propose(
        self, state: MtpProposerState, token: int, stack: Array, position: int, n: int, **more: Any
    ) -> list[int]:
        ptr = upload(self.gpu, stack if self.stacked else stack[0].astype(BF16))
        hidden, stacks = (DevicePtr.NULL, ptr) if self.stacked else (ptr, None)
        try:
            return self.head.propose(
                token, hidden, position, n, state, self.ctx, self.stream, target_hidden_stack=stacks, **more
            )
        finally:
            self.gpu.free(ptr)

    def feed(
        self, state: MtpProposerState, tokens: Sequence[int], stacks: Array, row_base: int = 0, pos_base: int = 1
    ) -> int:
        ptr = upload(self.gpu, stacks if self.stacked else stacks[:, 0].astype(BF16))
        hidden, given = (DevicePtr.NULL, ptr) if self.stacked else (ptr, None)
        try:
            return self.head.catchup_drafter(tokens, hidden, row_base, pos_base, state, self.ctx, self.stream, given)
        finally:
            self.gpu.free(ptr)

    def rows(self, state: MtpProposerState) -> list[bytes]:
        """The bytes of the state's rows, read through its block table."""
        self.gpu.synchronize(self.stream)
        kv = self.head.kv_cache
        blocks = [kv.read_block(0, block)[0].reshape(BLOCK, -1) for block in state.block_table]
        return [row.tobytes() for row in np.concatenate(blocks)[: state.seq_len]] if blocks else []

    def snapshot(self, state: MtpProposerState) -> Any:
        """All that a state is, and what its head has free."""
        return state.snapshot(), list(state.block_table), self.head.kv_cache.num_free_blocks()

    def logits(self) -> Array:
        return f64(download(self.gpu, self.ctx.buffers.logits(), (self.head.draft_vocab,), BF16))

    def streams(self) -> Array:
        """The head's own streams after its last row, FP32 [S, h]."""
        shape = (self.raw["hc_mult"], self.raw["hidden_size"])
        return download(self.gpu, self.ctx.buffers.hc_streams(), shape, F32)

    def hidden(self) -> Array:
        """The head's collapsed row after its last row, BF16 [h]."""
        return download(self.gpu, self.ctx.buffers.hidden_states(), (self.raw["hidden_size"],), BF16)


def make_rig(
    gpu: GpuBackend,
    rng: np.random.Generator,
    mode: HiddenMode = HiddenMode.REFERENCE,
    *,
    levers: ModelLevers | None = None,
    max_seq_len: int = 256,
    mtp_vocab_size: int = 0,
    kv_dtype: KvCacheDtype = KvCacheDtype.BF16,
    head_class: type[DeepseekV4MtpHead] = DeepseekV4MtpHead,
    arrays: dict[str, Array] | None = None,
    arena_seq_len: int | None = None,
    **changes: Any,
) -> Rig:
    """A head of random weights; every buffer and the pool hold NaN. The arena is for `arena_seq_len` tokens, by default
    the head's."""
    raw, levers = RAW | changes, levers or ModelLevers()
    config = ModelConfig.from_dict(raw)
    arrays = arrays or mtp_tensors(rng, raw)
    buffers = BufferArena(config, 4, arena_seq_len or max_seq_len, 16, 4, gpu)
    for name, nbytes in buffers.sizes().items():
        if nbytes:
            gpu.memset(buffers.pointer(name), 0xFF, nbytes)
    tables = [
        DenseWeight(upload(gpu, arrays[f"{name}.weight"]), arrays[f"{name}.weight"].shape) for name in ("embed", "head")
    ]
    head = head_class(
        to_device(gpu, arrays, raw["n_routed_experts"]), *tables, config, gpu, mtp_vocab_size, max_seq_len, levers,
        kv_dtype=kv_dtype, hidden_mode=mode,
    )  # fmt: skip
    gpu.memset(head.kv_cache.k_pool_ptr(0), 0xFF, head.kv_cache.total_bytes())
    ctx = ForwardContext(buffers, gpu, config, levers)
    return Rig(gpu, raw, config, arrays, head, ctx, gpu.default_stream(), mode is HiddenMode.REFERENCE)


# ---------------------------------------------------------------- the same in FP64


@dataclass
class Oracle:
    """The module's formulas, from the published code: `rows` are the block's inputs [S, h], one a token. The arguments
    of `row` name misreadings."""

    raw: dict[str, Any]
    w: dict[str, Array]
    rows: list[Array] = field(default_factory=list)
    gaps: list[Array] = field(default_factory=list)

    @classmethod
    def of(cls, rig: Rig) -> Oracle:
        return cls(rig.raw, {name: f64(value) for name, value in rig.arrays.items()})

    def row(self, token: int, stack: Array, *, norm_over_all: bool = False, swapped: bool = False) -> Array:
        """Z_s = W_e norm(e) + W_h norm(X_s)."""
        eps, x = self.raw["rms_norm_eps"], f64(stack)
        e = v4_oracle.rms(self.w["embed.weight"][token], eps, self.w["enorm.weight"])
        if norm_over_all:
            hidden = v4_oracle.rms(x.reshape(-1), eps).reshape(x.shape) * self.w["hnorm.weight"]
        else:
            hidden = v4_oracle.rms(x, eps, self.w["hnorm.weight"])
        first, second = ("h_proj", "e_proj") if swapped else ("e_proj", "h_proj")
        found: Array = self.w[f"{first}.weight"] @ e + hidden @ self.w[f"{second}.weight"].T
        return found

    def step(self, token: int, stack: Array, **misread: bool) -> tuple[Array, Array, Array]:
        """(logits [V], streams [S, h], collapsed row [h]) after one more row."""
        self.rows.append(self.row(token, stack, **misread))
        streams = v4_tiny.oracle_block(self.raw, self.w, "", np.stack(self.rows), [0], self.gaps)[-1]
        shape = v4_tiny.hyper_shape(self.raw)
        hidden = head_of(streams, v4_tiny.site_of(self.w, "hc_head"), shape)
        normed = v4_oracle.rms(hidden, self.raw["rms_norm_eps"], self.w["norm.weight"])
        return self.w["head.weight"] @ normed, streams, hidden


def equal_streams(hidden: Array, hc_mult: int) -> Array:
    """What the collapsed mode makes of one row: FP32 [S, h]."""
    return np.repeat(hidden.astype(F32)[None], hc_mult, 0)


# ---------------------------------------------------------------- a sequence


class Text:
    """Tokens that the target confirmed, each with streams of its own; the last token is not processed yet."""

    def __init__(self, rig: Rig, rng: np.random.Generator, prompt: int) -> None:
        self.rig, self.rng, self.vocab = rig, rng, rig.raw["vocab_size"]
        self.tokens = [int(t) for t in rng.integers(0, self.vocab, prompt + 1)]
        self.stacks = [rig.a_stack(rng) for _ in range(prompt)]

    @property
    def position(self) -> int:
        return len(self.stacks)

    def propose(self, state: MtpProposerState, n: int, **more: Any) -> list[int]:
        return self.rig.propose(state, self.tokens[-1], self.stacks[-1], self.position, n, **more)

    def confirm(self, drafts: list[int]) -> None:
        """The pending token and `drafts` are processed now; a random token is next."""
        self.stacks += [self.rig.a_stack(self.rng) for _ in range(1 + len(drafts))]
        self.tokens += [*drafts, int(self.rng.integers(0, self.vocab))]

    def prefill(self, state: MtpProposerState) -> int:
        """Feed a fresh state everything that is processed."""
        return self.rig.feed(state, self.tokens[:-1], np.stack(self.stacks))

    def catch_up(self, state: MtpProposerState) -> list[int]:
        """Feed what a propose must find; gives the keys."""
        head = self.rig.head
        missing = catchup_range(head.last_pair_key(state), self.position, 0, len(self.stacks))
        if missing is None:
            return []
        first, n = missing
        tokens, stacks = self.tokens[first : first + n + 1], np.stack(self.stacks[first : first + n])
        assert self.rig.feed(state, tokens, stacks, head.drafter_rows(state), first + 1) == n
        return list(range(first, first + n))
