# SPDX-License-Identifier: AGPL-3.0-only
"""Batched proposes: those of each sequence alone, bit for bit, and proof that the comparison would see a fault."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from spark_py.model.drafting.rows import propose_batch_cap
from spark_py.model.layer import AttnMetadataDev, ForwardContext
from spark_py.model.layers.mtp_head import (
    HeadBody,
    MtpHead,
    MtpProposerState,
    MtpQuantization,
    NormConvention,
    new,
    projection,
)
from spark_py.model.levers import ModelLevers
from spark_py.model.weight_map import Fp8ExpertWeight, QuantizedWeight
from spark_py.ops.w4a16_gemm_t import transpose_nvfp4
from spark_py.runtime.buffers import BufferArena, BufferSizes
from spark_py.runtime.errors import (
    CapacityError,
    InvalidArgumentError,
    KvCacheExhausted,
    ProposerStateError,
    ScratchOverlapError,
    SparkError,
)
from spark_py.runtime.gpu import DevicePtr, GpuBackend, StreamLike
from spark_py.runtime.scratch import ScratchRegion
from tests.model.mtp_forms import CLEAR_ID, FORMS, FUSED, Form, hide, make_form, to_blocks, to_nvfp4
from tests.model.support import (
    BF16,
    FFN,
    Array,
    Rig,
    config,
    make_rig,
    mtp_weights,
    random_weights,
    relative_l2,
    upload,
)  # fmt: skip
from tests.thin import thinned

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


# ---------------------------------------------------------------- bit for bit


def widths(form: Form) -> Sequence[int]:
    """Numbers of sequences that differ by a kernel: NVFP4 has one for each, the others one for all up to 8."""
    return range(2, 9) if form == FORMS[0] or form.quant is Q.NVFP4 or form.nvfp4_lm_head else (2, 3, 8)


@pytest.mark.parametrize(
    ("form", "n"),
    [pytest.param(form, n, marks=() if n in (2, 8) else pytest.mark.deep) for form in FORMS for n in widths(form)],
    ids=str,
)
def test_a_batch_is_its_sequences_alone(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, form: Form, n: int
) -> None:
    rig, _ = make_form(gpu, rng, monkeypatch, form)
    assert rig.head.propose_batch_max(rig.ctx.buffers, rig.config) == 8
    assert agree(rig, rng, n)


@pytest.mark.parametrize("n", [2, 8])
def test_a_wide_nvfp4_batch_is_its_sequences_alone(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """Rows that are long enough for this project's own kernel."""
    form = Form(Q.NVFP4, moe=True, nvfp4_lm_head=True)
    rig, _ = make_form(gpu, rng, monkeypatch, form, hidden_size=256, num_attention_heads=4, head_dim=64)
    assert agree(rig, rng, n)


@pytest.mark.parametrize("form", [form for form in FORMS if form.quant is not Q.BF16], ids=str)
def test_many_sequences(gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, form: Form) -> None:
    """FP8 and NVFP4 heads are exact at every width, also where the LM head is BF16."""
    rig = widen(make_form(gpu, rng, monkeypatch, form)[0], 16)
    assert agree(rig, rng, MANY, steps=1)


LOOPS = [ModelLevers(kv_gemv_pinned=True), ModelLevers(small_m_tier=False, kv_gemv_pinned=True)]


@pytest.mark.parametrize("levers", LOOPS, ids=["pinned", "no small tier"])
@pytest.mark.parametrize("n", [3, MANY])
def test_levers_that_keep_to_the_gemv(gpu: GpuBackend, rng: np.random.Generator, levers: ModelLevers, n: int) -> None:
    """The projections of this head are all below 4096 outputs."""
    assert agree(widen(make_rig(gpu, rng, levers=levers), 16), rng, n, steps=1)


@pytest.mark.parametrize("levers", [ModelLevers(chain_postnorm=True), ModelLevers(gemv_sw=False)], ids=["chain", "sw"])
@pytest.mark.parametrize("norm", NormConvention)
def test_levers_and_norms(gpu: GpuBackend, rng: np.random.Generator, levers: ModelLevers, norm: NormConvention) -> None:
    assert agree(make_rig(gpu, rng, levers=levers, body=HeadBody(norm=norm)), rng, 4)


