# SPDX-License-Identifier: AGPL-3.0-only
"""The benchmarks of the GPU suite: which programs, in which order, and which want the machine for themselves."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tools.gpu_children import json_step
from tools.gpu_goals import BESIDE_TORCH, DRAFTS
from tools.host_pace import HostPace

__all__ = ["BESIDE", "NOTHING", "QUIET", "Benchmarks"]

_BENCH = ["-m", "spark_py.cli.main", "bench", "--backend", "cuda", "--json"]
_TORCH = ["--mode", "bf16", "--path", "graph", "--repeats", "15", "--against", "torch", "--compile-limit", "90"]
_MODES = {"deepseek-v4-flash": ["--mode", "mxfp4"]}

NOTHING = "nothing"
"""What a program has beside it that has the machine for itself."""
QUIET: dict[str, list[str]] = {
    "compiling": ["tools/bench_startup.py", "--skip", "import", "--skip", "weights", "--keep"],
    "launch": ["tools/bench_launch.py"],
    **{name: [*_BENCH, "--shape", shape, *_MODES.get(shape, [])] for shape, name in DRAFTS.items()},
}
"""Times of the host: measured before anything else begins. Compiling comes first, so that no other waits for it."""
BESIDE: dict[str, list[str]] = {
    "products": ["tools/bench_products.py"],
    "kernels": ["tools/bench_kernels.py"],
    BESIDE_TORCH: [*_BENCH, "--shape", "qwen3.6-27b", *_TORCH],
    "DeepSeek-V4 by parts": ["tools/bench_v4.py", "--repeats", "15"],
    "drafts of a MiniMax-M2 module": [*_BENCH, "--shape", "minimax-m2", "--repeats", "15"],
    "start-up": ["tools/bench_startup.py", "--skip", "compile", "--gb", "1"],
    "drafts of Qwen3-Next-80B beside torch": [*_BENCH, "--shape", "qwen3-next-80b", *_TORCH],
}
"""Times of the device, which other work on the host changes little."""


_QUIET_LIMIT = 10.0
"""Seconds that a quiet host is waited for, before each of QUIET."""


class Benchmarks:
    """Runs them with `limit` seconds each; `found`: name -> {"ok", "values" or "message", "seconds", "beside"}, and
    "waited" where a quiet host was waited for, so many seconds.

    A folder of its own takes the compiled kernels, empty at first, so that the time of compiling is that of all of
    them; `env` names it for whatever else runs."""

    def __init__(
        self, output: Path, limit: float, env: Mapping[str, str], device: str | None, say: Callable[[str], None]
    ) -> None:
        self.found: dict[str, dict[str, Any]] = {}
        self._cache = tempfile.TemporaryDirectory(prefix="spark_py_cache_", ignore_cleanup_errors=True)
        self.env = {**env, "SPARK_PY_CACHE_DIR": self._cache.name}
        self._own = self.env if device is None else {**self.env, "CUDA_VISIBLE_DEVICES": device}
        self._output, self._limit, self._say = output, limit, say
        self._pace = HostPace()

    def run(self, programs: Mapping[str, list[str]], beside: str) -> None:
        """One after the other, with `beside` on the same machine; with nothing, each waits for a quiet host."""
        for name, program in programs.items():
            waited = {} if beside != NOTHING else {"waited": round(self._pace.wait(_QUIET_LIMIT), 1)}
            self._say(f"benchmark: {name}")
            log = self._output / f"benchmark_{name.replace(' ', '_')}.log"
            self.found[name] = {"beside": beside} | waited | json_step(program, log, self._limit, self._own)

    def leave_out(self, why: str) -> None:
        """None of them is run."""
        self.found = {name: {"ok": False, "skipped": True, "message": why} for name in (*QUIET, *BESIDE)}

    def close(self) -> None:
        """Remove the compiled kernels."""
        self._cache.cleanup()
