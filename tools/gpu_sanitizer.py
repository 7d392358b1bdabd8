# SPDX-License-Identifier: AGPL-3.0-only
"""compute-sanitizer over the kernel tests, and over kernels that are wrong on purpose, where it must be red."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.gpu_children import pytest_run, run

TOOLS = ("memcheck", "racecheck", "initcheck")
_ERRORS = re.compile(r"^=+ ERROR SUMMARY: (\d+) errors?\b", re.MULTILINE)
_HAZARDS = re.compile(
    r"^=+ RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)", re.MULTILINE
)
_PROBE = """
from spark_py.runtime import open_backend
with open_backend("cuda") as gpu:
    ptr = gpu.alloc(256)
    gpu.memset(ptr, 0, 256)
    gpu.free(ptr)
"""

_FAULTS = """
import sys, tempfile
from pathlib import Path
from spark_py.runtime import open_backend
SOURCE = '''
extern "C" __global__ void memcheck(unsigned* out, unsigned n) { out[n] = n; }
extern "C" __global__ void racecheck(unsigned* out, unsigned n) {
    __shared__ unsigned row[64];
    row[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = row[63 - threadIdx.x] + n;
}
extern "C" __global__ void initcheck(unsigned* out, unsigned n) { out[0] = out[1 + threadIdx.x % 8] + n; }
'''
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "faults.cu").write_text(SOURCE)
    with open_backend("cuda", kernels=folder) as gpu:
        out, stream = gpu.alloc(256), gpu.default_stream()
        gpu.launch_typed(gpu.kernel("faults", sys.argv[1]), (1, 1, 1), (64, 1, 1), 0, stream, [out, 64])
        gpu.synchronize(stream)
"""
"""A write past the end of an allocation, a missing barrier and a read of what nobody wrote."""


def read_summary(tool: str, output: str) -> tuple[int | None, str]:
    """(faults, line) from a sanitizer's output; faults is None where the summary line is missing.

    Several summaries (one a process) are added up; racecheck counts each hazard once, warnings included.
    """
    if tool == "racecheck":
        found = list(_HAZARDS.finditer(output))
        faults = sum(max(int(m[1]), int(m[2]) + int(m[3])) for m in found)
    else:
        found = list(_ERRORS.finditer(output))
        faults = sum(int(m[1]) for m in found)
    return (faults, found[-1][0].lstrip("= ")) if found else (None, "")


def find_sanitizer() -> str | None:
    """compute-sanitizer's path, from PATH or the toolkit's usual folder."""
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def sanitizer_message(output: str) -> str:
    """The first line in which compute-sanitizer says why it gave up, or the last line at all."""
    lines = [line.lstrip("= ") for line in output.splitlines() if line.startswith("====")]
    telling = [line for line in lines if re.search(r"not supported|unable|failed|error:|denied", line, re.IGNORECASE)]
    return (telling or lines or output.strip().splitlines() or ["it printed nothing"])[0 if telling else -1]


def sanitize(args: argparse.Namespace, env: dict[str, str]) -> dict[str, Any]:
    """All three tools over the kernel tests, side by side, after a probe that the tool attaches at all."""
    binary = find_sanitizer()
    if binary is None:
        return {"available": False, "message": "compute-sanitizer is neither on PATH nor in /usr/local/cuda/bin"}
    env = {**env, "SPARK_PY_LINEINFO": "1"}
    probe_log = args.output / "sanitizer-probe.log"
    command = [binary, "--tool", "memcheck", "--error-exitcode", "9"]
    probe = run([*command, sys.executable, "-c", _PROBE], probe_log, 60, env)
    if probe.returncode != 0 or read_summary("memcheck", probe.output)[0] != 0:
        return {"available": False, "message": sanitizer_message(probe.output)}
    probe_log.unlink()

    def control(tool: str, prefix: list[str]) -> dict[str, Any]:
        """Whether the tool sees a fault that is there; a green run says nothing where it does not."""
        log = args.output / f"{tool}-control.log"
        faults, line = read_summary(tool, run([*prefix, sys.executable, "-c", _FAULTS, tool], log, 60, env).output)
        return {"faults": faults, "summary": line, "ok": bool(faults)}

    def one(tool: str) -> dict[str, Any]:
        prefix = [binary, "--tool", tool, "--error-exitcode", "9", "--print-limit", "50"]
        known = control(tool, prefix)
        tests = ["tests/kernels", "--backend", "cuda", "--seed", args.seed, "--sanitizer"]
        result = pytest_run(prefix, tests, args.output / f"{tool}.log", args.sanitizer_limit, env)
        faults, line = read_summary(tool, result.pop("output"))
        result.update(faults=faults, summary=line, control=known, ok=result["ok"] and faults == 0 and known["ok"])
        if faults is None:
            result.setdefault("message", "no summary line: the tool did not finish")
        return result

    with ThreadPoolExecutor(len(TOOLS)) as pool:
        return {"available": True, "tools": dict(zip(TOOLS, pool.map(one, TOOLS), strict=True))}