def test_plain_norms_without_the_fused_kernel(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, gpu, "spark_residual_add_rms_norm_vanilla")
    rig = make_rig(gpu, rng, body=HeadBody(norm=NormConvention.PLAIN))
    assert not rig.head.residual_add_rms_norm_k
    assert agree(rig, rng, 4, steps=1)


TIERS = "w4a16_gemv::w4a16_gemv_batch"
LACKING = {
    "no batched BF16 GEMV": (Form(Q.BF16), ("dense_gemv_bf16_batchm::",), MANY, 16),
    "no GEMM": (Form(Q.BF16), ("gemm::",), MANY, 16),
    "no batched FP8 GEMV": (Form(Q.FP8), ("gemv_fp8w::spark_",), MANY, 16),
    "no joint kernel for two rows": (Form(Q.NVFP4, moe=True), ("w4a16_gemv::w4a16_gemv_qg_batch2",), 5, 16),
    "no joint kernels": (Form(Q.NVFP4, moe=True), ("w4a16_gemv::w4a16_gemv_qg_batch",), 5, 16),
    "no tiers": (Form(Q.NVFP4, moe=True), (TIERS,), MANY, 16),
    "no wide tiers": (Form(Q.NVFP4, moe=True), (TIERS + "16", TIERS + "32"), MANY, 16),
    "no wide tiers, NVFP4 head": (Form(Q.NVFP4, moe=True, nvfp4_lm_head=True), (TIERS + "16", TIERS + "32"), 8, 8),
    "one tier, NVFP4 head": (
        Form(Q.BF16, nvfp4_lm_head=True), tuple(TIERS + each for each in ("5", "6", "7", "8", "16", "32")), 4, 4
    ),
    "no batched argmax": (Form(Q.FP8), ("argmax::argmax_bf16_batch",), 5, 16),
}  # fmt: skip


@pytest.mark.parametrize(
    ("form", "lacks", "n", "most"), thinned(LACKING.values(), keep=range(0, 10, 3), ids=[*LACKING])
)
def test_sets_that_lack_kernels(
    gpu: GpuBackend,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    form: Form,
    lacks: tuple[str, ...],
    n: int,
    most: int,
) -> None:
    """The bits are the same; only an NVFP4 LM head without a kernel bounds the batch."""
    for name in lacks:
        hide(monkeypatch, gpu, "nothing", function=name)
    rig = widen(make_form(gpu, rng, monkeypatch, form)[0], 16)
    assert rig.head.propose_batch_max(rig.ctx.buffers, rig.config) == most
    assert agree(rig, rng, n, steps=1)


def test_an_nvfp4_lm_head_without_batched_kernels(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, gpu, "nothing", function=TIERS)
    rig, _ = make_form(gpu, rng, monkeypatch, Form(Q.FP8, nvfp4_lm_head=True))
    assert rig.head.propose_batch_max(rig.ctx.buffers, rig.config) == 1
    assert not rig.head.can_propose_batch(2, rig.ctx.buffers)


