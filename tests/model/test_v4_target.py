# SPDX-License-Identifier: AGPL-3.0-only
"""DeepSeek-V4's target: its numbers, the streams it keeps, the independence of its rows, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_py.model.target import DeepseekV4Target, TargetState
from spark_py.model.weight_map import DenseWeight
from spark_py.runtime.errors import (
    CapacityError,
    ConfigError,
    InvalidArgumentError,
    KvCacheExhausted,
    MissingWeightError,
    OutOfDeviceMemoryError,
    ReleasedError,
    UnsupportedError,
)
from spark_py.runtime.gpu import GpuBackend, KernelHandle
from spark_py.testing import BF16, F32, Array, relative_l2, upload
from tests.model import v4_files, v4_tiny
from tests.model.target_support import Trail, hidden, ids
from tests.model.tiny import Tiny
from tests.model.v4_tiny import clear_tokens, open_v4_target, oracle, write_v4_tiny

WINDOW = v4_tiny.CONFIG["sliding_window"]
ROUNDINGS_A_LAYER = 18
"""BF16 stores in a row through a layer: its mixed input, norm, latent, its norm, queries, their norm, heads, group,
output; mixed input, norm, gate, up, product, expert, shared product, expert, sum."""


@pytest.fixture
def tiny(tmp_path: Path, rng: np.random.Generator) -> Tiny:
    return write_v4_tiny(tmp_path / "model", rng)


@pytest.fixture
def published(tmp_path: Path, rng: np.random.Generator) -> Tiny:
    """A folder in the published formats, E4M3 and MXFP4, and the values of its tensors."""
    tensors = v4_files.published(rng)
    folder = v4_files.write_folder(tmp_path / "published", tensors)
    return Tiny(folder, v4_files.CONFIG, {name: value for name, (value, _) in v4_files.in_bf16(tensors).items()})


def streams(target: DeepseekV4Target, state: TargetState) -> Array:
    """[n, S, h] of every token."""
    c = target.config
    found = np.empty((state.seq_len, c.hc_mult, c.hidden_size), F32)
    target.gpu.copy_d2h(state.streams_row(0), found.view(np.uint8))
    return found


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"num_experts_per_tok": 6, "mlp_layer_types": ["moe", "moe"]},
        {"num_experts_per_tok": 1, "mlp_layer_types": ["hash_moe"] * 2, "hc_mult": 2, "swiglu_limit": 10.0},
    ],
    ids=["hash and learned", "all experts", "hash alone, two streams"],
)
def test_logits_hidden_and_streams_are_those_of_the_formulas(
    gpu: GpuBackend, tmp_path: Path, rng: np.random.Generator, overrides: dict[str, Any]
) -> None:
    """A BF16 store errs by 2**-9 relative at most, by 2**-9 / sqrt(3) on average, independently of the others. Three
    windows of rows."""
    tiny = write_v4_tiny(tmp_path / "model", rng, **overrides)
    tokens = clear_tokens(tiny, rng, 3 * WINDOW) if overrides.get("num_experts_per_tok") != 6 else ids(rng, 3 * WINDOW)
    check_numbers(gpu, tiny, tokens)


def test_published_formats_are_as_near_as_their_values_in_bf16(
    gpu: GpuBackend, published: Tiny, tmp_path: Path, rng: np.random.Generator
) -> None:
    """E4M3 and MXFP4 hold BF16 values, so that only the order of sums differs. These weights are larger, and what a
    store errs by grows on its way: the same weights in BF16 say how much."""
    (tmp_path / "plain").mkdir()
    plain = replace(published, folder=tmp_path / "plain")
    plain.save()
    tokens = clear_tokens(published, rng, 2 * WINDOW)
    wanted = oracle(published, tokens)[2]
    errors = []
    for tiny in (plain, published):
        with open_v4_target(gpu, tiny) as target:
            trail = Trail(target)
            trail.verify(tokens)
            errors.append(relative_l2(streams(target, trail.state), wanted))
            trail.close()
    assert errors[0] < 0.05
    assert errors[1] < 1.3 * errors[0]


def check_numbers(gpu: GpuBackend, tiny: Tiny, tokens: list[int]) -> None:
    wanted = oracle(tiny, tokens)
    with open_v4_target(gpu, tiny) as target:
        trail = Trail(target)
        trail.verify(tokens)
        logits = np.array(trail.logits).view(BF16).astype(np.float64)
        rows = hidden(target, trail.state.hidden_row(0), len(tokens)).view(BF16).astype(np.float64)
        found = logits, rows, streams(target, trail.state).astype(np.float64)
        picks = trail.picks
        trail.close()
    stores = ROUNDINGS_A_LAYER * target.config.num_hidden_layers + 3
    bound = 2 * 2.0**-9 / np.sqrt(3) * np.sqrt(stores)
    for name, got, want in zip(("logits", "hidden", "streams"), found, wanted, strict=True):
        flat = want.reshape(len(tokens), -1)
        error = np.linalg.norm(got.reshape(flat.shape) - flat, axis=1) / np.linalg.norm(flat, axis=1)
        assert error.max() < 2 * bound, f"relative L2 error of a row of {name} is {error.max():.4f}"
        assert np.sqrt(np.mean(error**2)) < bound, name
    two = np.sort(wanted[0], axis=1)[:, -2:]
    clear = two[:, 1] - two[:, 0] > 2 * np.abs(logits - wanted[0]).max()
    assert clear.mean() > 0.5
    assert (np.array(picks) == wanted[0].argmax(1))[clear].all()
    assert picks == logits.argmax(1).tolist(), "equal maxima give the lowest id"


def test_misreadings_are_far_off(gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator) -> None:
    """Of the whole model, what its layers' tests cannot see: which layer hashes, what collapses, which tokens."""
    tokens = clear_tokens(tiny, rng, 2 * WINDOW)
    with open_v4_target(gpu, tiny) as target:
        trail = Trail(target)
        trail.verify(tokens)
        got = streams(target, trail.state), np.array(trail.logits).view(BF16).astype(np.float64)
        trail.close()

    def off(other: Tiny, which: int) -> float:
        logits, _, wanted = oracle(other, tokens)
        want = (wanted, logits)[which]
        return float(np.linalg.norm(got[which] - want) / np.linalg.norm(want))

    def changed(**weights: Array) -> Tiny:
        named = {name.replace("__", "."): value for name, value in weights.items()}
        return Tiny(tiny.folder, tiny.raw, tiny.weights | named)

    w = tiny.weights
    table = w["layers.0.ffn.gate.tid2eid"]
    near = off(tiny, 0), off(tiny, 1)
    assert off(changed(layers__0__ffn__gate__tid2eid=np.roll(table, 1, 0)), 0) > 4 * near[0], "the neighbour's experts"
    assert off(changed(hc_head_fn=w["mtp.0.hc_head_fn"]), 1) > 4 * near[1], "the module's head"
    assert off(changed(norm__weight=np.ones_like(w["norm.weight"])), 1) > 4 * near[1], "no weight of the final norm"
    for window in (WINDOW - 1, WINDOW + 1):
        assert off(Tiny(tiny.folder, tiny.raw | {"sliding_window": window}, w), 0) > 4 * near[0], f"window {window}"


