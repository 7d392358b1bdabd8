# SPDX-License-Identifier: AGPL-3.0-only
"""What a draft costs at the shapes of real heads: each quantisation, eager and replayed, one sequence and several.

The rows of `spark-py bench` for the suite: random weights with the dimensions of Qwen3.6-27B (dense FFN) and of
Qwen3-Next-80B-A3B (experts), 4096 KV rows a sequence, a draft vocabulary of 100,000. `us` is a graph's replay on the
device, and `host_us` what the whole propose, `wall_us` on the host's clock, takes beyond it; launch by launch, `us` is
the whole propose. A row also says how many bytes must be read, and which share of the read bandwidth, measured in the
same run, `us` stands for. One JSON object on stdout.

    python tools/bench_propose.py [--shapes qwen3.6-27b,qwen3-next-80b] [--backend cuda] [--repeats 15]

With `--python` rows say instead what the Python of a propose takes: the replayed one of the demo's shape on the host,
where every call of the device returns at once. Nothing else takes time there, so that a change of a microsecond shows.

    python tools/bench_propose.py --python [--repeats 3000]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from spark_py.bench.rigs import SETS, BenchPath, measure_path, open_rig
from spark_py.bench.shapes import NAMES, bytes_read, shape_of
from spark_py.bench.timing import Bandwidth, read_bandwidth
from spark_py.runtime import GpuBackend, open_backend

CONTEXT = 4096
PATHS = [
    BenchPath(f"{what}, {way}", drafts, n, way == "graph")
    for drafts, n, what in (
        (1, 1, "1 draft"),
        (3, 1, "3 drafts"),
        (1, SETS, f"{SETS} sequences, 1 draft"),
        (3, SETS, f"{SETS} sequences, 3 drafts"),
    )
    for way in ("eager", "graph")
]


def rows_of(gpu: GpuBackend, name: str, repeats: int, context: int, bandwidth: Bandwidth | None) -> Iterator[Any]:
    """A row for each quantisation and path of a shape."""
    shape = shape_of(name)
    for mode in shape.modes:
        reads = bytes_read(shape, mode, context)
        with open_rig(gpu, shape, mode, context) as rig:
            for path in PATHS:
                if path.n > rig.most_at_once():
                    continue
                nbytes = path.drafts * reads.rows(path.n)
                _, times = measure_path(rig, path, rig.action(path), repeats)
                row: dict[str, Any] = {"shape": name, "quantization": mode, "path": path.name} | times.numbers()
                row["MB"] = round(nbytes / 1e6, 1)
                if bandwidth is not None:
                    floor = bandwidth.floor_us(nbytes)
                    row |= {"floor_us": round(floor, 1), "of_read_bandwidth": round(floor / times.shown.us, 3)}
                yield row


def python_rows(gpu: GpuBackend, repeats: int, context: int) -> Iterator[Any]:
    """A row for each path with a graph: medians of calls whose launches, copies and waits return at once."""
    device: Any = gpu._device  # type: ignore[attr-defined]
    queued = ("launch_graph", "h2d", "h2d_staged", "d2h", "d2d", "sync_stream", "record_event", "sync_event")
    with open_rig(gpu, shape_of("demo"), "bf16", context) as rig:
        for path in (path for path in PATHS if path.graph):
            action, times = rig.action(path), list[float]()
            for _ in range(2 * SETS + 1):  # every sequence, and a graph for each kind of call
                action()
            for name in queued:
                setattr(device, name, lambda *args: None)
            for _ in range(repeats):
                start = time.perf_counter()
                action()
                times.append((time.perf_counter() - start) * 1e6)
            for name in queued:
                delattr(device, name)
            yield {"path": path.name, "python_us": round(statistics.median(times), 2), "min_us": round(min(times), 2)}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen3.6-27b,qwen3-next-80b", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--backend", default="cuda", choices=("cuda", "host"))
    parser.add_argument("--context", type=int, default=CONTEXT, help=f"KV rows of a sequence (default {CONTEXT})")
    parser.add_argument("--repeats", type=int, help="calls that count (default 15, of --python 3000)")
    parser.add_argument("--python", action="store_true", help="what the Python of a propose takes, without a device")
    options = parser.parse_args()
    names = options.shapes.split(",")
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"no shape {', '.join(unknown)}: there are {', '.join(NAMES)}")
    repeats = options.repeats or (3000 if options.python else 15)
    if options.python:
        with open_backend("host") as gpu:
            rows = list(python_rows(gpu, repeats, options.context))
        json.dump({"context": options.context, "repeats": repeats, "rows": rows}, sys.stdout, indent=1)
        print()
        return 0
    with open_backend(options.backend) as gpu:
        bandwidth = read_bandwidth(gpu)
        found: dict[str, Any] = {"device": gpu.device_name()}
        rows = [row for name in names for row in rows_of(gpu, name, repeats, options.context, bandwidth)]
    if bandwidth is not None:
        found["read_GB_per_s"] = round(bandwidth.bytes_per_second / 1e9, 1)
    json.dump(found | {"context": options.context, "repeats": repeats, "rows": rows}, sys.stdout, indent=1)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
