# SPDX-License-Identifier: AGPL-3.0-only
"""What the benchmarks are to reach, line by line, and whether they do: computed from a run's numbers alone.

A line has one or several checks, each a number of one row (or two) and a bound; it is reached when all of them are. A
number that is not there is "not measured", and so is its line, unless another check of it has failed.

All floors here stand on one read bandwidth, the median of what the run's programs measured, so that no line is reached
or missed by which program its row is of. It is that of a plain sum of random BF16, as when the bounds were set:
cuBLAS's products take nearly the same fractions of it as then.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["BESIDE_TORCH", "DRAFTS", "goals_of", "render_goals"]

Benchmarks = Mapping[str, Mapping[str, Any]]
"""results.json's: name -> {"ok", "values", ...}."""
Row = Mapping[str, Any]

DRAFTS = {
    "qwen3.6-27b": "drafts of Qwen3.6-27B",
    "qwen3-next-80b": "drafts of Qwen3-Next-80B",
    "deepseek-v4-flash": "drafts of DeepSeek-V4-Flash",
}
"""The benchmark of a shape's drafts, measured while the machine has nothing else to do."""
BESIDE_TORCH = "drafts of Qwen3.6-27B beside torch"
HEADS = (
    ("qwen3.6-27b", "bf16"),
    ("qwen3.6-27b", "fp8+nvfp4"),
    ("qwen3-next-80b", "bf16"),
    ("qwen3-next-80b", "nvfp4"),
    ("deepseek-v4-flash", "mxfp4"),
)
_BF16_SHAPES = (
    (17408, 5120), (12288, 5120), (5120, 17408), (5120, 6144), (5120, 10240), (4096, 4096), (1024, 5120),
    (100_000, 5120), (248_320, 5120),
)  # fmt: skip
_PACKED_SHAPES = ((17408, 5120), (100_000, 5120), (248_320, 5120))
_SMALL_BYTES = 60e6
_SIGNS: dict[str, Callable[[float, float], bool]] = {
    ">=": lambda value, bound: value >= bound,
    "<=": lambda value, bound: value <= bound,
    ">": lambda value, bound: value > bound,
    "<": lambda value, bound: value < bound,
}


@dataclass(frozen=True)
class Check:
    """`measured`, None where the run has no such number, is to be `sign` `bound`. `kind`: what sort of number it is;
    `what`: of what."""

    kind: str
    what: str
    measured: float | None
    sign: str
    bound: float

    @property
    def reached(self) -> str:
        """yes, no, or not measured."""
        if self.measured is None:
            return "not measured"
        return "yes" if _SIGNS[self.sign](self.measured, self.bound) else "no"

    @property
    def strain(self) -> float:
        """How near the bound, or beyond it, the number is: the largest is the worst of a kind."""
        if self.measured is None:
            return float("inf")
        return self.bound - self.measured if ">" in self.sign else self.measured - self.bound

    def as_json(self) -> dict[str, Any]:
        """As results.json has it."""
        measured = None if self.measured is None else round(self.measured, 4)
        to_reach = f"{self.sign} {self.bound:g}"
        about = {"kind": self.kind, "what": self.what}
        return about | {"measured": measured, "to_reach": to_reach, "reached": self.reached}


def _rows(benchmarks: Benchmarks, name: str) -> list[Row]:
    rows: list[Row] = benchmarks.get(name, {}).get("values", {}).get("rows", [])
    return rows


def _only(rows: Iterable[Row], **wanted: Any) -> Row | None:
    """The row with these values; None where there is none."""
    return next((row for row in rows if all(row.get(key) == value for key, value in wanted.items())), None)


def _over(upper: Any, lower: Any) -> float | None:
    """The quotient, where both numbers are there."""
    return float(upper) / float(lower) if upper is not None and lower else None


def _number(row: Row | None, key: str) -> Any:
    return None if row is None else row.get(key)


def _product(benchmarks: Benchmarks, form: str, n: int, k: int) -> Row | None:
    """The quickest of the package's kernels for one row."""
    wanted = {"format": form, "m": 1, "n": n, "k": k}
    rows = [row for row in _rows(benchmarks, "products") if _only([row], **wanted) and row.get("us") is not None]
    return min(rows, key=lambda row: float(row["us"]), default=None)


def _shape(row: Row | None, n: int, k: int) -> str:
    return f"{n} x {k}" if row is None else f"{n} x {k}, {row.get('kernel')}, {row.get('launches')} launches"


def _readings(benchmarks: Benchmarks, key: str = "read_GB_per_s") -> list[float]:
    """GB/s that programs read."""
    values = [each.get("values", {}) for each in benchmarks.values()]
    return sorted(float(each[key]) for each in values if each.get(key))


def _floor(benchmarks: Benchmarks, row: Row | None) -> float | None:
    """Microseconds that reading a row's bytes takes at the run's read bandwidth."""
    readings, nbytes = _readings(benchmarks), _number(row, "MB")
    return float(nbytes) * 1e3 / statistics.median(readings) if readings and nbytes is not None else None