# ---------------------------------------------------------------- the independence of rows


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_a_row_has_the_same_bits_whatever_the_number_of_rows(
    gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator, rows: int
) -> None:
    check_groups(gpu, tiny, rng, rows)


def test_rows_of_published_formats_have_the_same_bits_too(
    gpu: GpuBackend, published: Tiny, rng: np.random.Generator
) -> None:
    check_groups(gpu, published, rng, 3)


def check_groups(gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator, rows: int) -> None:
    tokens = ids(rng, 2 * WINDOW + 1)
    with open_v4_target(gpu, tiny) as target:
        whole, grouped = Trail(target), Trail(target)
        whole.verify(tokens)
        for first in range(0, len(tokens), rows):
            grouped.verify(tokens[first : first + rows])
        np.testing.assert_array_equal(whole.logits, grouped.logits)
        assert whole.picks == grouped.picks
        for one, other in zip(whole.bits(), grouped.bits(), strict=True):
            np.testing.assert_array_equal(one, other)
        whole.close()
        grouped.close()


@pytest.mark.parametrize("how", ["decode", "prefill in parts", "after a rollback"])
def test_a_row_has_the_same_bits_however_the_kv_before_it_was_written(
    gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator, how: str
) -> None:
    tokens, after = ids(rng, 2 * WINDOW + 7), ids(rng, 4)
    with open_v4_target(gpu, tiny) as target:
        wanted, got = Trail(target), Trail(target)
        wanted.prefill(tokens)
        if how == "decode":
            for token in tokens:
                got.decode(token)
        elif how == "prefill in parts":
            got.prefill(tokens[:17])
            got.prefill(tokens[17:])
        else:
            got.prefill(tokens[:20])
            got.verify(ids(rng, 6))
            target.rollback(6, got.state)
            got.verify([*tokens[20:27], *ids(rng, 9)])
            target.rollback(9, got.state)
            got.prefill(tokens[27:])
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


