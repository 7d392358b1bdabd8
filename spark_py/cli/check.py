# SPDX-License-Identifier: AGPL-3.0-only
"""`spark-py check`: compile every kernel for every architecture, and hold parameter lists against the catalogue.

Needs NVRTC and no GPU.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from spark_py.catalog import find
from spark_py.runtime.arch import ARCHS, parse_arch, runs_on
from spark_py.runtime.errors import (
    ArchMismatchError,
    BackendUnavailableError,
    KernelSetError,
    SparkError,
    ToolkitMismatchError,
    UnsupportedError,
)
from spark_py.runtime.manifest import KernelSet, ModuleSource, kernels_path
from spark_py.runtime.modules import CompiledModule, compile_module, toolkit
from spark_py.runtime.signature import Signature, compare, kernel_spec_signature

__all__ = ["ARCHS", "CheckRow", "check", "check_command"]


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One kernel on one architecture. Bytes for memory; None where nothing was assembled (PTX, a kernel that this
    architecture does not have, a failure). `params` is the list as text, `log` says why `ok` is false, or what to
    know. `function` is "" where a failure hides which functions the file has."""

    module: str
    function: str
    file: str
    arch: str
    ok: bool
    params: tuple[str, ...] = ()
    registers: int | None = None
    shared: int | None = None
    stack: int | None = None
    spill_bytes: int | None = None
    log: str = ""


def check(
    paths: Sequence[Path], archs: Sequence[str], progress: Callable[[str], None] = lambda _: None
) -> list[CheckRow]:
    """Compile what `paths` hold (kernel folders, .cu or .ptx files; none: this project's kernels) for each of `archs`.

    What is wrong with a kernel or a manifest is a row with `ok` false. Raised are InvalidArgumentError and
    UnsupportedError for an architecture, and BackendUnavailableError or ToolkitMismatchError where NVRTC or its headers
    are at fault. `progress` is told each finished "module arch".
    """
    archs = tuple(dict.fromkeys(archs))
    for arch in archs:
        _known(arch)
    rows: list[CheckRow] = []
    jobs: list[tuple[ModuleSource, str]] = []
    for path in paths or [kernels_path()]:
        try:
            files = list(KernelSet.open(path).files())
        except KernelSetError as error:
            rows += [CheckRow("", "", str(path), arch, False, log=str(error)) for arch in archs]
            continue
        jobs += [(file, arch) for file in files for arch in archs]

    def run(job: tuple[ModuleSource, str]) -> list[CheckRow]:
        made = list(_rows(*job))
        progress(f"{job[0].name} {job[1]}")
        return made

    # NVRTC compiles outside the interpreter's lock.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for made in pool.map(run, jobs):
            rows += made
    return rows


def _known(arch: str) -> None:
    number = parse_arch(arch).number
    if number not in toolkit().archs:
        known = ", ".join(f"sm_{number}" for number in toolkit().archs)
        raise UnsupportedError(f"{arch} is not known to this compiler ({toolkit().versions()}); it knows {known}")


def _rows(module: ModuleSource, arch: str) -> Iterator[CheckRow]:
    declared = module.declared() or ("",)

    def all_of(ok: bool, log: str) -> Iterator[CheckRow]:
        for function in declared:
            yield CheckRow(module.name, function, str(module.path), arch, ok, log=log)

    capability = parse_arch(arch).capability
    if not runs_on(module.min_arch, capability):
        yield from all_of(True, f"needs {module.min_arch}, not compiled for {arch}")
        return
    try:
        compiled = compile_module(module, arch)
    except ArchMismatchError as error:  # PTX that was made for another architecture
        yield from all_of(True, str(error))
    except (BackendUnavailableError, ToolkitMismatchError):
        raise
    except SparkError as error:
        yield from all_of(False, str(error))
    else:
        if not compiled.signatures:
            yield from all_of(not module.functions, f"has no kernel for {arch}")
        for function, signature in compiled.signatures.items():
            yield _row(module, function, signature, compiled)


