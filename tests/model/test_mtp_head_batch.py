# SPDX-License-Identifier: AGPL-3.0-only
"""Batched proposes: those of each sequence alone, bit for bit, and proof that the comparison would see a fault."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from spark_py.model.layers.mtp_head import MtpProposerState, MtpQuantization
from spark_py.model.levers import ModelLevers
from spark_py.runtime.buffers import BufferArena
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from tests.model.mtp_forms import FORMS, Form, make_form
from tests.model.support import BF16, Array, Rig, upload

Q = MtpQuantization
MANY = 11
"""More than the batched GEMVs of BF16 and FP8 take at once, and no tier of NVFP4."""
EXACT = ModelLevers()
DRAFTS = 3


@dataclass
class Pair:
    """A sequence twice: one state drafts in the batch, its twin alone. `length`: tokens that the target processed."""

    batch: MtpProposerState
    alone: MtpProposerState
    length: int


def widen(rig: Rig, rows: int) -> Rig:
    """The arena for `rows` rows, all of it NaN."""
    seq_len = rig.ctx.buffers.max_seq_len()
    buffers = BufferArena(rig.config, rows, seq_len, 16, 4, rig.gpu)
    for name, nbytes in buffers.sizes().items():
        if nbytes:
            rig.gpu.memset(buffers.pointer(name), 0xFF, nbytes)
    rig.ctx.buffers.release()
    rig.ctx = replace(rig.ctx, buffers=buffers)
    return rig


def pairs(rig: Rig, rng: np.random.Generator, n: int) -> list[Pair]:
    """Sequences whose drafters hold 0 to 17 rows with gaps between them, the same ones in both states."""
    made = []
    for i in range(n):
        pair, rounds = Pair(rig.state(), rig.state(), int(rng.integers(1, 60))), (0, 3, 6, 1)[i % 4]
        for _ in range(rounds):
            token, hidden, accepted = one(rig, rng), row(rig, rng), int(rng.integers(0, DRAFTS + 1))
            for state in (pair.batch, pair.alone):
                rig.propose(state, token, hidden, pair.length, DRAFTS)
                rig.head.after_verify(accepted, state, rig.stream)
            pair.length += accepted + 1
        made.append(pair)
    return made


def one(rig: Rig, rng: np.random.Generator) -> int:
    return int(rng.integers(0, rig.config.vocab_size))


def row(rig: Rig, rng: np.random.Generator) -> Array:
    hidden: Array = (2 * rng.standard_normal(rig.config.hidden_size)).astype(BF16)
    return hidden


@contextmanager
def scattered(rig: Rig, rows: Sequence[Array]) -> Iterator[list[DevicePtr]]:
    """Hidden rows on the device: pairs of them one after the other, the second pair before the first, and so on."""
    h = 2 * rig.config.hidden_size
    base = upload(rig.gpu, np.concatenate([*rows, np.zeros_like(rows[0])]))
    where = [i ^ 2 if (i ^ 2) < len(rows) else i for i in range(len(rows))]
    for i, at in enumerate(where):
        rig.gpu.copy_h2d(rows[i].view(np.uint8), base.offset(at * h))
    yield [base.offset(at * h) for at in where]
    rig.gpu.free(base)


def batch(
    rig: Rig, tokens: Sequence[int], rows: Sequence[Array], lengths: Sequence[int], states: Sequence[Any],
    drafts: int = DRAFTS, conf: list[list[float]] | None = None,
) -> list[list[int]] | None:  # fmt: skip
    with scattered(rig, rows) as hiddens:
        return rig.head.propose_batch(tokens, hiddens, lengths, drafts, states, rig.ctx, rig.stream, conf)


def same(rig: Rig, pair: Pair) -> bool:
    """Whether both states are the same: bookkeeping and the bytes of all rows."""
    known = [(s.seq_len, s.last_num_drafted, s.last_pair_key, s.base_pair_key) for s in (pair.batch, pair.alone)]
    sides = zip(rig.rows(pair.batch), rig.rows(pair.alone), strict=True)
    return known[0] == known[1] and all(a.tobytes() == b.tobytes() for a, b in sides)


def agree(rig: Rig, rng: np.random.Generator, n: int, steps: int = 2) -> bool:
    """Whether `steps` batched proposes of n sequences give the ids and the rows of proposes alone."""
    sequences, fine = pairs(rig, rng, n), True
    for _ in range(steps):
        tokens, rows = [one(rig, rng) for _ in range(n)], [row(rig, rng) for _ in range(n)]
        lengths = [pair.length for pair in sequences]
        found = batch(rig, tokens, rows, lengths, [pair.batch for pair in sequences])
        assert found is not None
        for i, pair in enumerate(sequences):
            alone = rig.propose(pair.alone, tokens[i], rows[i], pair.length, DRAFTS)
            fine &= found[i] == alone and same(rig, pair)
            accepted = int(rng.integers(0, DRAFTS + 1))
            for state in (pair.batch, pair.alone):
                rig.head.after_verify(accepted, state, rig.stream)
            pair.length += accepted + 1
    return fine


# ---------------------------------------------------------------- bit for bit


@pytest.mark.parametrize("n", range(2, 9))
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_batch_is_its_sequences_alone(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, form: Form, n: int
) -> None:
    rig, _ = make_form(gpu, rng, monkeypatch, form)
    assert rig.head.propose_batch_max(rig.ctx.buffers, rig.config) == 8
    assert agree(rig, rng, n)
