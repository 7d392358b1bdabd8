# SPDX-License-Identifier: AGPL-3.0-only
"""DeepSeek-V4's target, the loop and the MTP module together, on a checkpoint whose module is often right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from spark_py.model.checkpoint import Checkpoint, family_of, open_checkpoint
from spark_py.model.layers.hidden_mode import HiddenMode
from spark_py.model.layers.mtp_head import MtpQuantization
from spark_py.model.levers import ModelLevers
from spark_py.model.row_policy import RowPolicy
from spark_py.model.speculative import SpeculativeDecoder
from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from tests.model.tiny import Tiny, open_target, write_tiny
from tests.model.v4_tiny import write_drafting_v4
from tests.thin import thinned

POLICIES = [(RowPolicy.SEED, False), (RowPolicy.VERIFIED, False), (RowPolicy.VERIFIED, True)]
MAX_SEQ_LEN = 96


@pytest.fixture
def tiny(tmp_path: Path, rng: np.random.Generator) -> Tiny:
    return write_drafting_v4(tmp_path / "model", rng)


@contextmanager
def opened(gpu: GpuBackend, tiny: Tiny) -> Iterator[Checkpoint]:
    """The checkpoint; nothing stays on the device."""
    before = gpu.live_bytes()
    with open_checkpoint(tiny.folder, gpu, MAX_SEQ_LEN, family_of(tiny.config), max_seqs=2) as found:
        yield found
    assert gpu.live_bytes() == before


@pytest.mark.parametrize("mode", thinned(HiddenMode, keep=[0]))
def test_the_tokens_are_those_of_the_plain_run(
    gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator, mode: HiddenMode
) -> None:
    """Whatever the drafter reads, keeps, and has seen. Prompt and text pass the window and several blocks."""
    prompt = rng.integers(1, 300, 19).tolist()
    with opened(gpu, tiny) as found:
        plain = SpeculativeDecoder(found.target, None, 0).generate(prompt, 24)
        accepted = 0
        for policy, refeed in POLICIES:
            for prefill in (True, False):
                levers = ModelLevers(prefill, row_policy=policy, refeed=refeed, mtp_max_seqs=2)
                head = found.proposer(levers, hidden_mode=mode)
                for num_drafts in (1, 3):
                    result = SpeculativeDecoder(found.target, head, num_drafts, levers=levers).generate(prompt, 24)
                    assert result.tokens == plain.tokens
                    accepted += result.stats.accepted
        assert accepted > 0, "the checkpoint shows nothing where no draft is accepted"


@pytest.mark.parametrize("mode", list(HiddenMode))
def test_a_conversation_goes_on_in_its_state(
    gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator, mode: HiddenMode
) -> None:
    levers = ModelLevers(row_policy=RowPolicy.VERIFIED, refeed=True, mtp_max_seqs=2)
    with opened(gpu, tiny) as found:
        decoder = SpeculativeDecoder(found.target, found.proposer(levers, hidden_mode=mode), 3, levers=levers)
        plain = SpeculativeDecoder(found.target, None, 0)
        state, text = decoder.alloc_state(), []
        for limit in (1, 7, 10):
            text += (turn := rng.integers(1, 300, 6).tolist())
            result = decoder.generate(turn, limit, state)
            assert result.tokens == plain.generate(text, limit).tokens
            text += result.tokens
            assert state.target.tokens == text[:-1]
        decoder.free_state(state)


def test_choices_that_are_not_its_own_are_refused(gpu: GpuBackend, tiny: Tiny, tmp_path: Path) -> None:
    levers = ModelLevers(mtp_max_seqs=1)
    with opened(gpu, tiny) as found:
        assert found.proposer.quantizations() == ()
        assert found.proposer.hidden_modes() == (HiddenMode.REFERENCE, HiddenMode.COLLAPSED)
        with pytest.raises(InvalidArgumentError, match="quantization"):
            found.proposer(levers, MtpQuantization.FP8)
        head = found.proposer(levers)
        qwen = write_tiny(tmp_path / "qwen", np.random.default_rng(0))
        with open_target(gpu, qwen) as other, pytest.raises(InvalidArgumentError, match="residual streams"):
            SpeculativeDecoder(other, head, 1)
    with opened(gpu, qwen) as found:
        assert found.proposer.hidden_modes() == ()
        with pytest.raises(InvalidArgumentError, match="hidden_mode"):
            found.proposer(levers, hidden_mode=HiddenMode.REFERENCE)
