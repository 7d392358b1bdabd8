# SPDX-License-Identifier: AGPL-3.0-only
"""What the benchmarks of kernels share: this package and torch on one stream, on the same data, timed in turns.

Each side's calls, at least eight, are captured in a CUDA graph of their own, over sets of inputs that together are
larger than the L2 cache, and the graphs are replayed in turns, timed with events. The time of a call is that of a graph
over its calls, the median of the replays. Before the first event a read of other memory is queued: while it runs the
host queues the graph, so that none of the time is the host's, and the cache holds nothing that the graph reads.

Within a graph calls follow each other on one stream, as the kernels of a draft step do. This package's are measured
twice: with ordinary launches, as torch and cuBLAS queue theirs, and with dependent ones, where the backend has them: a
call may begin, as far as it reads nothing that the call before writes, while that one ends. A row shows both times and
counts the lower one: a draft's products have another kernel between them, and neither order of equal products is that.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spark_py.bench.random_weights import RandomWeights
from spark_py.bench.timing import Bandwidth, ColdCache, Times, read_bandwidth
from spark_py.runtime import DevicePtr, GpuBackend, open_backend

__all__ = ["Bench", "Case", "Peers", "Run", "copies", "row_of", "run_cases"]

ROTATE_BYTES = 192 << 20
"""More than three times the L2 cache of any GPU so far."""
_WARM_UP, _CALLS, _COLD_READS = 3, 8, 4
_LARGEST_ERROR = 0.02
"""Of the largest magnitude of the exact result: 2^-7 is a step of BF16, and the probabilities of a softmax and the
scales of a weight are rounded too. A kernel that is further away has no row."""
_Graph = tuple[Callable[[], None], Callable[[], None]]
"""How to replay it, and how to destroy it."""
Run = Callable[[int], None]
ORDINARY, DEPENDENT = "ordinary", "dependent"
"""How this package's launches of a graph follow each other; the second where the device has it."""
Peers = Mapping[str, Callable[[int], Any]]
"""What to call each way of torch, and a call of it with the index of a set of inputs."""


@dataclass(frozen=True)
class Case:
    """A function that gives a row, its numbers and its switches."""

    call: Callable[..., dict[str, Any]]
    numbers: tuple[int, ...]
    switches: dict[str, Any]

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.call.__name__}{self.numbers}"


def copies(nbytes: int) -> int:
    """How many sets of inputs to rotate."""
    return max(2, min(64, math.ceil(ROTATE_BYTES / nbytes)))


def row_of(
    about: dict[str, Any], times: dict[str, Times], nbytes: float, flops: float, error: float, bandwidth: Bandwidth
) -> dict[str, Any]:
    """A row: `about` is what was measured; then bytes to read, the time, the floor and the quickest peer. `times` has
    ORDINARY, perhaps DEPENDENT, and the peers; the time is the lower of the two, `launches` says which, and `both_us`
    has both. `error`: the largest difference over the largest magnitude. ValueError for a result that is wrong."""
    if not error <= _LARGEST_ERROR:  # NaN too
        raise ValueError(f"the result is {error:.3g} of its largest magnitude away from torch's")
    own = {name: times[name] for name in (ORDINARY, DEPENDENT) if name in times}
    launches = min(own, key=lambda name: own[name].us)
    ours, theirs = own[launches], {name: each.us for name, each in times.items() if name not in own}
    quickest = min(theirs, key=lambda name: theirs[name])
    floor = bandwidth.floor_us(nbytes)
    return about | {
        "MB": round(nbytes / 1e6, 3),
        "us": round(ours.us, 2),
        "min_us": round(ours.min_us, 2),
        "max_us": round(ours.max_us, 2),
        "launches": launches,
        "both_us": " / ".join(f"{each.us:.2f}" for each in own.values()),
        "floor_us": round(floor, 2),
        "of_read_bandwidth": round(floor / ours.us, 3),
        "torch_us": round(theirs[quickest], 2),
        "torch_by": quickest,
        "torch_over_ours": round(theirs[quickest] / ours.us, 3),
        "TFLOP_per_s": round(flops / ours.us / 1e6, 2),
        "error": round(error, 5),
    }


