# SPDX-License-Identifier: AGPL-3.0-only
"""Which runs `spark-py demo` and `spark-py generate` make of a family whose drafts come from several modules."""

from __future__ import annotations

from typing import Any

from spark_py.cli.decoding import Request
from spark_py.model.checkpoint import FAMILIES
from spark_py.model.layers.mtp_head import MtpQuantization

DRAFTS = (0, 1, 2, 3)


def planned(offered: tuple[MtpQuantization, ...] = (), **chosen: Any) -> list[tuple[str, str, bool, bool, Any]]:
    """(quantisation, row policy, refeed, sees the prompt, drafts) of each head."""
    fields: dict[str, Any] = {"num_drafts": None, "row_policy": None, "refeed": False, "drafter_prefill": True}
    request = Request("minimax_m2", "host", "x", 4, **(fields | {"compare": True} | chosen))
    return [
        (
            head.quantization.value if head.quantization else "",
            head.levers.row_policy.value,
            head.levers.refeed,
            head.levers.drafter_prefill,
            head.drafts,
        )
        for head in request.plan(FAMILIES["minimax_m2"], offered)
    ]


def test_the_demo_shows_each_policy_for_every_number_of_drafts() -> None:
    all_policies = [
        ("bf16", "seed", False, False, DRAFTS),
        ("bf16", "verified", False, False, DRAFTS[1:]),
        ("bf16", "verified", True, True, DRAFTS[1:]),
    ]
    assert planned() == all_policies
    assert planned(tuple(MtpQuantization)) == [
        *all_policies,
        *((q.value, "seed", False, False, (3,)) for q in MtpQuantization if q is not MtpQuantization.BF16),
    ]
    assert planned(compare=False) == all_policies[:1]
    assert planned(row_policy="all") == all_policies
    assert planned(num_drafts=2) == [("bf16", "seed", False, False, (2,))]


def test_modules_are_shown_the_prompt_with_refeed_alone() -> None:
    refed: dict[str, Any] = {"row_policy": "verified", "refeed": True, "num_drafts": 3}
    assert planned(**refed) == [("bf16", "verified", True, True, (3,))]
    assert planned(**refed, drafter_prefill=False) == [("bf16", "verified", True, False, (3,))]
    assert planned(row_policy="verified", num_drafts=3) == [("bf16", "verified", False, False, (3,))]