def _row(module: ModuleSource, function: str, signature: Signature, compiled: CompiledModule) -> CheckRow:
    spec = find(module.name, function)
    difference = None if spec is None else compare(signature, kernel_spec_signature(spec))
    resources = compiled.resources.get(function)
    return CheckRow(
        module.name,
        function,
        str(module.path),
        compiled.arch,
        difference is None,
        tuple(f"{param.ctype or param.kind.value} {param.name}" for param in signature.params),
        None if resources is None else resources.registers,
        None if resources is None else resources.shared,
        None if resources is None else resources.stack,
        None if resources is None else resources.spill_stores + resources.spill_loads,
        "" if difference is None else f"{module.path}: parameter list differs from the catalogue's: {difference}",
    )


def _print(rows: Sequence[CheckRow]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # A pipe has no width of its own; names in it should stay whole.
    console = Console(width=None if sys.stdout.isatty() else 140)
    table = Table()
    table.add_column("kernel", overflow="fold")
    for heading in ("catalogue", "arch", "result"):
        table.add_column(heading)
    for heading in ("registers", "shared", "stack", "spills"):
        table.add_column(heading, justify="right")
    for row in rows:
        numbers = [row.registers, row.shared, row.stack, row.spill_bytes]
        state = "FAIL" if not row.ok else "skip" if row.log and row.registers is None else "ok"
        name = f"{row.module}::{row.function}" if row.module else row.file
        listed = "listed" if find(row.module, row.function) else "-"
        figures = ("-" if number is None else str(number) for number in numbers)
        table.add_row(Text(name), listed, row.arch, state, *figures)
    console.print(table)
    notes: dict[tuple[str, bool], list[CheckRow]] = {}
    for row in rows:
        if row.log:
            notes.setdefault((row.log.replace(row.arch, "ARCH"), row.ok), []).append(row)
    for (_, ok), which in notes.items():  # what differs in the architecture only is said once
        names = list(dict.fromkeys(f"{row.module}::{row.function}" for row in which if row.module))
        where = ", ".join([*names, *dict.fromkeys(row.arch for row in which)])
        console.print(Text(f"{'note' if ok else 'FAIL'}: {where}: {which[0].log}"), soft_wrap=True)
    bad = sum(not row.ok for row in rows)
    console.print(f"{len(rows)} checks, {bad} failed")


def _archs(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in value.split(",") if name.strip())
    if not names:
        raise click.BadParameter("name at least one architecture")
    for name in names:
        try:
            parse_arch(name)
        except SparkError as error:
            raise click.BadParameter(str(error)) from None
    return names


@click.command("check")
@click.argument("paths", nargs=-1, metavar="[PATH]...", type=click.Path(exists=True, path_type=Path))
@click.option("--arch", "archs", default=",".join(ARCHS), callback=_archs, show_default=True, metavar="SM[,SM...]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check_command(paths: tuple[Path, ...], archs: tuple[str, ...], as_json: bool) -> None:
    """Compile every kernel for every architecture, without a GPU, and check parameter lists.

    PATH is a kernel folder (kernels.toml, the engine's KERNEL.toml, or plain files) or one .cu or .ptx file; without
    any, this project's kernels. Exit code 0, or 1 when a kernel fails, or 2 for bad usage.
    """
    for path in paths:
        if path.is_file() and path.suffix not in (".cu", ".ptx"):
            raise click.UsageError(f"{path} is neither a kernel folder nor a .cu or .ptx file")
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("compiling") as status:
        try:
            rows = check(paths, archs, lambda done: status.update(f"compiled {done}"))
        except UnsupportedError as error:
            raise click.UsageError(str(error)) from None
    if as_json:
        kernels: list[dict[str, Any]] = [asdict(row) for row in rows]
        click.echo(json.dumps({"kernels": kernels}, indent=1))
    else:
        _print(rows)
    if not all(row.ok for row in rows):
        raise click.exceptions.Exit(1)
