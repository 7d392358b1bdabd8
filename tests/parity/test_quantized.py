# SPDX-License-Identifier: AGPL-3.0-only
"""MTP heads with experts in FP8 and NVFP4 on the rows of the `random_moe` fixture, in two steps.

Hugging Face's code has no such head, so that a head of NumPy in FP64 (`tests.model.support.Oracle`) stands between.
First: on the checkpoint's own weights it gives Hugging Face's logits and hidden rows; what differs are the fixture's
FP32 and the FP32 angles of Hugging Face's rotary embedding, up to 50 radians by 2^-24, of which the softmax and norms
make some 1e-5. Second: the quantised head gives what it gives on the weights decoded from the head's bytes. There the
bounds are those of tests/model/test_mtp_head_quant.py, which says where they come from.

The fixture's experts are 40 wide, and FP8 and NVFP4 read rows in groups of 16: they are made 48 wide, by 8 rows of
zeros in gate_proj and up_proj, which silu(0) * 0 = 0 takes out again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from spark_py.model.checkpoint import Checkpoint, open_checkpoint
from spark_py.model.config import ModelConfig
from spark_py.model.layer import ForwardContext
from spark_py.model.layers.mtp_head import MtpHead, MtpQuantization, new
from spark_py.model.layers.mtp_head.types import MtpProposerState, ProjectionWeight
from spark_py.model.levers import ModelLevers
from spark_py.model.row_policy import RowPolicy
from spark_py.model.weight_loader.mtp_names import (
    PROJECTIONS,
    attention_tensor_shapes,
    expert_tensor_shapes,
    ffn_tensor_shapes,
    routing_tensor_shapes,
)
from spark_py.runtime.gpu import GpuBackend
from tests.model.mtp_forms import Recorder, decode
from tests.model.support import Oracle, relative_l2
from tests.parity.support import MAX_SEQ_LEN, Array, first_sequence, load
from tools.goldens import cases, checkpoint

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8, NVFP4 = MtpQuantization.FP8, MtpQuantization.NVFP4
WIDTH = 48
WIDE = checkpoint.MOE_CONFIG | {"moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": WIDTH}
EXACT = 1e-4
BOUNDS = {FP8: 0.0125, NVFP4: 0.025}
"""Relative L2 of logits and hidden rows."""
CLEAR = {FP8: 0.15, NVFP4: 0.5}
"""Rows whose last chosen router logit is no further above the next one are left out: logits are 3 in size and off by a
share of that like BOUNDS, and a difference of two by more. The row after has the head's own hidden row in FP64 too."""
SHARE = 0.4
"""Of the rows, so many must be clear at least."""
KEPT = {FP8: 2.0**-4, NVFP4: 17 / 96}
"""How far quantising may move a weight: FP8, half a step of 3 bits, of the weight; NVFP4, half of the widest step, from
4 to 6, of the largest weight of its group, whose scale was rounded by a sixteenth."""


def exact_weights(tensors: dict[str, Array], config: ModelConfig) -> dict[str, Array]:
    """The weights of a head under the Oracle's names, in FP64."""
    fields = attention_tensor_shapes(config)
    names = {"embed_tokens": "model.embed_tokens.weight", "lm_head": "lm_head.weight"}
    if not config.num_experts:
        fields |= ffn_tensor_shapes("mtp.layers.0.mlp.", config.intermediate_size, config.hidden_size)
    else:
        fields |= routing_tensor_shapes(config)
        for e, expert in enumerate(expert_tensor_shapes(config), -1):
            names |= {
                f"{'shared_expert' if e < 0 else f'experts[{e}]'}.{part}": expert[part][0] for part in PROJECTIONS
            }
    names |= {field: name for field, (name, _) in fields.items()}
    return {field: tensors[name].astype(np.float64) for field, name in names.items()}


def widened() -> dict[str, Array]:
    """The fixture's tensors with experts of WIDTH."""

    def wide(name: str, w: Array) -> Array:
        if "expert" not in name or not name.endswith("_proj.weight"):
            return w
        shape = (w.shape[0], WIDTH) if "down_proj" in name else (WIDTH, w.shape[1])
        found = np.zeros(shape, w.dtype)
        found[: w.shape[0], : w.shape[1]] = w
        return found

    return {name: wide(name, w) for name, w in checkpoint.tensors(checkpoint.MOE_CONFIG).items()}


