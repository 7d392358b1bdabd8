# SPDX-License-Identifier: AGPL-3.0-only
"""DeepSeek-V4's layer, head of hyper-connections and target against what transformers' code gave for the fixture `v4`
(tools/make_goldens.py).

Where the bound of a layer's streams comes from: `support` says it for logits. A stream is FP32, so there is no last
store of its own: each element may differ by SIGMAS times the spread of its stream in its row, and the RMS error of
rows, and of all of them, is held to that spread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_py.model.config import ModelConfig
from spark_py.model.layer import ForwardContext
from spark_py.model.layers.deepseek_v4 import (
    V4Attention,
    V4Ffn,
    V4HyperConnections,
    V4Layer,
    V4Shapes,
    V4TargetWeights,
)
from spark_py.model.layers.deepseek_v4_mtp import DeepseekV4MtpHead
from spark_py.model.layers.hidden_mode import HiddenMode
from spark_py.model.levers import ModelLevers
from spark_py.model.row_policy import RowPolicy
from spark_py.model.target import DeepseekV4Target
from spark_py.model.weight_loader import load_v4_mtp_weights, load_v4_target_weights
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.runtime.weights import WeightStore
from spark_py.testing import BF16, F32, Array, Output, f64, upload
from tests.model.tiny import Tiny
from tests.model.v4_support import Pages, make_cache
from tests.model.v4_tiny import open_v4_target
from tests.parity.support import FIXTURES, SIGMAS, Part, Rows, check, check_rms, half_ulp, run_target, teach
from tools.goldens import cases, checkpoint, v4

S, H = v4.CONFIG["hc_mult"], v4.CONFIG["hidden_size"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("v4")
    v4.write(made)
    return made


@pytest.fixture(scope="module")
def arrays(folder: Path) -> dict[str, Array]:
    """The fixture's, for the checkpoint that the seed gives: else two different models would be compared."""
    meta, found = cases.load(FIXTURES / f"{v4.NAME}.npz")
    assert checkpoint.digest(folder) == meta["checkpoint"]
    return found


@contextmanager
def opened(gpu: GpuBackend, folder: Path) -> Iterator[tuple[V4TargetWeights, V4Shapes]]:
    config = ModelConfig.from_file(folder / "config.json")
    with WeightStore.open(folder) as store:
        yield load_v4_target_weights(store, config, gpu), V4Shapes.of(config)


def run_layer(
    gpu: GpuBackend,
    weights: V4TargetWeights,
    shapes: V4Shapes,
    index: int,
    rng: np.random.Generator,
    lengths: Sequence[int] = tuple(sorted(v4.LENGTHS, reverse=True)),
) -> list[Array]:
    """Streams [length, S, h] of sequences of `lengths`, the longest first, each in blocks at random and in step with
    the others."""
    given, block = v4.streams(index), weights.blocks[index]
    pages, count = Pages.scatter(rng, lengths), len(lengths)
    found: list[list[Array]] = [[] for _ in lengths]
    token_ids = gpu.alloc(4 * count, "parity.token_ids")
    with (
        make_cache(gpu, pages.blocks, shape=shapes.attention) as cache,
        V4Attention(block.attention, shapes.attention, cache, gpu, count) as attention,
        V4HyperConnections(shapes.hyper, gpu, count) as connections,
        V4Ffn(block.ffn, shapes.ffn, gpu, count, token_ids) as ffn,
    ):
        layer = V4Layer(block.layer, attention, ffn, connections)
        for token in range(lengths[0]):
            active = [s for s, length in enumerate(lengths) if token < length]
            gpu.copy_h2d(np.full(count, token, np.uint32).view(np.uint8), token_ids)
            state = Output(gpu, (len(active), S, H), F32, np.stack([given[token]] * len(active)))
            layer.decode(state.ptr, pages.meta(gpu, active, token, 0), gpu.default_stream())
            for s, row in zip(active, state.read(), strict=True):
                found[s].append(row)
    gpu.free(token_ids)
    return [np.stack(rows).astype(np.float64) for rows in found]


def check_layer(arrays: dict[str, Array], index: int, sequences: list[Array]) -> float:
    """AssertionError where a sequence is not the fixture's; gives the mean error over the expected one."""
    wanted, spread = arrays[f"layer{index}_streams"], arrays[f"layer{index}_spread"]
    sure = np.ones(len(wanted), bool)
    if f"layer{index}_routing_gap" in arrays:
        sure = (arrays[f"layer{index}_routing_gap"] > SIGMAS * arrays[f"layer{index}_routing_spread"]).all(1)
        assert sure.mean() > 0.8
    ratios = []
    for rows in sequences:
        kept = np.flatnonzero(sure[: len(rows)])
        error = rows[kept] - wanted[kept]
        assert np.isfinite(error).all()
        worst = float((np.abs(error) / (SIGMAS * spread[kept, :, None])).max(initial=0))
        assert worst <= 1, f"layer {index}, {len(rows)} rows: an element is {worst:.2f} of its bound away"
        ratios.append(check_rms(f"layer {index}, {len(rows)} rows", error.reshape(-1, H), spread[kept].reshape(-1)))
    return max(ratios)


