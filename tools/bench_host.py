# SPDX-License-Identifier: AGPL-3.0-only
"""What the Python of a propose takes: the replayed one of the demo's shape on the host, where every call of the device
returns at once. Nothing else takes time there, so that a change of a microsecond shows. One JSON object on stdout.

    python tools/bench_host.py [--repeats 3000] [--context 512]
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

from spark_py.bench.rigs import PATHS, SETS, BenchPath, open_rig
from spark_py.bench.shapes import shape_of
from spark_py.runtime import GpuBackend, open_backend

_QUEUED = ("launch_graph", "h2d", "h2d_staged", "d2h", "d2d", "sync_stream", "record_event", "sync_event")


def python_rows(gpu: GpuBackend, repeats: int, context: int) -> Iterator[dict[str, Any]]:
    """A row for each path with a graph: the median and the lowest microseconds of a call."""
    device: Any = gpu._device  # type: ignore[attr-defined]
    with open_rig(gpu, shape_of("demo"), "bf16", context, SETS) as rig:
        for path in (BenchPath.of(name, 3, SETS) for name in PATHS):
            if not path.graph:
                continue
            action, times = rig.action(path), list[float]()
            for _ in range(2 * SETS + 1):  # every sequence, and a graph for each kind of call
                action()
            for name in _QUEUED:
                setattr(device, name, lambda *args: None)
            for _ in range(repeats):
                start = time.perf_counter()
                action()
                times.append((time.perf_counter() - start) * 1e6)
            for name in _QUEUED:
                delattr(device, name)
            yield {"path": path.name, "python_us": round(statistics.median(times), 2), "min_us": round(min(times), 2)}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=512, help="KV rows of a sequence (default 512)")
    parser.add_argument("--repeats", type=int, default=3000, help="calls of each path (default 3000)")
    options = parser.parse_args()
    with open_backend("host") as gpu:
        rows = list(python_rows(gpu, options.repeats, options.context))
    json.dump({"context": options.context, "repeats": options.repeats, "rows": rows}, sys.stdout, indent=1)
    print()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
