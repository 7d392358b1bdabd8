# SPDX-License-Identifier: AGPL-3.0-only
"""`spark-py generate`: text from a checkpoint folder by speculative decoding, with and without drafts."""

from __future__ import annotations

from pathlib import Path

import click

from .decoding import Request, decode, decoding_options, report


@click.command("generate", short_help="Generate text from a checkpoint folder, with drafts.")
@click.argument("model_dir", type=click.Path(path_type=Path))
@decoding_options
def generate_command(model_dir: Path, request: Request, as_json: bool) -> None:
    """Go on from a prompt greedily with the checkpoint in MODEL_DIR, and say what its drafts saved.

    MODEL_DIR is a folder in Hugging Face's form: config.json, tokenizer.json and safetensors, MTP tensors included.
    Each run is compared with the plain run; exit code 1 tells that one of them differs, which would be a fault.
    """
    report(decode(model_dir, request), as_json, request.single)
