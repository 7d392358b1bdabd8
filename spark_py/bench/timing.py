# SPDX-License-Identifier: AGPL-3.0-only
"""How calls are timed, and how fast this machine's memory is read."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from spark_py.model.weight_map import DenseWeight
from spark_py.ops.gemv import dense_gemv
from spark_py.runtime.gpu import GpuBackend

from .random_weights import RandomWeights

__all__ = [
    "COLD_BYTES",
    "Bandwidth",
    "ColdCache",
    "Counted",
    "ProposeTimes",
    "Times",
    "count_work",
    "graph_of",
    "measure",
    "measure_graph",
    "measure_queued",
    "quietest",
    "read_bandwidth",
]

_COLD_ROWS, _COLD_COLUMNS = 16384, 8192
COLD_BYTES = 2 * _COLD_ROWS * _COLD_COLUMNS
"""256 MiB: more than twice the L2 cache of any GPU so far."""
_WARM_READS = 1500
"""A tenth of a second of an H200. After a second without work its memory reads a tenth slower for some 20 ms."""
_WARM_SECONDS = 0.25
_COLD_READS = 8
"""Half a millisecond of an H200: what the host has to queue a graph in, on a machine with other things to do."""
_SUM_BYTES = 4 << 30
_WARM_UP, _SUMS = 3, 12
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds of a call on the host's clock: the median, the shortest and the longest."""

    us: float
    min_us: float
    max_us: float


@dataclass(frozen=True, slots=True)
class ProposeTimes:
    """`wall`: a whole propose on the host's clock. `device`: the replay of its graph on the device, if it has one."""

    wall: Times
    device: Times | None = None

    @property
    def shown(self) -> Times:
        """What a floor is held against."""
        return self.device or self.wall

    def numbers(self) -> dict[str, float | None]:
        """us, min_us, max_us, wall_us, host_us: what the propose takes beyond its graph."""
        rounded: dict[str, float | None] = {name: round(us, 1) for name, us in asdict(self.shown).items()}
        host = None if self.device is None else round(self.wall.us - self.device.us, 1)
        return rounded | {"wall_us": round(self.wall.us, 1), "host_us": host}


def measure(action: Callable[[], object], repeats: int, before: Callable[[], None] = lambda: None) -> Times:
    """Times of `repeats` calls, after three that do not count. `before` runs before each and is not timed."""
    times = []
    for repeat in range(repeats + _WARM_UP):
        before()
        start = time.perf_counter()
        action()
        if repeat >= _WARM_UP:
            times.append((time.perf_counter() - start) * 1e6)
    return Times(statistics.median(times), min(times), max(times))


def quietest(gpu: GpuBackend, round_of: Callable[[], Times]) -> Times:
    """Of five rounds of calls, on a CPU of one, that with the lowest median: what the host has to do besides a call
    takes milliseconds or seconds at a time and only adds."""
    return min((round_of() for _ in range(_ROUNDS if gpu.name == "cuda" else 1)), key=lambda times: times.us)


def measure_graph(gpu: GpuBackend, stream: int, action: Callable[[], object], repeats: int, replays: int = 10) -> Times:
    """Times of what an action queues on `stream`, within `replays` replays of its graph behind each other."""
    action()
    gpu.begin_capture(stream)
    try:
        action()
        graph = gpu.end_capture(stream)
    except BaseException:
        gpu.abort_capture_if_active(stream)
        raise

    def replay() -> None:
        for _ in range(replays):
            gpu.launch_graph(graph, stream)
        gpu.synchronize(stream)

    until = time.monotonic() + (_WARM_SECONDS if gpu.name == "cuda" else 0.0)
    try:
        while time.monotonic() < until:
            replay()
        times = measure(replay, repeats, lambda: gpu.synchronize(stream))
    finally:
        gpu.destroy_graph(graph)
    return Times(times.us / replays, times.min_us / replays, times.max_us / replays)


@dataclass(frozen=True, slots=True)
class Counted:
    """`kernels` that a call runs on the device, and `host_calls`, what the host queues for it once it is warm: launches
    of kernels and graphs, copies and fills."""

    kernels: int
    host_calls: int


def count_work(gpu: GpuBackend, action: Callable[[], object]) -> Counted:
    """Count the first call of an action, whose graph is not captured yet, and the third, where it replays."""
    steps = []
    for _ in range(3):
        with gpu.trace() as trace:
            action()
            steps.append(trace.step())
    kinds = Counter(entry.kind for entry in steps[0])
    return Counted(kinds["launch"], len(steps[2]))


def graph_of(gpu: GpuBackend, action: Callable[[], object], stream: int) -> Callable[[], object] | None:
    """What queues on `stream` the graphs that a call of a warm action replays, and nothing else of it; None where it
    replays none."""
    with gpu.trace() as trace:
        action()
        graphs = [entry for entry in trace.step() if entry.kind == "launch_graph"]
    if not graphs:
        return None
    trace.steps.append(graphs)
    return lambda: trace.replay(-1, stream)


