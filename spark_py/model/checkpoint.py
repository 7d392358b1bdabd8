# SPDX-License-Identifier: AGPL-3.0-only
"""From a checkpoint folder to what decodes: a target and its draft head on one backend, sharing tables and arena."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from ..runtime.buffers import BufferArena
from ..runtime.errors import InvalidArgumentError, UnsupportedError
from ..runtime.gpu import GpuBackend
from ..runtime.weights import WeightStore
from .config import MODEL_TYPES, ModelConfig
from .mtp_factory import HeadFactory, MtpFactory
from .mtp_modules_factory import MtpModulesFactory
from .proposer_factory import ProposerFactory
from .row_policy import RowPolicy
from .target import BLOCK_SIZE, DecoderTarget, DeepseekV4Target, Target, load_target_weights
from .target.deepseek_v4 import check_v4_offered
from .v4_factory import V4MtpFactory
from .weight_loader import load_v4_target_weights

__all__ = ["FAMILIES", "Checkpoint", "Family", "ProposerFactory", "check_family", "family_of", "open_checkpoint"]

log = logging.getLogger("spark_py.model")

BATCH_TOKENS = 32
"""Rows that the arena holds: twice what the batched GEMV takes, and as many as a batched propose."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on a backend: a target, and what makes draft heads for it."""

    config: ModelConfig
    target: Target
    proposer: ProposerFactory


def _qwen3_next(folder: Path, gpu: GpuBackend, max_seq_len: int, stack: ExitStack, max_seqs: int) -> Checkpoint:
    """Gated full attention with dense FFNs or with experts, as the configuration says, and an MTP head."""
    return _decoder(MtpFactory, folder, gpu, max_seq_len, stack, max_seqs)


def _minimax_m2(folder: Path, gpu: GpuBackend, max_seq_len: int, stack: ExitStack, max_seqs: int) -> Checkpoint:
    """Ungated full attention with experts, and MTP modules behind the last layer."""
    return _decoder(MtpModulesFactory, folder, gpu, max_seq_len, stack, max_seqs)


def _decoder(
    factory: type[HeadFactory], folder: Path, gpu: GpuBackend, max_seq_len: int, stack: ExitStack, max_seqs: int
) -> Checkpoint:
    config = _config(folder)
    store = stack.enter_context(WeightStore.open(folder))
    weights = load_target_weights(store, config, gpu)
    buffers = stack.enter_context(BufferArena(config, BATCH_TOKENS, max_seq_len, BLOCK_SIZE, max_seqs, gpu))
    target = stack.enter_context(DecoderTarget(weights, config, gpu, buffers, max_seqs))
    blocks = target.kv_cache.num_blocks()
    return Checkpoint(config, target, factory(folder, store, config, gpu, weights, max_seq_len, blocks, stack))


def _deepseek_v4(folder: Path, gpu: GpuBackend, max_seq_len: int, stack: ExitStack, max_seqs: int) -> Checkpoint:
    """Sliding-window layers with hyper-connections, and the MTP module that reads their streams."""
    config = _config(folder)
    check_v4_offered(config)
    store = stack.enter_context(WeightStore.open(folder))
    weights = load_v4_target_weights(store, config, gpu)
    buffers = stack.enter_context(BufferArena(config, BATCH_TOKENS, max_seq_len, BLOCK_SIZE, max_seqs, gpu))
    target = stack.enter_context(DeepseekV4Target(weights, config, gpu, buffers, max_seqs))
    return Checkpoint(config, target, V4MtpFactory(store, config, gpu, weights, max_seq_len, stack))


def _config(folder: Path) -> ModelConfig:
    config = ModelConfig.from_file(folder)
    if config.unknown:
        log.info("fields of config.json that nothing reads: %s", ", ".join(sorted(config.unknown)))
    return config


class Opener(Protocol):
    """Opens a family's checkpoint; what it opens lives as long as `stack`."""

    def __call__(
        self, folder: Path, gpu: GpuBackend, max_seq_len: int, stack: ExitStack, max_seqs: int
    ) -> Checkpoint: ...


@dataclass(frozen=True, slots=True)
class Family:
    """A family of checkpoints. `model_types`: those of MODEL_TYPES' values that it opens. `row_policy`: what its
    drafters do unless told otherwise. `quantizes`, `hidden_modes`: whether its heads have these choices.
    `several_modules`: each draft is another module's; only with refeed are these fed."""

    open: Opener
    model_types: frozenset[str]
    row_policy: RowPolicy = RowPolicy.SEED
    quantizes: bool = False
    hidden_modes: bool = False
    several_modules: bool = False


_QWEN = Family(_qwen3_next, frozenset({"qwen3_next", "qwen3_5", "qwen3_5_moe"}), quantizes=True)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "qwen3_next": _QWEN,
        "qwen3_next_moe": _QWEN,
        "minimax_m2": Family(_minimax_m2, frozenset({"minimax_m2"}), quantizes=True, several_modules=True),
        "deepseek_v4": Family(
            _deepseek_v4, frozenset({"deepseek_v4"}), row_policy=RowPolicy.VERIFIED, hidden_modes=True
        ),
    }
)
"""By the name that the command line has for it. Families have a demo checkpoint each."""


def family_of(config: ModelConfig) -> str:
    """The first of FAMILIES that opens a checkpoint with this configuration."""
    kind = MODEL_TYPES[config.model_type]
    found = next((name for name, family in FAMILIES.items() if kind in family.model_types), None)
    if found is None:
        raise UnsupportedError(f"model_type {config.model_type!r} has no target here: {', '.join(FAMILIES)} have")
    return found


def check_family(name: str, config: ModelConfig) -> Family:
    """The family called `name`; InvalidArgumentError for an unknown one, or one that does not open such checkpoints."""
    if name not in FAMILIES:
        raise InvalidArgumentError("family", name, f"one of {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    if MODEL_TYPES[config.model_type] not in family.model_types:
        right = family_of(config)
        raise InvalidArgumentError("family", name, f"config.json says {config.model_type!r}, which {right} opens")
    return family


@contextmanager
def open_checkpoint(
    folder: Path | str, gpu: GpuBackend, max_seq_len: int, family: str = "qwen3_next", max_seqs: int = 1
) -> Iterator[Checkpoint]:
    """The target of a folder in Hugging Face's form, for `max_seqs` sequences of at most `max_seq_len` tokens at once.

    ConfigError, WeightError, UnsupportedError or InvalidArgumentError name the file, field or tensor that is missing,
    damaged or not offered. The draft head's tensors are read when `proposer` is called.
    """
    found = check_family(family, ModelConfig.from_file(folder))
    with ExitStack() as stack:
        yield found.open(Path(folder), gpu, max_seq_len, stack, max_seqs)
