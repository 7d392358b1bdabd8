# SPDX-License-Identifier: AGPL-3.0-only
"""The demo checkpoint on the CPU and on a GPU: the same text, and drafts that change nothing.

The CPU backend continues each held-out prompt greedily. The other backend is then given the same tokens (teacher
forcing) and its choice after each is compared: they must agree wherever the CPU's two largest logits lie further apart
than the stated bound. It also continues each prompt by itself, without and with drafts, which must give equal ids.
Prints one JSON object; exit code 1 where one of the two fails.

    python tools/compare_backends.py [--backend cuda] [--prompts 50] [--new-tokens 64]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from spark_py.model.checkpoint import Checkpoint, open_checkpoint
from spark_py.model.levers import ModelLevers
from spark_py.model.speculative import SpeculativeDecoder, SpeculativeStats
from spark_py.runtime import open_backend

CHECKPOINT = Path(__file__).resolve().parents[1] / "spark_py" / "demo_models" / "qwen3_next"
BOUND = 0.5
"""Logits. Two backends round activations to BF16 at the same places and differ in the order of FP32 sums and in exp; a
value that falls on another side of a rounding moves by 2**-8 of itself, and the layers carry that to the logits, which
reach about 20 here. A choice can differ only where the gap is below the sum of two such differences;
`largest_logit_difference` in the output is what was measured."""
CHUNK = 16
Prompt = list[int]


def held_out(count: int) -> list[Prompt]:
    """Token ids of the first prompts that come with the checkpoint."""
    prompts = json.loads((CHECKPOINT / "prompts.json").read_text())["prompts"]
    return [list(prompt["ids"]) for prompt in prompts[:count]]


def forced(checkpoint: Checkpoint, prompt: Prompt, ids: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Logits [len(ids), vocab] after the prompt and after each of `ids` but the last."""
    target = checkpoint.target
    stream, state = target.gpu.default_stream(), target.alloc_state()
    try:
        rows = [target.prefill(prompt, state, stream, keep_logits=True).logits]
        for at in range(0, len(ids) - 1, CHUNK):
            chunk = ids[at : min(at + CHUNK, len(ids) - 1)]
            rows.append(target.verify(chunk, state, stream, keep_logits=True).logits)
        return np.concatenate([np.asarray(row, np.float32) for row in rows])
    finally:
        target.free_state(state)


def greedy(checkpoint: Checkpoint, prompt: Prompt, new_tokens: int, drafts: int) -> tuple[list[int], SpeculativeStats]:
    """Ids that a backend gives by itself, and what its drafts did."""
    levers = ModelLevers(mtp_max_seqs=1)
    proposer = checkpoint.proposer(levers) if drafts else None
    decoder = SpeculativeDecoder(checkpoint.target, proposer, drafts, levers=levers)
    done = decoder.generate(prompt, new_tokens)
    return done.tokens, done.stats


def on_cpu(job: tuple[Prompt, int]) -> tuple[list[int], np.ndarray[Any, np.dtype[np.float32]]]:
    """Greedy ids of the CPU backend, and the logits behind each."""
    prompt, new_tokens = job
    with open_backend("host") as gpu, open_checkpoint(CHECKPOINT, gpu, len(prompt) + new_tokens) as checkpoint:
        ids, _ = greedy(checkpoint, prompt, new_tokens, 0)
        return ids, forced(checkpoint, prompt, ids)


def main() -> int:
    """Compare, print, and say by the exit code whether it held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cuda", choices=["cuda", "emulated"], help="what the CPU is compared with")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--drafts", type=int, default=3)
    options = parser.parse_args()
    prompts = held_out(options.prompts)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    with multiprocessing.get_context("spawn").Pool(min(len(prompts), os.cpu_count() or 1)) as pool:
        expected = pool.map(on_cpu, [(prompt, options.new_tokens) for prompt in prompts], chunksize=1)

    positions = close = agreeing = wrong = 0
    worst = 0.0
    unequal: list[int] = []
    steps = drafted = accepted = 0
    longest = max(map(len, prompts)) + options.new_tokens
    with open_backend(options.backend) as gpu:
        for number, (prompt, (ids, logits)) in enumerate(zip(prompts, expected, strict=True)):
            with open_checkpoint(CHECKPOINT, gpu, longest) as checkpoint:
                theirs = forced(checkpoint, prompt, ids)
                plain, _ = greedy(checkpoint, prompt, options.new_tokens, 0)
                with_drafts, stats = greedy(checkpoint, prompt, options.new_tokens, options.drafts)
            second, first = np.sort(logits, axis=1)[:, -2:].T
            clear = first - second > BOUND
            same = theirs.argmax(axis=1) == np.asarray(ids)
            positions, close, agreeing = positions + len(ids), close + int((~clear).sum()), agreeing + int(same.sum())
            wrong += int((clear & ~same).sum())
            worst = max(worst, float(np.abs(theirs - logits).max()))
            unequal += [number] if plain != with_drafts else []
            steps, drafted, accepted = steps + stats.verify_steps, drafted + stats.drafted, accepted + stats.accepted
        device = gpu.device_name()
    result = {
        "backend": options.backend,
        "device": device,
        "prompts": len(prompts),
        "positions": positions,
        "bound": BOUND,
        "positions_below_bound": close,
        "agreeing": agreeing,
        "disagreeing_above_bound": wrong,
        "largest_logit_difference": worst,
        "num_drafts": options.drafts,
        "prompts_where_drafts_changed_the_text": len(unequal),
        "acceptance_rate": round(accepted / drafted, 4),
        "mean_accepted_length": round(1 + accepted / steps, 4),
    }
    print(json.dumps(result))
    return 1 if wrong or unequal else 0


if __name__ == "__main__":
    sys.exit(main())
