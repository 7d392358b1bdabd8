# SPDX-License-Identifier: AGPL-3.0-only
"""The quantisation that a checkpoint forces on its MTP head."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..config import ModelConfig
from ..layers.mtp_head.types import MtpQuantization
from .ignore_modules import covering
from .mtp_names import LAYER

__all__ = ["forced_quantization"]

log = logging.getLogger("spark_py.model.weight_loader")

_DECIDING = ("mtp.fc.weight", f"{LAYER}self_attn.q_proj.weight")


def forced_quantization(
    config: ModelConfig, requested: MtpQuantization, quietly: bool = False, deciding: Sequence[str] = _DECIDING
) -> MtpQuantization:
    """`requested`, or BF16 where the configuration's ignore_modules cover the head's fc or q_proj (`deciding`): a head
    that was kept out of quantisation drafts poorly when it is quantised after all. Unless `quietly`, the change is
    logged as a warning."""
    for tensor in deciding:
        entry = covering(tensor, config.ignore_modules)
        if entry is not None and requested is not MtpQuantization.BF16:
            if not quietly:
                log.warning("the MTP head stays BF16, not %s: ignore_modules has %r", requested.value, entry)
            return MtpQuantization.BF16
    return requested
