# SPDX-License-Identifier: AGPL-3.0-only
"""Tests, compute-sanitizer and the benchmarks on a GPU; writes results.json and RESULTS.md.

    python tools/gpu_suite.py --output docs/gpu [--commit SHA] [--trees FILE]
    python tools/gpu_suite.py --bench --output docs/gpu     # the benchmarks alone

Exit code: 0 all clean, 1 something failed, 3 nothing failed but compute-sanitizer cannot attach on this machine.
The results are written in each case. docs/gpu/README.md describes them. Needs no installed package, only its
dependencies: the repository's root is put on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.gpu_benchmarks import BESIDE, NOTHING, QUIET, Benchmarks
from tools.gpu_children import hear_interrupts, json_step, pytest_run
from tools.gpu_goals import goals_of
from tools.gpu_report import counts_of, render
from tools.gpu_sanitizer import sanitize

ROOT = Path(__file__).resolve().parent.parent
TREES = (
    "cuda_src",
    "spark_py/bench",
    "spark_py/ops",
    "spark_py/model/layers",
    "spark_py/runtime/checked",
    "spark_py/runtime/cuda.py",
    "spark_py/runtime/cuda_images.py",
    "spark_py/runtime/cuda_query.py",
    "spark_py/runtime/launch.py",
    "spark_py/runtime/modules.py",
    "spark_py/runtime/plan.py",
    "spark_py/runtime/signature.py",
)
"""What the numbers depend on; where a hash differs from HEAD's, the results are stale."""

CPU_ROOMS = ("--ignore=tests/emulator", "--ignore=tests/tools")
"""Tests that take minutes of a CPU and have no use for a GPU."""
_EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"


def _demo(backend: str, family: str) -> list[str]:
    return ["-m", "spark_py.cli.main", "demo", "--backend", backend, "--family", family, "--json"]


DEMO = {
    "kernels emulated and on the GPU": ["tools/compare_emulated.py"],
    "backends compared": ["tools/compare_backends.py"],
    "on the GPU": _demo("cuda", "qwen3_next"),
    "on the CPU": _demo("host", "qwen3_next"),
    "experts, on the GPU": _demo("cuda", "qwen3_next_moe"),
    "several modules, on the GPU": _demo("cuda", "minimax_m2"),
    "DeepSeek-V4, on the GPU": _demo("cuda", "deepseek_v4"),
}
"""The CPU beside the GPU, and what the demo checkpoint does on both: name -> a command of Python that prints JSON."""