def test_a_small_arena_and_a_set_without_batched_argmax_give_the_same_bits(
    gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator
) -> None:
    tokens = ids(rng, 19)
    found = []
    for rows in (5, 32):
        with open_v4_target(gpu, tiny, max_batch_tokens=rows) as target:
            assert target.chunk_rows == min(rows, 16)
            if rows == 5:
                target._gemv_batchm_k = target._argmax_batch_k = KernelHandle(0)
            trail = Trail(target)
            trail.verify(tokens)
            found.append([np.array(trail.logits), *trail.bits()])
            trail.close()
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_sequences_do_not_touch_each_other(gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator) -> None:
    first, second = ids(rng, 25), ids(rng, 25)
    with open_v4_target(gpu, tiny) as target:
        alone, one, two = Trail(target), Trail(target), Trail(target)
        alone.verify(first)
        for start in range(0, 25, 5):
            one.verify(first[start : start + 5])
            two.verify(second[start : start + 5])
        np.testing.assert_array_equal(alone.logits, one.logits)
        for a, b in zip(alone.bits(), one.bits(), strict=True):
            np.testing.assert_array_equal(a, b)
        assert not set(one.state.block_table) & set(two.state.block_table)
        for trail in (alone, one, two):
            trail.close()
        assert target.kv_cache.num_free_blocks() == target.kv_cache.num_blocks()


# ---------------------------------------------------------------- states


def test_a_state_has_the_streams_of_every_token(gpu: GpuBackend, tiny: Tiny) -> None:
    before = gpu.live_bytes()
    with open_v4_target(gpu, tiny) as target:
        assert target.keeps_streams
        trail = Trail(target)
        with pytest.raises(InvalidArgumentError, match="0 tokens"):
            trail.state.streams_row(0)
        trail.prefill([5, 6, 7])
        size = 4 * target.config.hc_mult * target.config.hidden_size
        assert trail.state.streams_row(2).address - trail.state.streams_row(0).address == 2 * size
        with pytest.raises(InvalidArgumentError, match="position"):
            trail.state.streams_row(3)
        held = gpu.live_bytes()
        trail.close()
        trail.close()
        assert held - gpu.live_bytes() == target.max_seq_len * (size + 2 * target.config.hidden_size)
        with pytest.raises(ReleasedError):
            trail.decode(1)
    assert gpu.live_bytes() == before


