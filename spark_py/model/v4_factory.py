# SPDX-License-Identifier: AGPL-3.0-only
"""Draft heads of a DeepSeek-V4 checkpoint in either hidden mode. Twin of the proposer's part of `factory`."""

from __future__ import annotations

from contextlib import ExitStack

from ..runtime.gpu import GpuBackend
from ..runtime.kv_cache import KvCacheDtype
from ..runtime.weights import WeightStore
from .config import ModelConfig
from .layers.deepseek_v4 import V4MtpWeights, V4TargetWeights
from .layers.deepseek_v4_mtp import DeepseekV4MtpHead
from .layers.hidden_mode import HiddenMode
from .layers.mtp_head import MtpQuantization
from .levers import ModelLevers
from .proposer_factory import ProposerFactory
from .weight_loader import load_v4_mtp_weights

__all__ = ["V4MtpFactory"]


class V4MtpFactory(ProposerFactory):
    """Makes heads that share the module's tensors, which `store` uploads with the first of them, and the target's
    embedding and LM head. Heads live as long as `stack`."""

    def __init__(
        self,
        store: WeightStore,
        config: ModelConfig,
        gpu: GpuBackend,
        weights: V4TargetWeights,
        max_seq_len: int,
        stack: ExitStack,
    ) -> None:
        self._store, self._config, self._gpu, self._weights = store, config, gpu, weights
        self._max_seq_len, self._stack = max_seq_len, stack
        self._module: V4MtpWeights | None = None

    def hidden_modes(self) -> tuple[HiddenMode, ...]:
        """Both; the target keeps the streams that the first of them reads."""
        return tuple(HiddenMode)

    def __call__(
        self,
        levers: ModelLevers,
        quantization: MtpQuantization | None = None,
        hidden_mode: HiddenMode | None = None,
        kv_dtype: KvCacheDtype = KvCacheDtype.BF16,
    ) -> DeepseekV4MtpHead:
        """A head with a KV pool of its own, in reference mode unless `hidden_mode` says otherwise. InvalidArgumentError
        for a quantisation: tensors stay as the checkpoint has them. Other errors as `load_v4_mtp_weights` and
        `DeepseekV4MtpHead`."""
        self._refuse_quantization(quantization)
        if self._module is None:
            self._module = load_v4_mtp_weights(self._store, self._config, self._gpu)
        head = DeepseekV4MtpHead(
            self._module, self._weights.embed, self._weights.head, self._config, self._gpu, 0, self._max_seq_len,
            levers, kv_dtype=kv_dtype, hidden_mode=hidden_mode or HiddenMode.REFERENCE,
        )  # fmt: skip
        self._stack.callback(head.release)
        return head