def git_object(path: Path) -> str:
    """The hash that git gives a file (blob) or folder (tree) as it lies on disk, caches left out.

    Taken from disk so that it names what ran, also in a copy without .git or with uncommitted changes.
    """
    if path.is_dir():
        entries = []
        for child in path.iterdir():
            digest = "" if child.name == "__pycache__" else git_object(child)
            if digest in ("", _EMPTY_TREE):
                continue
            mode = b"40000" if child.is_dir() else b"100755" if child.stat().st_mode & 0o100 else b"100644"
            name = child.name.encode()
            order = name + b"/" if child.is_dir() else name
            entries.append((order, mode + b" " + name + b"\0" + bytes.fromhex(digest)))
        kind, data = b"tree", b"".join(entry for _, entry in sorted(entries))
    else:
        kind, data = b"blob", path.read_bytes()
    return hashlib.sha1(kind + b" %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def trees_of(root: Path) -> dict[str, str]:
    """Path -> hash, for those of TREES that exist."""
    return {path: git_object(root / path) for path in TREES if (root / path).exists()}


def head(path: str = "") -> str:
    """HEAD's commit, or its object for `path`; "" where git or the path is missing."""
    name = f"HEAD:{path}" if path else "HEAD"
    try:
        return subprocess.run(
            ["git", "rev-parse", "--verify", "--quiet", name], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def problems_of(results: dict[str, Any], expected: dict[str, str] | None) -> list[str]:
    """What keeps the run from being clean, one line each; skipped steps and a missing sanitizer are not among them."""
    problems = []
    if expected is not None and expected != results["trees"]:
        differing = sorted(p for p in {*expected, *results["trees"]} if expected.get(p) != results["trees"].get(p))
        problems.append(f"files differ from the commit's: {', '.join(differing)}")
    if not results["tests"]["ok"] and not results["tests"].get("skipped"):
        problems.append(f"tests: {counts_of(results['tests'])}")
    for tool, result in results["sanitizer"].get("tools", {}).items():
        if not result["ok"]:
            known = "" if result["control"]["ok"] else "; a fault that is there was not seen"
            problems.append(f"{tool}: {result['summary'] or 'no summary line'}; {counts_of(result)}{known}")
    for name, step in results["demo"].items():
        if not step["ok"]:
            problems.append(f"demo {name}: {step['message']}")
    for name, benchmark in results["benchmarks"].items():
        if not benchmark["ok"] and not benchmark.get("skipped"):
            problems.append(f"benchmark {name}: {benchmark['message']}")
    return problems


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Run tests, compute-sanitizer and the benchmarks on a GPU.")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for results and logs")
    parser.add_argument("--commit", default="", metavar="SHA", help="commit that runs (default: git's HEAD)")
    parser.add_argument(
        "--trees",
        type=Path,
        metavar="FILE",
        help="JSON map path -> git hash that the files must have (default: HEAD's)",
    )
    parser.add_argument("--bench", action="store_true", help="the benchmarks and their goals alone; never clean")
    parser.add_argument("--seed", default="0", help="seed of the tests (default: 0)")
    parser.add_argument("--skip-sanitizer", action="store_true", help="leave compute-sanitizer out; never clean")
    parser.add_argument("--skip-benchmark", action="store_true", help="leave the benchmarks out; never clean")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes that run the tests (default: 1)")
    parser.add_argument("--side-by-side", action="store_true", help="tests, sanitizer and demo at the same time")
    parser.add_argument("--demo-limit", type=float, default=180, metavar="S", help="seconds for each run of the demo")
    parser.add_argument("--test-limit", type=float, default=180, metavar="S", help="seconds for the tests")
    parser.add_argument("--sanitizer-limit", type=float, default=200, metavar="S", help="seconds for the three tools")
    parser.add_argument(
        "--benchmark-device", metavar="N", help="run the benchmarks at the same time, on a GPU of their own"
    )
    parser.add_argument("--benchmark-limit", type=float, default=180, metavar="S", help="seconds for each benchmark")
    args = parser.parse_args(argv)
    if args.bench and args.skip_benchmark:
        parser.error("--bench and --skip-benchmark leave nothing to run")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run all steps; the exit code."""
    args = parse_arguments(argv)
    hear_interrupts()
    args.output = args.output.resolve()
    args.output.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    expected = json.loads(args.trees.read_text()) if args.trees else {p: head(p) for p in TREES if head(p)} or None
    skipped = {"ok": False, "skipped": True, "message": "left out by option"}

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    say("environment")
    doctor = json_step(["-m", "spark_py.cli.main", "doctor", "--json"], args.output / "doctor.log", 60, env)
    benchmarks = Benchmarks(args.output, args.benchmark_limit, env, args.benchmark_device, say)
    env = env if args.skip_benchmark else benchmarks.env

    def test() -> dict[str, Any]:
        say("tests")
        workers = ["-n", str(args.workers), "--dist", "worksteal"] if args.workers > 1 else []
        selection = ["tests", *CPU_ROOMS, "--backend", "cuda", "--seed", args.seed, *workers]
        result = pytest_run([], selection, args.output / "tests.log", args.test_limit, env)
        del result["output"]
        return result

    def sanitizing() -> dict[str, Any]:
        if args.skip_sanitizer:
            return {"available": False, **skipped}
        say("compute-sanitizer")
        return sanitize(args, env)

    def demonstrate() -> dict[str, Any]:
        say("demo")
        return {n: json_step(c, args.output / "demo.log", args.demo_limit, env) for n, c in DEMO.items()}

    if args.skip_benchmark:
        benchmarks.leave_out("left out by option")
    else:
        benchmarks.run(QUIET, NOTHING)
    tests, sanitizer, demo = dict(skipped), {"available": False, **skipped}, dict[str, Any]()
    if args.bench:
        benchmarks.run(BESIDE, NOTHING)
    else:
        with ThreadPoolExecutor(3 if args.side_by_side else 1) as pool:
            steps = [pool.submit(step) for step in (test, sanitizing, demonstrate)]
            if args.benchmark_device is not None and not args.skip_benchmark:
                benchmarks.run(BESIDE, "the tests, on another GPU")
            tests, sanitizer, demo = (step.result() for step in steps)
        if args.benchmark_device is None and not args.skip_benchmark:
            benchmarks.run(BESIDE, NOTHING)
    benchmarks.close()
    kernels: set[str] = set()
    kernels.update(*(result.pop("kernels", []) for result in sanitizer.get("tools", {}).values()))
    not_run = set(tests.pop("kernels", [])) - kernels
    sanitizer.update(kernels=sorted(kernels), kernels_not_run=sorted(not_run))
    results: dict[str, Any] = {
        "ran": "the benchmarks alone" if args.bench else "everything",
        "environment": environment_of(doctor),
        "commit": args.commit or head(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "trees": trees_of(ROOT),
        "tests": tests,
        "sanitizer": sanitizer,
        "demo": demo,
        "benchmarks": benchmarks.found,
        "goals": goals_of(benchmarks.found),
    }
    results["problems"] = problems_of(results, expected)
    skips = args.bench or args.skip_sanitizer or args.skip_benchmark
    results["clean"] = not results["problems"] and sanitizer["available"] and not skips
    text = portable(json.dumps(results, indent=2))
    (args.output / "results.json").write_text(text + "\n")
    (args.output / "RESULTS.md").write_text(render(json.loads(text)))
    for text in results["problems"]:
        say(f"problem: {text}")
    for goal in results["goals"]:
        say(f"goal {goal['line']}, {goal['what']}: {goal['reached']}; {goal['measured']}")
    if results["problems"]:
        return 1
    if not sanitizer["available"] and not args.bench and not args.skip_sanitizer:
        say(f"compute-sanitizer cannot attach: {sanitizer['message']}")
        return 3
    return 0


def portable(text: str) -> str:
    """Paths below the repository as they are on any machine."""
    return text.replace(f"{ROOT}/", "")


def environment_of(doctor: dict[str, Any]) -> dict[str, str]:
    """Name -> value of the doctor's findings, or its error."""
    if "values" not in doctor:
        return {"doctor": doctor["message"]}
    return {row["name"]: row["value"] for row in doctor["values"]["findings"] if row["value"]}


if __name__ == "__main__":
    sys.exit(main())
