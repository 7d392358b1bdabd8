# SPDX-License-Identifier: AGPL-3.0-only
"""DecoderTarget with other bodies than Qwen3-Next's, and decoding with several modules: MiniMax-M2 and GLM-4.5. What
their rows are tests/parity holds against transformers; here: the same bits however they are made, and the same tokens
whatever drafts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spark_py.model.checkpoint import Checkpoint, open_checkpoint
from spark_py.model.config import ModelConfig
from spark_py.model.levers import ModelLevers
from spark_py.model.row_policy import RowPolicy
from spark_py.model.speculative import SpeculativeDecoder
from spark_py.model.target import BLOCK_SIZE, DecoderTarget, load_target_weights
from spark_py.model.weight_map import MoeWeights
from spark_py.runtime.buffers import BufferArena
from spark_py.runtime.errors import InvalidArgumentError, MissingWeightError, UnsupportedError
from spark_py.runtime.gpu import GpuBackend
from spark_py.runtime.weights import WeightStore
from tests.model.mtp_forms import hide
from tools.goldens import modules

MAX_SEQ_LEN = 64
RUNS = ((RowPolicy.SEED, False, (3,)), (RowPolicy.VERIFIED, False, (2,)), (RowPolicy.VERIFIED, True, (1, 3, 4)))
NEW = 20
BODIES = ("glm4_moe_2", "glm4_moe_3", "minimax_m2")


def open_target(name: str, folder: Path, gpu: GpuBackend, stack: ExitStack) -> DecoderTarget:
    if not (folder / "config.json").exists():
        modules.write(folder, modules.CONFIGS[name])
    config = ModelConfig.from_file(folder)
    weights = load_target_weights(stack.enter_context(WeightStore.open(folder)), config, gpu)
    buffers = stack.enter_context(BufferArena(config, 32, MAX_SEQ_LEN, BLOCK_SIZE, 1, gpu))
    return stack.enter_context(DecoderTarget(weights, config, gpu, buffers, 1))


def logits_of(target: DecoderTarget, tokens: list[int], rows: int) -> np.ndarray[Any, Any]:
    """Bits of every row's logits, so many rows at a time."""
    state, stream, found = target.alloc_state(), target.gpu.default_stream(), []
    for first in range(0, len(tokens), rows):
        given = target.verify(tokens[first : first + rows], state, stream, keep_logits=True)
        assert given.logits is not None
        found.append(given.logits.view(np.uint16))
    target.free_state(state)
    return np.concatenate(found)


@pytest.mark.parametrize("name", BODIES)
def test_a_row_has_the_same_bits_whatever_the_number_of_rows(
    name: str, gpu: GpuBackend, tmp_path: Path, rng: np.random.Generator
) -> None:
    tokens = rng.integers(0, 100, 19).tolist()
    with ExitStack() as stack:
        target = open_target(name, tmp_path, gpu, stack)
        wanted = logits_of(target, tokens, 1)
        for rows in (2, 5, 16):
            np.testing.assert_array_equal(logits_of(target, tokens, rows), wanted)


def test_a_set_without_the_fused_norm(
    gpu: GpuBackend, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sum and norm one after the other: mean squares of rounded sums, and again the same bits in groups of rows."""
    tokens = rng.integers(0, 100, 12).tolist()
    with ExitStack() as stack:
        fused = logits_of(open_target("minimax_m2", tmp_path, gpu, stack), tokens, 4)
    hide(monkeypatch, gpu, "spark_residual_add_rms_norm_vanilla")
    with ExitStack() as stack:
        target = open_target("minimax_m2", tmp_path, gpu, stack)
        composed = logits_of(target, tokens, 4)
        np.testing.assert_array_equal(logits_of(target, tokens, 1), composed)
    one, other = ((bits.astype(np.uint32) << 16).view(np.float32) for bits in (fused, composed))
    # Stores of 2**-9 each: some thirty a row and layer, as in test_target.
    assert np.linalg.norm(one - other) < 0.05 * np.linalg.norm(one)


@pytest.fixture
def minimax(gpu: GpuBackend, tmp_path: Path) -> Iterator[Checkpoint]:
    modules.write(tmp_path, modules.CONFIGS["minimax_m2"])
    with open_checkpoint(tmp_path, gpu, MAX_SEQ_LEN, "minimax_m2") as found:
        yield found


def test_three_modules_change_no_token(minimax: Checkpoint, rng: np.random.Generator) -> None:
    """Every policy, 1 to 3 drafts, and more than there are modules; each position is accepted somewhere."""
    prompt = rng.integers(0, 100, 9).tolist()
    plain = SpeculativeDecoder(minimax.target, None, 0, ()).generate(prompt, NEW)
    reached = np.zeros(3, int)
    for policy, refeed, widths in RUNS:
        levers = ModelLevers(refeed, row_policy=policy, refeed=refeed, mtp_max_seqs=1)
        head = minimax.proposer(levers)
        for drafts in widths:
            found = SpeculativeDecoder(minimax.target, head, drafts, (), levers).generate(prompt, NEW)
            assert found.tokens == plain.tokens
            accepted = found.stats.accepted_at
            reached[: len(accepted)] += accepted[:3]
            assert not any(accepted[3:]), "there is no fourth module"
    assert (reached > 0).all()


def test_experts_without_a_shared_one_and_biases_in_fp32(gpu: GpuBackend, tmp_path: Path) -> None:
    modules.write(tmp_path, modules.CONFIGS["minimax_m2"])
    config = ModelConfig.from_file(tmp_path)
    with WeightStore.open(tmp_path) as store:
        layer = load_target_weights(store, config, gpu).layers[0]
        assert isinstance(layer.ffn, MoeWeights)
        assert layer.ffn.shared_expert.gate_proj.weight.is_null
        assert layer.ffn.shared_expert_gate.weight.is_null
        assert layer.ffn.correction_bias is not None
        bias = np.empty(config.num_experts, np.float32)
        gpu.copy_d2h(layer.ffn.correction_bias.weight, bias.view(np.uint8))
        tensors = load_file(tmp_path / "model.safetensors")
        np.testing.assert_array_equal(bias, tensors["model.layers.0.block_sparse_moe.e_score_correction_bias"])
        assert layer.q_norm is not None
        assert layer.q_norm.shape == (config.num_attention_heads * config.head_dim,)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda b: None, MissingWeightError, "e_score_correction_bias"),
        (lambda b: b.astype(np.float16), UnsupportedError, "F16"),
        (lambda b: b[:-1], InvalidArgumentError, r"\(5,\).*\(6,\)"),
    ],
)
def test_a_router_bias_that_is_not_right_is_named(
    gpu: GpuBackend, tmp_path: Path, change: Any, error: type[Exception], words: str
) -> None:
    modules.write(tmp_path, modules.CONFIGS["minimax_m2"])
    name = "model.layers.1.block_sparse_moe.e_score_correction_bias"
    tensors = load_file(tmp_path / "model.safetensors")
    bias = change(tensors.pop(name))
    if bias is not None:
        tensors[name] = np.ascontiguousarray(bias)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    before = gpu.live_bytes()
    with WeightStore.open(tmp_path) as store, pytest.raises(error, match=words):
        load_target_weights(store, ModelConfig.from_file(tmp_path), gpu)
    assert gpu.live_bytes() == before
