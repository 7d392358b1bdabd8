# SPDX-License-Identifier: AGPL-3.0-only
"""The target, dense and with experts: its numbers, the independence of its rows, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from spark_py.model.target import load_target_weights
from spark_py.model.weight_map import MoeWeights
from spark_py.runtime.errors import (
    CapacityError,
    InvalidArgumentError,
    KvCacheExhausted,
    MissingWeightError,
    ReleasedError,
    UnsupportedError,
)
from spark_py.runtime.gpu import GpuBackend, KernelHandle
from spark_py.runtime.weights import WeightStore
from tests.model.target_support import Trail, hidden, ids
from tests.model.tiny import BF16, MOE, Tiny, clear_tokens, open_target, oracle, write_tiny

ROUNDINGS_A_LAYER = 9
"""BF16 stores in a row through a layer: norm, projection, head norm, RoPE, attention, gate, projection, sum; as many
through the FFN, of which the branch and the sum add to the stream."""


@pytest.fixture
def tiny(tmp_path: Path, rng: np.random.Generator) -> Tiny:
    return write_tiny(tmp_path / "model", rng)


@pytest.fixture(params=["dense", "experts"])
def either(request: pytest.FixtureRequest, tmp_path: Path, rng: np.random.Generator) -> Tiny:
    """A dense checkpoint, and one with experts in some layers."""
    return write_tiny(tmp_path / "model", rng, **(MOE if request.param == "experts" else {}))


@pytest.mark.parametrize(
    "overrides",
    [{}, MOE, MOE | {"norm_topk_prob": False, "num_experts_per_tok": 1}, MOE | {"num_experts_per_tok": 6}],
    ids=["dense", "experts", "one expert, its weight as it is", "all experts"],
)
def test_logits_and_hidden_are_those_of_the_formulas(
    gpu: GpuBackend, tmp_path: Path, rng: np.random.Generator, overrides: dict[str, Any]
) -> None:
    """A BF16 store errs by 2**-9 relative at most, by 2**-9 / sqrt(3) on average, independently of the others."""
    tiny = write_tiny(tmp_path / "model", rng, **overrides)
    tokens = clear_tokens(tiny, rng, 40) if overrides else ids(rng, 40)
    wanted_logits, wanted_hidden = oracle(tiny, tokens)
    with open_target(gpu, tiny) as target:
        trail = Trail(target)
        trail.verify(tokens)
        logits = np.array(trail.logits).view(BF16).astype(np.float64)
        rows = hidden(target, trail.state.hidden_row(0), len(tokens)).view(BF16).astype(np.float64)
        picks = trail.picks
        trail.close()
    stores = ROUNDINGS_A_LAYER * target.config.num_hidden_layers + 3
    bound = 2 * 2.0**-9 / np.sqrt(3) * np.sqrt(stores)
    for got, wanted in ((logits, wanted_logits), (rows, wanted_hidden)):
        error = np.linalg.norm(got - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
        assert error.max() < 2 * bound, f"relative L2 error of a row is {error.max():.4f}"
        assert np.sqrt(np.mean(error**2)) < bound
    two = np.sort(wanted_logits, axis=1)[:, -2:]
    clear = two[:, 1] - two[:, 0] > 2 * np.abs(logits - wanted_logits).max()
    assert clear.mean() > 0.5
    assert (np.array(picks) == wanted_logits.argmax(1))[clear].all()
    assert picks == logits.argmax(1).tolist(), "equal maxima give the lowest id"


@pytest.mark.parametrize("rows", range(1, 10))
def test_a_row_has_the_same_bits_whatever_the_number_of_rows(
    gpu: GpuBackend, either: Tiny, rng: np.random.Generator, rows: int
) -> None:
    tokens = ids(rng, 19)
    with open_target(gpu, either) as target:
        single, grouped = Trail(target), Trail(target)
        for token in tokens:
            single.decode(token)
        for first in range(0, len(tokens), rows):
            grouped.verify(tokens[first : first + rows])
        np.testing.assert_array_equal(single.logits, grouped.logits)
        assert single.picks == grouped.picks
        for one, other in zip(single.bits(), grouped.bits(), strict=True):
            np.testing.assert_array_equal(one, other)
        single.close()
        grouped.close()


@pytest.mark.parametrize("how", ["prefill", "decode", "verify", "prefill in parts", "after a rollback"])
def test_a_row_has_the_same_bits_however_the_kv_before_it_was_written(
    gpu: GpuBackend, either: Tiny, rng: np.random.Generator, how: str
) -> None:
    tokens, after = ids(rng, 35), ids(rng, 4)
    with open_target(gpu, either) as target:
        wanted, got = Trail(target), Trail(target)
        wanted.prefill(tokens)
        if how == "prefill":
            got.prefill(tokens)
        elif how == "decode":
            for token in tokens:
                got.decode(token)
        elif how == "verify":
            for first in range(0, len(tokens), 3):
                got.verify(tokens[first : first + 3])
        elif how == "prefill in parts":
            got.prefill(tokens[:17])
            got.prefill(tokens[17:])
        else:
            got.prefill(tokens[:20])
            got.verify(ids(rng, 6))
            target.rollback(6, got.state)
            got.verify([*tokens[20:30], *ids(rng, 9)])
            target.rollback(9, got.state)
            got.prefill(tokens[30:])
        assert got.state.tokens == tokens
        for one, other in zip(wanted.bits(), got.bits(), strict=True):
            np.testing.assert_array_equal(one, other)
        wanted.logits.clear()
        got.logits.clear()
        wanted.verify(after)
        for token in after:
            got.decode(token)
        np.testing.assert_array_equal(wanted.logits, got.logits)
        wanted.close()
        got.close()


def test_the_single_row_kernels_give_the_same_bits(gpu: GpuBackend, either: Tiny, rng: np.random.Generator) -> None:
    """A kernel set without the batched GEMV and argmax and the experts of several rows is slower, not different."""
    tokens = ids(rng, 21)
    with open_target(gpu, either) as target:
        batched, looped = Trail(target), Trail(target)
        batched.verify(tokens)
        target._gemv_batchm_k = target._argmax_batch_k = KernelHandle(0)
        for experts in target._experts.values():
            assert experts.rows_in_one_pass
            experts._rows_k = [KernelHandle(0)]
        looped.verify(tokens)
        np.testing.assert_array_equal(batched.logits, looped.logits)
        assert batched.picks == looped.picks
        batched.close()
        looped.close()


def test_a_small_arena_gives_the_same_bits(gpu: GpuBackend, either: Tiny, rng: np.random.Generator) -> None:
    tokens = ids(rng, 23)
    found = []
    for rows in (5, 32):
        with open_target(gpu, either, max_batch_tokens=rows) as target:
            assert target.chunk_rows == min(rows, 16)
            trail = Trail(target)
            trail.verify(tokens)
            found.append(np.array(trail.logits))
            trail.close()
    np.testing.assert_array_equal(*found)


def test_sequences_do_not_touch_each_other(gpu: GpuBackend, either: Tiny, rng: np.random.Generator) -> None:
    first, second = ids(rng, 30), ids(rng, 30)
    with open_target(gpu, either) as target:
        alone, one, two = Trail(target), Trail(target), Trail(target)
        alone.verify(first)
        for start in range(0, 30, 5):
            one.verify(first[start : start + 5])
            two.verify(second[start : start + 5])
        np.testing.assert_array_equal(alone.logits, one.logits)
        assert not set(one.state.block_table) & set(two.state.block_table)
        for trail in (alone, one, two):
            trail.close()
        assert target.kv_cache.num_free_blocks() == target.kv_cache.num_blocks()


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("bad", [-1, 300, 2**32 - 1, np.int32(-1), True, 1.5, "3", None])
def test_ids_out_of_the_vocabulary_are_refused(gpu: GpuBackend, tiny: Tiny, bad: Any) -> None:
    with open_target(gpu, tiny) as target:
        trail = Trail(target)
        trail.prefill([1, 2, 3])
        before = trail.bits()
        with pytest.raises(InvalidArgumentError, match=r"tokens\[1\]") as caught:
            trail.verify([4, bad])
        assert caught.value.value is bad
        assert trail.state.tokens == [1, 2, 3]
        for one, other in zip(before, trail.bits(), strict=True):
            np.testing.assert_array_equal(one, other)
        trail.close()


def test_no_tokens_and_too_many_are_refused(gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator) -> None:
    with open_target(gpu, tiny, max_seq_len=40) as target:
        trail = Trail(target)
        with pytest.raises(InvalidArgumentError, match="tokens"):
            trail.prefill([])
        with pytest.raises(CapacityError) as caught:
            trail.prefill(ids(rng, 41))
        assert (caught.value.value, caught.value.capacity) == (41, 40)
        assert trail.state.block_table == []
        trail.prefill(ids(rng, 40))
        assert target.room(trail.state) == 0
        with pytest.raises(CapacityError):
            trail.decode(1)
        with pytest.raises(InvalidArgumentError, match="40 tokens to drop"):
            target.rollback(41, trail.state)
        target.rollback(1, trail.state)
        trail.decode(1)
        trail.close()


def test_without_blocks_only_the_asking_sequence_fails(gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator) -> None:
    tokens = ids(rng, 20)
    with open_target(gpu, tiny, num_blocks=3) as target:
        one, two = Trail(target), Trail(target)
        one.prefill(tokens)
        two.prefill(tokens[:16])
        assert target.room(two.state) == 0
        before = two.bits()
        with pytest.raises(KvCacheExhausted) as caught:
            two.decode(5)
        assert (caught.value.need, caught.value.free) == (1, 0)
        assert two.state.tokens == tokens[:16]
        assert len(two.state.block_table) == 1
        for a, b in zip(before, two.bits(), strict=True):
            np.testing.assert_array_equal(a, b)
        one.verify(tokens[:3])
        one.close()
        two.decode(5)
        two.close()
        assert target.kv_cache.num_free_blocks() == 3


def test_a_state_is_freed_once(gpu: GpuBackend, tiny: Tiny) -> None:
    with open_target(gpu, tiny) as target:
        trail = Trail(target)
        trail.prefill([1, 2])
        trail.close()
        trail.close()
        assert target.kv_cache.num_free_blocks() == target.kv_cache.num_blocks()
        with pytest.raises(ReleasedError):
            trail.decode(1)


# ---------------------------------------------------------------- checkpoints


def test_padding_rows_are_never_picked(gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator) -> None:
    """The LM head is padded past the embedding table with rows that would win."""
    plain = []
    with open_target(gpu, tiny) as target:
        trail = Trail(target)
        trail.verify(range(20))
        plain = trail.logits
        trail.close()
    head = tiny.weights["lm_head.weight"]
    loud = (rng.standard_normal((20, head.shape[1])) * 100).astype(BF16)
    tiny.weights["lm_head.weight"] = np.concatenate([head, loud])
    tiny.raw["vocab_size"] = 320
    tiny.save()
    with open_target(gpu, tiny) as target:
        assert target.vocab_size == 300
        trail = Trail(target)
        trail.verify(range(20))
        np.testing.assert_array_equal(plain, trail.logits)
        with pytest.raises(InvalidArgumentError):
            trail.decode(300)
        trail.close()


def test_tied_and_wrapped_checkpoints_load(gpu: GpuBackend, tiny: Tiny) -> None:
    """The LM head may be the embedding table, and the text model may stand within a larger one."""
    del tiny.weights["lm_head.weight"]
    tiny.raw["tie_word_embeddings"] = True
    found = []
    for prefix in ("model.", "model.language_model."):
        tiny.weights = {
            prefix + name.removeprefix("model.") if name.startswith("model.") else name: value
            for name, value in tiny.weights.items()
        }
        tiny.save()
        with open_target(gpu, tiny) as target:
            trail = Trail(target)
            trail.verify(range(10))
            found.append(np.array(trail.logits))
            trail.close()
    np.testing.assert_array_equal(*found)


def test_f32_weights_become_bf16(gpu: GpuBackend, tiny: Tiny) -> None:
    found = []
    for _ in range(2):
        with open_target(gpu, tiny) as target:
            trail = Trail(target)
            trail.verify(range(10))
            found.append(np.array(trail.logits))
            trail.close()
        tiny.weights = {name: value.astype(np.float32) for name, value in tiny.weights.items()}
        tiny.save()
    np.testing.assert_array_equal(*found)


def refused(gpu: GpuBackend, tiny: Tiny, kind: type[Exception], words: str) -> None:
    """Loading raises, says `words`, and leaves nothing on the device."""
    before = gpu.live_bytes()
    with WeightStore.open(tiny.folder) as store, pytest.raises(kind, match=words):
        load_target_weights(store, tiny.config, gpu)
    assert gpu.live_bytes() == before


def test_missing_tensors_are_all_named(gpu: GpuBackend, tiny: Tiny) -> None:
    del tiny.weights["model.layers.1.mlp.up_proj.weight"]
    del tiny.weights["model.norm.weight"]
    tiny.save()
    with WeightStore.open(tiny.folder) as store, pytest.raises(MissingWeightError) as caught:
        load_target_weights(store, tiny.config, gpu)
    assert caught.value.missing == ("model.norm.weight", "model.layers.1.mlp.up_proj.weight")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (128, 64)),
        ("model.layers.1.mlp.down_proj.weight", (96, 64)),
        ("model.norm.weight", (65,)),
        ("lm_head.weight", (300, 32)),
        ("model.embed_tokens.weight", (300 * 64,)),
    ],
)
def test_a_tensor_of_another_shape_is_named(gpu: GpuBackend, tiny: Tiny, name: str, shape: tuple[int, ...]) -> None:
    tiny.weights[name] = np.ones(shape, BF16)
    tiny.save()
    refused(gpu, tiny, InvalidArgumentError, name)


def stack_experts(tiny: Tiny) -> None:
    """The experts of each layer in two tensors, as newer files have them."""
    for prefix in {name.split("experts.")[0] for name in tiny.weights if ".experts." in name}:
        parts = [
            [tiny.weights.pop(f"{prefix}experts.{e}.{part}_proj.weight") for part in ("gate", "up", "down")]
            for e in range(tiny.raw["num_experts"])
        ]
        tiny.weights[f"{prefix}experts.gate_up_proj"] = np.stack([np.concatenate((g, u)) for g, u, _ in parts])
        tiny.weights[f"{prefix}experts.down_proj"] = np.stack([down for _, _, down in parts])


def test_stacked_experts_are_those_that_stand_alone(gpu: GpuBackend, tmp_path: Path, rng: np.random.Generator) -> None:
    tiny, found = write_tiny(tmp_path / "model", rng, **MOE), []
    for stacked in (False, True):
        if stacked:
            stack_experts(tiny)
            tiny.save()
        with WeightStore.open(tiny.folder) as store:
            weights = load_target_weights(store, tiny.config, gpu)
            assert [isinstance(layer.ffn, MoeWeights) for layer in weights.layers] == [True, False, True]
            experts = [
                weight
                for layer in weights.layers
                if isinstance(layer.ffn, MoeWeights)
                for expert in (*layer.ffn.experts, layer.ffn.shared_expert)
                for weight in (expert.gate_proj, expert.up_proj, expert.down_proj)
            ]
            assert len(experts) == 2 * 3 * 7
            values = []
            for weight in experts:
                value = np.empty(weight.shape, np.uint16)
                gpu.copy_d2h(weight.weight, value.reshape(-1).view(np.uint8))
                values.append(value)
            found.append(values)
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_missing_experts_are_named(gpu: GpuBackend, tmp_path: Path, rng: np.random.Generator) -> None:
    tiny = write_tiny(tmp_path / "model", rng, **MOE)
    missing = (
        "model.layers.0.mlp.shared_expert_gate.weight",
        "model.layers.2.mlp.gate.weight",
        "model.layers.2.mlp.experts.5.up_proj.weight",
    )
    for name in missing:
        del tiny.weights[name]
    tiny.save()
    with WeightStore.open(tiny.folder) as store, pytest.raises(MissingWeightError) as caught:
        load_target_weights(store, tiny.config, gpu)
    assert set(caught.value.missing) == set(missing)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.mlp.gate.weight", (5, 64)),
        ("model.layers.0.mlp.shared_expert_gate.weight", (64,)),
        ("model.layers.2.mlp.experts.3.down_proj.weight", (40, 64)),
        ("model.layers.2.mlp.shared_expert.up_proj.weight", (96, 64)),
        ("model.layers.2.mlp.experts.gate_up_proj", (6, 64, 80)),
        ("model.layers.0.mlp.experts.down_proj", (7, 64, 40)),
    ],
)
def test_an_expert_of_another_shape_is_named(
    gpu: GpuBackend, tmp_path: Path, rng: np.random.Generator, name: str, shape: tuple[int, ...]
) -> None:
    tiny = write_tiny(tmp_path / "model", rng, **MOE)
    if not name.endswith(".weight"):
        stack_experts(tiny)
    assert name in tiny.weights
    tiny.weights[name] = np.ones(shape, BF16)
    tiny.save()
    refused(gpu, tiny, InvalidArgumentError, name)


def test_gates_that_the_configuration_lacks_are_noticed(gpu: GpuBackend, tiny: Tiny) -> None:
    tiny.raw["attn_output_gate"] = False
    tiny.save()
    with WeightStore.open(tiny.folder) as store, pytest.raises(InvalidArgumentError, match=r"layers\.0\..*q_proj"):
        load_target_weights(store, tiny.config, gpu)


def test_experts_of_sizes_that_no_kernel_takes_are_refused(
    gpu: GpuBackend, tmp_path: Path, rng: np.random.Generator
) -> None:
    tiny = write_tiny(tmp_path / "model", rng, **MOE)
    for field, value in (("moe_intermediate_size", 44), ("shared_expert_intermediate_size", 0)):
        tiny.raw[field], old = value, tiny.raw[field]
        tiny.save()
        refused(gpu, tiny, (UnsupportedError, InvalidArgumentError), f"{field} is {value}")  # type: ignore[arg-type]
        tiny.raw[field] = old


def test_other_dtypes_and_layers_are_refused(gpu: GpuBackend, tiny: Tiny) -> None:
    tiny.weights["model.norm.weight"] = np.ones(64, np.float16)
    save_file(tiny.weights, tiny.folder / "model.safetensors")
    refused(gpu, tiny, UnsupportedError, r"model\.norm\.weight.*F16")
    for field, value, words in (
        ("hidden_size", 60, "hidden_size is 60"),
        ("head_dim", 24, "head_dim is 24"),
    ):
        tiny.raw[field], old = value, tiny.raw.get(field)
        tiny.save()
        refused(gpu, tiny, (UnsupportedError, InvalidArgumentError), words)  # type: ignore[arg-type]
        tiny.raw[field] = old
