# SPDX-License-Identifier: AGPL-3.0-only
"""Several MTP modules, and their targets, against fixtures that transformers' code gave (tools/make_goldens.py): its
own `MtpModel` and `generate(use_mtp=True)` for GLM-4.5, MiniMax-M2's decoder layer within a module for the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_py.model.config import ModelConfig
from spark_py.model.layer import ForwardContext
from spark_py.model.layers.mtp_head import HeadBody
from spark_py.model.layers.mtp_multi import MultiModuleMtpHead
from spark_py.model.levers import ModelLevers
from spark_py.model.mtp_modules_factory import MtpModulesFactory
from spark_py.model.row_policy import RowPolicy
from spark_py.model.speculative import SpeculativeDecoder
from spark_py.model.target import BLOCK_SIZE, DecoderTarget, load_target_weights
from spark_py.runtime.buffers import BufferArena
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.runtime.weights import WeightStore
from tests.parity.support import BF16, FIXTURES, Array, Part, Rows, check, load, run_target
from tools.goldens import cases, checkpoint, modules, modules_cases

MAX_SEQ_LEN = 64
SHARE = 0.6
"""Of the ids, so many must qualify for the comparison at least; it depends on the fixtures alone."""
LEVERS = ModelLevers(row_policy=RowPolicy.VERIFIED, refeed=True, mtp_max_seqs=1)
LOOPS = [name for name in modules_cases.NAMES if modules_cases.case(name).new_tokens]


@pytest.fixture(params=modules_cases.NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Model:
    """A fixture's checkpoint: target, and all modules as one head."""

    def __init__(self, name: str, folder: Path, gpu: GpuBackend, stack: ExitStack) -> None:
        modules.write(folder, modules_cases.config_of(name))
        self.gpu, self.config = gpu, ModelConfig.from_file(folder)
        store = stack.enter_context(WeightStore.open(folder))
        weights = load_target_weights(store, self.config, gpu)
        buffers = stack.enter_context(BufferArena(self.config, 32, MAX_SEQ_LEN, BLOCK_SIZE, 1, gpu))
        self.target = stack.enter_context(DecoderTarget(weights, self.config, gpu, buffers, 1))
        blocks = self.target.kv_cache.num_blocks()
        made = MtpModulesFactory(folder, store, self.config, gpu, weights, MAX_SEQ_LEN, blocks, stack)(LEVERS)
        assert isinstance(made, MultiModuleMtpHead)
        self.head = made
        self.ctx = ForwardContext(buffers, gpu, self.config, LEVERS)


@pytest.fixture
def model(name: str, gpu: GpuBackend, tmp_path: Path) -> Iterator[Model]:
    with ExitStack() as stack:
        yield Model(name, tmp_path, gpu, stack)


class Taught:
    """From now on every module gives the drafts that it is told; kept is what each made of it."""

    def __init__(self, model: Model, patch: pytest.MonkeyPatch) -> None:
        self.model, self.drafts = model, iter(())  # type: ignore[var-annotated]
        self.logits: list[Array] = []
        self.picks: list[int] = []
        self.hiddens: list[Array] = []
        for module in model.head.modules:
            patch.setattr(module, "forward_one", self._taught(module, module.forward_one))

    def _taught(self, module: Any, forward_one: Any) -> Any:
        def taught(*args: Any, **kwargs: Any) -> int:
            self.picks.append(forward_one(*args, **kwargs))
            ctx, gpu = self.model.ctx, self.model.gpu
            for into, source, count in (
                (self.logits, ctx.buffers.logits(), module.draft_vocab),
                (self.hiddens, module.output_row(ctx), self.model.config.hidden_size),
            ):
                row = np.empty(count, BF16)
                gpu.copy_d2h_on_stream(source, row.view(np.uint8), gpu.default_stream())
                into.append(row.astype(np.float64))
            return int(next(self.drafts))

        return taught

    def rows(self) -> Rows:
        return Rows(np.array(self.logits), np.array(self.picks), np.array(self.hiddens))


@contextmanager
def sequences(model: Model, target: Part, head: Part) -> Iterator[Iterator[tuple[list[int], Any]]]:
    """(tokens, address of the hidden row before each position) of every sequence of a fixture."""
    gpu, kept = model.gpu, []
    row_bytes = model.config.hidden_size * BF16.itemsize

    def each() -> Iterator[tuple[list[int], Any]]:
        rows = head.hidden_in
        for tokens in np.split(target.tokens, np.cumsum(target.lengths)[:-1]):
            own, rows = rows[: len(tokens)], rows[len(tokens) :]
            hidden = gpu.alloc(own.nbytes, "parity.hidden")
            kept.append(hidden)
            gpu.copy_h2d(own.reshape(-1).view(np.uint8), hidden)

            def before(position: int, hidden: DevicePtr = hidden) -> DevicePtr:
                return hidden.offset((position - 1) * row_bytes)

            yield tokens.tolist(), before

    yield each()
    for ptr in kept:
        gpu.free(ptr)