def _of_bandwidth(benchmarks: Benchmarks, row: Row | None) -> float | None:
    return _over(_floor(benchmarks, row), _number(row, "us"))


def _of_floor(benchmarks: Benchmarks, row: Row | None) -> float | None:
    return _over(_number(row, "us"), _floor(benchmarks, row))


def _bf16(benchmarks: Benchmarks) -> Iterator[Check]:
    for n, k in _BF16_SHAPES:
        row = _product(benchmarks, "bf16", n, k)
        what = _shape(row, n, k)
        if 2 * n * k > _SMALL_BYTES:
            bound = 0.88 if (n, k) == (5120, 6144) else 0.90
            yield Check("of the read bandwidth", what, _of_bandwidth(benchmarks, row), ">=", bound)
        else:
            floor, us = _floor(benchmarks, row), _number(row, "us")
            beyond = None if floor is None or us is None else float(us) - floor
            yield Check("us beyond the floor", what, beyond, "<=", 3.0)
        speed = _over(_number(row, "torch_us"), _number(row, "us"))
        yield Check("times cuBLAS's speed", what, speed, ">=", 0.98)


def _packed(benchmarks: Benchmarks, form: str, bound: float) -> Iterator[Check]:
    for n, k in _PACKED_SHAPES:
        row = _product(benchmarks, form, n, k)
        yield Check("of the read bandwidth", _shape(row, n, k), _of_bandwidth(benchmarks, row), ">=", bound)


def _draft(benchmarks: Benchmarks, name: str, shape: str, mode: str, path: str) -> Row | None:
    """This package's row of a path: graph, chain or batched."""
    rows = [row for row in _rows(benchmarks, name) if str(row.get("path")).startswith(path)]
    return _only(rows, by="spark_py", shape=shape, mode=mode)


def _step(benchmarks: Benchmarks, shape: str, mode: str, bound: float) -> Check:
    row = _draft(benchmarks, DRAFTS[shape], shape, mode, "graph")
    return Check("times the floor", f"{shape}, {mode}", _of_floor(benchmarks, row), "<=", bound)


def _beside_torch(benchmarks: Benchmarks) -> Iterator[Check]:
    yield _step(benchmarks, "qwen3.6-27b", "bf16", 1.10)
    ours = _draft(benchmarks, BESIDE_TORCH, "qwen3.6-27b", "bf16", "graph")
    compiled = [row for row in _rows(benchmarks, BESIDE_TORCH) if str(row.get("path")).startswith("compiled")]
    theirs = _only(compiled, by="torch", shape="qwen3.6-27b", mode="bf16")
    again = _of_floor(benchmarks, ours)
    yield Check("times the floor", "qwen3.6-27b, bf16, beside torch", again, "<=", 1.10)
    speed = _over(_number(theirs, "us"), _number(ours, "us"))
    yield Check("times the speed of torch.compile in a graph", "qwen3.6-27b, bf16", speed, ">", 1.0)


def _chains(benchmarks: Benchmarks) -> Iterator[Check]:
    for shape, mode in HEADS:
        one, three = (_draft(benchmarks, DRAFTS[shape], shape, mode, path) for path in ("graph", "chain graph, 3"))
        what = f"{shape}, {mode}"
        yield Check("times one draft", what, _over(_number(three, "us"), _number(one, "us")), "<=", 3.05)
        for row, drafts in ((one, "1 draft"), (three, "3 drafts")):
            yield Check("us of the host", f"{what}, {drafts}", _number(row, "host_us"), "<", 40.0)


def _batch(benchmarks: Benchmarks) -> Iterator[Check]:
    shape, mode = "qwen3.6-27b", "bf16"
    one, eight = (_draft(benchmarks, DRAFTS[shape], shape, mode, path) for path in ("graph", "batched 8"))
    yield Check("times one sequence", f"{shape}, {mode}", _over(_number(eight, "us"), _number(one, "us")), "<=", 1.25)


def _launch(benchmarks: Benchmarks) -> Iterator[Check]:
    times = benchmarks.get("launch", {}).get("values", {})
    ours = times.get("launch_typed", {}).get("median_us")
    theirs = {name: each["median_us"] for name, each in times.items() if name.startswith("ctypes_")}
    # Without the way that keeps its objects the others would be easy to beat.
    quickest = min(theirs.values()) if "ctypes_kept_objects" in theirs else None
    yield Check("times the quickest ctypes", "launch_typed, 10 changing arguments", _over(ours, quickest), "<=", 1.15)


def _attention(benchmarks: Benchmarks) -> Iterator[Check]:
    shape = "1 x 32768 tokens, 24/4 heads of 256"
    rows = [row for row in _rows(benchmarks, "kernels") if str(row.get("kernel")).startswith("spark_paged_decode")]
    yield Check("of the read bandwidth", shape, _of_bandwidth(benchmarks, _only(rows, shape=shape)), ">=", 0.80)


