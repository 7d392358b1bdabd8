# SPDX-License-Identifier: AGPL-3.0-only
"""Every number that a training run depends on; each field is an option of tools/train_demo.py."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

__all__ = ["FAMILIES", "FOLDER_LIMITS", "QUICK", "QUICK_FAMILIES", "Settings"]

FOLDER_LIMITS = {"qwen3_next": 12_000_000, "deepseek_v4": 7_000_000, "minimax_m2": 7_000_000}
"""The most bytes that a shipped checkpoint folder of an architecture may hold."""


@dataclass(frozen=True)
class Settings:
    """One run. Lengths are in tokens, `steps` are optimiser steps; the other fields are named as in the model card."""

    architecture: str = "qwen3_next"  # the module of this package that has the model (base.family)
    seed: int = 0
    # Corpus and tokenizer. 0 files: all.
    max_files: int = 0
    vocab: int = 1024
    # Shape. The draft layer has the shape of a layer of the trunk.
    hidden: int = 256
    layers: int = 4
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rotary_factor: float = 0.5
    ffn: int = 896
    # With experts, every layer has them in place of the dense FFN, and a shared expert too; 0: none.
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    # MTP modules, each with a layer of its own; a family whose one layer drafts again and again has 1.
    modules: int = 1
    # Of DeepSeek-V4: ranks of queries and of each output group, attention's window, residual streams, layers whose
    # experts the token names, and Sinkhorn's iterations in training, where few of its 20 are enough.
    q_rank: int = 0
    out_groups: int = 0
    out_rank: int = 0
    attention_window: int = 0
    streams: int = 0
    hash_layers: int = 0
    train_iterations: int = 0
    window: int = 1024
    # Phase 1: trunk and draft layer together, on text.
    steps: int = 3000
    # Wall-clock limits of both phases in minutes; 0: none. The learning rate falls by steps or by time, whichever is
    # further on, so that a phase that is cut short ends as the other would.
    minutes: float = 0.0
    distill_minutes: float = 0.0
    batch: int = 16
    lr: float = 2e-3
    warmup: int = 200
    weight_decay: float = 0.1
    dropout: float = 0.1
    ema: float = 0.998
    # Both phases: the weight of the routers' load-balancing loss, and how many rows lie between whole chains of drafts
    # (first drafts are trained on every row).
    balance: float = 0.0
    chain_step: int = 1
    # Phase 2: the draft layer alone, distilled from the frozen trunk on text and on what the trunk writes.
    distill_steps: int = 2000
    distill_lr: float = 1e-3
    distill_dropout: float = 0.05
    generated: int = 6144
    generated_length: int = 512
    # Choices, by validation files.
    validate_every: int = 250
    validation_rows: int = 256
    # Evaluation, on held-out files.
    prompts: int = 50
    new_tokens: int = 64
    drafts: int = 3


QUICK = Settings(
    max_files=60,
    vocab=384,
    hidden=64,
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=32,
    ffn=128,
    window=192,
    steps=40,
    batch=4,
    warmup=10,
    ema=0.9,
    distill_steps=20,
    generated=16,
    generated_length=128,
    validate_every=20,
    validation_rows=8,
    prompts=6,
    new_tokens=16,
)
"""A run of seconds on a CPU that goes through every line; its model is good for nothing."""
_SMALL = [f.name for f in fields(QUICK) if getattr(QUICK, f.name) != f.default and f.name not in ("ffn", "kv_heads")]

_MOE = Settings(
    layers=3,
    ffn=0,
    experts=8,
    experts_per_token=2,
    expert_ffn=128,
    shared_ffn=128,
    balance=0.01,
    chain_step=4,
    generated=4096,
)
"""All widths are multiples of 128, the block of FP8 weights."""

_MINIMAX_M2 = Settings(
    architecture="minimax_m2",
    hidden=192,
    layers=4,
    q_heads=6,
    head_dim=32,
    ffn=0,
    experts=8,
    experts_per_token=2,
    expert_ffn=64,
    modules=3,
    balance=0.001,
    generated=4096,
)
"""The balancing term has a gradient for the routers' biases alone, and Adam makes steps of one size of any: its weight
says how little it counts when gradients are clipped."""

_DEEPSEEK_V4 = Settings(
    architecture="deepseek_v4",
    layers=3,
    q_heads=8,
    kv_heads=1,
    ffn=0,
    experts=8,
    experts_per_token=2,
    expert_ffn=64,
    shared_ffn=64,
    q_rank=64,
    out_groups=4,
    out_rank=32,
    attention_window=128,
    streams=4,
    hash_layers=1,
    train_iterations=6,
    batch=24,
    dropout=0.0,
    distill_dropout=0.0,
    balance=0.001,
    chain_step=4,
    generated=4096,
)
"""Launches, not arithmetic, take the time of a step of so many small parts: hence the larger batch.
A doubly stochastic matrix of mild logits is within 3e-8 of Sinkhorn's limit after 5 iterations."""

FAMILIES = {"qwen3_next": Settings(), "deepseek_v4": _DEEPSEEK_V4, "qwen3_next_moe": _MOE, "minimax_m2": _MINIMAX_M2}
QUICK_FAMILIES = {
    "qwen3_next": QUICK,
    "qwen3_next_moe": replace(
        QUICK, ffn=0, experts=4, experts_per_token=2, expert_ffn=32, shared_ffn=32, balance=0.01, chain_step=4
    ),
    "deepseek_v4": replace(
        _DEEPSEEK_V4,
        **{name: getattr(QUICK, name) for name in _SMALL},
        experts=4,
        expert_ffn=32,
        shared_ffn=32,
        q_rank=32,
        out_groups=2,
        out_rank=16,
        attention_window=64,
    ),
    "minimax_m2": replace(
        QUICK, architecture="minimax_m2", ffn=0, experts=4, experts_per_token=2, expert_ffn=32, modules=3, balance=0.001
    ),
}
