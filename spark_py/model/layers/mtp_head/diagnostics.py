# SPDX-License-Identifier: AGPL-3.0-only
"""What the head can write to the log about a draft: its most probable ids, and the norms of its stages.

Read from the arena after the draft's row, so that the forward pass is the same with and without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from ....runtime.gpu import DevicePtr, StreamLike
from ...layer import ForwardContext
from .new import BF16_BYTES, MtpHeadNew, log

__all__ = ["BF16", "Stage", "log_shadow_topk", "log_stage_norms", "norms_of", "stage_norms", "top_probabilities"]

BF16: np.dtype[np.generic] = np.dtype(ml_dtypes.bfloat16)
Stage: TypeAlias = tuple[DevicePtr, int, np.dtype[np.generic]]
"""Where a stage is, its elements and what they are."""


def top_probabilities(logits: np.ndarray[Any, Any], k: int) -> list[tuple[int, float]]:
    """The k largest of `logits` as (id, probability among all of them), best first; equal ones by id, NaN last."""
    values = logits.astype(np.float64)
    order = np.argsort(np.where(np.isnan(values), np.inf, -values), kind="stable")[:k]
    with np.errstate(invalid="ignore"):
        weights = np.exp(values - np.fmax.reduce(values))
    return [(int(i), float(weights[i] / weights.sum())) for i in order]


def log_shadow_topk(logits: np.ndarray[Any, Any], position: int, k: int) -> None:
    """The k most probable ids of the draft whose row is at `position`."""
    shown = ", ".join(f"{token}: {share:.4f}" for token, share in top_probabilities(logits, k))
    log.info("draft after position %d: %s", position, shown)


def stage_norms(
    head: MtpHeadNew, ctx: ForwardContext, stream: StreamLike, row: int = 0, rows: int = 1
) -> dict[str, float]:
    """L2 norms of the stages of row `row` of the last pass over `rows`, FP64 over BF16, in the order in which they are
    computed.

    Of a head with experts, the embedding and the attention's output are left out: the FFN wrote over them.
    """
    buf, h, q, kv = ctx.buffers, head.h, head.nq * head.hd, head.nkv * head.hd
    qkv, keys, values = buf.qkv_output(), rows * head.q_width, rows * (head.q_width + kv)

    def part(of: DevicePtr, width: int, start: int = 0) -> tuple[DevicePtr, int]:
        return of.offset(BF16_BYTES * (start + row * width)), width

    def half(second: bool) -> tuple[DevicePtr, int]:
        return buf.ssm_ba().offset(BF16_BYTES * h * (2 * row + second)), h

    stages: dict[str, tuple[DevicePtr, int]] = {
        "embedding": part(buf.ssm_qkvz(), h),
        "normed embedding": half(head.body.hidden_first),
        "normed hidden": half(not head.body.hidden_first),
        "query": (qkv.offset(BF16_BYTES * row * head.q_width), q),
        "gate": (qkv.offset(BF16_BYTES * (row * head.q_width + q)), q),
        "key": part(qkv, kv, keys),
        "value": part(qkv, kv, values),
        "attention": part(buf.attn_output(), q),
        "stream after attention": part(buf.residual(), h),
        "ffn": part(buf.moe_output(), h),
        "stream": part(buf.hidden_states(), h),
        "normed stream": part(buf.norm_output(), h),
        "logits": part(buf.logits(), head.draft_vocab),
    }
    if not head.body.gated:
        del stages["gate"]
    dense: object = head.dense_ffn_generic
    if not dense:
        del stages["embedding"], stages["attention"]
    return norms_of({name: (ptr, elements, BF16) for name, (ptr, elements) in stages.items()}, ctx, stream)


def norms_of(stages: Mapping[str, Stage], ctx: ForwardContext, stream: StreamLike) -> dict[str, float]:
    """The L2 norm of each, in FP64."""
    norms = {}
    for name, (ptr, elements, dtype) in stages.items():
        raw = np.empty(elements, dtype)
        ctx.gpu.copy_d2h_on_stream(ptr, raw.view(np.uint8), stream)
        norms[name] = float(np.linalg.norm(raw.astype(np.float64)))
    return norms


def log_stage_norms(norms: dict[str, float], position: int) -> None:
    """The norms of the row at `position`."""
    log.info("norms at position %d: %s", position, ", ".join(f"{name} {norm:.4g}" for name, norm in norms.items()))
