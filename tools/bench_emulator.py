# SPDX-License-Identifier: AGPL-3.0-only
"""What the kernels cost on a CPU: launches, loads and builds of the emulated backend, fast and checked.

Prints a table and writes it, with the machine and the compiler, to `--output` (default docs/cpu/emulator.json and
EMULATOR.md beside it). Each figure is the lowest of `--repeats` runs, since other work on the machine only adds. The
budgets are what a test suite needs to stay usable; a figure above its budget makes the exit code 1.

    python tools/bench_emulator.py [--output docs/cpu] [--repeats 7]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from spark_py.emulator.compiler import find_compiler
from spark_py.ops.argmax import argmax_bf16
from spark_py.ops.gemv import dense_gemv
from spark_py.ops.paged_decode import paged_decode_attn
from spark_py.runtime import DevicePtr, GpuBackend, open_backend
from spark_py.runtime.emulated import Schedule

ROOT = Path(__file__).resolve().parents[1]
EMPTY = 'extern "C" __global__ void empty() {}\n'
BUDGETS = {
    "gemv 4096x4096": 150.0,
    "paged decode 24 heads x 256 x 1024": 300.0,
    "argmax 150k": None,
    "empty launch": 0.2,
    "cached load": 10.0,
    "cold compile": 400.0,
}
"""Milliseconds, one OS thread, fast build; None: stated without a budget."""


def lowest(action: Callable[[], object], repeats: int) -> float:
    """Milliseconds of the quickest of `repeats` calls, after one that does not count."""
    action()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


class Memory:
    """Allocations of a backend that are given back together."""

    def __init__(self, gpu: GpuBackend, stack: ExitStack) -> None:
        self.gpu, self.stack = gpu, stack

    def alloc(self, nbytes: int) -> DevicePtr:
        """Memory until the stack unwinds."""
        ptr = self.gpu.alloc(nbytes)
        self.stack.callback(self.gpu.free, ptr)
        return ptr

    def upload(self, values: np.ndarray[Any, Any]) -> DevicePtr:
        """The values in memory of the backend."""
        ptr = self.alloc(values.nbytes)
        self.gpu.copy_h2d(values.view(np.uint8), ptr)
        return ptr


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray[Any, Any]:
    """BF16 values of a normal distribution."""
    return rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)


def kernels(gpu: GpuBackend, memory: Memory) -> dict[str, Callable[[], object]]:
    """The launches that are timed, by name."""
    rng, stream = np.random.default_rng(0), gpu.default_stream()
    n, vocab, heads, kv_heads, hd, length, block = 4096, 150_000, 24, 4, 256, 1024, 16
    x, weight, y = memory.upload(normal(rng, n)), memory.upload(normal(rng, n, n)), memory.alloc(2 * n)
    logits, picked = memory.upload(normal(rng, vocab)), memory.alloc(4)
    q, out = memory.upload(normal(rng, heads * hd)), memory.alloc(2 * heads * hd)
    cache = [memory.upload(normal(rng, length * kv_heads * hd)) for _ in range(2)]
    table = memory.upload(rng.permutation(length // block).astype(np.int32))
    seq_len = memory.upload(np.array([length], np.int32))
    gemv = gpu.kernel("gemv", "dense_gemv_bf16")
    attention = gpu.kernel("paged_decode", "paged_decode_attn")
    argmax = gpu.kernel("argmax", "argmax_bf16")

    def attend() -> None:
        paged_decode_attn(
            gpu, attention, q, cache[0], cache[1], out, table, seq_len, length // block, 1, heads, kv_heads, hd, block,
            hd**-0.5, heads * hd, 0, stream,
        )  # fmt: skip

    return {
        "gemv 4096x4096": lambda: dense_gemv(gpu, gemv, x, weight, y, n, n, stream),
        "paged decode 24 heads x 256 x 1024": attend,
        "argmax 150k": lambda: argmax_bf16(gpu, argmax, logits, picked, vocab, stream),
    }


def launches(repeats: int, workers: int, checked: bool) -> dict[str, float]:
    """Milliseconds of each launch of `kernels`."""
    with open_backend("emulated", checked=checked, schedule=Schedule(workers=workers)) as gpu, ExitStack() as stack:
        return {name: lowest(action, repeats) for name, action in kernels(gpu, Memory(gpu, stack)).items()}


def empty_launch(folder: Path, repeats: int) -> float:
    """Milliseconds of a launch of one warp of a kernel that does nothing."""
    (folder / "empty.cu").write_text(EMPTY)
    with open_backend("emulated", kernels=folder, schedule=Schedule(workers=1)) as gpu:
        kernel, stream = gpu.kernel("empty", "empty"), gpu.default_stream()
        return lowest(lambda: gpu.launch_typed(kernel, (1, 1, 1), (32, 1, 1), 0, stream, []), 100 * repeats)


LOAD = """
import sys, time
from spark_py.runtime import open_backend
with open_backend("emulated", kernels=sys.argv[1] or None) as gpu:
    start = time.perf_counter()
    gpu.kernel(sys.argv[2], sys.argv[3])
    print(time.perf_counter() - start)
