# SPDX-License-Identifier: AGPL-3.0-only
"""ModelLevers: fields that refuse nonsense, and the parse rule of each environment variable."""

from __future__ import annotations

from typing import Any

import pytest

from spark_py.model.levers import ModelLevers
from spark_py.model.row_policy import RowPolicy
from spark_py.runtime.errors import InvalidArgumentError


def test_an_empty_environment_gives_the_defaults() -> None:
    assert ModelLevers.from_env({}) == ModelLevers()


def test_the_environment_is_read_by_from_env_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATLAS_MTP_MAX_SEQS", "3")
    assert ModelLevers().mtp_max_seqs == 8
    assert ModelLevers.from_env().mtp_max_seqs == 3


@pytest.mark.parametrize(
    ("text", "seqs"),
    [("1", 1), ("32", 32), ("+4", 4), ("007", 7), ("", 8), (" 4", 8), ("4 ", 8), ("-1", 8), ("4.0", 8), ("x", 8),
     ("++4", 8), ("٣", 8), ("1_0", 8), (str(2**64), 8), ("0", 1)],
)  # fmt: skip
def test_mtp_max_seqs(text: str, seqs: int) -> None:
    assert ModelLevers.from_env({"ATLAS_MTP_MAX_SEQS": text}).mtp_max_seqs == seqs


@pytest.mark.parametrize(
    ("text", "tau"),
    [
        ("0.5", 0.5),
        ("0", 0.0),
        ("1", 0.99),
        ("5", 0.99),
        ("-1", 0.0),
        ("nan", 0.0),
        ("inf", 0.99),
        ("x", 0.0),
        ("", 0.0),
        (".5", 0.5),
        ("5e-1", 0.5),
        ("+0.5", 0.5),
        (" 0.5", 0.0),
        ("0.5\n", 0.0),
        ("0_1", 0.0),
        ("e1", 0.0),
        (".", 0.0),
    ],
)
def test_draft_conf(text: str, tau: float) -> None:
    assert ModelLevers.from_env({"ATLAS_MTP_DRAFT_CONF": text}).draft_conf_tau == tau


@pytest.mark.parametrize("text", ["1", "0", "", "true", " 1"])
def test_switches_that_are_on_for_exactly_1(text: str) -> None:
    env = {"ATLAS_NO_MTP_DRAFTER_CONTEXT": text, "ATLAS_MTP_REFEED_ACCEPTED": text, "ATLAS_MTP_MAX_SEQS": "1"}
    levers = ModelLevers.from_env(env)
    assert (levers.drafter_prefill, levers.refeed) == (text != "1", text == "1")


def test_refeed_is_for_one_sequence() -> None:
    assert not ModelLevers.from_env({"ATLAS_MTP_REFEED_ACCEPTED": "1"}).refeed
    assert not ModelLevers.from_env({"ATLAS_MTP_REFEED_ACCEPTED": "1", "ATLAS_MTP_MAX_SEQS": "2"}).refeed


@pytest.mark.parametrize(
    "fields",
    [
        {"mtp_max_seqs": 0}, {"mtp_max_seqs": True}, {"draft_conf_tau": 1.0}, {"draft_conf_tau": float("nan")},
        {"draft_conf_tau": -0.1}, {"row_policy": "seed"}, {"refeed": 1}, {"drafter_prefill": None},
        {"exact_drafter_rows": "yes"},
    ],
    ids=str,
)  # fmt: skip
def test_fields_that_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(fields))):
        ModelLevers(**fields)


def test_words_of_the_policies() -> None:
    assert RowPolicy("seed") is RowPolicy.SEED
    assert RowPolicy("verified") is RowPolicy.VERIFIED
