# SPDX-License-Identifier: AGPL-3.0-only
"""RESULTS.md, from results.json alone."""

from __future__ import annotations

from typing import Any

from tools.gpu_goals import render_goals

__all__ = ["counts_of", "render"]

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


def render(results: dict[str, Any]) -> str:
    """RESULTS.md from results.json: nothing in it that is not in the JSON."""
    lines = ["# Results on a GPU", "", "Made from results.json by tools/gpu_suite.py.", ""]
    lines += [f"- ran: {results['ran']}", f"- commit: {results['commit'] or 'unknown'}", f"- date: {results['date']}"]
    lines += [f"- clean: {'yes' if results['clean'] else 'no'}"]
    lines += [f"- problem: {text}" for text in results["problems"]]
    lines += render_goals(results["goals"], results["benchmarks"])
    lines += ["", "## Machine", ""]
    lines += [f"- {key}: {value}" for key, value in results["environment"].items()]
    tests = results["tests"]
    lines += ["", "## Tests", "", counts_of(tests)]
    lines += [f"- failed: {text}" for text in tests.get("failures", [])]
    lines += [f"- skipped {count}: {reason}" for reason, count in sorted(tests.get("skips", {}).items())]
    sanitizer = results["sanitizer"]
    lines += ["", "## compute-sanitizer", ""]
    if not sanitizer["available"]:
        lines.append(f"Not run: {sanitizer['message']}")
    else:
        lines += ["| tool | summary | tests | a kernel with such a fault |", "|---|---|---|---|"]
        for tool, result in sanitizer["tools"].items():
            cells = [tool, result["summary"] or "no summary line", counts_of(result), result["control"]["summary"]]
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
        if "seconds" in benchmark:
            lines.append(f"- took {benchmark['seconds']} s, beside {benchmark['beside']}")
        lines += _table(benchmark["values"]) if "values" in benchmark else []
        lines += ["", f"Not complete: {benchmark['message']}"] if "message" in benchmark else []
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
        columns = list(dict.fromkeys(key for row in rows for key in row))  # rows of several kinds have their own
        lines += ["", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        lines += [f"| {' | '.join(_number(row.get(column)) for column in columns)} |" for row in rows]
    return lines


def _short(values: dict[str, Any]) -> dict[str, Any]:
    """The demo's JSON without its texts and ids, one row a run."""
    if "runs" not in values:
        return values
    return {"rows": [{k: v for k, v in run.items() if k in _DEMO_COLUMNS} for run in values["runs"]]}


def _number(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) and abs(value) < 1e4 else str(value)


def counts_of(result: dict[str, Any]) -> str:
    if "passed" not in result:
        return str(result.get("message", "no counts"))
    counts = ", ".join(f"{result[key]} {key}" for key in ("passed", "failed", "errors", "skipped"))
    message = f"{result['message']}: " if "message" in result else ""
    return f"{message}{counts} in {result['seconds']} s"