def measure_queued(
    gpu: GpuBackend, stream: int, queue: Callable[[], object], repeats: int, cold: Callable[[int], None]
) -> Times:
    """Times on the device, between events, of what `queue` queues on `stream`. `cold` is queued before the first event,
    several times: while it runs the host queues the rest, so that the time of queueing is none of the device's."""
    start, end = gpu.create_event(timing=True), gpu.create_event(timing=True)
    times = []
    try:
        for repeat in range(repeats + _WARM_UP):
            for _ in range(_COLD_READS):
                cold(stream)
            gpu.record_event(start, stream)
            queue()
            gpu.record_event(end, stream)
            gpu.synchronize(stream)
            if repeat >= _WARM_UP:
                times.append(gpu.event_elapsed_ms(start, end) * 1e3)
    finally:
        gpu.destroy_event(start)
        gpu.destroy_event(end)
    return Times(statistics.median(times), min(times), max(times))


class ColdCache:
    """Called with a stream, queues a read of COLD_BYTES there, after which the L2 cache holds nothing that the next
    call reads, and nothing that is still to be written. Without a GPU it does nothing. What it reads is of `make`."""

    def __init__(self, gpu: GpuBackend, make: RandomWeights) -> None:
        self._gpu, self._matrix = gpu, DenseWeight.null()
        if gpu.name == "cuda":
            self._kernel = gpu.kernel("gemv", "dense_gemv_bf16")
            self._matrix, self._x = make.tensor(_COLD_ROWS, _COLD_COLUMNS), make.tensor(_COLD_COLUMNS).weight
            self._out = make.alloc(2 * _COLD_ROWS)

    def __call__(self, stream: int) -> None:
        if not self._matrix.weight.is_null:
            n, k = _COLD_ROWS, _COLD_COLUMNS
            dense_gemv(self._gpu, self._kernel, self._x, self._matrix, self._out, n, k, stream)

    def awake(self, stream: int) -> None:
        """Keep the device busy until its clocks are those of a device at work, and wait for it: before timing."""
        for _ in range(0 if self._matrix.weight.is_null else _WARM_READS):
            self(stream)
        self._gpu.synchronize(stream)


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes a second that `reader` read: the median of twelve sums of 4 GiB of random numbers. `of_fp32`: those of the
    same bytes taken as FP32, which is the quicker sum; None where that is the reader."""

    bytes_per_second: float
    reader: str
    of_fp32: float | None = None

    def floor_us(self, nbytes: float) -> float:
        """Microseconds that reading so many bytes takes."""
        return nbytes / self.bytes_per_second * 1e6

    def numbers(self) -> dict[str, float | str]:
        """read_GB_per_s, read_by, and fp32_read_GB_per_s where it was measured, as the programs print them."""
        found: dict[str, float | str] = {"read_GB_per_s": round(self.bytes_per_second / 1e9, 1), "read_by": self.reader}
        return found if self.of_fp32 is None else found | {"fp32_read_GB_per_s": round(self.of_fp32 / 1e9, 1)}


def read_bandwidth(gpu: GpuBackend) -> Bandwidth | None:
    """The read bandwidth of a GPU: that of a plain sum of weights, 4 GiB of random BF16, by torch where torch is there;
    else of CuPy's sum of FP32. None without a GPU: on a CPU the time of a draft is that of arithmetic, and a floor
    would say nothing."""
    if gpu.name != "cuda":
        return None
    try:
        import torch
    except ImportError:
        torch = None
    make = RandomWeights(gpu)
    try:
        ptr = make.alloc(_SUM_BYTES)
        make.fill(ptr, _SUM_BYTES)
        gpu.synchronize(gpu.default_stream())
        values = gpu.view(ptr, (_SUM_BYTES // 4,), "float32")
        if torch is not None and torch.cuda.is_available():
            tensor = torch.as_tensor(values, device="cuda")
            of_fp32, of_bf16 = (_SUM_BYTES / _torch_sum(torch, each) for each in (tensor, tensor.view(torch.bfloat16)))
            return Bandwidth(of_bf16, "torch.sum of 4 GiB of BF16", of_fp32)
        return Bandwidth(_SUM_BYTES / _array_sum(values), "CuPy's sum of 4 GiB of FP32")
    finally:
        make.release()


def _torch_sum(torch: Any, tensor: Any) -> float:
    """Seconds of a sum. One runs while the host queues the next, which is timed: on an idle device the time of queueing
    it, more on a machine with other things to do, would count as the memory's. Others run before, since a device that
    wakes up reads slower."""
    times = list[float]()
    until = time.monotonic() + _WARM_SECONDS
    while time.monotonic() < until:
        float(tensor.sum())
    for _ in range(_SUMS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        tensor.sum()
        start.record()
        tensor.sum()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(times)


def _array_sum(values: Any) -> float:
    """Four sums behind each other a time, so that the host's part does not show; others before, as above."""
    times = []
    until = time.monotonic() + _WARM_SECONDS
    while time.monotonic() < until:
        float(values.sum())
    for _ in range(_SUMS):
        start = time.perf_counter()
        sums = [values.sum() for _ in range(4)]
        float(sums[-1])
        times.append((time.perf_counter() - start) / 4)
    return statistics.median(times)
