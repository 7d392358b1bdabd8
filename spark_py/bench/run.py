# SPDX-License-Identifier: AGPL-3.0-only
"""The measurement of `spark-py bench`: a row for each shape, mode and path, and for each way of the peer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from spark_py.runtime import open_backend
from spark_py.runtime.errors import InvalidArgumentError, UnsupportedError
from spark_py.runtime.gpu import GpuBackend
from spark_py.runtime.sizes import count

from .rigs import PATHS, SETS, BenchPath, Rig, measure_path, open_rig
from .shapes import MODES, BenchShape, Reads, bytes_read, shape_of
from .timing import Bandwidth, ProposeTimes, read_bandwidth
from .torch_peer import WAYS, TorchPeer, require_torch

__all__ = ["BenchPlan", "BenchRow", "run_bench"]

_LARGEST_DISTANCE = 0.03
"""Relative L2 of logits. BF16 keeps 8 bits of each of some ten results in a row, which gives 0.002 to 0.01; a head
without its FFN is 0.1 away or more."""


@dataclass(frozen=True, slots=True)
class BenchRow:
    """A line of the result, under the names of the JSON output.

    Times are microseconds. `wall_us` is the median of a whole propose on the host's clock, from the call to the ids; on
    a GPU that of the quietest of five rounds. Where a graph drafts, `us`, `min_us` and `max_us` are its replay on the
    device, between events, and `host_us` is what the propose takes beyond it; elsewhere they are those of the whole
    propose, and `host_us` is None.

    `MB`: 10^6 bytes that must be read; `floor_us`: the time that this takes at the read bandwidth of the run;
    `of_floor`: floor_us over us. `kernels` run on the device, `host_calls` are queued by the host. Of a peer
    `same_drafts` says how many of the input sets gave the head's own draft, and `logits_l2` how far its logits are from
    the head's, in relative L2."""

    shape: str
    mode: str
    by: str
    path: str
    context: int
    MB: float
    us: float
    min_us: float
    max_us: float
    wall_us: float
    host_us: float | None
    floor_us: float | None
    of_floor: float | None
    kernels: int | None = None
    host_calls: int | None = None
    same_drafts: str | None = None
    logits_l2: float | None = None


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What is to be measured; empty tuples mean all that there is. InvalidArgumentError for what does not go together.
    `shapes` empty: demo without a GPU, the two of Qwen with one."""

    backend: Any = "auto"
    shapes: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    batch: int = SETS
    drafts: int = 3
    context: int | None = None
    repeats: int = 25
    seed: int = 0
    against_torch: bool = False
    compile_limit: float = 0.0

    def __post_init__(self) -> None:
        if count("--batch", self.batch, 2) > 64:
            raise InvalidArgumentError("--batch", self.batch, "64 at most")
        if count("--drafts", self.drafts) > 16:
            raise InvalidArgumentError("--drafts", self.drafts, "a graph holds 16 at most")
        count("--repeats", self.repeats)
        count("--seed", self.seed, 0)
        if self.context is not None and count("--context", self.context) > 1 << 20:
            raise InvalidArgumentError("--context", self.context, f"{1 << 20} at most")
        if not 0.0 <= self.compile_limit <= 3600.0:
            raise InvalidArgumentError("--compile-limit", self.compile_limit, "0 to 3600 seconds, 0: no limit")
        for name, values, offered in (("--mode", self.modes, MODES), ("--path", self.paths, PATHS)):
            for value in values:
                if value not in offered:
                    raise InvalidArgumentError(name, value, f"one of {', '.join(offered)}")
        for shape in map(shape_of, self.shapes):
            for mode in self.modes:
                shape.check_mode(mode)
            if self.against_torch and shape.is_v4:
                raise InvalidArgumentError("--against", "torch", f"{shape.name} has no peer there: leave it out")
        if self.against_torch:
            if self.modes and "bf16" not in self.modes:
                raise InvalidArgumentError(
                    "--against", "torch", f"its peers are BF16, and --mode {self.modes[0]} is not"
                )
            require_torch()

    def chosen(self, gpu: GpuBackend) -> list[BenchShape]:
        """The shapes for this backend; InvalidArgumentError for one that takes a GPU where there is none."""
        on_gpu = gpu.name == "cuda"
        names = self.shapes or (("qwen3.6-27b", "qwen3-next-80b") if on_gpu else ("demo",))
        for name in names:
            if name != "demo" and not on_gpu:
                raise InvalidArgumentError("--shape", name, f"takes a GPU: backend {gpu.name} runs demo")
        return [shape_of(name) for name in dict.fromkeys(names)]


def run_bench(plan: BenchPlan, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """All rows, and what they were measured with, as the JSON output has them; `say` hears of each row at once. Where
    it is interrupted, the rows so far, and a note."""
    with open_backend(plan.backend) as gpu:
        shapes = plan.chosen(gpu)
        bandwidth = read_bandwidth(gpu)
        found: dict[str, Any] = {"backend": gpu.name, "device": gpu.device_name(), "seed": plan.seed}
        found["repeats"] = plan.repeats
        if bandwidth is not None:
            found |= bandwidth.numbers()
        if plan.against_torch:
            found["torch"] = require_torch().__version__
        notes: list[str] = []
        rows = []
        try:
            for row in _rows(plan, gpu, shapes, bandwidth, notes):
                say(f"{row.shape} {row.mode}, {row.by}, {row.path}: {row.us:.1f} us, {row.wall_us:.1f} in all")
                rows.append(asdict(row))
        except KeyboardInterrupt:
            notes.append("interrupted: these are the rows so far")
        if bandwidth is None:
            notes.append(
                "no floor: on a CPU a draft's time is that of arithmetic in NumPy, not that of reading weights"
            )
        return found | {"notes": notes, "rows": rows}


def _rows(
    plan: BenchPlan, gpu: GpuBackend, shapes: Sequence[BenchShape], bandwidth: Bandwidth | None, notes: list[str]
) -> Iterator[BenchRow]:
    for shape in shapes:
        context = plan.context or shape.context
        for mode in plan.modes or shape.modes:
            reads = bytes_read(shape, mode, context)
            sequences = max(plan.batch, SETS)
            with open_rig(gpu, shape, mode, context, sequences, plan.seed) as rig:
                yield from _paths(plan, rig, shape, mode, reads, bandwidth, notes)
                if plan.against_torch and mode == "bf16":
                    yield from _peers(plan, rig, shape, reads, bandwidth, notes)
                elif plan.against_torch:
                    notes.append(f"{shape.name}, {mode}: no peer in torch, whose peers are BF16")


def _paths(
    plan: BenchPlan,
    rig: Rig,
    shape: BenchShape,
    mode: str,
    reads: Reads,
    bandwidth: Bandwidth | None,
    notes: list[str],
) -> Iterator[BenchRow]:
    paths = [BenchPath.of(name, plan.drafts, plan.batch) for name in plan.paths or PATHS]
    most = rig.most_at_once()
    if any(path.n > most for path in paths):  # said before anything is measured
        if most > 1:
            raise InvalidArgumentError("--batch", plan.batch, f"{shape.name} drafts for {most} at once at most")
        if plan.paths:
            raise InvalidArgumentError("--path", "batched", f"{shape.name} drafts for one sequence at a time")
        notes.append(f"{shape.name}: not batched, heads like it draft for one sequence at a time")
    for path in paths:
        if path.n > most:
            continue
        nbytes, action = path.drafts * reads.rows(path.n), rig.action(path)
        counted, times = measure_path(rig, path, action, plan.repeats)
        if path.graph and times.device is None:
            notes.append(f"{shape.name}, {mode}, {path.name}: not captured, these are times of single launches")
        about = (shape.name, mode, "spark_py", path.name, rig.context)
        numbers = _numbers(times, nbytes, bandwidth)
        yield BenchRow(*about, **numbers, kernels=counted.kernels, host_calls=counted.host_calls)


def _peers(
    plan: BenchPlan, rig: Rig, shape: BenchShape, reads: Reads, bandwidth: Bandwidth | None, notes: list[str]
) -> Iterator[BenchRow]:
    torch = require_torch()
    with torch.no_grad():
        peer = TorchPeer(rig)
        for way in WAYS:
            try:
                run = peer.ready(way, plan.compile_limit)
            except UnsupportedError as error:
                notes.append(f"{shape.name}: {error}")
                continue
            same, distance = peer.compare(run)
            if not distance <= _LARGEST_DISTANCE:
                raise InvalidArgumentError(f"logits of torch, {way}", distance, f"{_LARGEST_DISTANCE} from the head's")
            nbytes = reads.rows(1)
            times = peer.measure(run, plan.repeats)
            about = (shape.name, "bf16", "torch", way, rig.context)
            numbers = _numbers(times, nbytes, bandwidth)
            yield BenchRow(*about, **numbers, same_drafts=f"{same} of {SETS}", logits_l2=round(distance, 5))


def _numbers(times: ProposeTimes, nbytes: float, bandwidth: Bandwidth | None) -> dict[str, Any]:
    numbers: dict[str, Any] = {"MB": round(nbytes / 1e6, 3)} | times.numbers()
    floor = None if bandwidth is None else bandwidth.floor_us(nbytes)
    numbers |= {"floor_us": None, "of_floor": None}
    if floor is not None:
        numbers |= {"floor_us": round(floor, 1), "of_floor": round(floor / times.shown.us, 3)}
    return numbers
