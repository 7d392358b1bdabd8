# SPDX-License-Identifier: AGPL-3.0-only
"""What differs between the draft heads of the families. Rust has the Qwen3-Next head alone; here that is the default.

Sources: the modelling files and `MtpModel` of transformers 5.24 (minimax_m2, glm4_moe, deepseek_v3).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ....runtime.errors import UnsupportedError
from ...config import ModelConfig
from .types import NormConvention

__all__ = ["HeadBody", "QkNorm", "SharedExpert"]


class QkNorm(Enum):
    """What the RMS norm of queries and keys runs over: each head, the vector of all heads, or there is none."""

    PER_HEAD = "per_head"
    WHOLE = "per_layer"
    NONE = "none"


class SharedExpert(Enum):
    """The expert that sees every token: weighed by a sigmoid of its own, added as it is, or not there."""

    GATED = "gated"
    PLAIN = "plain"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class HeadBody:
    """A head's shape beyond its sizes. What the configuration says in numbers (RoPE, routing, widths) is not here.

    gated: the query projection has a gate a head, whose sigmoid weighs the attention's output. hidden_first: the first
    columns of `fc` act on the hidden row, not on the embedding. qkv_bias: the three projections of attention have a
    bias each, which a head with gates has not. chain_after_norm: the next draft, or module, goes on
    from the row behind the final norm; else from the residual stream, as the engine does.
    """

    gated: bool = True
    qk_norm: QkNorm = QkNorm.PER_HEAD
    norm: NormConvention = NormConvention.ONE_PLUS_W
    shared_expert: SharedExpert = SharedExpert.GATED
    hidden_first: bool = False
    chain_after_norm: bool = False
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        if self.qkv_bias and self.gated:
            raise UnsupportedError("a head with gates whose query projection has a bias is not offered")

    @classmethod
    def of(cls, config: ModelConfig) -> HeadBody:
        """The body of a configuration's family. UnsupportedError for multi-head latent attention."""
        if config.kv_lora_rank:
            raise UnsupportedError(
                f"a draft head with multi-head latent attention (kv_lora_rank {config.kv_lora_rank}) is not offered: "
                "DeepSeek-V3 makes keys and values of a head from the latent row, which DeepSeek-V4's attention, whose "
                "latent row is key and value at once, does not"
            )
        qwen = config.model_type not in _CHAIN_AFTER_NORM
        shared = SharedExpert.PLAIN if config.shared_expert_intermediate_size else SharedExpert.NONE
        return cls(
            gated=config.attn_gated,
            qk_norm=QkNorm(config.qk_norm_type) if config.use_qk_norm else QkNorm.NONE,
            norm=NormConvention.ONE_PLUS_W if qwen else NormConvention.PLAIN,
            shared_expert=SharedExpert.GATED if qwen else shared,
            hidden_first=config.mtp_hidden_states_first,
            chain_after_norm=_CHAIN_AFTER_NORM.get(config.model_type, False),
            qkv_bias=config.attention_bias,
        )


_CHAIN_AFTER_NORM = {"minimax_m2": False, "glm4_moe": True}
"""The families with plain norm weights and no gate at the shared expert. Nobody has published MiniMax-M2's modules."""