class Bench:
    """One backend, one stream that both sides use, and the loop that times them."""

    def __init__(self, gpu: GpuBackend, repeats: int, bandwidth: Bandwidth) -> None:
        import torch

        self.torch, self.gpu, self.repeats, self.bandwidth = torch, gpu, repeats, bandwidth
        self._device: Any = gpu._device  # type: ignore[attr-defined]
        self.stream = gpu.create_stream()
        self.torch_stream = torch.cuda.ExternalStream(self.stream)
        self.random = torch.Generator(device="cuda").manual_seed(0)
        self.kept: list[Any] = []
        self._make = RandomWeights(gpu)
        self._cold = ColdCache(gpu, self._make)

    def normal(self, *shape: int) -> Any:
        """A BF16 tensor of standard normal numbers."""
        return self.torch.randn(shape, generator=self.random, device="cuda", dtype=self.torch.bfloat16)

    def pointer(self, tensor: Any) -> DevicePtr:
        """The tensor's memory, known to the backend."""
        self.kept.append(tensor)
        return self.gpu.wrap(tensor)

    def poisoned(self, *shape: int) -> Any:
        """A BF16 tensor of NaN, for results."""
        return self.torch.full(shape, math.nan, device="cuda", dtype=self.torch.bfloat16)

    def times(self, run: Run, peers: Peers, sets: int) -> dict[str, Times]:
        """Microseconds of a call of `run`, with each kind of launches, and of each peer. They are called with 0 to
        sets - 1, the last time with sets - 1."""
        calls = sets * math.ceil(_CALLS / sets)
        order = [i % sets for i in range(calls)]
        graphs = {ORDINARY: self._graph(run, order, False)}
        if self._device.dependent_launches:
            graphs[DEPENDENT] = self._graph(run, order, True)
        graphs |= {name: self._torch_graph(call, order) for name, call in peers.items()}
        found: dict[str, list[float]] = {name: [] for name in graphs}
        gpu, stream = self.gpu, self.stream
        start, end = gpu.create_event(timing=True), gpu.create_event(timing=True)
        self._cold.awake(stream)
        with self.torch.cuda.stream(self.torch_stream):
            for repeat in range(self.repeats + _WARM_UP):
                for name, (replay, _) in graphs.items():
                    for _ in range(_COLD_READS):
                        self._cold(stream)
                    gpu.record_event(start, stream)
                    replay()
                    gpu.record_event(end, stream)
                    gpu.synchronize(stream)
                    if repeat >= _WARM_UP:
                        found[name].append(gpu.event_elapsed_ms(start, end) * 1e3 / calls)
        for _, destroy in graphs.values():
            destroy()
        gpu.destroy_event(start)
        gpu.destroy_event(end)
        return {name: Times(statistics.median(us), min(us), max(us)) for name, us in found.items()}

    def _graph(self, run: Run, order: Sequence[int], dependent: bool) -> _Graph:
        """A graph of the calls, its launches dependent or not; the device's own setting stays."""
        setting = self._device.dependent_launches
        self._device.dependent_launches = dependent
        self._forget_plans()  # they hold the kind of launches that they were made for
        try:
            return self._captured(run, order)
        finally:
            self._device.dependent_launches = setting
            self._forget_plans()

    def _forget_plans(self) -> None:
        plans: dict[Any, Any] = self.gpu._plans  # type: ignore[attr-defined]
        plans.clear()

    def _captured(self, run: Run, order: Sequence[int]) -> _Graph:
        gpu, stream = self.gpu, self.stream
        self.torch.cuda.synchronize()
        for index in order:
            run(index)
        gpu.synchronize(stream)
        gpu.begin_capture(stream)
        try:
            for index in order:
                run(index)
            graph = gpu.end_capture(stream)
        except BaseException:
            gpu.abort_capture_if_active(stream)
            raise
        return lambda: gpu.launch_graph(graph, stream), lambda: gpu.destroy_graph(graph)

    def _torch_graph(self, call: Callable[[int], Any], order: Sequence[int]) -> _Graph:
        torch = self.torch
        with torch.cuda.stream(self.torch_stream):
            for index in order:
                call(index)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            for index in order:
                call(index)
        return graph.replay, graph.reset

    def row(
        self, about: dict[str, Any], times: dict[str, Times], nbytes: float, flops: float, result: Any, exact: Any
    ) -> dict[str, Any]:
        """One line of the result; see `row_of`."""
        self.release()
        error = float((result.float() - exact).abs().max()) / float(exact.abs().max())
        return row_of(about, times, nbytes, flops, error, self.bandwidth)

    def release(self) -> None:
        """Forget wrapped tensors."""
        self.torch.cuda.synchronize()
        for tensor in self.kept:
            self.gpu.unwrap(DevicePtr(tensor.data_ptr()))
        self.kept.clear()

    def close(self) -> None:
        """Give back what is the bench's own."""
        self.release()
        self._make.release()
        self.gpu.destroy_stream(self.stream)


def run_cases(cases: Sequence[Case], description: str | None) -> int:
    """The program of a file of cases: every case that there is time for, as one JSON object on stdout; 1 where one
    fails."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="replays of each graph (default 15)")
    parser.add_argument("--seconds", type=float, default=50.0, help="after which no case is begun (default 50)")
    options = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        print(json.dumps({"not_run": "torch, the peer of these numbers, is not installed"}))
        return 0
    until = time.monotonic() + options.seconds
    rows, errors, late = list[dict[str, Any]](), list[str](), list[str]()
    with open_backend("cuda") as gpu:
        bandwidth = read_bandwidth(gpu)
        assert bandwidth is not None
        bench = Bench(gpu, options.repeats, bandwidth)
        for case in cases:
            if time.monotonic() > until:
                late.append(case.name)
                continue
            try:
                rows.append(case.call(bench, *case.numbers, **case.switches))
            except KeyboardInterrupt:
                errors.append("interrupted: the rows so far")
                break
            except Exception as error:
                errors.append(f"{case.name}: {error}")
                bench.release()
            bench.torch.cuda.empty_cache()
        bench.close()
        found: dict[str, Any] = {
            "device": gpu.device_name(),
            "torch": bench.torch.__version__,
            "repeats": options.repeats,
            **bandwidth.numbers(),
            "rows": rows,
        }
    notes = [f"no time for {name}" for name in late] + [f"failed: {error}" for error in errors]
    print(json.dumps(found | {"notes": notes}))
    return 1 if errors else 0
