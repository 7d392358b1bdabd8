# SPDX-License-Identifier: AGPL-3.0-only
"""Draft heads of a Qwen3-Next checkpoint in any quantisation. Twin of the proposer's part of `factory`."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from ..runtime.gpu import GpuBackend
from ..runtime.weights import WeightStore
from .config import ModelConfig
from .layers.hidden_mode import HiddenMode
from .layers.mtp_head import MtpHead, MtpQuantization
from .layers.mtp_head.quantize import Quantizer
from .levers import ModelLevers
from .proposer_factory import ProposerFactory
from .weight_loader import forced_quantization, free_copied, has_dense_ffn, load_mtp_weights
from .weight_map import DenseWeight, QuantizedWeight

__all__ = ["HeadFactory", "MtpFactory", "TargetTables"]

log = logging.getLogger("spark_py.model")


class TargetTables(Protocol):
    """A target's embedding and LM head, BF16 [V, h] each."""

    @property
    def embed_tokens(self) -> DenseWeight: ...

    @property
    def lm_head(self) -> DenseWeight: ...


class HeadFactory(ProposerFactory):
    """Makes heads that share the target's tables. What they need lives as long as `stack`.

    An unquantised head runs on the checkpoint's tensors, which `store` uploads once for all of them. A quantised one
    has copies, and the tensors that it copied are freed as soon as it is built; FP8 takes over what the checkpoint has
    in block-scaled E4M3. FP8 and BF16 draft with the target's own LM head, NVFP4 with a copy of it in NVFP4, made once.
    As in Rust, a LM head that only drafts has no transposed twin.
    """

    def __init__(
        self,
        folder: Path,
        store: WeightStore,
        config: ModelConfig,
        gpu: GpuBackend,
        weights: TargetTables,
        max_seq_len: int,
        main_kv_blocks: int,
        stack: ExitStack,
    ) -> None:
        self._folder, self._store, self._config, self._gpu = folder, store, config, gpu
        self._weights, self._max_seq_len, self._main_kv_blocks = weights, max_seq_len, main_kv_blocks
        self._stack = stack
        self._packed_lm_head: QuantizedWeight | None = None

    def _store_for(self, quantization: MtpQuantization) -> WeightStore:
        """The store that a head's tensors are loaded into: one of its own where it has copies of them."""
        if quantization is MtpQuantization.BF16:
            return self._store
        return self._stack.enter_context(WeightStore.open(self._folder))

    def _nvfp4_lm_head(self) -> QuantizedWeight:
        if self._packed_lm_head is None:
            quantizer = Quantizer(self._gpu, MtpQuantization.NVFP4, self._gpu.default_stream())
            self._stack.callback(quantizer.release)
            lm_head, h = self._weights.lm_head, self._config.hidden_size
            rows = lm_head.rows_of("lm_head", self._config.vocab_size, h)
            made = quantizer.proj("lm_head", lm_head, rows, h)
            assert isinstance(made, QuantizedWeight)
            self._packed_lm_head = made
        return self._packed_lm_head


class MtpFactory(HeadFactory):
    """Makes the heads of Qwen3-Next, 3.5 and 3.6."""

    def quantizations(self) -> tuple[MtpQuantization, ...]:
        """What the checkpoint's head may be quantised to, BF16 first: that alone where the checkpoint keeps the head
        out of quantisation, and no NVFP4 with a dense FFN."""
        offered = [MtpQuantization.BF16, MtpQuantization.FP8]
        if not has_dense_ffn(self._store, self._config):
            offered.append(MtpQuantization.NVFP4)
        return tuple(q for q in offered if forced_quantization(self._config, q, quietly=True) is q)

    def __call__(
        self,
        levers: ModelLevers,
        quantization: MtpQuantization | None = None,
        hidden_mode: HiddenMode | None = None,
    ) -> MtpHead:
        """A head with a KV pool of its own, in `quantization`, BF16 by default, unless the checkpoint forces BF16.
        Errors as `load_mtp_weights` and `MtpHead`: UnsupportedError for a dense FFN in NVFP4."""
        self._refuse_hidden_mode(hidden_mode)
        quantization = forced_quantization(self._config, quantization or MtpQuantization.BF16)
        config, gpu, copies = self._config, self._gpu, quantization is not MtpQuantization.BF16
        store = self._store_for(quantization)
        mtp = load_mtp_weights(store, config, gpu, native_fp8=quantization is MtpQuantization.FP8)
        packed = quantization is MtpQuantization.NVFP4 and mtp.dense_ffn is None
        head = MtpHead(
            mtp, self._weights.embed_tokens, self._nvfp4_lm_head() if packed else self._weights.lm_head, None, config,
            gpu, quantization, 0, self._max_seq_len, self._main_kv_blocks, levers,
        )  # fmt: skip
        self._stack.callback(head.release)
        if copies:
            free_copied(store, mtp, gpu)
        if unread := set(store.unread()).intersection(self._store.unread()):
            log.info("tensors that nothing reads: %s", ", ".join(sorted(unread)))
        return head
