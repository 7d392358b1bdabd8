# SPDX-License-Identifier: AGPL-3.0-only
"""The `spark-py` group: options that every command shares, errors, and the table of commands.

Results go to stdout, progress and logging to stderr. Exit codes: 0 success, 1 the command found a fault,
2 an error (also of usage).
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

import click

from spark_py import __version__
from spark_py.runtime.errors import SparkError

_COMMANDS = {
    "demo": ("spark_py.cli.demo", "demo_command"),
    "generate": ("spark_py.cli.generate", "generate_command"),
    "check": ("spark_py.cli.check", "check_command"),
    "kernels": ("spark_py.cli.kernels", "kernels_command"),
    "conform": ("spark_py.cli.conform", "conform_command"),
    "bench": ("spark_py.cli.bench", "bench_command"),
    "doctor": ("spark_py.cli.doctor", "doctor_command"),
}
"""Name -> (module, attribute). A module is imported when its command is asked for."""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute = _COMMANDS[cmd_name]
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SparkError as error:
            if ctx.params["debug"]:
                raise
            first, _, rest = str(error).partition("\n")
            if rest and not ctx.params["verbose"]:
                first += " (spark-py -v shows the rest)"
            click.echo(f"error: {first}", err=True)
            if rest and ctx.params["verbose"]:
                click.echo(rest, err=True)
            ctx.exit(2)


def _log_to_stderr(ctx: click.Context, level: int) -> None:
    from rich.console import Console
    from rich.logging import RichHandler

    logger = logging.getLogger("spark_py")
    handler = RichHandler(console=Console(stderr=True), show_path=False)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)

    def undo() -> None:
        logger.removeHandler(handler)
        logger.setLevel(before)

    ctx.call_on_close(undo)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="spark-py")
@click.option("-v", "--verbose", count=True, help="Log to stderr; twice for debug messages.")
@click.option("--debug", is_flag=True, help="Show a traceback when an error ends the command.")
@click.pass_context
def cli(ctx: click.Context, verbose: int, debug: bool) -> None:
    """The GPU runtime and kernels of the Atlas engine, in Python."""
    _log_to_stderr(ctx, (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)])


def main() -> None:
    """Entry point of the console script."""
    cli(prog_name="spark-py")


if __name__ == "__main__":
    main()
