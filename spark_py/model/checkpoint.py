# SPDX-License-Identifier: AGPL-3.0-only
"""From a checkpoint folder to what decodes: a target and its draft head on one backend, sharing tables and arena."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ..runtime.buffers import BufferArena
from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import GpuBackend
from ..runtime.weights import WeightStore
from .config import ModelConfig
from .layer import DraftProposer
from .layers.mtp_head import MtpHead, MtpQuantization
from .levers import ModelLevers
from .target import Qwen3NextTarget, Target, load_target_weights
from .target.qwen3_next import BLOCK_SIZE
from .weight_loader import load_mtp_weights

__all__ = ["FAMILIES", "Checkpoint", "open_checkpoint"]

log = logging.getLogger("spark_py.model")

BATCH_TOKENS = 32
"""Rows that the arena holds: twice what the batched GEMV takes, and as many as a batched propose."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on a backend. `proposer` makes a draft head for levers of its own: each head has its own KV pool,
    and lives until the checkpoint is closed. `quantization` is that of the draft head."""

    config: ModelConfig
    target: Target
    proposer: Callable[[ModelLevers], DraftProposer]
    quantization: str


def _qwen3_next(
    folder: Path, gpu: GpuBackend, max_seq_len: int, stack: ExitStack, max_seqs: int, quantization: MtpQuantization
) -> Checkpoint:
    """Gated full attention with dense FFNs or with experts, as the configuration says, and an MTP head."""
    config = ModelConfig.from_file(folder)
    if config.unknown:
        log.info("fields of config.json that nothing reads: %s", ", ".join(sorted(config.unknown)))
    store = stack.enter_context(WeightStore.open(folder))
    weights = load_target_weights(store, config, gpu)
    buffers = stack.enter_context(BufferArena(config, BATCH_TOKENS, max_seq_len, BLOCK_SIZE, max_seqs, gpu))
    target = stack.enter_context(Qwen3NextTarget(weights, config, gpu, buffers, max_seqs))

    def proposer(levers: ModelLevers) -> MtpHead:
        mtp = load_mtp_weights(store, config, gpu)
        if unread := store.unread():
            log.info("tensors that nothing reads: %s", ", ".join(unread))
        blocks = target.kv_cache.num_blocks()
        head = MtpHead(
            mtp, weights.embed_tokens, weights.lm_head, None, config, gpu, quantization, 0, max_seq_len, blocks,
            levers,
        )  # fmt: skip
        stack.callback(head.release)
        return head

    return Checkpoint(config, target, proposer, quantization.value)


FAMILIES = MappingProxyType({"qwen3_next": _qwen3_next, "qwen3_next_moe": _qwen3_next})
"""Family, as the command line calls it, to what opens its checkpoints. Families have a demo checkpoint each."""


@contextmanager
def open_checkpoint(
    folder: Path | str,
    gpu: GpuBackend,
    max_seq_len: int,
    family: str = "qwen3_next",
    max_seqs: int = 1,
    quantization: MtpQuantization = MtpQuantization.BF16,
) -> Iterator[Checkpoint]:
    """The target of a folder in Hugging Face's form, for `max_seqs` sequences of at most `max_seq_len` tokens at once,
    with draft heads in `quantization`.

    ConfigError, WeightError, UnsupportedError or InvalidArgumentError name the file, field or tensor that is missing,
    damaged or not offered. The draft head's tensors are read when `proposer` is first called.
    """
    if family not in FAMILIES:
        raise InvalidArgumentError("family", family, f"one of {', '.join(FAMILIES)}")
    with ExitStack() as stack:
        yield FAMILIES[family](Path(folder), gpu, max_seq_len, stack, max_seqs, quantization)
