# SPDX-License-Identifier: AGPL-3.0-only
"""The tensors of DeepSeek-V4, under the checkpoint's names, and which formats each may have on the device.

h hidden_size, E experts, k of them a token, I their width, S hc_mult, V token ids. Pointers belong to whoever loaded
them. `V4FfnShape` is what a feed-forward part is checked against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....ops.moe_topk import MAX_EXPERTS, MAX_TOP_K
from ....runtime.errors import InvalidArgumentError, UnsupportedError
from ....runtime.gpu import DevicePtr
from ....runtime.sizes import count
from ...config import ModelConfig
from ...weight_map import DenseWeight, Mxfp4Weight
from .attention import V4AttentionShape, V4AttentionWeights
from .hyper import V4HyperShape, V4HyperWeights
from .layer import V4LayerWeights
from .projection import V4Weight

__all__ = [
    "V4BlockWeights",
    "V4ExpertWeights",
    "V4FfnShape",
    "V4FfnWeights",
    "V4MtpWeights",
    "V4RouterWeights",
    "V4Shapes",
    "V4TargetWeights",
]

_STEP = 8  # elements of a 16-byte load
_GROUP = 32  # elements that share a scale in MXFP4


@dataclass(frozen=True, slots=True)
class V4FfnShape:
    """The sizes, by default those of DeepSeek-V4-Flash; `vocab_size` counts the rows of a hash router's table.

    The shared expert is as wide as the others. InvalidArgumentError for sizes that the kernels do not take.
    """

    hidden_size: int = 4096
    num_experts: int = 256
    top_k: int = 6
    inter: int = 2048
    routed_scaling: float = 1.5
    swiglu_limit: float = 10.0
    norm_topk_prob: bool = True
    vocab_size: int = 129280

    def __post_init__(self) -> None:
        for name, limit in (("num_experts", MAX_EXPERTS), ("top_k", MAX_TOP_K)):
            if count(name, getattr(self, name)) > limit:
                raise InvalidArgumentError(name, getattr(self, name), f"the router takes {limit} at most")
        if self.top_k > self.num_experts:
            raise InvalidArgumentError("top_k", self.top_k, f"there are {self.num_experts} experts")
        for name in ("hidden_size", "inter"):
            if count(name, getattr(self, name)) % _STEP:
                limit_text = f"a multiple of {_STEP} is needed: rows are read 16 bytes a load"
                raise InvalidArgumentError(name, getattr(self, name), limit_text)
        count("vocab_size", self.vocab_size)
        for name in ("routed_scaling", "swiglu_limit"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise InvalidArgumentError(name, getattr(self, name), "a finite number above 0 is needed")


@dataclass(frozen=True, slots=True)
class V4RouterWeights:
    """gate BF16 [E, h], and what chooses experts: `bias` FP32 [E] (learned; it is in the choice and not in the
    weights) or `tid2eid` i64 [V, k] (hash: the experts of each token id). The other one is NULL."""

    gate: DenseWeight
    bias: DevicePtr = DevicePtr.NULL
    tid2eid: DevicePtr = DevicePtr.NULL

    @property
    def is_hash(self) -> bool:
        """Whether the token id alone chooses the experts."""
        return not self.tid2eid.is_null

    def check(self, shape: V4FfnShape, name: str) -> None:
        """InvalidArgumentError for a gate that does not fit, and unless there is one of bias and tid2eid."""
        self.gate.check_shape(f"{name}.weight", shape.num_experts, shape.hidden_size)
        if self.bias.is_null == self.tid2eid.is_null:
            limit = "one of them is needed: a learned router has a bias, a hash router a table"
            raise InvalidArgumentError(f"{name}.bias and {name}.tid2eid", (self.bias, self.tid2eid), limit)


@dataclass(frozen=True, slots=True)
class V4ExpertWeights:
    """A SwiGLU expert: w1 (gate) and w3 (up) [I, h], w2 (down) [h, I]."""

    w1: V4Weight
    w3: V4Weight
    w2: V4Weight

    def check(self, shape: V4FfnShape, name: str) -> None:
        """InvalidArgumentError for the first tensor that is NULL or of another shape."""
        for part in ("w1", "w3"):
            getattr(self, part).check_shape(f"{name}.{part}", shape.inter, shape.hidden_size)
        self.w2.check_shape(f"{name}.w2", shape.hidden_size, shape.inter)


@dataclass(frozen=True, slots=True)
class V4FfnWeights:
    """A router, E experts, all BF16 or all MXFP4, and a shared one, each of whose tensors may have a format of its
    own."""

    router: V4RouterWeights
    experts: Sequence[V4ExpertWeights]
    shared: V4ExpertWeights

    def check(self, shape: V4FfnShape, name: str) -> None:
        """InvalidArgumentError for the first tensor that does not fit, UnsupportedError for another format."""
        self.router.check(shape, f"{name}.gate")
        if len(self.experts) != shape.num_experts:
            raise InvalidArgumentError(f"{name}.experts", len(self.experts), f"{shape.num_experts} are needed")
        for number, expert in enumerate(self.experts):
            expert.check(shape, f"{name}.experts.{number}")
        self.shared.check(shape, f"{name}.shared_experts")
        kinds = {type(getattr(expert, part)) for expert in self.experts for part in ("w1", "w3", "w2")}
        if kinds not in ({DenseWeight}, {Mxfp4Weight}):
            found = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise UnsupportedError(
                f"{name}.experts as {found} are not offered: make them all DenseWeight or Mxfp4Weight"
            )
        if Mxfp4Weight in kinds:
            for what in ("hidden_size", "inter"):
                if (size := getattr(shape, what)) % _GROUP:
                    raise InvalidArgumentError(what, size, f"a multiple of {_GROUP} is needed by MXFP4 experts")


@dataclass(frozen=True, slots=True)
class V4Shapes:
    """The shapes of all parts of a block."""

    attention: V4AttentionShape
    hyper: V4HyperShape
    ffn: V4FfnShape

    @classmethod
    def of(cls, config: ModelConfig) -> V4Shapes:
        """Those that a configuration gives. UnsupportedError for a shared expert of another width than the routed ones;
        InvalidArgumentError for sizes that the kernels do not take."""
        if config.shared_expert_intermediate_size != config.moe_intermediate_size:
            found = f"{config.shared_expert_intermediate_size}, and of a routed one {config.moe_intermediate_size}"
            raise UnsupportedError(f"the width of the shared expert is {found}: one shared expert as wide is offered")
        attention = V4AttentionShape(
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            rope_dim=config.qk_rope_head_dim,
            q_lora_rank=config.q_lora_rank,
            o_groups=config.o_groups,
            o_lora_rank=config.o_lora_rank,
            window=config.sliding_window,
            rope_theta=config.rope_theta,
            norm_eps=config.rms_norm_eps,
        )
        hyper = V4HyperShape(
            hidden_size=config.hidden_size,
            hc_mult=config.hc_mult,
            sinkhorn_iters=config.hc_sinkhorn_iters,
            norm_eps=config.rms_norm_eps,
            hc_eps=config.hc_eps,
        )
        ffn = V4FfnShape(
            hidden_size=config.hidden_size,
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            inter=config.moe_intermediate_size,
            routed_scaling=config.routed_scaling_factor,
            swiglu_limit=config.swiglu_limit,
            norm_topk_prob=config.norm_topk_prob,
            vocab_size=config.vocab_size,
        )
        return cls(attention, hyper, ffn)


@dataclass(frozen=True, slots=True)
class V4BlockWeights:
    """A decoder layer: connections and norms, attention, feed-forward part."""

    layer: V4LayerWeights
    attention: V4AttentionWeights
    ffn: V4FfnWeights

    def check(self, shapes: V4Shapes, name: str) -> None:
        """InvalidArgumentError or UnsupportedError for the first tensor that does not fit."""
        self.layer.check(shapes.attention.hidden_size, name)
        self.attention.check(shapes.attention, f"{name}.attn")
        self.ffn.check(shapes.ffn, f"{name}.ffn")


@dataclass(frozen=True, slots=True)
class V4MtpWeights:
    """An MTP module: a block with a learned router, and what is around it. Norms BF16 [h], used as they are; e_proj (of
    the embedding) and h_proj (of the hidden streams) [h, h]; hc_head the head of hyper-connections."""

    block: V4BlockWeights
    enorm: DenseWeight
    hnorm: DenseWeight
    e_proj: V4Weight
    h_proj: V4Weight
    norm: DenseWeight
    hc_head: V4HyperWeights

    def check(self, shapes: V4Shapes, name: str) -> None:
        """InvalidArgumentError or UnsupportedError for the first tensor that does not fit, or a hash router."""
        h = shapes.attention.hidden_size
        for part in ("enorm", "hnorm", "norm"):
            getattr(self, part).check_shape(f"{name}.{part}", h)
        for part in ("e_proj", "h_proj"):
            getattr(self, part).check_shape(f"{name}.{part}", h, h)
        self.hc_head.check(f"{name}.hc_head")
        if self.block.ffn.router.is_hash:
            raise UnsupportedError(f"{name}.ffn.gate.tid2eid: the router of an MTP module is learned, never a hash")
        self.block.check(shapes, name)


@dataclass(frozen=True, slots=True)
class V4TargetWeights:
    """A target: embed and head BF16 [V, h], the final norm [h], the head of hyper-connections, the blocks in order."""

    embed: DenseWeight
    blocks: tuple[V4BlockWeights, ...]
    hc_head: V4HyperWeights
    norm: DenseWeight
    head: DenseWeight