def chains(arrays: dict[str, Array]) -> Iterator[tuple[Array, Array, int, Array]]:
    """(tokens, hidden rows, base position, ids of the drafts) of every chain, in the fixture's order."""
    ids = iter(arrays["head_ids"].reshape(-1, cases.DRAFTS))
    hidden = arrays["head_hidden_in"].view(BF16)
    spans = np.split(arrays["target_tokens"], np.cumsum(arrays["target_lengths"])[:-1])
    for tokens, first in zip(spans, arrays["head_first"], strict=False):
        rows, hidden = hidden[: len(tokens)], hidden[len(tokens) :]
        for position in range(int(first), len(tokens)):
            yield tokens, rows, position, next(ids)


@pytest.mark.host_only("runs no kernel")
@pytest.mark.parametrize("name", cases.CONFIGS)
@pytest.mark.parametrize("wide", [False, True])
def test_the_head_in_fp64_is_hugging_faces(name: str, wide: bool, tmp_path: Path) -> None:
    if wide and name != "random_moe":
        pytest.skip("only experts are made wider")
    raw = WIDE if wide else cases.CONFIGS[name]
    checkpoint.write(tmp_path, raw)
    config = ModelConfig.from_file(tmp_path)
    weights = exact_weights(widened() if wide else checkpoint.tensors(raw), config)
    arrays = load(name)
    logits, hidden = [], []
    for tokens, rows, position, ids in chains(arrays):
        oracle = Oracle.of(config, weights)
        oracle.feed(tokens[:position].tolist(), rows.astype(np.float64))
        token, own = int(tokens[position]), rows[position - 1].astype(np.float64)
        for j, given in enumerate(ids):
            found, own = oracle.step(token, own, position + j)
            logits.append(found)
            hidden.append(own)
            token = int(given)
    full = arrays["head_full_rows"]
    assert relative_l2(np.array(logits)[full], arrays["head_logits"]) < EXACT
    assert relative_l2(np.array(hidden)[full], arrays["head_hidden"]) < EXACT
    top = np.take_along_axis(np.array(logits), arrays["head_top_ids"].astype(np.int64), axis=1)
    assert np.abs(top - arrays["head_top_logits"]).max() < EXACT * np.abs(top).max()


