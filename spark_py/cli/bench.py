# SPDX-License-Identifier: AGPL-3.0-only
"""`spark-py bench`: what a draft costs beside what reading its weights must cost, and beside torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from spark_py.bench.plot import draw, require_matplotlib
from spark_py.bench.rigs import PATHS
from spark_py.bench.run import BenchPlan, run_bench
from spark_py.bench.shapes import MODES, NAMES
from spark_py.runtime.errors import InvalidArgumentError

_STDOUT = "-"
_PIPE_WIDTH = 170


def _writable(option: str, file: str | None) -> Path | None:
    """The path, once it is known that it can be written: a measurement takes a while. None for stdout."""
    if file is None or file == _STDOUT:
        return None
    path = Path(file)
    if path.is_dir():
        raise InvalidArgumentError(option, file, "a file is needed, and this is a folder")
    if not path.parent.is_dir():
        raise InvalidArgumentError(option, file, f"there is no folder {path.parent}")
    there = path.exists()
    try:
        path.open("ab").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise InvalidArgumentError(option, file, f"it cannot be written: {error.strerror}") from error
    return path


def _show(found: dict[str, Any]) -> None:
    console = Console()
    if console.width < _PIPE_WIDTH and not console.is_terminal:
        console = Console(width=_PIPE_WIDTH)
    floor = "read_GB_per_s" in found
    title = f"{found['device']} ({found['backend']})"
    title += f", reads {found['read_GB_per_s']:.0f} GB/s by {found['read_by']}" if floor else ""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    for header in ("shape", "mode", "by", "path"):
        table.add_column(header, vertical="bottom", overflow="fold")
    for header in (
        "MB\nto read",
        "µs",
        "from - to",
        *(("floor\nµs", "of\nfloor") if floor else ()),
        "whole\npropose",
        "host",
        "kernels",
        "calls",
    ):
        table.add_column(header, justify="right", vertical="bottom", no_wrap=True)
    peers = any(row["same_drafts"] for row in found["rows"])
    if peers:
        table.add_column("same\ndrafts", justify="right", vertical="bottom", no_wrap=True)
    for row in found["rows"]:
        cells = [row["shape"], row["mode"], row["by"], row["path"], f"{row['MB']:.1f}", f"{row['us']:.1f}"]
        cells.append(f"{row['min_us']:.1f} - {row['max_us']:.1f}")
        if floor:
            cells += [f"{row['floor_us']:.1f}", f"{row['of_floor']:.0%}"]
        cells.append(f"{row['wall_us']:.1f}")
        cells += ["-" if row[name] is None else str(row[name]) for name in ("host_us", "kernels", "host_calls")]
        table.add_row(*cells, *([row["same_drafts"] or "-"] if peers else ()))
    console.print(table)
    for note in found["notes"]:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


@click.command("bench", short_help="Measure drafts beside what reading their weights costs.")
@click.option(
    "--shape",
    "shapes",
    type=click.Choice(NAMES),
    multiple=True,
    help="Which head; may be repeated. By default the two of Qwen on a GPU, and on the CPU demo, the only one there.",
)
@click.option(
    "--mode",
    "modes",
    type=click.Choice(MODES),
    multiple=True,
    help="How its weights are stored; may be repeated. By default all that the shape has.",
)
@click.option(
    "--path",
    "paths",
    type=click.Choice(PATHS),
    multiple=True,
    help="eager: a draft launch by launch; graph: as a graph; chain: --drafts of them in one; batched: --batch "
    "sequences at once, as a graph. May be repeated; by default all.",
)
@click.option("--batch", type=int, default=8, show_default=True, help="Sequences of path batched.")
@click.option("--drafts", type=int, default=3, show_default=True, help="Drafts of path chain.")
@click.option("--context", type=int, help="KV rows of each sequence. By default 4096, of demo 256.")
@click.option("--repeats", type=int, default=25, show_default=True, help="Calls that count.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of weights and inputs.")
@click.option(
    "--backend",
    type=click.Choice(["auto", "host", "cuda"]),
    default="auto",
    show_default=True,
    help="auto: the GPU where one answers, else the CPU.",
)
@click.option(
    "--against",
    type=click.Choice(["torch"]),
    help="Also the same draft in torch, BF16, on the same weights: eager, in a CUDA graph, compiled in a CUDA graph.",
)
@click.option(
    "--compile-limit",
    type=float,
    default=0.0,
    show_default=True,
    metavar="S",
    help="Leave the compiled peer out where torch takes more seconds to compile it; 0: no limit.",
)
@click.option(
    "--json",
    "json_file",
    is_flag=False,
    flag_value=_STDOUT,
    metavar="[FILE]",
    help="One JSON object, in FILE beside the table, or on stdout instead of it.",
)
@click.option("--plot", "plot_file", metavar="FILE", help="A picture (png, svg, pdf): times over bytes, and the floor.")
def bench_command(
    shapes: tuple[str, ...],
    modes: tuple[str, ...],
    paths: tuple[str, ...],
    batch: int,
    drafts: int,
    context: int | None,
    repeats: int,
    seed: int,
    backend: str,
    against: str | None,
    compile_limit: float,
    json_file: str | None,
    plot_file: str | None,
) -> None:
    """Measure proposes of draft heads with random weights: the graph on the device, and the whole, from the call to the
    ids on the host.

    Beside each median: the bytes that the draft must read, the time that this takes at the read bandwidth measured in
    the same run, and the share of the time that it is. Inputs take turns, and the L2 cache is emptied each time.
    """
    written, picture = _writable("--json", json_file), _writable("--plot", plot_file)
    if picture is not None:
        require_matplotlib()
        if picture.suffix not in (".png", ".svg", ".pdf"):
            raise InvalidArgumentError("--plot", plot_file, "a name that ends in .png, .svg or .pdf is needed")
    plan = BenchPlan(
        backend, tuple(dict.fromkeys(shapes)), tuple(dict.fromkeys(modes)), tuple(dict.fromkeys(paths)), batch, drafts,
        context, repeats, seed, against is not None, compile_limit,
    )  # fmt: skip
    found = run_bench(plan, lambda line: click.echo(line, err=True))
    text = json.dumps(found, indent=2)
    if written is not None:
        written.write_text(text + "\n")
    if picture is not None:
        draw(found, picture)
    if json_file == _STDOUT:
        click.echo(text)
    else:
        _show(found)
