# SPDX-License-Identifier: AGPL-3.0-only
"""ThroughputGate: whether drafting pays, decided by measured tokens a second. It reads no clock; the caller does.

Each number of concurrent sequences is judged on its own. Its mode, with or without drafts, is measured in windows of
steps; now and then a window of the other mode is put between (a probe). A mode that is slower than the other by more
than the noise in two windows one after another gives way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from ...runtime.errors import InvalidArgumentError
from ...runtime.sizes import count
from ..levers import ModelLevers

__all__ = ["Baseline", "GateMode", "ThroughputGate"]

WINDOW_STEPS = 16
"""Steps of a window."""
LEAST_STEPS = 8
"""Fewer, where the number of sequences changed, say nothing: such a window is thrown away."""
EWMA = 0.3
"""Weight of a new window."""
LEAST_MARGIN = 0.05
"""By how much a mode must be better, relative to its own rate; or half of both deviations, if that is more."""
LOSING_WINDOWS = 2
"""Windows that a mode must lose in a row."""
DEEP, DEPTH_FACTOR = 512, 2
"""A rate measured at a shorter context is stale where the context is beyond DEEP and has grown by this factor."""


class GateMode(Enum):
    """What a step does."""

    MTP = "mtp"
    PLAIN = "plain"

    @property
    def other(self) -> GateMode:
        """The other of the two."""
        return GateMode.PLAIN if self is GateMode.MTP else GateMode.MTP


@dataclass(slots=True)
class Baseline:
    """Tokens a second of a mode: weighted mean and mean absolute deviation over its windows; `depth` is the context
    length of the last one."""

    mean: float
    deviation: float
    depth: int

    def add(self, rate: float, depth: int) -> None:
        """Take in a window."""
        self.deviation += EWMA * (abs(rate - self.mean) - self.deviation)
        self.mean += EWMA * (rate - self.mean)
        self.depth = depth

    def stale(self, depth: int) -> bool:
        """Whether it was measured at a context too short to speak of `depth`."""
        return depth > DEEP and depth >= DEPTH_FACTOR * self.depth


@dataclass(slots=True)
class _Lane:
    """One number of sequences. `since` counts tokens since the other mode was measured."""

    home: GateMode = GateMode.MTP
    probing: bool = False
    losing: int = 0
    since: int = 0
    rates: dict[GateMode, Baseline] = field(default_factory=dict)
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    depth: int = 0

    @property
    def mode(self) -> GateMode:
        return self.home.other if self.probing else self.home

    def forget_window(self) -> None:
        self.steps = self.tokens = self.depth = 0
        self.seconds = 0.0


class ThroughputGate:
    """Asked before each step (`use_mtp`) and told after it (`record`). Starts with drafts.

    With drafts, the plain rate is measured when it is unknown or stale and after every `refresh` tokens; without, the
    drafts' after every `reprobe`. `forced`: drafts always.
    """

    def __init__(self, reprobe: int = 256, refresh: int = 1024, forced: bool = False) -> None:
        self.reprobe, self.refresh = count("reprobe", reprobe), count("refresh", refresh)
        self.forced = forced
        self._lanes: dict[int, _Lane] = {}
        self._current: int | None = None

    @classmethod
    def from_levers(cls, levers: ModelLevers) -> ThroughputGate:
        """A gate with the levers' cadence."""
        return cls(levers.gate_reprobe, levers.gate_refresh, levers.gate_force)

    def mode(self, sequences: int) -> GateMode:
        """The mode that `sequences` are in, probes apart."""
        lane = self._lanes.get(sequences)
        return GateMode.MTP if lane is None or self.forced else lane.home

    def baseline(self, sequences: int, mode: GateMode) -> Baseline | None:
        """What is known of a mode's rate."""
        lane = self._lanes.get(sequences)
        return None if lane is None else lane.rates.get(mode)

    def use_mtp(self, sequences: int, depth: int) -> bool:
        """Whether the next step drafts. sequences: those that take part. depth: tokens of the longest of them."""
        if self.forced:
            return True
        lane = self._enter(count("sequences", sequences))
        if not lane.probing and lane.steps == 0 and self._probe_is_due(lane, count("depth", depth, 0)):
            lane.probing = True
        return lane.mode is GateMode.MTP

    def record(self, sequences: int, depth: int, tokens: int, seconds: float) -> None:
        """A step, in the mode that `use_mtp` gave for it, emitted `tokens` over all sequences in `seconds`."""
        if not (isinstance(seconds, (int, float)) and math.isfinite(seconds) and seconds > 0.0):
            raise InvalidArgumentError("seconds", seconds, "a time above 0 is needed")
        made = count("tokens", tokens, 0)
        if self.forced:
            return
        lane = self._enter(count("sequences", sequences))
        lane.steps += 1
        lane.tokens += made
        lane.seconds += seconds
        lane.depth = max(lane.depth, count("depth", depth, 0))
        lane.since += made
        if lane.steps == WINDOW_STEPS:
            self._close(lane)

    def _enter(self, sequences: int) -> _Lane:
        """The lane of `sequences`; a window of another lane that is open ends with what it has."""
        if self._current is not None and self._current != sequences:
            self._close(self._lanes[self._current])
        self._current = sequences
        return self._lanes.setdefault(sequences, _Lane())

    def _probe_is_due(self, lane: _Lane, depth: int) -> bool:
        if lane.home not in lane.rates:
            return False
        other = lane.rates.get(lane.home.other)
        if other is None or other.stale(depth):
            return True
        return lane.since >= (self.refresh if lane.home is GateMode.MTP else self.reprobe)

    def _close(self, lane: _Lane) -> None:
        steps, tokens, seconds, depth = lane.steps, lane.tokens, lane.seconds, lane.depth
        lane.forget_window()
        if steps < LEAST_STEPS:
            return
        rate, known = tokens / seconds, lane.rates.get(lane.mode)
        if known is None or known.stale(depth):
            lane.rates[lane.mode] = Baseline(rate, 0.0, depth)
        else:
            known.add(rate, depth)
        own, other = lane.rates.get(lane.home), lane.rates.get(lane.home.other)
        if own is None or other is None:
            return
        if lane.probing:
            lane.since = 0
        lost = not own.stale(depth) and not other.stale(depth) and other.mean - own.mean > _margin(own, other)
        lane.losing = lane.losing + 1 if lost else 0
        if lane.losing >= LOSING_WINDOWS:
            lane.home, lane.losing, lane.since, lane.probing = lane.home.other, 0, 0, False
        elif not lost:
            lane.probing = False


def _margin(own: Baseline, other: Baseline) -> float:
    return max(LEAST_MARGIN * other.mean, 0.5 * (own.deviation + other.deviation))