@pytest.mark.parametrize("index", range(v4.CONFIG["num_hidden_layers"]), ids=v4.CONFIG["mlp_layer_types"])
def test_a_layer_of_each_kind(
    gpu: GpuBackend,
    folder: Path,
    arrays: dict[str, Array],
    rng: np.random.Generator,
    index: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of 1, window - 1, window, window + 1 and 3 windows of rows."""
    assert sorted(v4.LENGTHS) == [1, v4.WINDOW - 1, v4.WINDOW, v4.WINDOW + 1, 3 * v4.WINDOW]
    with opened(gpu, folder) as (weights, shapes):
        ratio = check_layer(arrays, index, run_layer(gpu, weights, shapes, index, rng))
    with capsys.disabled():
        print(f"\nlayer {index}: mean error {ratio:.2f} of the expected")


def test_the_head_of_hyper_connections(gpu: GpuBackend, folder: Path, arrays: dict[str, Array]) -> None:
    """FP32 sums, and one BF16 store: half an ulp, and half as much again for what FP32 moves over a boundary."""
    for index in range(v4.CONFIG["num_hidden_layers"]):
        streams, wanted = v4.streams(index), arrays[f"layer{index}_collapsed"]
        out = Output(gpu, wanted.shape)
        with (
            opened(gpu, folder) as (weights, shapes),
            V4HyperConnections(shapes.hyper, gpu, len(streams)) as connections,
        ):
            connections.collapse(weights.hc_head, upload(gpu, streams), out.ptr, len(streams), gpu.default_stream())
            assert (np.abs(f64(out.read()) - wanted) <= 1.5 * half_ulp(wanted)).all()


@pytest.mark.no_sanitizer("64 rows through a model; the layers above run the same kernels")
def test_target(gpu: GpuBackend, folder: Path, arrays: dict[str, Array], capsys: pytest.CaptureFixture[str]) -> None:
    part = Part(arrays, "target")
    with open_v4_target(gpu, Tiny(folder, v4.CONFIG, v4.tensors())) as target:
        line = check(part, run_target(target, part), 0.6)
    with capsys.disabled():
        print(f"\nv4 {line}")


def run_drafts(
    gpu: GpuBackend,
    folder: Path,
    target: DeepseekV4Target,
    arrays: dict[str, Array],
    mode: HiddenMode,
    patch: pytest.MonkeyPatch,
) -> Rows:
    """Chains of drafts by `propose` at every base position, as `support.run_head` has them; in reference mode from the
    fixture's streams, in collapsed mode from its collapsed rows."""
    stacked, part, sequences = mode is HiddenMode.REFERENCE, Part(arrays, mode.value), Part(arrays, "target")
    given = arrays["target_streams"] if stacked else arrays["collapsed_hidden_in"]
    levers, stream = ModelLevers(row_policy=RowPolicy.VERIFIED, mtp_max_seqs=1), gpu.default_stream()
    weights, config = target.weights, target.config
    ctx = ForwardContext(target.buffers, gpu, config, levers)
    with (
        WeightStore.open(folder) as store,
        DeepseekV4MtpHead(
            load_v4_mtp_weights(store, config, gpu), weights.embed, weights.head, config, gpu, 0, 64, levers,
            hidden_mode=mode,
        ) as head,
    ):  # fmt: skip
        rows_found = teach(head, ctx, part, patch)
        for tokens in np.split(sequences.tokens, np.cumsum(sequences.lengths)[:-1]):
            rows, given = given[: len(tokens)], given[len(tokens) :]
            hidden, state = upload(gpu, rows), head.alloc_state_for(gpu, 64)
            row_bytes, fed = rows[0].nbytes, tokens[: v4.FIRST].tolist()
            if stacked:
                head.prefill_drafter(fed, DevicePtr.NULL, state, ctx, stream, hidden_stacks=hidden)
            else:
                head.prefill_drafter(fed, hidden, state, ctx, stream)
            for position in range(v4.FIRST, len(tokens)):
                row = hidden.offset((position - 1) * row_bytes)
                pair = (DevicePtr.NULL, row) if stacked else (row, None)
                head.propose(
                    int(tokens[position]), pair[0], position, cases.DRAFTS, state, ctx, stream,
                    target_hidden_stack=pair[1],
                )  # fmt: skip
                head.after_verify(0, state, stream)
            head.free_state(gpu, state)
        return rows_found()


@pytest.mark.no_sanitizer("156 drafts in each mode")
@pytest.mark.parametrize("mode", HiddenMode, ids=lambda mode: mode.value)
def test_drafts(
    gpu: GpuBackend,
    folder: Path,
    arrays: dict[str, Array],
    mode: HiddenMode,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Three chained drafts at every position, past the window, rows of the prompt fed first."""
    with open_v4_target(gpu, Tiny(folder, v4.CONFIG, v4.tensors())) as target:
        rows = run_drafts(gpu, folder, target, arrays, mode, monkeypatch)
    line = check(Part(arrays, mode.value), replace(rows, hidden=None), 0.5)
    with capsys.disabled():
        print(f"\nv4 {line}")


def test_the_modes_differ(arrays: dict[str, Array]) -> None:
    """Else one fixture would do for both: the first draft differs too, since streams do."""
    one, two = (arrays[f"{mode.value}_top_ids"][::3, 0] for mode in HiddenMode)
    assert (one != two).mean() > 0.05


LONGEST = v4.LENGTHS[-1:]
SHAPE_FAULTS: dict[str, Any] = {
    "a window of one row less": ("attention", {"window": v4.WINDOW - 1}),
    "a window of one row more": ("attention", {"window": v4.WINDOW + 1}),
    "the base of compressed layers": ("attention", {"rope_theta": 160000.0}),
    "half the rotated elements": ("attention", {"rope_dim": v4.CONFIG["qk_rope_head_dim"] // 2}),
    "another epsilon of norms": ("attention", {"norm_eps": 1e-6}),
    "one iteration fewer": ("hyper", {"sinkhorn_iters": v4.CONFIG["hc_sinkhorn_iters"] - 1}),
    "no epsilon in the mixes": ("hyper", {"hc_eps": 1e-12}),
    "no limit of SwiGLU": ("ffn", {"swiglu_limit": 1e9}),
    "no scaling of routed experts": ("ffn", {"routed_scaling": 1.0}),
    "weights that do not sum to 1": ("ffn", {"norm_topk_prob": False}),
    "one expert fewer": ("ffn", {"top_k": v4.CONFIG["num_experts_per_tok"] - 1}),
}


@pytest.mark.deep
@pytest.mark.parametrize("fault", SHAPE_FAULTS)
def test_a_fault_of_shape_is_seen(
    gpu: GpuBackend, backend_name: str, folder: Path, arrays: dict[str, Array], rng: np.random.Generator, fault: str
) -> None:
    if backend_name != "host":
        pytest.skip("the comparison's own test: the host is enough")
    part, change = SHAPE_FAULTS[fault]
    with opened(gpu, folder) as (weights, shapes):
        shapes = replace(shapes, **{part: replace(getattr(shapes, part), **change)})
        with pytest.raises(AssertionError):
            check_layer(arrays, 1, run_layer(gpu, weights, shapes, 1, rng, LONGEST))


def transposed(fn: Array) -> Array:
    """Mixes of comb (i, j) as (j, i)."""
    rest = fn[2 * S :].reshape(S, S, -1).swapaxes(0, 1)
    return np.concatenate([fn[: 2 * S], rest.reshape(S * S, -1)])


TENSOR_FAULTS: dict[str, Any] = {
    "no sinks": ("attn.attn_sink", lambda x: np.full_like(x, -1e30)),
    "sinks of other heads": ("attn.attn_sink", lambda x: np.roll(x, 1)),
    "groups exchanged": ("attn.wo_a.weight", lambda x: np.roll(x, v4.CONFIG["o_lora_rank"], 0)),
    "norms of 1 + w": ("attn_norm.weight", lambda x: (x.astype(F32) + 1).astype(BF16)),
    "streams in another order": ("hc_attn_fn", lambda x: x.reshape(len(x), S, H)[:, ::-1].reshape(x.shape)),
    "comb transposed": ("hc_ffn_fn", transposed),
    "gate and up exchanged": ("ffn.shared_experts.w1.weight", "ffn.shared_experts.w3.weight"),
    "no bias of the choice": ("ffn.gate.bias", np.zeros_like),
    "a router of 8 bits": ("ffn.gate.weight", lambda x: (np.round(x.astype(F32) * 8) / 8).astype(BF16)),
}
"""Tensors of a layer that are taken in another way: what a loader may do wrong."""


@pytest.mark.deep
@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_a_fault_of_tensors_is_seen(
    gpu: GpuBackend, backend_name: str, tmp_path: Path, arrays: dict[str, Array], rng: np.random.Generator, fault: str
) -> None:
    if backend_name != "host":
        pytest.skip("the comparison's own test: the host is enough")
    name, change = TENSOR_FAULTS[fault]
    tensors = v4.tensors()
    if isinstance(change, str):
        one, two = f"layers.1.{name}", f"layers.1.{change}"
        tensors[one], tensors[two] = tensors[two], tensors[one]
    else:
        tensors[f"layers.1.{name}"] = np.ascontiguousarray(change(tensors[f"layers.1.{name}"]))
    v4.write(tmp_path, tensors)
    with opened(gpu, tmp_path) as (weights, shapes), pytest.raises(AssertionError):
        check_layer(arrays, 1, run_layer(gpu, weights, shapes, 1, rng, LONGEST))


def test_the_fixture_says_what_made_it() -> None:
    meta, found = cases.load(FIXTURES / f"{v4.NAME}.npz")
    assert {"torch", "transformers", "numpy", "checkpoint"} <= meta.keys()
    assert (found["layer1_spread"] > 0).all()
    assert found["target_tokens"].shape == (2 * v4.case().clear,)
    assert (found["target_routing_gap"] > SIGMAS * found["target_routing_spread"]).all()
