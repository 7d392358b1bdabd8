# SPDX-License-Identifier: AGPL-3.0-only
"""A launch trace: record steps, compare two word by word, replay one.

Twin of `launch_trace` of the Rust runtime. A difference between two steps that should be the same is a host value
that a captured graph would freeze.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import InvalidArgumentError
from .gpu import DevicePtr, GraphHandle
from .signature import Kind, Param

if TYPE_CHECKING:
    from types import TracebackType

    from .checked import CheckedBackend
    from .device import Dim3, LoadedKernel

__all__ = ["Difference", "Entry", "LaunchTrace"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One operation: `kind` is "launch" or the name of a copy or fill; `name` the kernel; `words` its arguments.

    `words` are (name, bits) pairs; `payload` holds what `replay` needs beyond them (an upload's bytes).
    """

    kind: str
    name: str
    grid: Dim3
    block: Dim3
    shared_mem: int
    words: tuple[tuple[str, int | bytes], ...]
    payload: Any = None


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two steps part: the index of the operation, what it is, which word, and both values."""

    index: int
    operation: str
    word: str
    first: Any
    second: Any

    def __str__(self) -> str:
        show = [hex(v) if isinstance(v, int) else repr(v) for v in (self.first, self.second)]
        return f"#{self.index} {self.operation}: {self.word}: {show[0]} -> {show[1]}"


def _bits(param: Param, value: Any) -> int | bytes:
    if param.kind is Kind.F32:
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    if param.kind is Kind.F64:
        return int(struct.unpack("<Q", struct.pack("<d", value))[0])
    return value if isinstance(value, bytes) else int(value)


class LaunchTrace:
    """Records what a backend queues while the trace is active (`with gpu.trace() as trace`).

    `step()` ends the current step and starts the next; `steps` holds them.
    """

    def __init__(self, gpu: CheckedBackend) -> None:
        self._gpu = gpu
        self._current: list[Entry] = []
        self.steps: list[list[Entry]] = []

    def __enter__(self) -> LaunchTrace:
        if self._gpu._trace is not None:
            raise InvalidArgumentError("trace", "a second one", "one trace at a time on a backend")
        self._gpu._follow(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._gpu._follow(None)
        if self._current:
            self.step()

    def step(self) -> list[Entry]:
        """End the step being recorded, and give it."""
        done, self._current = self._current, []
        self.steps.append(done)
        return done

    def diff(self, first: int = -2, second: int = -1, max_report: int = 20) -> list[Difference]:
        """Differences between two recorded steps, at most `max_report`; the last two by default."""
        for name, number in (("first", first), ("second", second)):
            if not -len(self.steps) <= number < len(self.steps):
                raise InvalidArgumentError(name, number, f"{len(self.steps)} steps are recorded")
        return self.compare(self.steps[first], self.steps[second])[:max_report]

    @staticmethod
    def compare(first: Sequence[Entry], second: Sequence[Entry]) -> list[Difference]:
        """All differences between two steps."""
        found: list[Difference] = []
        for index, (a, b) in enumerate(zip(first, second, strict=False)):
            operation = a.name or a.kind
            for word, x, y in (
                ("operation", (a.kind, a.name), (b.kind, b.name)),
                ("grid", a.grid, b.grid),
                ("block", a.block, b.block),
                ("shared_mem", a.shared_mem, b.shared_mem),
            ):
                if x != y:
                    found.append(Difference(index, operation, word, x, y))
            if (a.kind, a.name) == (b.kind, b.name):
                found += [
                    Difference(index, operation, name, x, y)
                    for (name, x), (_, y) in zip(a.words, b.words, strict=False)
                    if x != y
                ]
                if a.kind != "launch" and a.payload != b.payload:  # a launch's words say all that its arguments do
                    found.append(Difference(index, operation, "bytes", a.payload, b.payload))
        if len(first) != len(second):
            found.append(Difference(min(len(first), len(second)), "step", "operations", len(first), len(second)))
        return found

    def replay(self, step: int = -1, stream: int | None = None) -> int:
        """Queue a recorded step again on `stream` (default stream); gives the number of operations.

        Downloads are left out: their host memory is the recorder's. Addresses must still be alive.
        """
        if not -len(self.steps) <= step < len(self.steps):
            raise InvalidArgumentError("step", step, f"{len(self.steps)} steps are recorded")
        gpu, target = self._gpu, stream if stream is not None else self._gpu.default_stream()
        active = gpu._trace
        gpu._follow(None)
        done = 0
        try:
            for entry in self.steps[step]:
                done += self._replay_one(entry, target)
        finally:
            gpu._follow(active)
        return done

    def _replay_one(self, entry: Entry, stream: int) -> int:
        gpu = self._gpu
        if entry.kind == "launch":
            handle, args, cooperative = entry.payload
            (gpu.launch_cooperative if cooperative else gpu.launch_typed)(
                handle, entry.grid, entry.block, entry.shared_mem, stream, args
            )
        elif entry.kind.startswith("copy_h2d"):
            gpu.copy_h2d_async(entry.payload, DevicePtr(entry.words[0][1]), stream)
        elif entry.kind.startswith("copy_d2d_2d"):
            src, dst, *rest = (int(bits) for _, bits in entry.words)
            gpu.copy_d2d_2d_async(DevicePtr(src), rest[0], DevicePtr(dst), rest[1], rest[2], rest[3], stream)
        elif entry.kind.startswith("copy_d2d"):
            src, dst, size = (int(bits) for _, bits in entry.words)
            gpu.copy_d2d_async(DevicePtr(src), DevicePtr(dst), size, stream)
        elif entry.kind.startswith("memset"):
            ptr, value, size = (int(bits) for _, bits in entry.words)
            gpu.memset_async(DevicePtr(ptr), value, size, stream)
        elif entry.kind == "launch_graph":
            gpu.launch_graph(GraphHandle(int(entry.words[0][1]), gpu._id), stream)
        else:
            return 0
        return 1

    # ------------------------------------------------------------ called by the backend

    def record_launch(
        self,
        kernel: LoadedKernel,
        handle: Any,
        grid: Dim3,
        block: Dim3,
        shared: int,
        cooperative: bool,
        values: Sequence[Any],
        args: Sequence[Any],
    ) -> None:
        """A launch with its packed values and the caller's own arguments."""
        words = tuple(
            (param.name, _bits(param, value)) for param, value in zip(kernel.signature.params, values, strict=True)
        )
        payload = (handle, tuple(args), cooperative)
        self._current.append(Entry("launch", kernel.name, grid, block, shared, words, payload))

    def record_operation(self, kind: str, words: Sequence[tuple[str, int]], payload: bytes | None = None) -> None:
        """A copy, fill or graph launch."""
        self._current.append(Entry(kind, "", (0, 0, 0), (0, 0, 0), 0, tuple(words), payload))
