# SPDX-License-Identifier: AGPL-3.0-only
"""The child processes of the GPU suite: how they are run, ended and read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
GRACE = 15.0
"""Seconds that a child has between interrupt and kill."""


@dataclass(frozen=True)
class Run:
    """How a child process ended. `returncode` is None where the time limit ended it; `output` has both streams."""

    returncode: int | None
    seconds: float
    output: str
    stdout: str


def hear_interrupts() -> None:
    """For a main thread before it calls `run`. A shell's background job ignores interrupts, and its children would, but
    an interrupt is how a child is told that its time is up."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def run(command: list[str], log: Path, limit: float, env: dict[str, str]) -> Run:
    """Run to the end or to `limit` seconds, then interrupt it, so that it can still say how far it came, and kill its
    process group. stderr, then stdout, are kept in `log`."""
    start = time.monotonic()
    with tempfile.TemporaryFile() as out, log.open("wb") as err:
        child = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=err, start_new_session=True)
        try:
            code: int | None = child.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            code = None
            child.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                child.wait(timeout=GRACE)
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        out.seek(0)
        stdout = out.read()
        err.write(stdout)
    return Run(code, time.monotonic() - start, log.read_text(errors="replace"), stdout.decode(errors="replace"))


def read_junit(text: str) -> dict[str, Any]:
    """Counts, skips by reason, and the failed tests of a junit file."""
    counts = {"passed": 0, "failed": 0, "errors": 0, "skipped": 0}
    skips: dict[str, int] = {}
    failures: list[str] = []
    for case in ElementTree.fromstring(text).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        outcomes = {child.tag: child for child in case}
        if "failure" in outcomes or "error" in outcomes:
            kind = "failure" if "failure" in outcomes else "error"
            counts["failed" if kind == "failure" else "errors"] += 1
            failures.append(f"{name}: {(outcomes[kind].get('message') or '').partition(chr(10))[0][:300]}")
        elif "skipped" in outcomes:
            counts["skipped"] += 1
            reason = outcomes["skipped"].get("message") or "no reason given"
            skips[reason] = skips.get(reason, 0) + 1
        else:
            counts["passed"] += 1
    return {**counts, "skips": skips, "failures": failures}


def pytest_run(prefix: list[str], arguments: list[str], log: Path, limit: float, env: dict[str, str]) -> dict[str, Any]:
    """One pytest run; `ok` is true when it ended by itself, something passed and nothing failed."""
    with tempfile.TemporaryDirectory() as folder:
        junit, audit = Path(folder, "junit.xml"), Path(folder, "audit.json")
        command = [*prefix, sys.executable, "-m", "pytest", *arguments, "-q", "-p", "no:cacheprovider"]
        done = run([*command, f"--junitxml={junit}", f"--audit={audit}"], log, limit, env)
        result: dict[str, Any] = {"seconds": round(done.seconds, 1), "returncode": done.returncode}
        if done.returncode is None:
            result["message"] = f"stopped after {limit:g} s"
        elif not junit.exists():
            result["message"] = f"pytest wrote no report; see {log.name}"
        if junit.exists():
            result.update(read_junit(junit.read_text()))
            lists = [json.loads(path.read_text()) for path in Path(folder).glob("audit.json*")]
            result["kernels"] = sorted({name for names in lists for name in names})
    result["ok"] = done.returncode == 0 and result.get("passed", 0) > 0
    result["output"] = done.output
    return result


def json_step(script: list[str], log: Path, limit: float, env: dict[str, str]) -> dict[str, Any]:
    """Run a script that prints one JSON object on stdout; {"ok", "seconds"} and "values", "message" or both: a script
    that the limit interrupts, or that fails, may still have printed what it had."""
    done = run([sys.executable, *script], log, limit, env)
    ended = f"stopped after {limit:g} s" if done.returncode is None else f"exit code {done.returncode}"
    result: dict[str, Any] = {"ok": done.returncode == 0, "seconds": round(done.seconds, 1)}
    try:
        result["values"] = json.loads(done.stdout)
    except json.JSONDecodeError as error:
        missing = "" if done.returncode is None else f", stdout is no JSON object: {error}"
        return result | {"ok": False, "message": ended + missing}
    return result if result["ok"] else result | {"message": ended}