def test_a_state_that_does_not_fit_leaves_nothing(gpu: GpuBackend, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_v4_target(gpu, tiny) as target:
        before, alloc = gpu.live_bytes(), gpu.alloc

        def short(nbytes: int, label: str = "") -> Any:
            if label == "target.streams":
                raise OutOfDeviceMemoryError(nbytes, 0, 0, "a full device")
            return alloc(nbytes, label)

        monkeypatch.setattr(gpu, "alloc", short)
        with pytest.raises(OutOfDeviceMemoryError):
            target.alloc_state()
        assert gpu.live_bytes() == before


def test_what_a_forward_refuses_leaves_the_state(gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator) -> None:
    with open_v4_target(gpu, tiny, max_seq_len=40, num_blocks=2) as target:
        trail = Trail(target)
        trail.prefill([1, 2, 3])
        before = trail.bits()
        for bad, kind in (([4, 300], InvalidArgumentError), ([], InvalidArgumentError), ([1] * 38, CapacityError)):
            with pytest.raises(kind):
                trail.verify(bad)
        with pytest.raises(KvCacheExhausted):
            trail.verify([1] * 30)
        assert (trail.state.tokens, target.room(trail.state)) == ([1, 2, 3], 29)
        for one, other in zip(before, trail.bits(), strict=True):
            np.testing.assert_array_equal(one, other)
        trail.close()


# ---------------------------------------------------------------- checkpoints


def test_padding_rows_are_never_picked(gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator) -> None:
    """Weights with a head that is padded past the embedding with rows that would win."""
    with open_v4_target(gpu, tiny) as target:
        plain = Trail(target)
        plain.verify(range(10))
        loud = np.concatenate([tiny.weights["head.weight"], (rng.standard_normal((20, 64)) * 100).astype(BF16)])
        weights = replace(target.weights, head=DenseWeight(upload(gpu, loud), loud.shape))
        config = replace(target.config, vocab_size=320)
        with DeepseekV4Target(weights, config, gpu, target.buffers) as padded:
            assert padded.vocab_size == 300
            trail = Trail(padded)
            trail.verify(range(10))
            np.testing.assert_array_equal(plain.logits, trail.logits)
            with pytest.raises(InvalidArgumentError):
                trail.decode(300)
            trail.close()
        plain.close()


@pytest.mark.parametrize(
    ("overrides", "kind", "words"),
    [
        (
            {"layer_types": ["sliding_attention", "heavily_compressed_attention"]},
            UnsupportedError,
            "layer 1 has heavily",
        ),
        ({"layer_types": None, "compress_ratios": [4, 0, 0]}, UnsupportedError, "layer 0 has compressed_sparse"),
        ({"o_groups": 3}, InvalidArgumentError, "o_groups"),
        ({"hc_mult": 5}, InvalidArgumentError, "hc_mult"),
        ({"q_lora_rank": 32}, InvalidArgumentError, "layers.0.attn.wq_a"),
        ({"hidden_size": 80}, InvalidArgumentError, r"\(300, 64\)"),
        ({"n_routed_experts": 7}, (InvalidArgumentError, MissingWeightError), r"layers\.\d\.ffn"),
        ({"num_hidden_layers": 3}, ConfigError, "layer_types"),
    ],
)
def test_configurations_that_do_not_fit(
    gpu: GpuBackend, tiny: Tiny, overrides: dict[str, Any], kind: Any, words: str
) -> None:
    before = gpu.live_bytes()
    tiny.raw |= overrides
    tiny.save()
    with pytest.raises(kind, match=words), open_v4_target(gpu, tiny):
        pass
    assert gpu.live_bytes() == before


@pytest.mark.parametrize(
    "name", ["embed.weight", "hc_head_base", "layers.1.attn.attn_sink", "layers.1.ffn.gate.bias", "norm.weight"]
)
def test_a_missing_tensor_is_named(gpu: GpuBackend, tiny: Tiny, name: str) -> None:
    before = gpu.live_bytes()
    del tiny.weights[name]
    tiny.save()
    with pytest.raises(MissingWeightError, match=name), open_v4_target(gpu, tiny):
        pass
    assert gpu.live_bytes() == before