@pytest.mark.parametrize("n", [3, MANY])
def test_block_scaled_fp8(gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    changes = {"hidden_size": 192, "intermediate_size": 160}
    arrays = random_weights(rng, config(**changes))
    weights = mtp_weights(gpu, arrays)
    given: dict[str, Any] = {}
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", *FFN):
        given[name], arrays[name] = to_blocks(gpu, rng, arrays[name])
    triple = Fp8ExpertWeight(*(given.pop(name) for name in FFN))
    weights = replace(weights, **given, dense_ffn=triple)
    rig, _ = make_form(gpu, rng, monkeypatch, Form(Q.FP8), weights=weights, arrays=arrays, **changes)
    assert agree(widen(rig, 16), rng, n, steps=1)


@pytest.mark.parametrize("form", [Form(Q.BF16), Form(Q.FP8, moe=True, hidden=FUSED)], ids=str)
def test_hidden_rows_in_the_buffer_that_drafting_overwrites(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, form: Form
) -> None:
    """As a verify leaves them, in another order than the sequences'."""
    rig, n = make_form(gpu, rng, monkeypatch, form)[0], 5
    sequences, tokens = pairs(rig, rng, n), [one(rig, rng) for _ in range(n)]
    rows = [row(rig, rng) for _ in range(n)]
    h, at = 2 * rig.config.hidden_size, [3, 2, 4, 0, 1]
    hidden_states = rig.ctx.buffers.hidden_states()
    for i in range(n):
        gpu.copy_h2d(rows[i].view(np.uint8), hidden_states.offset(at[i] * h))
    found = rig.head.propose_batch(
        tokens, [hidden_states.offset(i * h) for i in at], [pair.length for pair in sequences], DRAFTS,
        [pair.batch for pair in sequences], rig.ctx, rig.stream,
    )  # fmt: skip
    assert found == [rig.propose(p.alone, tokens[i], rows[i], p.length, DRAFTS) for i, p in enumerate(sequences)]
    assert all(same(rig, pair) for pair in sequences)


# ---------------------------------------------------------------- kernels whose sums have another order

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


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_many_sequences_of_a_bf16_head(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, moe: bool
) -> None:
    """More rows than the batched GEMV is used for go through the GEMM."""
    rig = widen(make_form(gpu, rng, monkeypatch, Form(Q.BF16, moe=moe))[0], 16)
    with gpu.trace() as trace:
        batch_of(rig, rng, MANY)
    projections = 6 if moe else 9
    assert launched(trace, "gemm::dense_gemm_bf16_pipelined") == projections * DRAFTS
    found = [near(rig, rng, MANY, lambda logits: CLEAR_ID) for _ in range(3)]
    unclear, differ, rows = (float(np.mean(each)) for each in zip(*found, strict=True))
    print(f"of the drafts {unclear:.1%} are not clear, {differ:.1%} differ; K and V by {rows:.2%}")
    # A router whose choice hangs on a rounding changes a row as a whole.
    assert rows < (0.2 if moe else GEMM_BOUND)
    assert unclear < 0.7, "some drafts say something"


@pytest.mark.parametrize("n", [4, 5, 8])
@pytest.mark.parametrize("tiled", [True, False])
def test_the_tiled_lm_head(gpu: GpuBackend, rng: np.random.Generator, n: int, tiled: bool) -> None:
    """From 5 rows on, unless its lever is off. Rows of K and V are the same as long as the ids are."""
    arrays = random_weights(rng, config())
    rig, twin = tiled_rig(gpu, rng, arrays, tiled)
    with gpu.trace() as trace:
        batch_of(rig, rng, n)
    assert launched(trace, "w4a16::") == (DRAFTS if tiled and n >= 5 else 0)
    unclear, differ, rows = near(rig, rng, n, lambda logits: 2 * ONE_ULP * float(np.abs(logits).max()))
    print(f"of the drafts {unclear:.1%} are not clear, {differ:.1%} differ")
    assert rows == 0
    assert unclear < 0.5
    for ptr in (twin.weight, twin.weight_scale):
        gpu.free(ptr)


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


# ---------------------------------------------------------------- what is launched


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


@pytest.mark.parametrize("own", [True, False])
def test_what_a_pass_launches(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """Weights are read once for all rows; what a sequence's own cache is for runs once a sequence; ids come back in one
    copy, and block tables go out once a propose. With the engine's kernels and with this project's own."""
    if not own:
        hide(monkeypatch, gpu, "spark_gemv_rows", "spark_qk_norm_rope_cache")
    rig, n = make_rig(gpu, rng, levers=BY_STEP), 5
    with gpu.trace() as trace:
        batch_of(rig, rng, n, conf=[])
    entries = [entry for step in trace.steps for entry in step]
    assert launched(trace, "gemv::") == 0
    if own:
        assert launched(trace, "spark_gemv_rows::") == 6 * DRAFTS, "fc, Q and K and V, o, gate and up, down, LM head"
        assert launched(trace, "dense_gemv_bf16_batchm::") == launched(trace, "rope::") == 0
        assert launched(trace, "spark_qk_norm_rope_cache::") == DRAFTS
    else:
        assert launched(trace, "dense_gemv_bf16_batchm::") == 9 * DRAFTS, "fc, Q, K, V, o, three of the FFN, LM head"
        assert launched(trace, "rope::") == n * DRAFTS
    assert launched(trace, "paged_decode::") == n * DRAFTS
    assert launched(trace, "argmax::argmax_bf16_batch_lp") == launched(trace, "argmax::") == DRAFTS
    assert sum(entry.kind.startswith("copy_d2h") for entry in entries) == DRAFTS
    slabs = [entry for entry in entries if entry.kind.startswith("copy_h2d") and rig_slab(rig, entry)]
    assert len(slabs) == n * DRAFTS


def rig_slab(rig: Rig, entry: Any) -> bool:
    """Whether an upload goes to the metadata."""
    base = rig.head.propose_meta.address
    return any(base <= int(word) < base + 32 * rig.head.propose_meta_stride for _, word in entry.words)


@pytest.mark.parametrize("form", [Form(Q.BF16), Form(Q.FP8, moe=True), Form(Q.NVFP4, moe=True)], ids=str)
def test_a_pass_can_be_captured(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, form: Form
) -> None:
    """Between the uploads and the ids nothing is asked of the host: the replay of a graph gives the same logits."""
    rig, n = make_form(gpu, rng, monkeypatch, form, levers=BY_STEP)[0], 4
    head, stream, graphs = rig.head, gpu.create_stream(), []
    rig.stream = stream
    _, states = batch_of(rig, rng, n)
    body = MtpHead._forward_batch_rows
    logits: list[Array] = []

    def captured(n: int, metas: Sequence[AttnMetadataDev], ctx: ForwardContext, stream: Any) -> None:
        gpu.begin_capture(stream)
        body(head, n, metas, ctx, stream)
        graphs.append(gpu.end_capture(stream))
        gpu.launch_graph(graphs[-1], stream)

    for state in states:
        head.after_verify(0, state, stream)
    rows, tokens = [row(rig, rng) for _ in range(n)], [one(rig, rng) for _ in range(n)]
    found = []
    for patched in (None, captured):
        if patched is not None:
            monkeypatch.setattr(head, "_forward_batch_rows", patched)
        found.append(batch(rig, tokens, rows, [9] * n, states))
        logits.append(np.concatenate([rig.logits()]))
        for state in states:
            head.after_verify(0, state, stream)
    assert len(graphs) == DRAFTS
    assert found[0] == found[1]
    np.testing.assert_array_equal(logits[0], logits[1])
    for graph in graphs:
        gpu.destroy_graph(graph)
    gpu.destroy_stream(stream)


def test_a_batch_writes_its_own_slots_and_nothing_else(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig, n = make_rig(gpu, rng), 4
    sequences = pairs(rig, rng, n)
    kv = rig.head.kv_cache

    def whole() -> Array:
        return np.stack([np.stack(kv.read_block(0, block)) for block in range(kv.num_blocks())])

    before, lengths = whole(), [pair.batch.seq_len for pair in sequences]
    rows = [row(rig, rng) for _ in range(n)]
    batch(rig, [one(rig, rng) for _ in range(n)], rows, [pair.length for pair in sequences],
          [pair.batch for pair in sequences])  # fmt: skip
    slots = {
        pair.batch.block_table[at // 16] * 16 + at % 16
        for pair, start in zip(sequences, lengths, strict=True) for at in range(start, start + DRAFTS)
    }  # fmt: skip
    shape = (kv.num_blocks(), 2, 16, -1)
    changed = np.argwhere((before.reshape(shape) != whole().reshape(shape)).any(axis=(1, 3)))
    assert {int(block) * 16 + int(slot) for block, slot in changed} == slots


# ---------------------------------------------------------------- how many


class Sized:
    """An arena's sizes, without the memory."""

    def __init__(self, sizes: BufferSizes, rows: int) -> None:
        self._sizes, self._rows = sizes, rows

    def sizes(self) -> BufferSizes:
        return self._sizes

    def max_batch_tokens(self) -> int:
        return self._rows


@pytest.mark.parametrize(
    ("m", "nv", "h", "cap"), [(8192, 48, 5120, 32), (2048, 48, 5120, 19), (512, 48, 5120, 4), (256, 32, 2048, 4)]
)
def test_the_engines_worked_numbers(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, m: int, nv: int, h: int, cap: int
) -> None:
    rig = make_rig(gpu, rng)
    monkeypatch.setattr(rig.head, "h", h)
    ample = {name: 1 << 40 for name, _ in rig.ctx.buffers.sizes().items()}
    sizes = replace(rig.ctx.buffers.sizes(), **(ample | {"ssm_ba": 4 * m * nv, "ssm_gates": 8 * m * nv}))
    buffers: Any = Sized(sizes, m)
    assert propose_batch_cap(sizes, h, m) == rig.head.propose_batch_max(buffers, rig.config) == cap
    offered = [n for n in range(40) if rig.head.can_propose_batch(n, buffers)]
    assert offered == list(range(2, cap + 1))


def test_no_buffer_is_overrun(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """Those that the engine's formula leaves out bound the batch too."""
    rig = make_rig(gpu, rng)
    ample = {name: 1 << 40 for name, _ in rig.ctx.buffers.sizes().items()}
    for name, nbytes in rig.head.row_bytes().items():
        sizes = replace(rig.ctx.buffers.sizes(), **(ample | {name: 4 * nbytes - 1}))
        buffers: Any = Sized(sizes, 64)
        assert rig.head.propose_batch_max(buffers, rig.config) == 3, name


# ---------------------------------------------------------------- long sequences

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


def test_sequences_longer_than_a_slab_of_the_original_size(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng, max_seq_len=8192)
    states = long_states(rig, 4)
    tokens, rows = [one(rig, rng), one(rig, rng)], [row(rig, rng), row(rig, rng)]
    found = batch(rig, tokens, rows, [7500, 7600], states[:2], 2)
    assert found == [rig.propose(states[2 + i], tokens[i], rows[i], 7500 + 100 * i, 2) for i in range(2)]
    for i in range(2):
        assert same(rig, Pair(states[i], states[2 + i], 0))


def test_a_stride_that_is_too_small_is_said(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """Before anything is launched, and the states stay as they were."""
    rig = make_rig(gpu, rng, max_seq_len=8192, levers=ModelLevers(propose_meta_stride=2048))
    states = long_states(rig, 2)
    before, free = [state.snapshot() for state in states], rig.head.kv_cache.num_free_blocks()
    with gpu.trace() as trace, pytest.raises(CapacityError, match="entries of the MTP block table"):
        batch(rig, [1, 2], [row(rig, rng), row(rig, rng)], [7500, 7600], states)
    assert launched(trace, "") == 0
    assert [state.snapshot() for state in states] == before
    assert rig.head.kv_cache.num_free_blocks() == free


# ---------------------------------------------------------------- faults that must show


def packed_norm(self: Any, qg: DevicePtr, n: int, stream: StreamLike) -> None:
    self._rms_norm(qg, self.q_norm, qg, n * self.nq, self.hd, stream)


def first_slab(self: Any, *args: Any) -> list[AttnMetadataDev]:
    metas = upload_meta(self, *args)
    return [metas[0]] * len(metas)


def stale_tables(self: Any, positions: Any, states: Any, stream: Any, tables: bool) -> list[AttnMetadataDev]:
    return upload_meta(self, positions, states, stream, False)


def one_run(self: Any, sources: Any, target: DevicePtr, row_bytes: int, stream: StreamLike) -> None:
    self.gpu.copy_d2d_async(sources[0], target, len(sources) * row_bytes, stream)


def shared_row(self: Any, normed: DevicePtr, ctx: Any, stream: StreamLike, row: int = 0) -> DevicePtr:
    return generic(self, normed, ctx, stream, 0)


upload_meta, generic = MtpHead._upload_batch_meta, MtpHead.moe_forward_generic
FAULTS: dict[str, tuple[str, Any, Form]] = {
    "a norm over rows of [Q | gate]": (
        "_norm_queries",
        packed_norm,
        Form(Q.BF16, hidden=("spark_qk_norm_rope_cache",)),
    ),
    "one sequence's metadata for all": ("_upload_batch_meta", first_slab, Form(Q.BF16)),
    "block tables that are not uploaded": ("_upload_batch_meta", stale_tables, Form(Q.BF16)),
    "hidden rows taken for one run": ("_copy_rows", one_run, Form(Q.BF16)),
    "experts of all rows in one place": ("moe_forward_generic", shared_row, Form(Q.BF16, moe=True, hidden=FUSED)),
}


@pytest.mark.no_sanitizer("the faults read memory that nobody wrote")
@pytest.mark.parametrize(("method", "mutant", "form"), FAULTS.values(), ids=FAULTS.keys())
def test_faults_show(
    gpu: GpuBackend,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    mutant: Any,
    form: Form,
) -> None:
    rig, _ = make_form(gpu, rng, monkeypatch, form, levers=BY_STEP)
    assert agree(rig, rng, 4, steps=1)
    # Block 0 for all, where nobody says which.
    gpu.memset(rig.head.propose_meta, 0, 4 * rig.head.propose_meta_stride)
    monkeypatch.setattr(MtpHead, method, mutant)
    try:
        alike = agree(rig, rng, 4, steps=1)
    except SparkError:
        return  # a backend that checks memory refuses
    assert not alike


def test_a_tier_with_more_rows_than_it_takes_is_refused(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would leave the others as they were."""
    rig, _ = make_form(gpu, rng, monkeypatch, Form(Q.NVFP4, moe=True, nvfp4_lm_head=True))
    monkeypatch.setattr(projection, "lm_head_batch_width", lambda *args: 4)
    with pytest.raises(InvalidArgumentError, match="takes 4 rows at most"):
        batch_of(rig, rng, 5)


def test_a_fixed_stride_is_refused_and_not_overrun(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new, "propose_meta_stride", lambda *args: 2048)
    rig = make_rig(gpu, rng, max_seq_len=8192)
    with pytest.raises(CapacityError, match="entries of the MTP block table"):
        batch(rig, [1, 2], [row(rig, rng), row(rig, rng)], [7500, 7600], long_states(rig, 2))


def drafted_at_each_position(rig: Rig, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    states, seen = [rig.state() for _ in range(3)], []
    body = MtpHead._forward_batch_rows

    def forward(self: MtpHead, *args: Any) -> None:
        seen.append([state.last_num_drafted for state in states])
        body(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(MtpHead, "_forward_batch_rows", forward)
        batch(rig, [1, 2, 3], [row(rig, rng) for _ in range(3)], [4, 5, 6], states)
    return [*seen, [state.last_num_drafted for state in states]]


def test_drafts_are_counted_as_their_rows_are_written(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, wanted = make_rig(gpu, rng, levers=BY_STEP), [[0] * 3, [1] * 3, [2] * 3, [3] * 3]
    assert drafted_at_each_position(rig, rng, monkeypatch) == wanted
    count, calls = MtpHead._count_rows, []

    def late(self: MtpHead, positions: Sequence[int], states: Sequence[MtpProposerState]) -> None:
        calls.append(1)
        count(self, positions, states)
        for state in states:
            state.last_num_drafted = DRAFTS if len(calls) == DRAFTS else 0

    monkeypatch.setattr(MtpHead, "_count_rows", late)
    assert drafted_at_each_position(rig, rng, monkeypatch) != wanted


# ---------------------------------------------------------------- probabilities


def test_probabilities_of_the_drafts(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """ln softmax in FP32: 203 terms, each and their sum off by a few 2^-24."""
    rig, n = make_rig(gpu, rng, levers=ModelLevers(draft_conf_tau=0.01)), 4
    conf: list[list[float]] = [[5.0]]
    states, rows, tokens = [rig.state() for _ in range(n)], [row(rig, rng) for _ in range(n)], [3, 1, 4, 1]
    found = batch(rig, tokens, rows, [7] * n, states, DRAFTS, conf)
    least = rig.head.last_confidence()
    wanted: list[list[float]] = []
    for i in range(n):
        _, logits = chain(rig, rig.state(), tokens[i], rows[i], 7)
        wanted.append([float(each.max() - np.log(np.exp(each).sum())) for each in logits])
    assert found is not None
    np.testing.assert_allclose(conf, wanted, atol=1e-4)
    assert least == pytest.approx(np.exp(min(map(min, wanted))), abs=1e-4)


def test_without_the_kernel_each_draft_counts_as_certain(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, gpu, "nothing", function="argmax::argmax_bf16_batch_lp")
    rig, conf = make_rig(gpu, rng), [[1.0]] * 7
    batch_of(rig, rng, 3, conf)
    assert conf == [[0.0] * DRAFTS] * 3


def test_logs_of_each_row(gpu: GpuBackend, rng: np.random.Generator, caplog: pytest.LogCaptureFixture) -> None:
    """What a propose alone says of its drafts, for every sequence of a batch."""
    rig, n = make_rig(gpu, rng, levers=ModelLevers(shadow_topk=3, debug_norms=True)), 3
    sequences = pairs(rig, rng, n)
    tokens, rows = [one(rig, rng) for _ in range(n)], [row(rig, rng) for _ in range(n)]
    with caplog.at_level(logging.INFO):
        caplog.clear()
        batch(rig, tokens, rows, [pair.length for pair in sequences], [pair.batch for pair in sequences])
        together = sorted(record.message for record in caplog.records)
        caplog.clear()
        for i, pair in enumerate(sequences):
            rig.propose(pair.alone, tokens[i], rows[i], pair.length, DRAFTS)
    assert together == sorted(record.message for record in caplog.records)
    assert len(together) == 2 * n * DRAFTS


# ---------------------------------------------------------------- refusals and errors


def test_what_is_not_offered_is_none(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """One sequence, more than the arena holds, and states of another type, which are left alone."""

    class Other:
        block_table: list[int] = []  # noqa: RUF012 - the protocol's attribute

    rig = make_rig(gpu, rng)
    with gpu.trace() as trace:
        assert batch(rig, [1], [row(rig, rng)], [4], [rig.state()]) is None
        assert batch(rig, [1] * 9, [row(rig, rng)] * 9, [4] * 9, [rig.state() for _ in range(9)]) is None
        states: list[Any] = [rig.state(), Other()]
        assert batch(rig, [1, 2], [row(rig, rng)] * 2, [4, 4], states) is None
    assert launched(trace, "") == 0
    assert states[0].snapshot() == rig.state().snapshot()


def test_no_drafts_touch_nothing(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig, conf = make_rig(gpu, rng), [[1.0]]
    with gpu.trace() as trace:
        found, states = batch_of(rig, rng, 3, conf, drafts=0)
    assert (found, conf) == ([[]] * 3, [[]] * 3)
    assert launched(trace, "") == 0
    assert all(state.snapshot() == rig.state().snapshot() for state in states)


def test_what_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig, other = make_rig(gpu, rng), make_rig(gpu, rng)
    state, second = rig.state(), rig.state()
    gates = rig.ctx.buffers.ssm_gates()
    hidden = upload(gpu, row(rig, rng))

    def refused(error: type[Exception], match: str, **changes: Any) -> None:
        given: dict[str, Any] = {
            "last_tokens": [1, 2], "target_hiddens": [hidden, hidden], "positions": [4, 5], "num_drafts": 2,
            "states": [state, second],
        }  # fmt: skip
        with gpu.trace() as trace, pytest.raises(error, match=match):
            rig.head.propose_batch(**(given | changes), ctx=rig.ctx, stream=rig.stream)
        assert launched(trace, "") == 0
        assert state.snapshot() == second.snapshot() == rig.state().snapshot()

    refused(InvalidArgumentError, "length of last_tokens", last_tokens=[1])
    refused(InvalidArgumentError, "length of target_hiddens", target_hiddens=[hidden] * 3)
    refused(InvalidArgumentError, "length of positions", positions=[])
    refused(InvalidArgumentError, "length of grammar_bitmasks", grammar_bitmasks=[None])
    refused(InvalidArgumentError, r"last_tokens\[1\]", last_tokens=[1, rig.config.vocab_size])
    refused(InvalidArgumentError, "num_drafts", num_drafts=-1)
    refused(InvalidArgumentError, "position", positions=[4, 0])
    refused(CapacityError, "position of the last draft", positions=[4, 254])
    refused(InvalidArgumentError, r"target_hiddens\[1\]", target_hiddens=[hidden, DevicePtr(0)])
    refused(InvalidArgumentError, "ssm_gates", target_hiddens=[hidden, gates.offset(2)])
    refused(InvalidArgumentError, "one is there twice", states=[state, state])
    refused(ProposerStateError, "belongs to another MtpHead", states=[state, other.state()])
    batch(rig, [1, 2], [row(rig, rng)] * 2, [4, 5], [state, second], 1)
    before = state.snapshot()
    with pytest.raises(ProposerStateError, match="verdict on the last 1 drafts"):
        batch(rig, [1, 2], [row(rig, rng)] * 2, [6, 7], [state, second], 1)
    assert state.snapshot() == before


@pytest.mark.parametrize("left", [0, 1, 2])
def test_an_exhausted_pool_leaves_all_states_as_they_were(gpu: GpuBackend, rng: np.random.Generator, left: int) -> None:
    """Three sequences need a block each. Afterwards one with a block in hand still drafts alone."""
    rig, conf = make_rig(gpu, rng), [[7.0]]
    kv, states = rig.head.kv_cache, [rig.state() for _ in range(3)]
    held = kv.alloc_blocks(kv.num_free_blocks() - left)
    with gpu.trace() as trace, pytest.raises(KvCacheExhausted):
        batch(rig, [1, 2, 3], [row(rig, rng)] * 3, [4, 5, 6], states, DRAFTS, conf)
    assert launched(trace, "") == 0
    assert (kv.num_free_blocks(), conf) == (left, [[7.0]])
    assert all(state.snapshot() == rig.state().snapshot() for state in states)
    kv.free_blocks(held)
    assert batch(rig, [1, 2, 3], [row(rig, rng)] * 3, [4, 5, 6], states)


@pytest.mark.parametrize("fails", range(DRAFTS))
def test_an_error_at_any_position_is_undone(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    rig, n = make_rig(gpu, rng), 3
    sequences, conf = pairs(rig, rng, n), [[7.0]]
    before = [pair.batch.snapshot() for pair in sequences]
    free, calls, body = rig.head.kv_cache.num_free_blocks(), [], MtpHead._argmax_rows

    def argmax(self: MtpHead, *args: Any) -> None:
        calls.append(1)
        if len(calls) == fails + 1:
            raise RuntimeError("on purpose")
        body(self, *args)

    tokens, rows = [one(rig, rng) for _ in range(n)], [row(rig, rng) for _ in range(n)]
    lengths, states = [pair.length for pair in sequences], [pair.batch for pair in sequences]
    with monkeypatch.context() as patch:
        patch.setattr(MtpHead, "_argmax_rows", argmax)
        with pytest.raises(RuntimeError, match="on purpose"):
            batch(rig, tokens, rows, lengths, states, DRAFTS, conf)
    assert [state.snapshot() for state in states] == before
    assert (rig.head.kv_cache.num_free_blocks(), conf) == (free, [[7.0]])
    assert rig.ctx.buffers.scratch_map.live() == ()
    found = batch(rig, tokens, rows, lengths, states)
    assert found == [rig.propose(p.alone, tokens[i], rows[i], p.length, DRAFTS) for i, p in enumerate(sequences)]


@pytest.mark.parametrize("offset", [0, 256 + 4], ids=["ids", "probabilities"])
def test_a_region_that_someone_holds_is_not_written(gpu: GpuBackend, rng: np.random.Generator, offset: int) -> None:
    rig = make_rig(gpu, rng, levers=BY_STEP)
    states, rows = [rig.state(), rig.state()], [row(rig, rng)] * 2
    with (
        rig.ctx.buffers.lease(ScratchRegion("someone", offset, 4)),
        pytest.raises(ScratchOverlapError, match="someone"),
    ):
        batch(rig, [1, 2], rows, [4, 5], states, DRAFTS, [])
    assert all(state.snapshot() == rig.state().snapshot() for state in states)
    assert batch(rig, [1, 2], rows, [4, 5], states)
