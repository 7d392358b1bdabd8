# SPDX-License-Identifier: AGPL-3.0-only
"""Batched proposes for tests: sequences twice, one state for the batch and one that drafts alone; long sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spark_py.model.layers.mtp_head import (
    MtpHead,
    MtpProposerState,
    MtpQuantization,
)
from spark_py.model.levers import ModelLevers
from spark_py.model.weight_map import QuantizedWeight
from spark_py.ops.w4a16_gemm_t import transpose_nvfp4
from spark_py.runtime.buffers import BufferArena
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from tests.model.mtp_forms import to_nvfp4
from tests.model.support import (
    BF16,
    Array,
    Rig,
    make_rig,
    mtp_weights,
    relative_l2,
    upload,
)

Q = MtpQuantization
MANY = 11
"""More than the batched GEMVs of BF16 and FP8 take at once, and no tier of NVFP4."""
DRAFTS = 3
BY_STEP = ModelLevers(propose_graph=False)
"""What is seen of a propose that goes draft by draft; its graph is the matter of test_mtp_head_graph_batch."""


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


def pairs(rig: Rig, rng: np.random.Generator, n: int, rounds: Sequence[int] = (0, 3, 6, 1)) -> list[Pair]:
    """Sequences whose drafters hold 0 to 17 rows with gaps between them, those of `rounds` proposes, by turns; the same
    ones in both states."""
    made = []
    for i in range(n):
        state, length = rig.state(), int(rng.integers(1, 60))
        for _ in range(rounds[i % len(rounds)]):
            accepted = int(rng.integers(0, DRAFTS + 1))
            rig.propose(state, one(rig, rng), row(rig, rng), length, DRAFTS)
            rig.head.after_verify(accepted, state, rig.stream)
            length += accepted + 1
        made.append(Pair(state, copy_of(rig, state), length))
    return made


def copy_of(rig: Rig, state: MtpProposerState) -> MtpProposerState:
    """Another state with the same rows."""
    copy, kv = rig.state(), rig.head.kv_cache
    rig.head.reserve_rows(copy, state.seq_len)
    nbytes = kv.total_bytes() // 2 // kv.num_blocks()
    for source, target in zip(state.block_table, copy.block_table, strict=False):
        for pool in (kv.k_pool_ptr(0), kv.v_pool_ptr(0)):
            rig.gpu.copy_d2d_async(pool.offset(source * nbytes), pool.offset(target * nbytes), nbytes, rig.stream)
    copy.seq_len, copy.last_pair_key = state.seq_len, state.last_pair_key
    return copy


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


ONE_ULP = 2.0**-7
"""Of a BF16 number, relative at most. A tile's FP32 sum differs from a GEMV's far less, so that each logit is the same
or its neighbour, and where two are more than two steps of the larger apart their order is the same."""
GEMM_BOUND = 0.025
"""Relative L2 of K and V: both heads are within 0.0125 of the exact one, see test_mtp_head_quant."""


def chain(rig: Rig, state: MtpProposerState, token: int, hidden: Array, position: int) -> tuple[list[int], list[Array]]:
    """The drafts of one propose, made one by one, and the logits of each."""
    ids, logits = [], []
    for j in range(DRAFTS):
        (token,) = rig.propose(state, token, hidden, position + j, 1)
        rig.head.after_verify(1, state, rig.stream)
        hidden = rig.hidden().astype(BF16)
        ids.append(token)
        logits.append(rig.logits())
    return ids, logits


def near(
    rig: Rig, rng: np.random.Generator, n: int, clear: Callable[[Array], float], rounds: Sequence[int] = (0, 3, 6, 1)
) -> tuple[float, float, float]:
    """Shares of drafts that are not clear and of those that differ, and the relative L2 between rows of K and V.

    A draft that differs where the two best logits are more than `clear` apart fails; one that differs elsewhere ends
    the comparison of its sequence, whose later drafts follow from it.
    """
    sequences = pairs(rig, rng, n, rounds)
    tokens, rows = [one(rig, rng) for _ in range(n)], [row(rig, rng) for _ in range(n)]
    lengths = [pair.length for pair in sequences]
    found = batch(rig, tokens, rows, lengths, [pair.batch for pair in sequences])
    assert found is not None
    unclear = differ = compared = 0
    sides: list[tuple[Array, Array]] = []
    for i, pair in enumerate(sequences):
        first = pair.alone.seq_len
        alone, seen = chain(rig, pair.alone, tokens[i], rows[i], lengths[i])
        for j, logits in enumerate(seen):
            second, best = np.partition(logits, -2)[-2:]
            compared += 1
            unclear += best - second <= clear(logits)
            for a, b in zip(rig.rows(pair.batch), rig.rows(pair.alone), strict=True):
                sides.append((a[first + j].astype(np.float64), b[first + j].astype(np.float64)))
            if found[i][j] != alone[j]:
                differ += 1
                assert best - second <= clear(logits), f"draft {j} of sequence {i}"
                break
    a, b = (np.concatenate([np.ravel(side[which]) for side in sides]) for which in (0, 1))
    return unclear / compared, differ / compared, relative_l2(a, b)


def tiled_rig(
    gpu: GpuBackend, rng: np.random.Generator, arrays: dict[str, Array], tiled: bool, levers: ModelLevers | None = None
) -> tuple[Rig, Any]:
    """A BF16 head whose NVFP4 LM head has a transposed twin."""
    lm_head: QuantizedWeight = to_nvfp4(gpu, arrays["lm_head"])
    twin, ldb = transpose_nvfp4(gpu, lm_head, *lm_head.shape)
    levers = replace(levers or ModelLevers(), lm_head_tgemm=tiled)
    rig = make_rig(gpu, rng, arrays=arrays, lm_head=lm_head, levers=levers)
    rig.head.release()
    head = MtpHead(
        mtp_weights(gpu, arrays), rig.head.embed_tokens, lm_head,
        (QuantizedWeight(twin.weight, twin.weight_scale, twin.weight_scale_2), ldb), rig.config, gpu, Q.BF16, 0, 256,
        1 << 20, levers,
    )  # fmt: skip
    rig.head = head
    return rig, twin


def batch_of(
    rig: Rig, rng: np.random.Generator, n: int, conf: list[list[float]] | None = None, drafts: int = DRAFTS
) -> tuple[list[list[int]], list[MtpProposerState]]:
    """A batched propose of fresh states."""
    states, rows = [rig.state() for _ in range(n)], [row(rig, rng) for _ in range(n)]
    found = batch(rig, [one(rig, rng) for _ in range(n)], rows, range(1, n + 1), states, drafts, conf)
    assert found is not None
    return found, states


def launched(trace: Any, name: str) -> int:
    return sum(entry.name.startswith(name) for step in trace.steps for entry in step if entry.kind == "launch")


def rig_slab(rig: Rig, entry: Any) -> bool:
    """Whether an upload goes to the metadata."""
    base = rig.head.propose_meta.address
    return any(base <= int(word) < base + 32 * rig.head.propose_meta_stride for _, word in entry.words)


LONG = 7200
"""Rows beyond the 448 blocks of a slab of 2048 bytes."""


def long_states(rig: Rig, n: int) -> list[MtpProposerState]:
    """States of LONG rows of zeros."""
    head, states = rig.head, []
    for pool in (head.kv_cache.k_pool_ptr(0), head.kv_cache.v_pool_ptr(0)):
        rig.gpu.memset(pool, 0, head.kv_cache.total_bytes() // 2)
    for _ in range(n):
        states.append(rig.state())
        assert head.install_drafter_kv(states[-1], head.kv_cache.alloc_blocks(LONG // 16), LONG, LONG)
    return states
