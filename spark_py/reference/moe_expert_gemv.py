# SPDX-License-Identifier: AGPL-3.0-only
"""Kernel `moe_expert_gemv::moe_expert_gemv`: one NVFP4 projection of each chosen expert, as `nvfp4_product` adds up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ._bf16 import Bf16Array, to_f32
from .moe_shared_expert_fused import Nvfp4, nvfp4_slots


def moe_expert_gemv(rows: Bf16Array, experts: Sequence[Nvfp4 | None], outputs: int) -> Bf16Array:
    """bf16(row . w[n]) of each row with its expert: BF16 [slots, K] gives BF16 [slots, outputs]; zeros without one."""
    with np.errstate(all="ignore"):
        return nvfp4_slots(list(to_f32(rows)), experts, outputs)
