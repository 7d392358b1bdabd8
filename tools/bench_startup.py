# SPDX-License-Identifier: AGPL-3.0-only
"""What starting costs: the import, kernels on a cold and on a warm cache, and weights from a file to the device.

Imports are timed in fresh processes. Kernels: every module of the set for one architecture, which needs NVRTC and no
GPU, with an empty cache by `--workers` processes, then once more from the cache by one; `--keep` compiles into the
user's cache folder (SPARK_PY_CACHE_DIR) instead of one that is thrown away. Weights: a safetensors file of
random BF16 tensors, which the page cache holds, through `WeightStore.load` and, where torch is there, through
`safetensors.torch.load_file`, in turns; the first and the last tensor are compared. One JSON object on stdout.

    python tools/bench_startup.py [--backend cuda] [--gb 2] [--arch sm_90a] [--skip compile] [--keep]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from safetensors.numpy import save_file

from spark_py.runtime import GpuBackend, open_backend
from spark_py.runtime.cubin_cache import CubinCache
from spark_py.runtime.cuda import probe
from spark_py.runtime.manifest import KernelSet, ModuleSource
from spark_py.runtime.modules import compile_module
from spark_py.runtime.weights import WeightStore

ROOT = Path(__file__).resolve().parents[1]
STEPS = ("import", "compile", "weights")
_TENSOR_BYTES = 64 << 20
_SLOW = ("gemm_pipelined.cu",)
"""Begun first."""
_IMPORTS = ("spark_py", "spark_py.runtime", "spark_py.cli.main")


def seconds(action: Callable[[], Any]) -> tuple[float, Any]:
    """How long a call takes, and what it gives."""
    start = time.perf_counter()
    found = action()
    return time.perf_counter() - start, found


def imports(repeats: int) -> list[dict[str, Any]]:
    """Seconds of each import within a fresh process, and whether CuPy came with it."""
    rows = []
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    for name in _IMPORTS:
        script = f"import sys, time; t = time.perf_counter(); import {name}; "
        script += "print(time.perf_counter() - t, 'cupy' in sys.modules)"
        command = [sys.executable, "-c", script]
        done = [subprocess.run(command, env=env, capture_output=True, text=True, check=True) for _ in range(repeats)]
        times = [float(each.stdout.split()[0]) for each in done]
        rows.append({"what": f"import {name}", "s": round(statistics.median(times), 4)})
        rows[-1]["note"] = "CuPy loaded" if done[0].stdout.split()[1] == "True" else "CuPy not loaded"
    return rows


def _compiled(source: ModuleSource, arch: str, folder: Path | None) -> tuple[float, str]:
    return seconds(lambda: compile_module(source, arch, CubinCache(folder)))[0], source.path.name


def kernels(arch: str, workers: int, keep: bool) -> list[dict[str, Any]]:
    """Seconds until every module of the set is compiled, from nothing and from the cache."""
    files = [source for source in KernelSet.open().files() if source.path.suffix == ".cu"]
    files.sort(key=lambda source: source.path.name not in _SLOW)
    with tempfile.TemporaryDirectory() as own:
        folder = None if keep else Path(own) / "cache"

        # Processes, which have no lock in common.
        def in_processes() -> list[tuple[float, str]]:
            with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
                return [done.result() for done in [pool.submit(_compiled, file, arch, folder) for file in files]]

        cold, each = seconds(in_processes)
        cache = CubinCache(folder)
        warm, _ = seconds(lambda: [compile_module(source, arch, cache) for source in files])
    what = f"{len(files)} modules for {arch}"
    slowest = max(each)
    return [
        {
            "what": f"{what}, cold cache, {workers} processes",
            "s": round(cold, 2),
            "note": "start of processes included",
        },
        {"what": f"{what}, cold, the slowest alone", "s": round(slowest[0], 2), "note": slowest[1]},
        {"what": f"{what}, cold, sum of all", "s": round(sum(s for s, _ in each), 2), "note": ""},
        {
            "what": f"{what}, warm cache, 1 process",
            "s": round(warm, 3),
            "note": f"{warm / len(files) * 1e3:.2f} ms each",
        },
    ]


def weights(gpu: GpuBackend, nbytes: int, repeats: int) -> list[dict[str, Any]]:
    """GB/s from a file to the device, by this package and by safetensors with torch."""
    count = max(2, nbytes // _TENSOR_BYTES)
    # Random bytes of a pool in another order each time; what they mean does not matter here.
    pool = np.random.default_rng(0).integers(0, 1 << 15, _TENSOR_BYTES // 2, dtype=np.uint16)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        tensors = {f"t{i:03}": np.roll(pool, 4097 * i).view(ml_dtypes.bfloat16).reshape(-1, 4096) for i in range(count)}
        save_file(tensors, file)
        ends = [(name, tensors[name].view(np.uint8).reshape(-1)) for name in (f"t{0:03}", f"t{count - 1:03}")]
        del tensors
        times: dict[str, list[float]] = {}
        for _ in range(repeats + 1):
            times.setdefault("WeightStore.load", []).append(_ours(gpu, file, ends))
            if (theirs := _torch(gpu.name, file, ends)) is not None:
                times.setdefault("safetensors.torch.load_file", []).append(theirs)
        rows = []
        for name, all_times in times.items():
            median = statistics.median(all_times[1:])  # the first reads the file
            row = {"what": f"{count} tensors of 64 MiB to {gpu.name}, {name}", "s": round(median, 3)}
            rows.append(row | {"note": f"{count * _TENSOR_BYTES / median / 1e9:.2f} GB/s"})
    return rows


def _ours(gpu: GpuBackend, file: Path, ends: list[tuple[str, Any]]) -> float:
    with WeightStore.open(file) as store:

        def load() -> None:
            store.load(gpu, store.names())
            gpu.synchronize(gpu.default_stream())

        taken, _ = seconds(load)
        for name, wanted in ends:
            found = np.empty_like(wanted)
            gpu.copy_d2h(store.get(name).ptr, found)
            assert np.array_equal(found, wanted), f"{name} is not what the file holds"
    return taken


def _torch(backend: str, file: Path, ends: list[tuple[str, Any]]) -> float | None:
    try:
        import torch
        from safetensors.torch import load_file
    except ImportError:
        return None
    device = "cuda" if backend == "cuda" else "cpu"
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def load() -> Any:
        found = load_file(file, device=device)
        if device == "cpu":
            # On a CPU it maps the file; a copy is what a store makes too.
            found = {name: tensor.clone() for name, tensor in found.items()}
        wait()
        return found

    taken, found = seconds(load)
    for name, wanted in ends:
        assert np.array_equal(found[name].cpu().view(torch.uint8).numpy().reshape(-1), wanted)
    del found
    if device == "cuda":
        torch.cuda.empty_cache()
    return taken


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cuda", choices=("cuda", "host"))
    parser.add_argument("--gb", type=float, default=2.0, help="size of the file (default 2)")
    parser.add_argument("--arch", help="what kernels are compiled for (default: the first GPU's, else sm_90a)")
    parser.add_argument("--workers", type=int, default=min(32, os.cpu_count() or 1), help="processes that compile")
    parser.add_argument("--keep", action="store_true", help="leave what is compiled in the user's cache folder")
    parser.add_argument("--repeats", type=int, default=3, help="measurements that count (default 3)")
    parser.add_argument("--skip", action="append", default=[], choices=STEPS, help="leave a step out")
    options = parser.parse_args()
    if not 0.0 < options.gb <= 64.0 or options.repeats < 1 or options.workers < 1:
        parser.error("--gb is above 0 and at most 64, --repeats and --workers are 1 or more")
    rows: list[dict[str, Any]] = []
    if "import" not in options.skip:
        rows += imports(options.repeats)
    if "compile" not in options.skip:
        devices = probe()["devices"]
        rows += kernels(options.arch or (devices[0]["arch"] if devices else "sm_90a"), options.workers, options.keep)
    found: dict[str, Any] = {"cpus": os.cpu_count()}
    if "weights" not in options.skip:
        with open_backend(options.backend) as gpu:
            found["device"] = gpu.device_name()
            rows += weights(gpu, int(options.gb * 1e9), options.repeats)
    json.dump(found | {"rows": rows}, sys.stdout, indent=1)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
