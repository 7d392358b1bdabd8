# SPDX-License-Identifier: AGPL-3.0-only
"""Draft depths at and beside every width that is compiled into a kernel (8, 16 and 32 rows, and a verify is one row
wider than its drafts): undo, rows and tokens are right on both sides of each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spark_py.model.layers.mtp_head import MtpHead, MtpQuantization
from spark_py.model.levers import ModelLevers
from spark_py.model.row_policy import RowPolicy
from spark_py.model.speculative import SpeculativeDecoder
from spark_py.model.weight_loader import load_mtp_weights
from spark_py.runtime.gpu import GpuBackend
from spark_py.runtime.weights import WeightStore
from tests.model.test_speculative import noisy, plain, right
from tests.model.tiny import open_target, write_tiny
from tests.thin import thinned

DEPTHS = [7, 8, 9, 15, 16, 17, 31, 32, 33]
NEW_TOKENS, FEW = 36, 4


@pytest.mark.parametrize("depth", thinned(DEPTHS, keep=[1, 4, 8]))
@pytest.mark.parametrize("kind", ["right", "noisy"])
def test_scripted_drafts(gpu: GpuBackend, rng: np.random.Generator, tmp_path: Path, kind: str, depth: int) -> None:
    prompt = rng.integers(0, 300, 13).tolist()
    with open_target(gpu, write_tiny(tmp_path / "model", rng), 128, max_batch_tokens=64) as target:
        wanted = plain(target, prompt, NEW_TOKENS)
        proposer = right(prompt, wanted) if kind == "right" else noisy(prompt, wanted, rng, 0.97)
        result = SpeculativeDecoder(target, proposer, depth).generate(prompt, NEW_TOKENS)
        assert result.tokens == wanted
        if kind == "right":
            assert result.stats.verify_steps == -(-(NEW_TOKENS - 1) // (depth + 1))
        assert target.kv_cache.num_free_blocks() == target.kv_cache.num_blocks()


@pytest.mark.parametrize("depth", thinned(DEPTHS, keep=[2, 4, 7]))
@pytest.mark.parametrize("policy", RowPolicy)
def test_drafts_of_the_head(
    gpu: GpuBackend, rng: np.random.Generator, tmp_path: Path, policy: RowPolicy, depth: int
) -> None:
    """Its own rows are as many as its drafts; a random head is nearly always wrong, so all are undone."""
    tiny = write_tiny(tmp_path / "model", rng)
    prompt = rng.integers(0, 300, 13).tolist()
    levers = ModelLevers(row_policy=policy, refeed=policy is RowPolicy.VERIFIED, mtp_max_seqs=1)
    with open_target(gpu, tiny, 128, max_batch_tokens=64) as target, WeightStore.open(tiny.folder) as store:
        wanted = plain(target, prompt, FEW)
        mtp, tables = load_mtp_weights(store, target.config, gpu), target.weights
        with MtpHead(
            mtp, tables.embed_tokens, tables.lm_head, None, target.config, gpu, MtpQuantization.BF16, 0, 128, 64, levers
        ) as head:
            result = SpeculativeDecoder(target, head, depth, levers=levers).generate(prompt, FEW)
            assert result.tokens == wanted
            assert result.stats.drafted >= depth
            assert head.kv_cache.num_free_blocks() == head.kv_cache.num_blocks()
