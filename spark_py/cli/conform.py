# SPDX-License-Identifier: AGPL-3.0-only
"""`spark-py conform`: kernels that somebody else wrote, held against the catalogue and its cases."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from spark_py.runtime.arch import parse_arch
from spark_py.runtime.errors import InvalidArgumentError, SparkError, UnsupportedError
from spark_py.testing.conform import KernelReport, conform

__all__ = ["conform_command"]

_BACKENDS = ("host", "emulated", "emulated-checked", "cuda")
_SHOWN = 3


def _name(report: KernelReport) -> str:
    name = f"{report.module}::{report.function}" if report.function else f"{report.module} ({Path(report.file).name})"
    return f"{name} in {report.set}" if report.set else name


def _compiles(report: KernelReport) -> str:
    if not report.compiles:
        return "-"
    bad = [arch for arch, ok in report.compiles.items() if ok is False]
    if bad:
        return f"not for {', '.join(bad)}"
    made = sum(ok is True for ok in report.compiles.values())
    return f"{made} of {len(report.compiles)}" if made < len(report.compiles) else "yes"


def _print(reports: Sequence[KernelReport], strict: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # A pipe has no width of its own; names in it should stay whole.
    console = Console(width=None if sys.stdout.isatty() else 140)
    table = Table()
    table.add_column("kernel", overflow="fold")
    for heading in ("compiles", "parameters"):
        table.add_column(heading)
    for heading in ("cases", "faults"):
        table.add_column(heading, justify="right")
    table.add_column("result", overflow="fold")
    listed = [report for report in reports if report.known]
    for report in listed:
        ran = report.passed + len({failure.case for failure in report.failures})
        table.add_row(
            Text(_name(report)),
            _compiles(report),
            "-" if report.abi is None else "ok" if report.abi == "ok" else "differ",
            f"{report.passed}/{ran}" if ran else "-",
            "-" if report.faults is None else str(len(report.faults)),
            Text(report.status),
        )
    if listed:
        console.print(table)
    for report in listed:
        for line in _notes(report):
            console.print(Text(f"{_name(report)}: {line}"), soft_wrap=True)
    unknown = list(dict.fromkeys(_name(report) for report in reports if not report.known))
    if unknown:
        console.print(Text(f"not in the catalogue: {', '.join(unknown)}"), soft_wrap=True)
    for report in reports:
        if not report.known and report.messages:
            console.print(Text(f"{_name(report)}: {report.messages[-1]}"), soft_wrap=True)
    bad = sum(report.fails(strict) for report in reports)
    console.print(f"{len(listed)} kernels, {bad} failed")


def _notes(report: KernelReport) -> list[str]:
    """What there is to say about a kernel beyond its row."""
    notes = list(report.messages)
    if report.abi not in ("ok", None):
        notes.append(f"parameters: {report.abi}")
    hard = [f"case '{f.case}': {f.message}" for f in report.failures if f.tag != "decision"]
    soft = [f"{f.subject}, case '{f.case}': {f.message}" for f in report.failures if f.tag == "decision"]
    for group in (report.faults or [], hard, soft):
        notes += group[:_SHOWN]
        if len(group) > _SHOWN:
            notes.append(f"and {len(group) - _SHOWN} more")
    return notes


def _archs(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = tuple(name.strip() for name in value.split(",") if name.strip())
    if not names:
        raise click.BadParameter("name at least one architecture")
    for name in names:
        try:
            parse_arch(name)
        except SparkError as error:
            raise click.BadParameter(str(error)) from None
    return names


@click.command("conform")
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--module", metavar="M", help="This module alone; for a single file, the module that it stands for.")
@click.option("--backend", type=click.Choice(_BACKENDS), default="emulated-checked", show_default=True)
@click.option("--arch", "archs", callback=_archs, metavar="SM[,SM...]", help="Compile for these instead of all.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the inputs.")
@click.option("--strict", is_flag=True, help="Fail also where a kernel only decides otherwise than this project.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def conform_command(
    path: Path,
    module: str | None,
    backend: Any,
    archs: tuple[str, ...] | None,
    seed: int,
    strict: bool,
    as_json: bool,
) -> None:
    """Hold the kernels at PATH against the catalogue: compiling, parameters, values, races and bounds.

    PATH is a kernel folder (kernels.toml, KERNEL.toml, or plain files), one .cu or .ptx file, or a tree of the engine's
    layout (HARDWARE/common, HARDWARE/MODEL/QUANT). Exit code 0, or 1 when a kernel fails, or 2 for bad usage.
    """
    if path.is_file() and path.suffix not in (".cu", ".ptx"):
        raise click.UsageError(f"{path} is neither a kernel folder nor a .cu or .ptx file")
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("reading") as status:
        try:
            reports = conform(path, module, backend, archs, seed, status.update)
        except (InvalidArgumentError, UnsupportedError) as error:
            raise click.UsageError(str(error)) from None
    if as_json:
        click.echo(json.dumps({"kernels": [report.as_json() for report in reports]}, indent=1))
    else:
        _print(reports, strict)
    if any(report.fails(strict) for report in reports):
        raise click.exceptions.Exit(1)
