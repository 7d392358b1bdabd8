# SPDX-License-Identifier: AGPL-3.0-only
"""DeepSeek-V4's draft head in the decoding loop, with the target's streams or its collapsed rows: which rows it holds,
whoever fed them, and its factory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_py.model.batched_speculative import BatchedSpeculativeDecoder
from spark_py.model.checkpoint import Checkpoint, open_checkpoint
from spark_py.model.decode_state import DecodeState
from spark_py.model.layers.deepseek_v4_mtp import DeepseekV4MtpHead
from spark_py.model.layers.hidden_mode import HiddenMode
from spark_py.model.layers.mtp_head import MtpQuantization
from spark_py.model.levers import ModelLevers
from spark_py.model.proposer_factory import ProposerFactory
from spark_py.model.row_policy import RowPolicy
from spark_py.model.speculative import SpeculativeDecoder
from spark_py.model.v4_factory import V4MtpFactory
from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.runtime.kv_cache import KvCacheDtype
from tests.model.tiny import Tiny, write_tiny
from tests.model.v4_files import published, write_folder
from tests.model.v4_tiny import write_drafting_v4

MAX_SEQ_LEN = 64
MODES = list(HiddenMode)
COMPLETE = ModelLevers(row_policy=RowPolicy.VERIFIED, refeed=True, mtp_max_seqs=1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return write_drafting_v4(tmp_path_factory.mktemp("drafting_v4"), np.random.default_rng(3))


@pytest.fixture
def opened(gpu: GpuBackend, tiny: Tiny) -> Iterator[Checkpoint]:
    with open_checkpoint(tiny.folder, gpu, MAX_SEQ_LEN, "deepseek_v4", 2) as found:
        yield found


def rows_of(head: DeepseekV4MtpHead, state: Any) -> list[bytes]:
    kv = head.kv_cache
    blocks = [kv.read_block(0, block)[0].reshape(kv.block_size(), -1) for block in state.block_table]
    return [row.tobytes() for row in np.concatenate(blocks)[: state.seq_len]] if blocks else []


def head_of(found: Checkpoint, levers: ModelLevers, mode: HiddenMode) -> DeepseekV4MtpHead:
    head = found.proposer(levers, hidden_mode=mode)
    assert isinstance(head, DeepseekV4MtpHead)
    return head


@pytest.mark.parametrize("mode", MODES)
def test_the_rows_are_those_of_the_confirmed_sequence(
    gpu: GpuBackend, opened: Checkpoint, rng: np.random.Generator, mode: HiddenMode
) -> None:
    """Over two requests of one sequence; the streams that the feed passes are those of the right tokens."""
    head = head_of(opened, COMPLETE, mode)
    decoder = SpeculativeDecoder(opened.target, head, 3, levers=COMPLETE)
    state = decoder.alloc_state()
    decoder.generate(rng.integers(0, 300, 9).tolist(), 14, state)
    decoder.generate(rng.integers(0, 300, 5).tolist(), 6, state)
    decoder._complete(state)
    assert head.drafter_rows(state.draft) == state.target.seq_len - 1  # type: ignore[arg-type]
    assert rows_of(head, state.draft) == fresh_rows(gpu, decoder, head, state)
    decoder.free_state(state)


def test_rows_of_a_checkpoint_as_published(gpu: GpuBackend, rng: np.random.Generator, tmp_path: Path) -> None:
    """Projections and pool in E4M3, experts in MXFP4: a row that was fed has the bytes of one that drafted."""
    write_folder(tmp_path, published(rng))
    with open_checkpoint(tmp_path, gpu, MAX_SEQ_LEN, "deepseek_v4") as found:
        assert isinstance(found.proposer, V4MtpFactory)
        head = found.proposer(COMPLETE, kv_dtype=KvCacheDtype.FP8)
        decoder = SpeculativeDecoder(found.target, head, 2, levers=COMPLETE)
        state = decoder.alloc_state()
        prompt = rng.integers(0, 300, 14).tolist()
        tokens = decoder.generate(prompt, 5, state).tokens
        decoder._complete(state)
        assert rows_of(head, state.draft) == fresh_rows(gpu, decoder, head, state)
        assert tokens == SpeculativeDecoder(found.target, None, 0).generate(prompt, 5).tokens
        decoder.free_state(state)


def fresh_rows(
    gpu: GpuBackend, decoder: SpeculativeDecoder, head: DeepseekV4MtpHead, state: DecodeState
) -> list[bytes]:
    """Of a drafter that is fed the whole sequence at once."""
    seq, fresh = state.target, head.alloc_state(gpu)
    stacks = seq.streams_row(0) if head.reads_streams else None
    head.prefill_drafter(seq.tokens, seq.hidden_row(0), fresh, decoder._ctx, decoder.stream, stacks)
    found = rows_of(head, fresh)
    head.free_state(gpu, fresh)
    return found


@pytest.mark.parametrize("mode", MODES)
def test_the_ring_keeps_what_the_drafter_reads(
    gpu: GpuBackend, opened: Checkpoint, rng: np.random.Generator, mode: HiddenMode
) -> None:
    """The engine's rule loses a key a step; catch-up from the ring of the last rows, or streams, gives it back."""
    levers = ModelLevers(catchup=True, refeed=True, mtp_max_seqs=1)
    head = head_of(opened, levers, mode)
    decoder = SpeculativeDecoder(opened.target, head, 2, levers=levers)
    state = decoder.alloc_state()
    decoder.generate(rng.integers(0, 300, 9).tolist(), 16, state)
    decoder._complete(state)
    assert rows_of(head, state.draft) == fresh_rows(gpu, decoder, head, state)
    decoder.free_state(state)


