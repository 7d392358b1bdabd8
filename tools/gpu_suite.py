# SPDX-License-Identifier: AGPL-3.0-only
"""Tests, compute-sanitizer and the benchmarks on a GPU; writes results.json and RESULTS.md.

    python tools/gpu_suite.py --output docs/gpu [--commit SHA] [--trees FILE]

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

from tools.gpu_children import hear_interrupts, json_step, pytest_run
from tools.gpu_sanitizer import sanitize

ROOT = Path(__file__).resolve().parent.parent
TREES = (
    "cuda_src",
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
_DEMO_COLUMNS = (
    "quantization",
    "hidden_mode",
    "drafter_prefill",
    "num_drafts",
    "row_policy",
    "refeed",
    "acceptance_rate",
    "per_position",
    "mean_accepted_length",
    "verify_steps",
    "new_tokens",
    "tokens_per_second",
    "identical_to_greedy",
)
_EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
_BENCH = ["-m", "spark_py.cli.main", "bench", "--backend", "cuda", "--repeats", "15"]
BENCHMARKS = {
    "launch": ["tools/bench_launch.py"],
    "kernels": ["tools/bench_kernels.py"],
    "drafts": ["tools/bench_propose.py"],
    "drafts of DeepSeek-V4": [*_BENCH, "--shape", "deepseek-v4-flash", "--mode", "mxfp4", "--json"],
    "DeepSeek-V4 by parts": ["tools/bench_v4.py", "--repeats", "15"],
    "drafts of a MiniMax-M2 module": [*_BENCH, "--shape", "minimax-m2", "--json"],
    "drafts beside torch": [
        *_BENCH, "--shape", "qwen3.6-27b", "--mode", "bf16", "--path", "graph", "--path", "chain",
        "--against", "torch", "--compile-limit", "90", "--json",
    ],
    "start-up": ["tools/bench_startup.py", "--gb", "1"],
}  # fmt: skip


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


def render(results: dict[str, Any]) -> str:
    """RESULTS.md from results.json: nothing in it that is not in the JSON."""
    lines = ["# Results on a GPU", "", "Made from results.json by tools/gpu_suite.py.", ""]
    lines += [f"- {key}: {value}" for key, value in results["environment"].items()]
    lines += [f"- commit: {results['commit'] or 'unknown'}", f"- date: {results['date']}"]
    lines += [f"- clean: {'yes' if results['clean'] else 'no'}"]
    lines += [f"- problem: {text}" for text in results["problems"]]
    tests = results["tests"]
    lines += ["", "## Tests", "", _counts(tests)]
    lines += [f"- failed: {text}" for text in tests.get("failures", [])]
    lines += [f"- skipped {count}: {reason}" for reason, count in sorted(tests.get("skips", {}).items())]
    sanitizer = results["sanitizer"]
    lines += ["", "## compute-sanitizer", ""]
    if not sanitizer["available"]:
        lines.append(f"Not run: {sanitizer['message']}")
    else:
        lines += ["| tool | summary | tests | a kernel with such a fault |", "|---|---|---|---|"]
        for tool, result in sanitizer["tools"].items():
            cells = [tool, result["summary"] or "no summary line", _counts(result), result["control"]["summary"]]
            lines.append(f"| {' | '.join(cells)} |")
        lines += ["", f"Kernels looked up under it: {len(sanitizer['kernels'])}."]
        if sanitizer["kernels_not_run"]:
            lines.append(f"Kernels tested, but not under it: {', '.join(sanitizer['kernels_not_run'])}.")
    lines += ["", "## Demo checkpoint, and the CPU beside the GPU"]
    for name, step in results["demo"].items():
        lines += ["", f"### {name}", ""]
        lines += _table(_short(step["values"])) if "values" in step else []
        lines += [f"Not complete: {step['message']}"] if "message" in step else []
    lines += ["", "## Benchmarks"]
    for name, benchmark in results["benchmarks"].items():
        lines += ["", f"### {name}", ""]
        lines += _table(benchmark["values"]) if "values" in benchmark else []
        lines += [f"Not complete: {benchmark['message']}"] if "message" in benchmark else []
    lines += ["", "## Trees", "", "| path | hash |", "|---|---|"]
    lines += [f"| {path} | {value} |" for path, value in results["trees"].items()]
    return "\n".join(lines) + "\n"


def _table(values: dict[str, Any]) -> list[str]:
    """A benchmark's JSON as Markdown: plain values as a list, rows (or objects by name) as a table."""
    objects = {key: value for key, value in values.items() if isinstance(value, dict)}
    rows = values.get("rows") or [{"": name, **row} for name, row in objects.items()]
    lines = [f"- {key}: {value}" for key, value in values.items() if not isinstance(value, dict | list)]
    lines += [f"- note: {note}" for note in values.get("notes", [])]
    if rows:
        lines += ["", f"| {' | '.join(rows[0])} |", "|" + "---|" * len(rows[0])]
        lines += [f"| {' | '.join(_number(value) for value in row.values())} |" for row in rows]
    return lines


