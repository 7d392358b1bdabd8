# SPDX-License-Identifier: AGPL-3.0-only
"""The throughput gate, rule by rule, with rates that the test makes up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from spark_py.model.drafting.gate import Baseline, GateMode, ThroughputGate
from spark_py.model.levers import ModelLevers
from spark_py.runtime.errors import InvalidArgumentError

MTP, PLAIN = GateMode.MTP, GateMode.PLAIN


def step(
    gate: ThroughputGate, mtp: float, plain: float, n: int = 1, depth: int = 100, tokens: int | None = None
) -> bool:
    """One step at `mtp` or `plain` tokens a second, whichever the gate wants; whether it drafted."""
    drafts = gate.use_mtp(n, depth)
    made = (3 if drafts else 1) * n if tokens is None else tokens
    gate.record(n, depth, made, made / (mtp if drafts else plain))
    return drafts


def steps(gate: ThroughputGate, count: int, mtp: float, plain: float, **more: Any) -> list[bool]:
    return [step(gate, mtp, plain, **more) for _ in range(count)]


def windows(drafted: list[bool]) -> str:
    """One letter a run of 16 steps: m, p, or ? where it was mixed."""
    groups = [drafted[i : i + 16] for i in range(0, len(drafted), 16)]
    return "".join("m" if all(g) else "?" if any(g) else "p" for g in groups)


def test_drafts_that_pay_stay() -> None:
    gate = ThroughputGate()
    # A window of drafts, one of the plain run for comparison, then drafts until 1024 tokens have passed: 21.3 windows.
    assert windows(steps(gate, 16 * 26, 200, 100)) == "mp" + "m" * 22 + "pm"
    assert gate.mode(1) is MTP


def test_drafts_that_do_not_pay_end_after_two_windows() -> None:
    gate = ThroughputGate()
    # The plain run is measured twice, since the drafts have to lose two windows. Then every 256 tokens one window of
    # drafts: 16 windows of 16 plain tokens.
    assert windows(steps(gate, 16 * 22, 100, 200)) == "mpp" + "p" * 16 + "mpp"
    assert gate.mode(1) is PLAIN


def test_drafts_come_back_when_they_pay() -> None:
    gate = ThroughputGate()
    steps(gate, 48, 100, 200)
    assert gate.mode(1) is PLAIN
    drafted = steps(gate, 16 * 24, 400, 200)
    # The old rate of 100 is not forgotten at once: 100, 190, 253, 297 by the weight of 0.3, and 210 must be passed in
    # two windows.
    assert windows(drafted).startswith("p" * 16 + "mp")
    steps(gate, 16 * 60, 400, 200)
    assert gate.mode(1) is MTP


@pytest.mark.parametrize(("mtp", "mode"), [(95.3, MTP), (94.9, PLAIN), (100.0, MTP)])
def test_five_percent_is_no_difference(mtp: float, mode: GateMode) -> None:
    gate = ThroughputGate()
    steps(gate, 48, mtp, 100)
    assert gate.mode(1) is mode


def test_noise_widens_the_margin() -> None:
    """Drafts are 6 % slower: too slow where they are always so, within the noise where every other window is not."""
    steady, noisy = ThroughputGate(), ThroughputGate()
    steps(steady, 48, 94, 100)
    for i in range(41):
        drafted = steps(noisy, 16, 94 + (20 if i % 2 else -20) if i else 114, 100)
        assert windows(drafted) in ("m", "p")
    own, other = noisy.baseline(1, MTP), noisy.baseline(1, PLAIN)
    assert own is not None
    assert other is not None
    assert other.mean - own.mean > 0.05 * other.mean, "in the last window but for the noise"
    assert 0.5 * (own.deviation + other.deviation) > 0.05 * other.mean
    assert (steady.mode(1), noisy.mode(1)) == (PLAIN, MTP)


def test_one_lost_window_is_not_enough() -> None:
    """A window in which the plain run is fast by chance, and an ordinary one after it."""
    gate = ThroughputGate()
    steps(gate, 16, 100, 100)
    steps(gate, 16, 100, 130)
    assert gate.mode(1) is MTP
    drafted = steps(gate, 32, 100, 60)
    assert windows(drafted) == "pm", "the probe goes on for a second window, which decides"
    assert gate.mode(1) is MTP


def test_lost_windows_count_in_a_row() -> None:
    """Lost, won, lost: means of 94, 98.8 and 93.2 against 100, and margins of 5, 5 and 6."""
    gate = ThroughputGate()
    steps(gate, 32, 100, 100)
    for rate in (80, 110, 80):
        assert windows(steps(gate, 16, rate, 100)) == "m"
        assert gate.mode(1) is MTP
    steps(gate, 16, 80, 100)
    assert gate.mode(1) is PLAIN


def test_rates_are_weighted_means() -> None:
    rate = Baseline(100, 0, 10)
    rate.add(200, 20)
    assert (rate.mean, rate.deviation, rate.depth) == (pytest.approx(130), pytest.approx(30), 20)
    rate.add(130, 30)
    assert (rate.mean, rate.deviation) == (pytest.approx(130), pytest.approx(21))


@pytest.mark.parametrize(("made", "counts"), [(1, False), (7, False), (8, True), (15, True)])
def test_a_window_that_is_cut_short(made: int, counts: bool) -> None:
    """The number of sequences changes in the middle of a window: below 8 steps it says nothing."""
    gate = ThroughputGate()
    steps(gate, made, 100, 100)
    step(gate, 100, 100, n=2)
    found = gate.baseline(1, MTP)
    assert (found is not None) is counts
    assert gate.baseline(2, MTP) is None


def test_a_short_window_replaces_no_rate() -> None:
    gate = ThroughputGate()
    steps(gate, 32, 100, 50)
    for _ in range(9):
        step(gate, 1, 1)
        step(gate, 100, 50, n=2)
    found = gate.baseline(1, MTP)
    assert found is not None
    assert found.mean == pytest.approx(100)
    assert gate.mode(1) is MTP


def test_each_number_of_sequences_is_judged_on_its_own() -> None:
    gate = ThroughputGate()
    steps(gate, 48, 200, 100, n=1)
    steps(gate, 48, 100, 200, n=8)
    assert (gate.mode(1), gate.mode(8), gate.mode(2)) == (MTP, PLAIN, MTP)
    assert step(gate, 200, 100, n=1)
    assert not step(gate, 100, 200, n=8)


@pytest.mark.parametrize(
    ("measured", "depth", "stale"),
    [(100, 512, False), (100, 513, True), (300, 599, False), (300, 600, True), (256, 512, False), (0, 513, True)],
)
def test_rates_of_short_contexts_become_stale(measured: int, depth: int, stale: bool) -> None:
    assert Baseline(100, 0, measured).stale(depth) is stale


def test_a_stale_rate_is_measured_again_and_compared_with_nothing() -> None:
    gate = ThroughputGate()
    steps(gate, 32, 200, 150, depth=300)
    # At 700 tokens drafts are slower than the old plain rate; the plain run is too.
    drafted = steps(gate, 48, 100, 80, depth=700)
    assert gate.mode(1) is MTP
    assert windows(drafted) == "pmm"
    plain, mtp = gate.baseline(1, PLAIN), gate.baseline(1, MTP)
    assert plain is not None
    assert mtp is not None
    assert (plain.mean, mtp.mean) == (pytest.approx(80), pytest.approx(100)), "replaced, not mixed"


def test_a_rate_that_becomes_stale_within_a_window_is_compared_with_nothing() -> None:
    """The context passes 600 tokens in the middle of a window. The next two are of the plain run, and both are lost."""
    gate = ThroughputGate()
    steps(gate, 32, 100, 100, depth=300)
    steps(gate, 8, 50, 100, depth=500)
    steps(gate, 8, 50, 100, depth=700)
    assert gate.mode(1) is MTP
    assert windows(steps(gate, 16, 50, 100, depth=700)) == "p"
    assert gate.mode(1) is MTP, "one window that counts"
    assert windows(steps(gate, 16, 50, 100, depth=700)) == "p"
    assert gate.mode(1) is PLAIN


def test_the_cadence_is_the_levers() -> None:
    gate = ThroughputGate.from_levers(ModelLevers(gate_reprobe=32, gate_refresh=96))
    assert windows(steps(gate, 16 * 10, 200, 100)) == "mpmmpmmpmm"
    gate = ThroughputGate.from_levers(ModelLevers(gate_reprobe=32))
    assert windows(steps(gate, 16 * 12, 100, 200)) == "mpp" + "ppmppmppm"


def test_forced_drafts_stay() -> None:
    gate = ThroughputGate.from_levers(ModelLevers(gate_force=True))
    assert all(steps(gate, 100, 1, 1000))
    assert gate.mode(1) is MTP


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda gate: gate.record(1, 10, 1, 0.0), "seconds"),
        (lambda gate: gate.record(1, 10, 1, float("nan")), "seconds"),
        (lambda gate: gate.record(1, 10, -1, 1.0), "tokens"),
        (lambda gate: gate.record(0, 10, 1, 1.0), "sequences"),
        (lambda gate: gate.use_mtp(0, 10), "sequences"),
        (lambda gate: ThroughputGate(reprobe=0), "reprobe"),
        (lambda gate: ThroughputGate(refresh=-1), "refresh"),
    ],
)
def test_what_is_refused(call: Callable[[ThroughputGate], object], name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        call(ThroughputGate())