@pytest.mark.parametrize("mode", MODES)
def test_sequences_together_have_the_tokens_of_their_own_runs(
    opened: Checkpoint, rng: np.random.Generator, mode: HiddenMode
) -> None:
    levers = ModelLevers(row_policy=RowPolicy.VERIFIED, refeed=True)
    prompts = [rng.integers(0, 300, length).tolist() for length in (4, 9)]
    plain = SpeculativeDecoder(opened.target, None, 0)
    wanted = [plain.generate(prompt, 12).tokens for prompt in prompts]
    decoder = BatchedSpeculativeDecoder(opened.target, head_of(opened, levers, mode), 2, levers=levers)
    found = decoder.generate_all(prompts, 12)
    assert [each.tokens for each in found] == wanted
    assert all(each.stats.drafted for each in found)


def test_rows_are_carried_to_the_next_sequence(opened: Checkpoint, rng: np.random.Generator) -> None:
    head = head_of(opened, COMPLETE, HiddenMode.REFERENCE)
    decoder = SpeculativeDecoder(opened.target, head, 2, levers=COMPLETE)
    state = decoder.alloc_state()
    prompt = rng.integers(0, 300, 20).tolist()
    decoder.generate(prompt, 6, state)
    left = decoder.rewind(state, [*prompt, 7, 8])
    assert left == [7, 8]
    assert state.has_context
    assert head.drafter_rows(state.draft) >= 18  # type: ignore[arg-type]
    decoder.free_state(state)


def test_a_target_without_streams_refuses_a_head_that_reads_them(
    gpu: GpuBackend, opened: Checkpoint, rng: np.random.Generator, tmp_path: Path
) -> None:
    write_tiny(tmp_path, rng)
    head = head_of(opened, ModelLevers(), HiddenMode.REFERENCE)
    with open_checkpoint(tmp_path, gpu, MAX_SEQ_LEN) as other:
        with pytest.raises(InvalidArgumentError, match="reads no residual streams"):
            SpeculativeDecoder(other.target, head, 1)
        state = other.target.alloc_state()
        other.target.prefill([1, 2], state, gpu.default_stream())
        with pytest.raises(InvalidArgumentError, match="streams"):
            state.streams_row(0)
        other.target.free_state(state)


def test_the_factory(gpu: GpuBackend, opened: Checkpoint) -> None:
    """Heads share the module's tensors, and have pools of their own."""
    factory = opened.proposer
    assert isinstance(factory, ProposerFactory)
    assert factory.hidden_modes() == (HiddenMode.REFERENCE, HiddenMode.COLLAPSED)
    assert factory.quantizations() == ()
    default = factory(ModelLevers())
    assert isinstance(default, DeepseekV4MtpHead)
    assert (default.hidden_mode, default.reads_streams) == (HiddenMode.REFERENCE, True)
    other = head_of(opened, ModelLevers(), HiddenMode.COLLAPSED)
    assert not other.reads_streams
    assert other.module is default.module
    assert other.kv_cache is not default.kv_cache
    with pytest.raises(InvalidArgumentError, match="quantization"):
        factory(ModelLevers(), MtpQuantization.BF16)


def test_hidden_modes_by_name() -> None:
    assert [HiddenMode.parse(text) for text in ("reference", "Collapsed")] == MODES
    with pytest.raises(InvalidArgumentError, match="one of reference, collapsed"):
        HiddenMode.parse("streams")


def test_everything_is_given_back(gpu: GpuBackend, tiny: Tiny) -> None:
    before = gpu.live_bytes()
    with ExitStack() as stack:
        found = stack.enter_context(open_checkpoint(tiny.folder, gpu, MAX_SEQ_LEN, "deepseek_v4", 2))
        for mode in MODES:
            head_of(found, ModelLevers(), mode)
    assert gpu.live_bytes() == before