def run_chains(model: Model, target: Part, head: Part, patch: pytest.MonkeyPatch) -> Rows:
    """A propose at every base position, each draft replaced by the fixture's; none is accepted, so that every base
    stands on rows of the sequence's own tokens."""
    taught, gpu, stream = Taught(model, patch), model.gpu, model.gpu.default_stream()
    taught.drafts = iter(head.ids.tolist())
    with sequences(model, target, head) as each:
        for tokens, before in each:
            state = model.head.alloc_state(gpu)
            model.head.prefill_drafter(tokens[: modules_cases.FIRST], before(1), state, model.ctx, stream)
            for position in range(modules_cases.FIRST, len(tokens)):
                model.head.propose(tokens[position], before(position), position, head.drafts, state, model.ctx, stream)
                model.head.after_verify(0, state, stream)
            model.head.free_state(gpu, state)
    return taught.rows()


def parts(name: str) -> tuple[Part, Part]:
    arrays = load(name)
    return Part(arrays, "target"), Part(arrays, "head", modules.module_count(modules_cases.config_of(name)))


@pytest.mark.parametrize("name", modules.CONFIGS, indirect=True)
@pytest.mark.no_sanitizer("70 rows through two layers of experts")
def test_target(name: str, model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    target, _ = parts(name)
    assert target.sure().all()
    line = check(target, run_target(model.target, target), SHARE)
    with capsys.disabled():
        print(f"\n{name} {line}")


@pytest.mark.parametrize("name", modules.CONFIGS, indirect=True)
@pytest.mark.no_sanitizer("200 drafts")
def test_modules(name: str, model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    target, head = parts(name)
    line = check(head, run_chains(model, target, head, monkeypatch), SHARE)
    with capsys.disabled():
        print(f"\n{name} {line}")


def run_loop(model: Model, target: Part, head: Part, patch: pytest.MonkeyPatch, fed: bool = True) -> tuple[Array, Rows]:
    """The steps that `generate(use_mtp=True)` took, with what it accepted: (which rows of the fixture its drafts are,
    what the head made of each). Rows of accepted drafts stay; those that they left out are fed, unless not `fed`."""
    gpu, stream, taught, count, arrays = (
        model.gpu,
        model.gpu.default_stream(),
        Taught(model, patch),
        head.drafts,
        head.arrays,
    )
    steps = np.split(arrays["loop_positions"], np.cumsum(arrays["loop_steps"])[:-1])
    drafts = iter(arrays["loop_drafts"].reshape(-1, count).tolist())
    base, at, accepts = 0, [], set()
    with sequences(model, target, head) as each:
        for (tokens, before), positions in zip(each, map(np.ndarray.tolist, steps), strict=True):
            state = model.head.alloc_state(gpu)
            model.head.prefill_drafter(tokens[: positions[0]], before(1), state, model.ctx, stream)
            for position, following in zip(positions, [*positions[1:], None], strict=True):
                given = next(drafts)
                taught.drafts = iter(given)
                model.head.propose(tokens[position], before(position), position, count, state, model.ctx, stream)
                at.append(base + position - modules_cases.FIRST)
                if following is None:
                    break
                accepted = following - position - 1
                accepts.add(accepted)
                assert given[:accepted] == tokens[position + 1 : following]
                model.head.after_verify(accepted, state, stream)
                if accepted and fed:
                    model.head.catchup_drafter(
                        tokens[position:following], before(position + 1), model.head.drafter_rows(state), position + 1,
                        state, model.ctx, stream,
                    )  # fmt: skip
            model.head.free_state(gpu, state)
            base += len(tokens) - modules_cases.FIRST
    assert accepts == set(range(count + 1)), "steps that accept none, some and all"
    rows = (count * np.array(at)[:, None] + np.arange(count)).reshape(-1)
    assert np.array_equal(arrays["loop_drafts"], head.ids[rows])
    return rows, taught.rows()


@pytest.mark.parametrize("name", LOOPS, indirect=True)
@pytest.mark.no_sanitizer("100 drafts")
def test_the_steps_of_transformers_generate(name: str, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each step the head drafts what the fixture does where that is clear, and has logits within the bounds: its
    caches are full at every step, as MTPCandidateGenerator keeps its own."""
    target, head = parts(name)
    rows, found = run_loop(model, target, head, monkeypatch)
    clear = head.qualifies()[rows]
    assert np.array_equal(found.picks[clear], head.ids[rows][clear])
    assert clear.mean() > SHARE
    assert (away(head, rows, found) <= 1).all()


@pytest.mark.parametrize("name", LOOPS[:1], indirect=True)
@pytest.mark.no_sanitizer("100 drafts")
def test_rows_that_are_left_out_are_noticed(name: str, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    target, head = parts(name)
    rows, found = run_loop(model, target, head, monkeypatch, fed=False)
    assert (away(head, rows, found) > 1).mean() > 0.1


def away(head: Part, rows: Array, found: Rows) -> Array:
    """The best logits' errors over their bounds."""
    top = np.take_along_axis(found.logits, head.top_ids[rows].astype(np.int64), axis=1)
    errors: Array = np.abs(top - head.top_logits[rows]) / head.bound()[rows]
    return errors


@pytest.mark.parametrize("name", LOOPS[-1:], indirect=True)
@pytest.mark.no_sanitizer("80 tokens")
def test_decoding_takes_the_steps_of_transformers_generate(
    name: str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Target, modules and loop together, with nothing of the fixture but the prompts: the same tokens, the same
    drafts, and as many of them accepted at every step. It is the fixture where no two logits that matter are near."""
    target, head = parts(name)
    arrays, taken, drafted = head.arrays, [], []
    propose = model.head.propose

    def seen(token: int, hidden: DevicePtr, position: int, *args: Any, **kwargs: Any) -> list[int]:
        found = propose(token, hidden, position, *args, **kwargs)
        taken.append(position)
        drafted.append(found)
        return found

    monkeypatch.setattr(model.head, "propose", seen)
    decoder = SpeculativeDecoder(model.target, model.head, head.drafts, (), LEVERS)
    steps = iter(np.split(arrays["loop_positions"], np.cumsum(arrays["loop_steps"])[:-1]))
    drafts = iter(arrays["loop_drafts"].reshape(-1, head.drafts).tolist())
    for tokens in np.split(target.tokens, np.cumsum(target.lengths)[:-1]):
        first = modules_cases.FIRST
        result = decoder.generate(tokens[:first].tolist(), len(tokens) - first)
        assert result.tokens == tokens[first:].tolist()
        # In its last steps the loop here asks for no more drafts than tokens are wanted.
        wanted = next(steps).tolist()
        for position, found, known in zip(taken, drafted, [next(drafts) for _ in wanted], strict=False):
            assert position == wanted.pop(0)
            assert found == known[: len(found)]
        assert len(taken) >= 10
        taken.clear()
        drafted.clear()


def test_the_fixture_is_of_the_checkpoint_that_the_seed_gives(name: str, tmp_path: Path) -> None:
    """Else two different models would be compared: the weights are made again, not stored."""
    modules.write(tmp_path, modules_cases.config_of(name))
    meta, arrays = cases.load(FIXTURES / f"{name}.npz")
    assert checkpoint.digest(tmp_path) == meta["checkpoint"]
    assert {"torch", "transformers", "numpy"} <= meta.keys()
    _, head = parts(name)
    assert len(head.ids) == head.drafts * sum(n - modules_cases.FIRST for n in arrays["target_lengths"])
    assert head.sure().mean() > 0.8


def test_the_bodies_are_those_that_differ(name: str) -> None:
    """What the fixtures stand for beside Qwen3-Next's."""
    config = ModelConfig.from_dict(modules_cases.config_of(name))
    body = HeadBody.of(config)
    assert not body.gated
    assert body.chain_after_norm is name.startswith("glm4")
    assert config.num_mtp_modules == (2 if "_2" in name and "glm" in name else 3)


FAULTS = {
    "chained on the other side of the norm": ("glm4_moe_2", "chain_after_norm"),
    "columns of eh_proj the other way round": ("minimax_m2", "hidden_first"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.no_sanitizer("200 drafts")
def test_another_body_is_noticed(gpu: GpuBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    name, field = FAULTS[fault]
    right = HeadBody.of

    def wrong(config: ModelConfig) -> HeadBody:
        body = right(config)
        return replace(body, **{field: not getattr(body, field)})

    monkeypatch.setattr(HeadBody, "of", wrong)
    noticed(name, gpu, tmp_path, monkeypatch)


@pytest.mark.no_sanitizer("200 drafts")
def test_routing_without_the_bias_is_noticed(gpu: GpuBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = modules.tensors

    def unbiased(config: Any) -> dict[str, Array]:
        return {n: x * 0 if n.endswith("e_score_correction_bias") else x for n, x in drawn(config).items()}

    monkeypatch.setattr(modules, "tensors", unbiased)
    noticed("glm4_moe_2", gpu, tmp_path, monkeypatch)


def noticed(name: str, gpu: GpuBackend, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """The comparison of modules fails."""
    target, head = parts(name)
    with ExitStack() as stack:
        rows = run_chains(Model(name, folder, gpu, stack), target, head, patch)
    with pytest.raises(AssertionError, match=r"of its bound|differ|times the expected"):
        check(head, rows, SHARE)
