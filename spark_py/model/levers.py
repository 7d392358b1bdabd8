# SPDX-License-Identifier: AGPL-3.0-only
"""ModelLevers: every switch of the draft heads, as explicit fields.

Twin of `layers/ops` `ModelLevers` and of the `ATLAS_*` variables around it. Nothing else reads the environment.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..runtime.errors import InvalidArgumentError
from ..runtime.sizes import count
from .row_policy import RowPolicy

__all__ = ["DEFAULT_MTP_MAX_SEQS", "ModelLevers"]

log = logging.getLogger("spark_py.model")

DEFAULT_MTP_MAX_SEQS = 8
_USIZE_MAX = 2**64 - 1
_F32 = re.compile(r"[+-]?(inf|infinity|nan|(\d+\.?\d*|\.\d+)(e[+-]?\d+)?)", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ModelLevers:
    """Switches of one model; each is read when a head is built, so that a running head never changes its mind.

    drafter_prefill: the drafter sees the prompt, and its scratch for that is allocated.
    exact_drafter_rows: rows fed by prefill and catch-up have the bits of rows that a propose writes (batched GEMV);
        off, the engine's own way, a GEMM, whose sums have another order.
    row_policy, refeed: what stays after a verify; see RowPolicy.
    mtp_max_seqs: sequences that draft at the same time; sizes the drafter's KV pool.
    draft_conf_tau: above 0, each propose measures the probability of its drafts (`last_confidence`), and the decoding
        loop verifies none where the smallest is below it; 0 to 0.99.
    """

    drafter_prefill: bool = True
    exact_drafter_rows: bool = True
    row_policy: RowPolicy = RowPolicy.SEED
    refeed: bool = False
    mtp_max_seqs: int = DEFAULT_MTP_MAX_SEQS
    draft_conf_tau: float = 0.0

    def __post_init__(self) -> None:
        for name in ("drafter_prefill", "exact_drafter_rows", "refeed"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidArgumentError(name, value, "True or False")
        if not isinstance(self.row_policy, RowPolicy):
            raise InvalidArgumentError("row_policy", self.row_policy, "a RowPolicy")
        count("mtp_max_seqs", self.mtp_max_seqs)
        if not 0.0 <= self.draft_conf_tau <= 0.99:
            raise InvalidArgumentError("draft_conf_tau", self.draft_conf_tau, "a number from 0 to 0.99 is needed")

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> ModelLevers:
        """The levers that the engine's environment variables ask for, each by the engine's own parse rule.

        ATLAS_NO_MTP_DRAFTER_CONTEXT: exactly "1" turns drafter_prefill off. ATLAS_MTP_MAX_SEQS: a decimal number
        without blanks, the default for anything else; 0, with which the engine has no pool, counts as 1 and is logged.
        ATLAS_MTP_REFEED_ACCEPTED: exactly "1", and only where mtp_max_seqs is 1. ATLAS_MTP_DRAFT_CONF: a number, held
        within 0 to 0.99; 0 for anything else. The row policy is SEED.
        """
        values = os.environ if env is None else env
        seqs = _usize(values.get("ATLAS_MTP_MAX_SEQS"))
        if seqs == 0:
            log.warning("ATLAS_MTP_MAX_SEQS is 0, a drafter without a KV pool: taken as 1")
        seqs = DEFAULT_MTP_MAX_SEQS if seqs is None else max(seqs, 1)
        return cls(
            drafter_prefill=values.get("ATLAS_NO_MTP_DRAFTER_CONTEXT") != "1",
            refeed=values.get("ATLAS_MTP_REFEED_ACCEPTED") == "1" and seqs <= 1,
            mtp_max_seqs=seqs,
            draft_conf_tau=_confidence(values.get("ATLAS_MTP_DRAFT_CONF")),
        )


def _usize(text: str | None) -> int | None:
    """As Rust's `str::parse::<usize>`: ASCII digits with at most one plus sign before them, no blanks."""
    digits = (text or "").removeprefix("+")
    if not (digits.isascii() and digits.isdigit()):
        return None
    number = int(digits)
    return number if number <= _USIZE_MAX else None


def _confidence(text: str | None) -> float:
    """As Rust's `str::parse::<f32>`, which knows neither blanks nor underscores; held within 0 to 0.99."""
    if not _F32.fullmatch(text or ""):
        return 0.0
    value = float(text or "")
    return 0.0 if math.isnan(value) else min(max(value, 0.0), 0.99)