"""


def load(cache: Path, kernel_folder: str, module: str, function: str) -> float:
    """Milliseconds of the lookup of a kernel in a fresh process, with the given cache folder."""
    env = os.environ | {"SPARK_PY_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LOAD, kernel_folder, module, function]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1]) * 1e3


def builds(folder: Path, repeats: int) -> dict[str, float]:
    """A cold compile after a change of the source (the precompiled headers exist), and a load from the cache."""
    cache, source = folder / "cache", folder / "kernels"
    source.mkdir()
    norm = (ROOT / "cuda_src" / "norm.cu").read_text()
    (source / "rms_norm.cuh").write_text((ROOT / "cuda_src" / "rms_norm.cuh").read_text())
    (source / "spark_common.cuh").write_text((ROOT / "cuda_src" / "spark_common.cuh").read_text())
    cold, cached = [], []
    for turn in range(repeats + 1):
        (source / "norm.cu").write_text(f"{norm}// {turn}\n")
        cold.append(load(cache, str(source), "norm", "rms_norm"))
        cached.append(load(cache, str(source), "norm", "rms_norm"))
    return {"cached load": min(cached), "cold compile": min(cold[1:])}


def measure(repeats: int) -> dict[str, Any]:
    """All figures, and where they were taken."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        empty = folder / "empty"
        empty.mkdir()
        single = launches(repeats, 1, checked=False)
        single |= {"empty launch": empty_launch(empty, repeats)} | builds(folder, repeats)
        return machine() | {
            "compiler": find_compiler().version.splitlines()[0],
            "milliseconds": {
                "fast, 1 thread": single,
                "fast, 2 threads": launches(repeats, 2, checked=False),
                "checked, 2 threads": launches(1, 2, checked=True),
            },
            "budgets": BUDGETS,
        }


def machine() -> dict[str, Any]:
    """Where figures are taken."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    }


def cpu_name() -> str:
    """The processor's name where the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def table(found: dict[str, Any]) -> str:
    """The figures as Markdown."""
    columns = list(found["milliseconds"])
    lines = [
        "# The kernels on a CPU",
        "",
        "Made by tools/bench_emulator.py: lowest of several runs, in milliseconds.",
        "",
        *(f"- {key}: {found[key]}" for key in ("cpu", "cores", "system", "compiler")),
        "",
        f"| what | {' | '.join(columns)} | budget, 1 thread |",
        f"|---|{'---|' * len(columns)}---|",
    ]
    for name, budget in BUDGETS.items():
        cells = [f"{found['milliseconds'][c][name]:.3g}" if name in found["milliseconds"][c] else "" for c in columns]
        lines.append(f"| {name} | {' | '.join(cells)} | {budget if budget is not None else ''} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure, print, write; 1 where a budget is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "cpu", help="folder (default docs/cpu)")
    parser.add_argument("--repeats", type=int, default=7, help="runs of each figure (default 7)")
    options = parser.parse_args()
    found = measure(options.repeats)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "emulator.json").write_text(json.dumps(found, indent=1) + "\n")
    (options.output / "EMULATOR.md").write_text(table(found))
    print(table(found), end="")
    single = found["milliseconds"]["fast, 1 thread"]
    over = [name for name, budget in BUDGETS.items() if budget is not None and single[name] > budget]
    if over:
        print(f"above the budget: {', '.join(over)}", file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
