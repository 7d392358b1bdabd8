# SPDX-License-Identifier: AGPL-3.0-only
"""`spark-py demo`: the checkpoint that comes with the package goes on from a text, with 0, 1, 2 and 3 drafts."""

from __future__ import annotations

import functools
from pathlib import Path

import click

import spark_py

from .decoding import Request, decode, decoding_options, report
from .kernel_demo import demo_kernels

DEMO_MODELS = Path(spark_py.__file__).parent / "demo_models"
"""One checkpoint folder a family."""


@click.command("demo", short_help="Generate text with the checkpoint that comes with the package.")
@functools.partial(decoding_options, compare=True, family="qwen3_next")
@click.option("--kernels", is_flag=True, help="Run one kernel instead and compare it with its formula.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the inputs of --kernels.")
def demo_command(request: Request, as_json: bool, kernels: bool, seed: int) -> None:
    """Complete a text by speculative decoding, show that drafts leave it as it is, and what they save.

    On a GPU where one answers, else on the CPU. Exit code 1 tells that drafts changed the text, which would be a fault.
    """
    if kernels:
        demo_kernels(request.backend, seed, as_json)
        return
    assert request.family is not None
    report(decode(DEMO_MODELS / request.family, request), as_json, request.single)
