# SPDX-License-Identifier: AGPL-3.0-only
"""`spark-py kernels`: the catalogue, with each kernel's signature, geometry, reference and source file."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import click

from spark_py.catalog import all_kernels
from spark_py.catalog.spec import KernelSpec
from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.manifest import KernelSet, ModuleSource


def describe(spec: KernelSpec, modules: Mapping[str, ModuleSource]) -> dict[str, Any]:
    """One catalogue row as plain values. `modules` are those of the kernel set."""
    source = modules.get(spec.module)
    return {
        "module": spec.module,
        "function": spec.function,
        "parameters": [{"type": param.ctype, "name": param.name} for param in spec.params],
        "grid": spec.grid_text,
        "block": spec.block_text,
        "gpu_only": spec.gpu_only,
        "optional": spec.optional,
        "min_arch": spec.min_arch,
        "reference": f"{spec.reference.__module__}.{spec.reference.__qualname__}",
        "docstring": inspect.getdoc(spec.reference) or "",
        "source": str(source.holding(spec.function).path) if source else None,
    }


def matching(pattern: str) -> Iterator[KernelSpec]:
    """The kernels whose "module::function", module or function matches the shell pattern."""
    for spec in all_kernels():
        if any(fnmatchcase(text, pattern) for text in ("::".join(spec.key), *spec.key)):
            yield spec


def _text(row: Mapping[str, Any], whole: bool) -> str:
    params = ", ".join(f"{param['type']} {param['name']}" for param in row["parameters"])
    doc = row["docstring"] if whole else row["docstring"].partition("\n")[0]
    notes = [f"grid {row['grid']}", f"block {row['block']}", f"from {row['min_arch']}"]
    notes += ["GPU only"] if row["gpu_only"] else []
    notes += ["optional"] if row["optional"] else []
    lines = [f"{row['module']}::{row['function']}({params})"]
    lines += [f"    {line}".rstrip() for line in doc.splitlines()]
    lines += [f"    {'; '.join(notes)}", f"    reference {row['reference']}"]
    lines += [f"    source {row['source']}"] if row["source"] else []
    return "\n".join(lines)


@click.command("kernels", short_help="List the kernels of the catalogue.")
@click.argument("pattern", default="*")
@click.option("--json", "as_json", is_flag=True, help="One JSON array on stdout.")
def kernels_command(pattern: str, as_json: bool) -> None:
    """List the kernels whose name matches PATTERN (shell wildcards on module, function or module::function).

    One match prints the whole docstring of its reference, several print the first line of each.
    """
    modules = KernelSet.open().modules
    rows = [describe(spec, modules) for spec in matching(pattern)]
    if not rows:
        raise InvalidArgumentError("pattern", pattern, "no kernel of the catalogue matches")
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        click.echo("\n\n".join(_text(row, whole=len(rows) == 1) for row in rows))
