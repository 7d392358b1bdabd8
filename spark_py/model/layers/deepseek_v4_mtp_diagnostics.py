# SPDX-License-Identifier: AGPL-3.0-only
"""The norms of a DeepSeek-V4 draft's stages, read from the arena after its row."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ...runtime.gpu import DevicePtr, StreamLike
from ..layer import ForwardContext
from .deepseek_v4_mtp_new import DeepseekV4MtpNew

__all__ = ["stage_norms"]


def stage_norms(head: DeepseekV4MtpNew, ctx: ForwardContext, stream: StreamLike, stacked: bool) -> dict[str, float]:
    """L2 norms of the stages of the last row that drafted, FP64, in the order in which they are computed. "streams" are
    those after the body: where hyper-connections diverge, it is there that it shows."""
    buf, h, stack = ctx.buffers, head.h, head.hc_mult * head.h
    bf16, f32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
    stages: dict[str, tuple[DevicePtr, int, np.dtype[np.generic]]] = {
        "embedding": (buf.ssm_qkvz(), h, bf16),
        "normed embedding": (buf.ssm_deinterleaved(), h, bf16),
        "normed hidden": (buf.ssm_gates(), stack if stacked else h, bf16),
        "streams": (buf.hc_streams(), stack, f32),
        "hidden": (buf.hidden_states(), h, bf16),
        "normed output": (buf.norm_output(), h, bf16),
        "logits": (buf.logits(), head.draft_vocab, bf16),
    }
    norms = {}
    for name, (ptr, elements, dtype) in stages.items():
        raw = np.empty(elements, dtype)
        ctx.gpu.copy_d2h_on_stream(ptr, raw.view(np.uint8), stream)
        norms[name] = float(np.linalg.norm(raw.astype(np.float64)))
    return norms
