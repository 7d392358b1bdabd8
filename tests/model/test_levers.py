# SPDX-License-Identifier: AGPL-3.0-only
"""ModelLevers: fields that refuse nonsense, and the parse rule of each environment variable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import pytest

from spark_py.model.drafting.ladder import DEFAULT_LADDER
from spark_py.model.env_rules import is_one, parse_f32, parse_isize, parse_usize, present
from spark_py.model.levers import IGNORED, ModelLevers
from spark_py.model.row_policy import RowPolicy
from spark_py.runtime.errors import InvalidArgumentError

TEXTS = ("0", "1", "", " ", " 1", "1 ", "01", "+1", "true", "True", "yes", "on", "off", "-1", "x", "1\n", "\u0661")
"""What people write into a switch."""

ON_BY_PRESENCE = {"MTP_KV_GEMV": "kv_gemv_pinned", "MTP_ACCEPT_DEBUG": "accept_debug"}
OFF_BY_PRESENCE = {
    "NO_MTP_LMHEAD_TGEMM": "lm_head_tgemm",
    "NO_GEMV_EXACT_M_TIERS": "gemv_exact_m_tiers",
    "NO_MTP_EAGER_DRAFTER": "eager_drafter",
    "NO_MTP_BATCH_PROPOSE": "batch_propose",
    "NO_MTP_DCUT": "dcut",
}
ON_BY_ONE = {
    "MTP_REFEED_DEBUG": "refeed_debug",
    "MTP_DEBUG_NORMS": "debug_norms",
    "MTP_PREFILL_PROFILE": "prefill_profile",
    "MTP_CARRY_DEBUG": "carry_debug",
    "MTP_GATE_FORCE": "gate_force",
    "MTP_CHAIN_POSTNORM": "chain_postnorm",
}
OFF_BY_ONE = {
    "NO_GEMV_SW": "gemv_sw",
    "NO_DRAFTER_SMALL_M_TIER": "small_m_tier",
    "NO_MTP_PROPOSE_GRAPH": "propose_graph",
    "NO_MTP_BF16_MOE_FUSED": "bf16_moe_fused",
}
ON_BY_ONE_FOR_ONE_SEQUENCE = {"MTP_CATCHUP": "catchup", "MTP_REFEED_ACCEPTED": "refeed"}

VALUES: dict[str, tuple[str, dict[str, Any]]] = {
    "MTP_MAX_SEQS": ("mtp_max_seqs", {
        "1": 1, "32": 32, "+4": 4, "007": 7, "": 8, " 4": 8, "4 ": 8, "-1": 8, "4.0": 8, "x": 8, "++4": 8, "\u0663": 8,
        "1_0": 8, str(2**64): 8, str(2**64 - 1): 2**64 - 1, "0": 1,
    }),
    "MTP_GATE_REPROBE": ("gate_reprobe", {"1": 1, "9": 9, "": 256, " 9": 256, "x": 256, "-1": 256, "0": 1}),
    "MTP_GATE_REFRESH": ("gate_refresh", {"1": 1, "9": 9, "": 1024, "9 ": 1024, "x": 1024, "1.5": 1024, "0": 1}),
    "MTP_DCUT_MAX_SEQS": ("dcut_max_seqs", {"0": 0, "1": 1, "32": 32, "": 8, " 1": 8, "x": 8, "-1": 8}),
    "MTP_SHADOW_TOPK": ("shadow_topk", {"0": 0, "1": 1, "8": 8, "9": 8, "999": 8, "": 0, " 3": 0, "x": 0, "-1": 0}),
    "MTP_REFEED_SHIFT": ("refeed_shift", {
        "0": 0, "1": 1, "-1": -1, "+2": 2, "4": 4, "5": 4, "-5": -4, "99": 4, "": 0, " 1": 0, "x": 0, "1.0": 0,
        str(2**63): 0, str(-(2**63)): -4,
    }),
    "MTP_DRAFT_CONF": ("draft_conf_tau", {
        "0.5": 0.5, "0": 0.0, "1": 0.99, "5": 0.99, "-1": 0.0, "nan": 0.0, "inf": 0.99, "-inf": 0.0, "x": 0.0, "": 0.0,
        ".5": 0.5, "5e-1": 0.5, "+0.5": 0.5, " 0.5": 0.0, "0.5\n": 0.0, "0_1": 0.0, "e1": 0.0, ".": 0.0,
    }),
    "MTP_DCUT_RATIO": ("dcut_ratio", {
        "0.25": 0.25, "0.5": 0.5, "0.75": 0.75, "1": 1.0, "2": 1.0, "inf": 1.0, "0": 0.25, "-3": 0.25, "0.1": 0.25,
        "0.374": 0.25, "0.375": 0.5, "0.6": 0.5, "0.63": 0.75, "0.9": 1.0, "nan": 0.75, "": 0.75, " 1": 0.75, "x": 0.75,
    }),
    "PROPOSE_META_STRIDE": ("propose_meta_stride", {
        "100": 2048, "0": 2048, "2048": 2048, "2049": 2056, " 4096 ": 4096, "\t4096\n": 4096, "+4096": 4096,
        "abc": None, "": None, " ": None, "-1": None, "4096.0": None, "99999999999": 1 << 24, str(2**64): None,
    }),
    "MTP_K_LADDER": ("mtp_k_ladder", {
        "4:3": ((4, 3),), "2:4,8:2": ((2, 4), (8, 2)), " 2 : 4 , 8:2 ": ((2, 4), (8, 2)), "0:0": ((0, 0),),
        "8:1,4:3": ((8, 1), (4, 3)), "": DEFAULT_LADDER, "4": DEFAULT_LADDER, "4:3,": DEFAULT_LADDER,
        "4:3,x:1": DEFAULT_LADDER, "4:3,8:1:2": DEFAULT_LADDER, "4:-3": DEFAULT_LADDER, "4;3": DEFAULT_LADDER,
        "off": DEFAULT_LADDER, "4:": DEFAULT_LADDER, "0": DEFAULT_LADDER,
    }),
}  # fmt: skip

OWN_TESTS = {"NO_MTP_K_LADDER", "NO_MTP_DRAFTER_CONTEXT", "MTP_DRAFTER_CONTEXT_PREFILL_ONLY_UNSAFE"}
NOT_READ = {"exact_drafter_rows", "row_policy", "keep_logits"}
"""Fields of this project alone, which no variable of the engine speaks of."""


def read(name: str, text: str, **more: str) -> ModelLevers:
    return ModelLevers.from_env({f"ATLAS_{key}": value for key, value in {name: text, **more}.items()})


def changed(levers: ModelLevers) -> dict[str, Any]:
    """Fields that are not the default."""
    default = ModelLevers()
    names = [field.name for field in fields(ModelLevers)]
    return {name: value for name in names if (value := getattr(levers, name)) != getattr(default, name)}


# ---------------------------------------------------------------- rules


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("name", "field"), [*ON_BY_PRESENCE.items(), *OFF_BY_PRESENCE.items()])
def test_switches_by_presence(name: str, field: str, text: str) -> None:
    assert changed(read(name, text)) == {field: name in ON_BY_PRESENCE}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("name", "field"), [*ON_BY_ONE.items(), *OFF_BY_ONE.items()])
def test_switches_by_exactly_one(name: str, field: str, text: str) -> None:
    assert changed(read(name, text)) == ({field: name in ON_BY_ONE} if text == "1" else {})


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("name", "field"), ON_BY_ONE_FOR_ONE_SEQUENCE.items())
def test_switches_for_one_sequence(name: str, field: str, text: str) -> None:
    on = {field: True} if text == "1" else {}
    assert changed(read(name, text, MTP_MAX_SEQS="1")) == {"mtp_max_seqs": 1} | on
    assert changed(read(name, text, MTP_MAX_SEQS="0")) == {"mtp_max_seqs": 1} | on
    assert changed(read(name, text)) == {}
    assert changed(read(name, text, MTP_MAX_SEQS="2")) == {"mtp_max_seqs": 2}


@pytest.mark.parametrize(
    ("name", "field", "text", "value"),
    [(name, field, text, value) for name, (field, rows) in VALUES.items() for text, value in rows.items()],
)
def test_values(name: str, field: str, text: str, value: Any) -> None:
    assert getattr(read(name, text), field) == value
    assert set(changed(read(name, text))) <= {field}


@pytest.mark.parametrize("text", TEXTS)
def test_without_a_ladder_4_sequences_draft_at_once(text: str) -> None:
    assert changed(read("NO_MTP_K_LADDER", text)) == {"mtp_k_ladder": None, "mtp_max_seqs": 4}
    assert read("NO_MTP_K_LADDER", text, MTP_K_LADDER="2:2", MTP_MAX_SEQS="6").mtp_max_seqs == 6
    assert read("NO_MTP_K_LADDER", text, MTP_K_LADDER="2:2", MTP_MAX_SEQS=" 6").mtp_max_seqs == 4
    assert read("NO_MTP_K_LADDER", text, MTP_K_LADDER="2:2").mtp_k_ladder is None


@pytest.mark.parametrize("text", TEXTS)
def test_the_drafters_context(text: str) -> None:
    """One variable ends prefill and carry, another carry alone; the first wins."""
    off, no_carry = {"drafter_prefill": False, "carry_drafter": False}, {"carry_drafter": False}
    one = text == "1"
    unsafe = "MTP_DRAFTER_CONTEXT_PREFILL_ONLY_UNSAFE"
    assert changed(read("NO_MTP_DRAFTER_CONTEXT", text)) == (off if one else {})
    assert changed(read(unsafe, text)) == (no_carry if one else {})
    assert changed(read("NO_MTP_DRAFTER_CONTEXT", "1", **{unsafe: text})) == off
    assert changed(read("NO_MTP_DRAFTER_CONTEXT", text, **{unsafe: "1"})) == (off if one else no_carry)


@pytest.mark.parametrize("name", IGNORED)
@pytest.mark.parametrize("text", ["0", "1", ""])
def test_what_changes_nothing_says_so(name: str, text: str, caplog: pytest.LogCaptureFixture) -> None:
    assert ModelLevers.from_env({name: text}) == ModelLevers()
    assert [record.message for record in caplog.records] == [f"{name} is set and changes nothing: {IGNORED[name]}"]


@pytest.mark.parametrize("name", ["MTP_MAX_SEQS", "MTP_GATE_REPROBE", "MTP_GATE_REFRESH"])
def test_a_zero_that_counts_as_one_says_so(name: str, caplog: pytest.LogCaptureFixture) -> None:
    read(name, "0")
    assert [f"ATLAS_{name} is 0" in record.message for record in caplog.records] == [True]


class Watched(Mapping[str, str]):
    """An environment without variables that remembers what was asked for."""

    def __init__(self) -> None:
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self.asked.add(name)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def test_every_name_and_every_field_has_a_row() -> None:
    single = [ON_BY_PRESENCE, OFF_BY_PRESENCE, ON_BY_ONE, OFF_BY_ONE, ON_BY_ONE_FOR_ONE_SEQUENCE]
    names = {name for table in single for name in table} | set(VALUES) | OWN_TESTS
    watched = Watched()
    assert ModelLevers.from_env(watched) == ModelLevers(), "an empty environment gives the defaults"
    assert watched.asked == {f"ATLAS_{name}" for name in names} | set(IGNORED)
    found = {field for table in single for field in table.values()} | {field for field, _ in VALUES.values()}
    found |= {"drafter_prefill", "carry_drafter"} | NOT_READ
    assert found == {field.name for field in fields(ModelLevers)}


def test_the_environment_is_read_by_from_env_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATLAS_MTP_MAX_SEQS", "3")
    assert ModelLevers().mtp_max_seqs == 8
    assert ModelLevers.from_env().mtp_max_seqs == 3


def test_rules() -> None:
    assert [present(text) for text in (None, "", "0", "1")] == [False, True, True, True]
    assert [is_one(text) for text in (None, "", "0", "1", "1 ", "+1")] == [False, False, False, True, False, False]
    assert [parse_usize(None), parse_isize(None), parse_f32(None)] == [None, None, None]
    assert [parse_usize("-0"), parse_isize("-0"), parse_isize("- 1")] == [None, 0, None]
    assert [parse_f32(text) for text in ("1.", ".5", "1e2", "Infinity", "1.5f", "0x1")] == [
        1.0, 0.5, 100.0, float("inf"), None, None,
    ]  # fmt: skip


# ---------------------------------------------------------------- fields


@pytest.mark.parametrize(
    "wrong",
    [
        {"mtp_max_seqs": 0}, {"mtp_max_seqs": True}, {"draft_conf_tau": 1.0}, {"draft_conf_tau": float("nan")},
        {"draft_conf_tau": -0.1}, {"draft_conf_tau": "0.5"}, {"draft_conf_tau": False}, {"row_policy": "seed"},
        {"gate_reprobe": 0}, {"gate_refresh": 1.5}, {"dcut_max_seqs": -1}, {"dcut_ratio": 0.6}, {"dcut_ratio": True},
        {"shadow_topk": 9}, {"shadow_topk": -1}, {"shadow_topk": True}, {"refeed_shift": 5}, {"refeed_shift": -5},
        {"refeed_shift": 0.5}, {"mtp_k_ladder": ()}, {"mtp_k_ladder": "4:3"}, {"mtp_k_ladder": ((4,),)},
        {"mtp_k_ladder": ((4, -1),)}, {"mtp_k_ladder": (4, 3)}, {"propose_meta_stride": 2047},
        {"propose_meta_stride": 2049}, {"propose_meta_stride": (1 << 24) + 8}, {"propose_meta_stride": 0},
        {"catchup": True}, {"catchup": True, "mtp_max_seqs": 2},
    ],
    ids=str,
)  # fmt: skip
def test_fields_that_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        ModelLevers(**wrong)


@pytest.mark.parametrize("name", [field.name for field in fields(ModelLevers) if field.type == "bool"])
@pytest.mark.parametrize("value", [0, 1, None, "1"])
def test_switches_are_true_or_false(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        replace(ModelLevers(mtp_max_seqs=1), **{name: value})


def test_what_follows_from_fields() -> None:
    one = ModelLevers(mtp_max_seqs=1)
    assert one.carries
    assert not ModelLevers().carries, "several sequences share the drafter"
    assert not replace(one, carry_drafter=False).carries
    assert not replace(one, drafter_prefill=False).carries
    blind = replace(one, drafter_prefill=False)
    assert (one.feeds_drafter, blind.feeds_drafter) == (True, False)
    assert replace(blind, refeed=True).feeds_drafter
    assert replace(blind, catchup=True).feeds_drafter


def test_words_of_the_policies() -> None:
    assert RowPolicy("seed") is RowPolicy.SEED
    assert RowPolicy("verified") is RowPolicy.VERIFIED