_Checks = Callable[[Benchmarks], Iterable[Check]]
_LINES: tuple[tuple[str, str, _Checks], ...] = (
    (
        "BF16 products of a row",
        "0.90 of the read bandwidth (5120 x 6144: 0.88); 10 to 60 MB: floor + 3 us; 0.98 of cuBLAS's speed",
        _bf16,
    ),
    ("NVFP4 products of a row", "0.80 of the read bandwidth", lambda found: _packed(found, "nvfp4", 0.80)),
    ("FP8 products of a row", "0.85 of the read bandwidth", lambda found: _packed(found, "fp8", 0.85)),
    ("Qwen3.6-27B's step in BF16", "1.10 x floor, and faster than torch.compile in a graph", _beside_torch),
    (
        "Qwen3.6-27B's step in FP8 with an NVFP4 LM head; Qwen3-Next-80B's in NVFP4",
        "1.35 x floor",
        lambda found: (
            _step(found, "qwen3.6-27b", "fp8+nvfp4", 1.35),
            _step(found, "qwen3-next-80b", "nvfp4", 1.35),
        ),
    ),
    ("Qwen3-Next-80B's step in BF16", "1.35 x floor", lambda found: [_step(found, "qwen3-next-80b", "bf16", 1.35)]),
    ("DeepSeek-V4-Flash's step", "1.5 x floor", lambda found: [_step(found, "deepseek-v4-flash", "mxfp4", 1.5)]),
    ("Three drafts in a graph", "3.05 x one draft's graph; under 40 us of the host a propose", _chains),
    ("Eight sequences at once, Qwen3.6-27B", "1.25 x one sequence", _batch),
    ("launch_typed, ten changing arguments", "1.15 x ctypes that packs and checks nothing", _launch),
    ("Attention over 32,768 tokens", "0.80 of the read bandwidth", _attention),
)


def goals_of(benchmarks: Benchmarks) -> list[dict[str, Any]]:
    """For each line: number, what, to_reach, measured (the worst of each kind), reached, and its checks."""
    goals = []
    for number, (what, to_reach, checks_of) in enumerate(_LINES, 1):
        checks = list(checks_of(benchmarks))
        states = {check.reached for check in checks}
        reached = next(state for state in ("no", "not measured", "yes") if state in states)
        goal = {"line": number, "what": what, "to_reach": to_reach, "measured": _worst(checks), "reached": reached}
        goals.append(goal | {"checks": [check.as_json() for check in checks]})
    return goals


def _worst(checks: list[Check]) -> str:
    texts = []
    for kind in dict.fromkeys(check.kind for check in checks):
        of_kind = [check for check in checks if check.kind == kind]
        known = [check for check in of_kind if check.measured is not None]
        if not known:
            texts.append(f"{kind}: not measured")
            continue
        worst = max(known, key=lambda check: check.strain)
        missing = f", {len(of_kind) - len(known)} not measured" if len(known) < len(of_kind) else ""
        texts.append(f"{worst.measured:.3f} {kind} ({worst.what}{missing})")
    return "; ".join(texts)


def render_goals(goals: list[dict[str, Any]], benchmarks: Benchmarks) -> list[str]:
    """The section of RESULTS.md: a table of the lines, then one of all checks."""
    counts = {state: sum(goal["reached"] == state for goal in goals) for state in ("yes", "no", "not measured")}
    lines = ["", "## Goals", ""]
    lines.append(
        f"Reached {counts['yes']} of {len(goals)}, missed {counts['no']}, not measured {counts['not measured']}."
    )
    lines += ["", "| line | what | to reach | measured, the worst of each | reached |", "|---|---|---|---|---|"]
    for goal in goals:
        lines.append("| {line} | {what} | {to_reach} | {measured} | {reached} |".format(**goal))
    readings = _readings(benchmarks)
    by = sorted({each["values"]["read_by"] for each in benchmarks.values() if "read_by" in each.get("values", {})})
    if readings:
        text = f"Floors here are times of reading at {statistics.median(readings):.0f} GB/s, the median of what"
        text += (
            f" {len(readings)} programs of the run read, {readings[0]:.0f} to {readings[-1]:.0f}, each before its rows"
        )
        text += f" ({', '.join(by)}). The floors in a program's own rows stand on its own reading."
        if fp32 := _readings(benchmarks, "fp32_read_GB_per_s"):
            text += f" A sum of FP32 reads {statistics.median(fp32):.0f} GB/s."
        lines += ["", text]
    quiet = [name for name, each in benchmarks.items() if each.get("beside") == "nothing"]
    lines += ["", f"Measured while nothing else ran on the machine: {', '.join(quiet) or 'none'}."]
    lines += ["", "Every number that the lines ask for:", ""]
    lines += ["| line | what | | measured | to reach | reached |", "|---|---|---|---|---|---|"]
    for goal in goals:
        for check in goal["checks"]:
            measured = "" if check["measured"] is None else f"{check['measured']:.3f}"
            cells = [str(goal["line"]), check["what"], check["kind"], measured, check["to_reach"], check["reached"]]
            lines.append(f"| {' | '.join(cells)} |")
    return lines
