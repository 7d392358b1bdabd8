# SPDX-License-Identifier: AGPL-3.0-only
"""From a checkpoint folder to what decodes: a target and its draft head on one backend, sharing tables and arena."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from ..runtime.buffers import BufferArena
from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import GpuBackend
from ..runtime.weights import WeightStore
from .config import ModelConfig
from .layer import DraftProposer
from .layers.mtp_head import MtpQuantization
from .levers import ModelLevers
from .mtp_factory import MtpFactory
from .target import BLOCK_SIZE, DecoderTarget, Target, load_target_weights

__all__ = ["FAMILIES", "Checkpoint", "ProposerFactory", "open_checkpoint"]

log = logging.getLogger("spark_py.model")

BATCH_TOKENS = 32
"""Rows that the arena holds: twice what the batched GEMV takes, and as many as a batched propose."""


class ProposerFactory(Protocol):
    """Makes a family's draft heads. Each has a KV pool of its own, and lives until the checkpoint is closed."""

    def quantizations(self) -> tuple[MtpQuantization, ...]:
        """What a head of the checkpoint may be quantised to, BF16 first."""
        ...

    def __call__(self, levers: ModelLevers, quantization: MtpQuantization = MtpQuantization.BF16) -> DraftProposer:
        """A head, in BF16 where the checkpoint forces that. Its tensors are read here: a WeightError names what is
        missing or damaged, UnsupportedError what is not offered."""
        ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on a backend: a target, and what makes draft heads for it."""

    config: ModelConfig
    target: Target
    proposer: ProposerFactory


def _qwen3_next(folder: Path, gpu: GpuBackend, max_seq_len: int, stack: ExitStack, max_seqs: int) -> Checkpoint:
    """Gated full attention with dense FFNs or with experts, as the configuration says, and an MTP head."""
    config = ModelConfig.from_file(folder)
    if config.unknown:
        log.info("fields of config.json that nothing reads: %s", ", ".join(sorted(config.unknown)))
    store = stack.enter_context(WeightStore.open(folder))
    weights = load_target_weights(store, config, gpu)
    buffers = stack.enter_context(BufferArena(config, BATCH_TOKENS, max_seq_len, BLOCK_SIZE, max_seqs, gpu))
    target = stack.enter_context(DecoderTarget(weights, config, gpu, buffers, max_seqs))
    blocks = target.kv_cache.num_blocks()
    return Checkpoint(config, target, MtpFactory(folder, store, config, gpu, weights, max_seq_len, blocks, stack))


FAMILIES = MappingProxyType({"qwen3_next": _qwen3_next, "qwen3_next_moe": _qwen3_next})
"""Family, as the command line calls it, to what opens its checkpoints. Families have a demo checkpoint each."""


@contextmanager
def open_checkpoint(
    folder: Path | str, gpu: GpuBackend, max_seq_len: int, family: str = "qwen3_next", max_seqs: int = 1
) -> Iterator[Checkpoint]:
    """The target of a folder in Hugging Face's form, for `max_seqs` sequences of at most `max_seq_len` tokens at once.

    ConfigError, WeightError, UnsupportedError or InvalidArgumentError name the file, field or tensor that is missing,
    damaged or not offered. The draft head's tensors are read when `proposer` is called.
    """
    if family not in FAMILIES:
        raise InvalidArgumentError("family", family, f"one of {', '.join(FAMILIES)}")
    with ExitStack() as stack:
        yield FAMILIES[family](Path(folder), gpu, max_seq_len, stack, max_seqs)