def _short(values: dict[str, Any]) -> dict[str, Any]:
    """The demo's JSON without its texts and ids, one row a run."""
    if "runs" not in values:
        return values
    return {"rows": [{k: v for k, v in run.items() if k in _DEMO_COLUMNS} for run in values["runs"]]}


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) and abs(value) < 1e4 else str(value)


def _counts(result: dict[str, Any]) -> str:
    if "passed" not in result:
        return str(result.get("message", "no counts"))
    counts = ", ".join(f"{result[key]} {key}" for key in ("passed", "failed", "errors", "skipped"))
    message = f"{result['message']}: " if "message" in result else ""
    return f"{message}{counts} in {result['seconds']} s"


def problems_of(results: dict[str, Any], expected: dict[str, str] | None) -> list[str]:
    """What keeps the run from being clean, one line each; skipped steps and a missing sanitizer are not among them."""
    problems = []
    if expected is not None and expected != results["trees"]:
        differing = sorted(p for p in {*expected, *results["trees"]} if expected.get(p) != results["trees"].get(p))
        problems.append(f"files differ from the commit's: {', '.join(differing)}")
    if not results["tests"]["ok"]:
        problems.append(f"tests: {_counts(results['tests'])}")
    for tool, result in results["sanitizer"].get("tools", {}).items():
        if not result["ok"]:
            known = "" if result["control"]["ok"] else "; a fault that is there was not seen"
            problems.append(f"{tool}: {result['summary'] or 'no summary line'}; {_counts(result)}{known}")
    for name, step in results["demo"].items():
        if not step["ok"]:
            problems.append(f"demo {name}: {step['message']}")
    for name, benchmark in results["benchmarks"].items():
        if not benchmark["ok"] and not benchmark.get("skipped"):
            problems.append(f"benchmark {name}: {benchmark['message']}")
    return problems


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Run tests, compute-sanitizer and the benchmark on a GPU.")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for results and logs")
    parser.add_argument("--commit", default="", metavar="SHA", help="commit that runs (default: git's HEAD)")
    parser.add_argument(
        "--trees",
        type=Path,
        metavar="FILE",
        help="JSON map path -> git hash that the files must have (default: HEAD's)",
    )
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
    return parser.parse_args(argv)


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

    def measure() -> dict[str, Any]:
        own = env if args.benchmark_device is None else {**env, "CUDA_VISIBLE_DEVICES": args.benchmark_device}
        found: dict[str, Any] = {}
        for name, script in BENCHMARKS.items():
            if args.skip_benchmark:
                found[name] = skipped
                continue
            say(f"benchmark: {name}")
            log = args.output / f"benchmark_{name.replace(' ', '_')}.log"
            found[name] = json_step(script, log, args.benchmark_limit, own)
        return found

    with ThreadPoolExecutor(3 if args.side_by_side else 1) as pool, ThreadPoolExecutor(1) as other:
        steps = [pool.submit(step) for step in (test, sanitizing, demonstrate)]
        beside = None if args.benchmark_device is None else other.submit(measure)
        tests, sanitizer, demo = (step.result() for step in steps)
        benchmarks = measure() if beside is None else beside.result()
    kernels: set[str] = set()
    kernels.update(*(result.pop("kernels", []) for result in sanitizer.get("tools", {}).values()))
    not_run = set(tests.pop("kernels", [])) - kernels
    sanitizer.update(kernels=sorted(kernels), kernels_not_run=sorted(not_run))
    results: dict[str, Any] = {
        "environment": environment_of(doctor),
        "commit": args.commit or head(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "trees": trees_of(ROOT),
        "tests": tests,
        "sanitizer": sanitizer,
        "demo": demo,
        "benchmarks": benchmarks,
    }
    results["problems"] = problems_of(results, expected)
    skips = args.skip_sanitizer or args.skip_benchmark
    results["clean"] = not results["problems"] and sanitizer["available"] and not skips
    text = portable(json.dumps(results, indent=2))
    (args.output / "results.json").write_text(text + "\n")
    (args.output / "RESULTS.md").write_text(render(json.loads(text)))
    for text in results["problems"]:
        say(f"problem: {text}")
    if results["problems"]:
        return 1
    if not sanitizer["available"] and not args.skip_sanitizer:
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