@pytest.fixture
def model(gpu: GpuBackend, tmp_path: Path) -> Iterator[Checkpoint]:
    checkpoint.write(tmp_path, WIDE)
    save_file(widened(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    with open_checkpoint(tmp_path, gpu, MAX_SEQ_LEN, "qwen3_next_moe") as found:
        yield found


def quantised(model: Checkpoint, quant: MtpQuantization, patch: pytest.MonkeyPatch) -> tuple[MtpHead, dict[str, Array]]:
    """A head, and the weights that it has under the Oracle's names."""
    patch.setattr(new, "Quantizer", Recorder)
    head = model.proposer(ModelLevers(row_policy=RowPolicy.VERIFIED, mtp_max_seqs=1), quant)
    assert isinstance(head, MtpHead)
    weights = exact_weights(widened(), model.config)
    made: dict[str, ProjectionWeight] = Recorder.made | {"lm_head": head.lm_head}
    return head, weights | {name: decode(model.target.gpu, weight) for name, weight in made.items()}


def compare(model: Checkpoint, head: MtpHead, weights: dict[str, Array]) -> str:
    """The chains of the fixture's first sequence by the head, held against FP64 on `weights`; gives a line to print."""
    gpu, quant = model.target.gpu, head.quant
    stream, arrays = gpu.default_stream(), first_sequence(load("random_moe"))
    ctx = ForwardContext(model.target.buffers, gpu, model.config, head.levers)
    oracle = Oracle.of(model.config, weights, kv_e4m3=not head.kv_bf16)
    state = head.alloc_state_for(gpu, MAX_SEQ_LEN)
    assert isinstance(state, MtpProposerState)
    rows = arrays["head_hidden_in"].view(BF16)
    device = gpu.alloc(rows.nbytes, "parity.hidden")
    gpu.copy_h2d(rows.reshape(-1).view(np.uint8), device)
    stride = rows.shape[1] * BF16.itemsize

    def row(pointer: Any, count: int) -> Array:
        found = np.empty(count, BF16)
        gpu.copy_d2h_on_stream(pointer, found.view(np.uint8), stream)
        exact: Array = found.astype(np.float64)
        return exact

    outputs: list[tuple[Array, Array]] = []
    wanted: list[tuple[Array, Array]] = []
    total = 0

    def chain(tokens: Array, position: int, ids: Array) -> None:
        """Drafts from a base position; of their rows the first stays, which is made of the fixture's hidden."""
        nonlocal total
        own, given = rows[position - 1].astype(np.float64), iter(ids.tolist())

        def taught(token: int, source: Any, at: int, *rest: Any) -> int:
            nonlocal own
            type(head).forward_one(head, token, source, at, *rest)
            exact = oracle.step(token, own, at)
            own = row(ctx.buffers.hidden_states(), model.config.hidden_size)
            if oracle.router_gap > CLEAR[quant]:
                outputs.append((row(ctx.buffers.logits(), head.draft_vocab), own))
                wanted.append(exact)
            return int(next(given))

        kept = len(oracle.keys) + 1
        head.forward_one = taught  # type: ignore[method-assign,assignment]
        source = device.offset((position - 1) * stride)
        assert head.propose(int(tokens[position]), source, position, len(ids), state, ctx, stream) == ids.tolist()
        head.after_verify(0, state, stream)
        del oracle.keys[kept:], oracle.values[kept:]
        assert state.seq_len == kept
        total += len(ids)

    everything = list(chains(arrays))
    tokens, _, first, _ = everything[0]
    for position in range(1, first):  # what a BF16 head would be fed
        chain(tokens, position, tokens[position + 1 : position + 2])
    for tokens, _, position, ids in everything:
        chain(tokens, position, ids)
    head.free_state(gpu, state)
    gpu.free(device)
    assert len(outputs) >= SHARE * total, f"{len(outputs)} of {total} rows are clear"
    found = [
        relative_l2(np.array(got), np.array(true))
        for got, true in zip(zip(*outputs, strict=True), zip(*wanted, strict=True), strict=True)
    ]
    assert max(found) < BOUNDS[quant], f"logits and hidden rows are off by {found}"
    return f"{quant.value}: {len(outputs)} of {total} rows, logits off by {found[0]:.2%}, hidden rows by {found[1]:.2%}"


@pytest.mark.parametrize("quant", [FP8, NVFP4], ids=lambda quant: quant.value)
def test_a_quantised_head_on_dequantised_weights(
    model: Checkpoint, quant: MtpQuantization, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = compare(model, *quantised(model, quant, monkeypatch))
    with capsys.disabled():
        print(f"\nrandom_moe, {line}")


@pytest.mark.parametrize("quant", [FP8, NVFP4], ids=lambda quant: quant.value)
def test_dequantised_weights_are_the_checkpoints(
    model: Checkpoint, quant: MtpQuantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each where it belongs, and as near as the format allows."""
    _, found = quantised(model, quant, monkeypatch)
    wanted = exact_weights(widened(), model.config)
    assert found.keys() == wanted.keys()
    changed = {name for name in wanted if not np.array_equal(found[name], wanted[name])}
    plain = {name for name in wanted if "norm" in name} | {"embed_tokens", "moe_gate", "shared_expert_gate"}
    assert changed == wanted.keys() - plain - ({"lm_head"} if quant is FP8 else set())
    for name in changed:
        largest = np.abs(wanted[name])
        # Of a row's smallest weights, E4M3 has half of its smallest step: 2^-10 of the scale, which is a 448th.
        floor = largest.max(axis=1, keepdims=True) / 448 * 2.0**-10
        if quant is NVFP4:
            floor = np.zeros(1)
            largest = np.repeat(largest.reshape(len(largest), -1, 16).max(axis=2), 16, axis=1)
        assert (np.abs(found[name] - wanted[name]) <= (KEPT[quant] * largest + floor) * 1.001).all(), name


FAULTS: dict[str, dict[str, str]] = {
    "experts exchanged": {"experts[0].down_proj": "experts[1].down_proj"},
    "gate_proj and up_proj of the shared expert exchanged": {"shared_expert.gate_proj": "shared_expert.up_proj"},
    "gate_proj and up_proj of an expert exchanged": {"experts[2].gate_proj": "experts[2].up_proj"},
}


@pytest.mark.deep
@pytest.mark.parametrize("quant", [FP8, NVFP4], ids=lambda quant: quant.value)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(
    model: Checkpoint, quant: MtpQuantization, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, weights = quantised(model, quant, monkeypatch)
    ((one, other),) = FAULTS[fault].items()
    weights[one], weights[other] = weights[other], weights[one]
    with pytest.raises(AssertionError, match="are off by"):
        compare(model, head, weights)


@pytest.mark.parametrize("quant", [FP8, NVFP4], ids=lambda quant: quant.value)
def test_the_weights_before_quantising_are_further_away(
    model: Checkpoint, quant: MtpQuantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison is fine enough to see the quantisation itself."""
    head, _ = quantised(model, quant, monkeypatch)
    with pytest.raises(AssertionError, match="are off by"):
        compare(model, head, exact_weights(widened(), model.config))
