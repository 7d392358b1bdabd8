# SPDX-License-Identifier: AGPL-3.0-only
"""How quick the host is now, beside the quickest that it has been: times of the host are taken while it is at its best.

Another tenant of a machine, or a clock that comes down behind a burst of compilers, makes the same Python take 1.2 to 2
times as long for seconds, and only ever longer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

__all__ = ["HostPace"]

_ROUNDS, _LOOPS = 20, 100_000
_SLOWER = 1.1
"""A host within a tenth of its best is at its best: medians of a quiet one differ by less."""
_PAUSE = 0.25


def _loop() -> float:
    """Seconds of a loop of a few milliseconds."""
    start = time.perf_counter()
    for _ in range(_LOOPS):
        pass
    return time.perf_counter() - start


class HostPace:
    """`quickest`: the lowest median of some loops so far, the first of them taken at construction, before the machine
    is given work."""

    def __init__(
        self,
        loop: Callable[[], float] = _loop,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._loop, self._clock, self._sleep = loop, clock, sleep
        self.quickest = float("inf")
        self._at_pace()

    def _at_pace(self) -> bool:
        """Whether the median of some loops is about the lowest so far."""
        median = statistics.median(self._loop() for _ in range(_ROUNDS))
        self.quickest = min(self.quickest, median)
        return median <= _SLOWER * self.quickest

    def wait(self, limit: float) -> float:
        """Seconds that passed until the host was at its best, at most about `limit`."""
        start = self._clock()
        while not self._at_pace() and self._clock() - start < limit:
            self._sleep(_PAUSE)
        return self._clock() - start
