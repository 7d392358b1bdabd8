# SPDX-License-Identifier: AGPL-3.0-only
"""Twin of `layers/mtp_head/`: the draft head of Qwen3-Next, 3.5 and 3.6, one file a Rust file, and in `body` what
other families have in its place."""

from __future__ import annotations

from .body import HeadBody, QkNorm, SharedExpert
from .draft_proposer import MtpHead
from .types import MtpProposerState, MtpQuantization, NormConvention

__all__ = ["HeadBody", "MtpHead", "MtpProposerState", "MtpQuantization", "NormConvention", "QkNorm", "SharedExpert"]
