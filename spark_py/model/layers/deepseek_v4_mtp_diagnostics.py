# SPDX-License-Identifier: AGPL-3.0-only
"""The norms of a DeepSeek-V4 draft's stages, read from the arena after its row."""

from __future__ import annotations

import numpy as np

from ...runtime.gpu import StreamLike
from ..layer import ForwardContext
from .deepseek_v4_mtp_new import DeepseekV4MtpNew
from .mtp_head.diagnostics import BF16, Stage, norms_of

__all__ = ["stage_norms"]


def stage_norms(head: DeepseekV4MtpNew, ctx: ForwardContext, stream: StreamLike, stacked: bool) -> dict[str, float]:
    """L2 norms of the stages of the last row that drafted, FP64, in the order in which they are computed. "streams" are
    those after the body: where hyper-connections diverge, it is there that it shows."""
    buf, h, stack = ctx.buffers, head.h, head.hc_mult * head.h
    f32 = np.dtype(np.float32)
    stages: dict[str, Stage] = {
        "embedding": (buf.ssm_qkvz(), h, BF16),
        "normed embedding": (buf.ssm_deinterleaved(), h, BF16),
        "normed hidden": (buf.ssm_gates(), stack if stacked else h, BF16),
        "streams": (buf.hc_streams(), stack, f32),
        "hidden": (buf.hidden_states(), h, BF16),
        "normed output": (buf.norm_output(), h, BF16),
        "logits": (buf.logits(), head.draft_vocab, BF16),
    }
    return norms_of(stages, ctx, stream)
