# SPDX-License-Identifier: AGPL-3.0-only
"""Waiting for a quiet host: until its loops are as quick as they were, and no longer than the limit."""

from __future__ import annotations

import pytest

from tools.host_pace import HostPace


class Host:
    """A clock that loops and pauses move; a loop takes as long as `speed` says at that time."""

    def __init__(self, *speeds: tuple[float, float]) -> None:
        self.now, self._speeds = 0.0, speeds

    def loop(self) -> float:
        took = next(seconds for until, seconds in self._speeds if self.now < until)
        self.now += took
        return took

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def pace(self) -> HostPace:
        return HostPace(self.loop, lambda: self.now, self.sleep)


FOREVER = float("inf")


def test_a_quiet_host_is_not_waited_for() -> None:
    host = Host((FOREVER, 0.005))
    assert host.pace().wait(30.0) == pytest.approx(20 * 0.005)


def test_a_slow_one_is_until_it_is_as_quick_as_before() -> None:
    host = Host((0.1, 0.005), (8.0, 0.008), (FOREVER, 0.0052))
    pace = host.pace()
    waited = pace.wait(30.0)
    assert 7.0 < waited < 9.0
    assert pace.quickest == 0.005


def test_one_that_stays_slow_for_the_limit() -> None:
    host = Host((0.1, 0.005), (FOREVER, 0.008))
    assert 2.0 <= host.pace().wait(2.0) < 2.6


def test_a_host_that_was_slow_at_first_shows_its_best_later() -> None:
    host = Host((0.5, 0.008), (FOREVER, 0.005))
    pace = host.pace()
    pace.wait(30.0)
    host.sleep(1.0)
    pace.wait(30.0)
    assert pace.quickest == 0.005
