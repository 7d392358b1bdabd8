# SPDX-License-Identifier: AGPL-3.0-only
"""What MtpHead refuses, what it does with blocks when things go wrong, and how large its vocabulary is."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spark_py.model.layers.mtp_head import MtpHead, MtpProposerState, MtpQuantization
from spark_py.model.layers.mtp_head.new import mtp_num_blocks
from spark_py.model.levers import ModelLevers
from spark_py.model.weight_map import DenseWeight, QuantizedWeight
from spark_py.runtime.buffers import BufferArena
from spark_py.runtime.errors import (
    CapacityError,
    InvalidArgumentError,
    KvCacheExhausted,
    ModuleNotFoundInSetError,
    ProposerStateError,
    ScratchOverlapError,
    UnsupportedError,
)
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.runtime.scratch import ScratchRegion
from tests.model.support import BF16, Array, Rig, config, dense, download, make_rig, mtp_weights, random_weights

ONE = ModelLevers(mtp_max_seqs=1)


def a_hidden(rig: Rig, rng: np.random.Generator) -> Array:
    return rng.standard_normal(rig.config.hidden_size).astype(BF16)


# ---------------------------------------------------------------- ids and positions


@pytest.mark.parametrize(
    "token",
    [-1, 203, 2**32 - 1, 2**64, np.int32(-1), np.uint32(2**32 - 1), True, 3.0, "3", None],
    ids=lambda t: f"{type(t).__name__}_{t}",
)
def test_a_token_outside_the_table_is_refused_before_any_copy(
    gpu: GpuBackend, rng: np.random.Generator, token: Any
) -> None:
    rig = make_rig(gpu, rng)
    state, hidden = rig.state(), rig.put(a_hidden(rig, rng))
    with gpu.trace() as trace:
        with pytest.raises(ValueError, match="last_token"):
            rig.head.propose(token, hidden, 4, 2, state, rig.ctx, rig.stream)
        with pytest.raises(ValueError, match=r"tokens\[1\]"):
            rig.head.prefill_drafter([1, token, 2], hidden, state, rig.ctx, rig.stream)
    assert len(trace.steps) == 0
    assert state.snapshot() == rig.state().snapshot()


def test_integers_of_numpy_are_tokens(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng)
    hidden = a_hidden(rig, rng)
    ids = [rig.propose(rig.state(), token, hidden, 4, 1) for token in (202, np.int32(202), np.uint8(202))]
    assert ids[0] == ids[1] == ids[2]


@pytest.mark.parametrize("position", [0, -1, True, 4.0], ids=str)
def test_a_position_without_a_token_before_it(gpu: GpuBackend, rng: np.random.Generator, position: Any) -> None:
    rig = make_rig(gpu, rng)
    with pytest.raises(InvalidArgumentError, match="position"):
        rig.propose(rig.state(), 3, a_hidden(rig, rng), position, 1)


def test_drafts_end_with_the_sequence(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """Of 32 tokens the last has position 31; the drafts of a propose at 28 are at 29, 30 and 31."""
    rig = make_rig(gpu, rng, max_seq_len=32, levers=ONE)
    state, hidden = rig.state(), rng.standard_normal((32, rig.config.hidden_size))
    rig.feed(state, [1] * 28, hidden)
    before, free = state.snapshot(), rig.head.kv_cache.num_free_blocks()
    with pytest.raises(CapacityError, match=r"position of the last draft is 32: the limit is 31"):
        rig.propose(state, 3, hidden[0], 28, 4)
    with pytest.raises(CapacityError):
        rig.propose(state, 3, hidden[0], 31, 1)
    assert (state.snapshot(), rig.head.kv_cache.num_free_blocks()) == (before, free)
    assert len(rig.propose(state, 3, hidden[0], 28, 3)) == 3
    assert len(state.block_table) == 2


def test_no_drafts_touch_nothing(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng)
    state, hidden = rig.state(), rig.put(a_hidden(rig, rng))
    with gpu.trace() as trace:
        assert rig.head.propose(3, hidden, 4, 0, state, rig.ctx, rig.stream) == []
    assert len(trace.steps) == 0
    assert state.snapshot() == rig.state().snapshot()
    with pytest.raises(InvalidArgumentError, match="num_drafts is -1"):
        rig.head.propose(3, hidden, 4, -1, state, rig.ctx, rig.stream)


def test_a_hidden_row_must_be_somewhere(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng)
    with pytest.raises(InvalidArgumentError, match="target_hidden"):
        rig.head.propose(3, DevicePtr.NULL, 4, 1, rig.state(), rig.ctx, rig.stream)


def test_states_of_others_are_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig, other = make_rig(gpu, rng), make_rig(gpu, rng)
    hidden = a_hidden(rig, rng)
    with pytest.raises(ProposerStateError, match="another MtpHead"):
        rig.propose(other.state(), 3, hidden, 4, 1)
    with pytest.raises(ProposerStateError, match="another MtpHead"):
        rig.propose(MtpProposerState(), 3, hidden, 4, 1)
    with pytest.raises(ProposerStateError, match="a dict is no state"):
        rig.head.free_state(gpu, {})  # type: ignore[arg-type]


# ---------------------------------------------------------------- vocabulary


@pytest.mark.parametrize(("asked", "vocab"), [(0, 203), (500, 203), (203, 203), (100, 100), (1, 1)])
def test_size_of_the_draft_vocabulary(gpu: GpuBackend, rng: np.random.Generator, asked: int, vocab: int) -> None:
    rig = make_rig(gpu, rng, mtp_vocab_size=asked)
    assert rig.head.draft_vocab == vocab
    gpu.memset(rig.ctx.buffers.logits(), 0xFF, 2 * 203)
    picked = rig.propose(rig.state(), 3, a_hidden(rig, rng), 4, 1)[0]
    assert picked == int(np.argmax(rig.logits()))
    beyond = download(gpu, rig.ctx.buffers.logits(), (203,), np.dtype(np.uint16))[vocab:]
    assert (beyond == 0xFFFF).all(), "logits beyond the draft vocabulary are not computed"


@pytest.mark.parametrize(("embed", "head", "vocab"), [(203, 320, 203), (190, 320, 190), (320, 190, 190)])
def test_padded_tables(gpu: GpuBackend, rng: np.random.Generator, embed: int, head: int, vocab: int) -> None:
    """The largest logits of all are in the rows behind the vocabulary."""
    arrays = random_weights(rng, config())
    for name, rows in (("embed_tokens", embed), ("lm_head", head)):
        table = rng.standard_normal((rows, 64)).astype(BF16)
        table[vocab:] = 1000.0
        table[vocab + 1 :: 2] = -1000.0
        arrays[name] = table
    rig = make_rig(gpu, rng, arrays=arrays, vocab_size=300)
    assert rig.head.draft_vocab == min(vocab, 300)
    hidden = a_hidden(rig, rng)
    ids = rig.propose(rig.state(), vocab - 1, hidden, 4, 3)
    assert all(0 <= token < vocab for token in ids)
    with pytest.raises(InvalidArgumentError, match="last_token"):
        rig.propose(rig.state(), embed, hidden, 4, 1)


def test_a_negative_vocabulary_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    with pytest.raises(InvalidArgumentError, match="mtp_vocab_size is -1"):
        make_rig(gpu, rng, mtp_vocab_size=-1)


# ---------------------------------------------------------------- blocks


def test_an_exhausted_pool_leaves_the_state_as_it_was(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """3 blocks: a neighbour has 2, the sequence 15 rows in the third; its second draft would need a fourth."""
    rig = make_rig(gpu, rng, max_seq_len=32, levers=ONE)
    assert rig.head.kv_cache.num_blocks() == 3
    hidden = rng.standard_normal((20, rig.config.hidden_size))
    neighbour, state = rig.state(), rig.state()
    rig.feed(neighbour, [1] * 18, hidden)
    tokens = [int(t) for t in rng.integers(0, 203, 16)]
    rig.feed(state, tokens, hidden)
    before, rows = state.snapshot(), rig.rows(state)
    with pytest.raises(KvCacheExhausted) as caught:
        rig.propose(state, 5, hidden[16], 16, 3)
    assert (caught.value.need, caught.value.free) == (1, 0)
    assert state.snapshot() == before
    assert [a.tobytes() for a in rig.rows(state)] == [a.tobytes() for a in rows]
    assert rig.head.drafter_rows(neighbour) == 17

    rig.head.free_state(gpu, neighbour)
    again = rig.propose(state, 5, hidden[16], 16, 3)
    roomy = make_rig(gpu, rng, arrays=rig.arrays)
    fresh = roomy.state()
    roomy.feed(fresh, tokens, hidden)
    assert again == roomy.propose(fresh, 5, hidden[16], 16, 3)


def test_a_prompt_that_does_not_fit_takes_no_block(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng, max_seq_len=32, levers=ONE)
    hidden = rng.standard_normal((32, rig.config.hidden_size))
    neighbour, state = rig.state(), rig.state()
    rig.feed(neighbour, [1] * 18, hidden)
    with pytest.raises(KvCacheExhausted):
        rig.feed(state, [1] * 32, hidden)
    assert (state.snapshot(), rig.head.kv_cache.num_free_blocks()) == (rig.state().snapshot(), 1)


class FailsAt(MtpHead):
    """A head whose n-th draft fails after it wrote its row."""

    fail_at = 2
    calls = 0

    def forward_one(self, *args: Any) -> int:
        picked = super().forward_one(*args)
        self.calls += 1
        if self.calls == self.fail_at:
            raise RuntimeError("on purpose")
        return picked


def test_an_error_between_drafts_is_undone(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng, head_class=FailsAt, levers=ModelLevers(draft_conf_tau=0.1))
    state, hidden = rig.state(), rng.standard_normal((20, rig.config.hidden_size))
    rig.feed(state, [7] * 16, hidden)
    before, free, conf = state.snapshot(), rig.head.kv_cache.num_free_blocks(), rig.head.last_confidence()
    target = gpu.alloc(2 * rig.config.hidden_size)
    with pytest.raises(RuntimeError, match="on purpose"):
        rig.propose(state, 5, hidden[16], 16, 3)
    assert (state.snapshot(), rig.head.kv_cache.num_free_blocks()) == (before, free)
    assert rig.head.last_confidence() == conf
    with pytest.raises(ProposerStateError):
        rig.head.after_verify(0, state, rig.stream)
    FailsAt.fail_at, rig.head.calls = 10**9, 0  # type: ignore[attr-defined]
    try:
        assert len(rig.propose(state, 5, hidden[16], 16, 3, draft_embed_target=target)) == 3
    finally:
        FailsAt.fail_at = 2


class Counting(MtpHead):
    """A head that keeps books and computes nothing."""

    def forward_one(self, token: Any, target_hidden: Any, position: Any, state: Any, *rest: Any) -> int:
        self._ensure_blocks(state, state.seq_len + 1)
        state.seq_len += 1
        state.last_pair_key = position - 1
        return 0


def test_a_thousand_requests_lose_no_block(
    gpu: GpuBackend, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(gpu, rng, head_class=Counting)
    hidden = rig.put(a_hidden(rig, rng))
    free = rig.head.kv_cache.num_free_blocks()
    for n in range(1000):
        state = rig.state()
        position = 1
        for _ in range(int(rng.integers(1, 9))):
            drafts = int(rng.integers(1, 9))
            rig.head.propose(1, hidden, position, drafts, state, rig.ctx, rig.stream)
            accepted = int(rng.integers(0, drafts + 1))
            position += accepted + 1
            if n % 3:
                rig.head.after_verify(accepted, state, rig.stream)
            else:
                break
        if n % 5 == 0:
            with pytest.raises(CapacityError):
                rig.head.propose(1, hidden, 10**6, 1, rig.state(), rig.ctx, rig.stream)
        if n % 7:
            rig.head.free_state(gpu, state)
            rig.head.free_state(gpu, state)
            assert state.snapshot() == rig.state().snapshot()
        else:
            del state  # dropped without free_state
            gc.collect(0)
        assert rig.head.kv_cache.num_free_blocks() == free, f"request {n}"
    assert sum("without free_state" in r.message for r in caplog.records) == 143


def test_a_freed_state_begins_again(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng)
    state, hidden = rig.state(), a_hidden(rig, rng)
    first = rig.propose(state, 5, hidden, 9, 3)
    rig.head.free_state(gpu, state)
    assert rig.propose(state, 5, hidden, 9, 3) == first


@pytest.mark.parametrize(
    ("max_seq", "seqs", "main", "blocks"),
    [
        (16384, 16, 15203, 15203), (16384, 8, 15203, 8200), (32768, 8, 8000, 8000), (131072, 8, 20000, 20000),
        (131072, 1, 20000, 8193), (131072, 32, 6000, 8193), (1, 1, 0, 1), (15, 3, 100, 3), (16, 3, 100, 6),
    ],
)  # fmt: skip
def test_blocks_of_the_pool(max_seq: int, seqs: int, main: int, blocks: int) -> None:
    assert mtp_num_blocks(max_seq, seqs, main) == blocks


# ---------------------------------------------------------------- construction


def construct(gpu: GpuBackend, rng: np.random.Generator, **changes: Any) -> MtpHead:
    c = config(**changes.pop("config", {}))
    arrays = random_weights(rng, config()) | changes.pop("arrays", {})
    args: dict[str, Any] = {
        "weights": mtp_weights(gpu, arrays),
        "embed_tokens": dense(gpu, arrays["embed_tokens"]),
        "lm_head": dense(gpu, arrays["lm_head"]),
        "lm_head_nvfp4_t": None,
        "config": c,
        "gpu": gpu,
        "quant": MtpQuantization.BF16,
        "mtp_vocab_size": 0,
        "max_seq_len": 64,
        "main_kv_blocks": 0,
        "levers": ModelLevers(),
    }
    change = changes.pop("change", lambda a: {})
    args |= change(args) | changes
    before = gpu.live_bytes()
    try:
        return MtpHead(**args)
    except BaseException:
        assert gpu.live_bytes() == before, "nothing stays allocated after an error"
        raise


NVFP4 = QuantizedWeight(DevicePtr(4096), DevicePtr(8192), 1.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant": MtpQuantization.NVFP4}, "an MTP head in nvfp4"),
        ({"quant": MtpQuantization.FP8}, "an MTP head in fp8"),
        ({"lm_head": NVFP4}, "NVFP4 LM head"),
        ({"lm_head_nvfp4_t": (NVFP4, 256)}, "NVFP4 LM head"),
        ({"change": lambda a: {"weights": replace(a["weights"], dense_ffn=None)}}, "experts"),
        ({"config": {"attn_output_gate": False}}, "gate"),
    ],
)
def test_what_is_not_offered(gpu: GpuBackend, rng: np.random.Generator, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        construct(gpu, rng, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arrays": {"fc": np.zeros((64, 64), BF16)}}, r"mtp fc is \(64, 64\): \(64, 128\)"),
        ({"arrays": {"q_norm": np.zeros(64, BF16)}}, r"mtp q_norm is \(64,\): \(32,\)"),
        ({"arrays": {"down_proj": np.zeros((96, 64), BF16)}}, "mtp down_proj"),
        ({"arrays": {"embed_tokens": np.zeros((203, 32), BF16)}}, "embed_tokens"),
        ({"lm_head": DenseWeight(DevicePtr.NULL)}, "lm_head"),
        ({"max_seq_len": 0}, "max_seq_len is 0"),
        ({"main_kv_blocks": -1}, "main_kv_blocks is -1"),
        ({"config": {"head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 4}}, "head_dim is 16"),
        ({"config": {"hidden_size": 60}}, "hidden_size is 60"),
    ],
)
def test_what_does_not_fit(gpu: GpuBackend, rng: np.random.Generator, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        construct(gpu, rng, **changes)


def test_a_missing_kernel_is_named(gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    real = type(gpu).kernel

    def kernel(self: GpuBackend, module: str, function: str) -> Any:
        if module == "rope":
            raise ModuleNotFoundInSetError(module, (), "this set")
        return real(self, module, function)

    monkeypatch.setattr(type(gpu), "kernel", kernel)
    with pytest.raises(ModuleNotFoundInSetError, match="no module 'rope'"):
        construct(gpu, rng)


def test_kernels_that_a_bf16_head_does_not_run_are_not_asked_for(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[str] = set()
    for name in ("kernel", "try_kernel"):
        real = getattr(type(gpu), name)

        def look_up(self: GpuBackend, module: str, function: str, real: Any = real) -> Any:
            asked.add(f"{module}::{function}")
            return real(self, module, function)

        monkeypatch.setattr(type(gpu), name, look_up)
    construct(gpu, rng)
    assert asked == {
        "norm::rms_norm", "norm::residual_add_rms_norm", "rope::rope_forward",
        "reshape_and_cache::reshape_and_cache_flash", "paged_decode::paged_decode_attn",
        "residual_add::bf16_residual_add", "residual_add::sigmoid_gate_mul", "residual_add::bf16_concat",
        "argmax::argmax_bf16", "embed_from_argmax::embed_from_argmax", "gemv::dense_gemv_bf16",
        "ssm_preprocess::deinterleave_qg", "moe_silu_mul::moe_silu_mul", "gemm::dense_gemm_bf16",
        "dense_gemv_bf16_batchm::dense_gemv_bf16_batchm",
    }  # fmt: skip


def test_everything_is_freed(gpu: GpuBackend, rng: np.random.Generator) -> None:
    weights = gpu.live_bytes()
    with construct(gpu, rng) as head:
        pools = head.kv_cache.total_bytes()
        assert pools > 0
        state = head.alloc_state(gpu)
        grown = gpu.live_bytes()
    head.release()
    assert gpu.live_bytes() < grown - pools
    assert weights <= gpu.live_bytes()
    head.free_state(gpu, state)


def test_an_allocation_that_fails_leaves_nothing(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = type(gpu).alloc

    def alloc(self: GpuBackend, nbytes: int, label: str = "") -> DevicePtr:
        if label == "mtp_head.prefill.k_out":
            raise MemoryError(label)
        return real(self, nbytes, label)

    monkeypatch.setattr(type(gpu), "alloc", alloc)
    with pytest.raises(MemoryError):
        construct(gpu, rng)


# ---------------------------------------------------------------- shared buffers


def test_an_arena_of_another_model_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng)
    small = BufferArena(config(vocab_size=8, hidden_size=8, intermediate_size=8), 8, 256, 16, 4, gpu)
    rig.ctx = replace(rig.ctx, buffers=small)
    with pytest.raises(CapacityError, match="bytes that the MTP head writes to"):
        rig.propose(rig.state(), 3, a_hidden(rig, rng), 4, 1)


@pytest.mark.parametrize("offset", [0, 49152 + 200], ids=["picked id", "metadata"])
def test_a_region_that_someone_holds_is_not_written(gpu: GpuBackend, rng: np.random.Generator, offset: int) -> None:
    rig = make_rig(gpu, rng)
    state = rig.state()
    with (
        rig.ctx.buffers.lease(ScratchRegion("someone", offset, 64)),
        pytest.raises(ScratchOverlapError, match="someone"),
    ):
        rig.propose(state, 3, a_hidden(rig, rng), 4, 1)
    assert state.snapshot() == rig.state().snapshot()
    assert rig.ctx.buffers.scratch_map.live() == ()
    assert rig.propose(state, 3, a_hidden(rig, rng), 4, 1)


# ---------------------------------------------------------------- ids that stay on the device, confidence


def test_a_deferred_draft(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng)
    hidden, target = a_hidden(rig, rng), gpu.alloc(2 * rig.config.hidden_size)
    with pytest.raises(ProposerStateError, match="no draft on the device"):
        rig.head.read_deferred_draft_token(gpu)
    wanted = rig.propose(rig.state(), 5, hidden, 9, 3)
    with pytest.raises(ProposerStateError):
        rig.head.read_deferred_draft_token(gpu)
    for drafts in (1, 3):
        gpu.memset(target, 0xFF, 2 * rig.config.hidden_size)
        ids = rig.propose(rig.state(), 5, hidden, 9, drafts, draft_embed_target=target)
        assert ids == [*wanted[: drafts - 1], 0]
        assert rig.head.read_deferred_draft_token(gpu) == wanted[drafts - 1]
        row = download(gpu, target, (rig.config.hidden_size,))
        assert row.tobytes() == rig.arrays["embed_tokens"][wanted[drafts - 1]].tobytes()


def test_confidence_is_the_probability_of_the_least_sure_draft(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng, levers=ModelLevers(draft_conf_tau=0.5))
    hidden = a_hidden(rig, rng)
    found = []
    for drafts in (1, 2, 3):
        rig.propose(rig.state(), 5, hidden, 9, drafts)
        logits = rig.logits()
        probability = float(np.exp(logits - logits.max()).sum() ** -1)
        found.append((rig.head.last_confidence(), probability))
    least = 1.0
    for confidence, probability in found:
        least = min(least, probability)
        assert confidence == pytest.approx(least, rel=1e-9)
    assert make_rig(gpu, rng).head.last_confidence() is None
