# SPDX-License-Identifier: AGPL-3.0-only
"""MultiModuleMtpHead's numbers: every module's drafts against the definition in FP64, decoding with it, and versions of
it that are wrong in one detail, which the tests must see.

Bound: as for one head, 2.5 % in relative L2 of a chain of three rows (see test_mtp_head_forward). Module i's outputs go
through i + 1 heads, which is what three chained drafts do.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from spark_py.model.batched_speculative import BatchedSpeculativeDecoder
from spark_py.model.checkpoint import open_checkpoint
from spark_py.model.layers import mtp_multi, mtp_multi_rows, mtp_multi_state
from spark_py.model.layers.mtp_head import MtpHead
from spark_py.model.levers import ModelLevers
from spark_py.model.row_policy import RowPolicy
from spark_py.model.speculative import SpeculativeDecoder
from spark_py.runtime.gpu import GpuBackend
from tests.model import test_mtp_multi as rules
from tests.model.multi_support import MultiRig, Text, make_multi
from tests.model.scripted import write_drafting_tiny
from tests.model.support import Array, Oracle, relative_l2
from tests.thin import thinned

BOUND = 0.025
MultiModule = mtp_multi.MultiModuleMtpHead


def definition(rig: MultiRig, tokens: list[int], hidden: list[Array]) -> list[tuple[Array, Array]]:
    """(logits, hidden) of draft i for each module i, by the definition of the chain over a whole sequence in FP64.

    tokens: the sequence, its pending token, and all drafts but the last. hidden: the target's row after each token that
    is processed. Module i combines the output of the module before at index x with the token at x + i + 1.
    """
    before = [row.astype(np.float64) for row in hidden]
    last = []
    for i, module in enumerate(rig.rigs):
        oracle, outputs = Oracle.of(rig.first.config, module.arrays), []
        logits = np.empty(0)
        for x, row in enumerate(before):
            logits, out = oracle.step(tokens[x + i + 1], row, x + i + 1)
            outputs.append(out)
        last.append((logits, outputs[-1]))
        before = outputs
    return last


def check_chain(rig: MultiRig, text: Text, state: Any) -> list[int]:
    """A propose by every module, each draft's logits and hidden against the definition."""
    drafts: list[int] = []
    found = []
    for k in range(1, rig.head.num_modules() + 1):
        one = rig.state()
        text.prefill(one)
        drafts = text.propose(one, k)
        found.append((rig.first.logits(), rig.first.hidden()))
        rig.head.free_state(rig.first.gpu, one)
    assert text.propose(state, rig.head.num_modules()) == drafts
    for i, (logits, out) in enumerate(definition(rig, [*text.tokens, *drafts[:-1]], text.hidden)):
        assert relative_l2(found[i][0], logits) < BOUND, f"logits of module {i}"
        assert relative_l2(found[i][1], out) < BOUND, f"hidden row of module {i}"
        best, second = np.sort(logits)[-1], np.sort(logits)[-2]
        if best - second > 4 * BOUND * np.sqrt(np.mean(logits**2)):
            assert drafts[i] == int(np.argmax(logits)), f"draft {i}"
    return drafts


@pytest.mark.parametrize("prompt", thinned([1, 2, 3, 5, 17, 40], keep=[0, 2]))
def test_drafts_are_those_of_the_definition(gpu: GpuBackend, rng: np.random.Generator, prompt: int) -> None:
    """After a prompt, and again after a verdict and a feed."""
    rig = make_multi(gpu, rng, policy=RowPolicy.VERIFIED, refeed=True)
    text, state = Text(rig, rng, prompt), rig.state()
    text.prefill(state)
    for accepted in (2, 0, 3, 1):
        drafts = check_chain(rig, text, state)
        rig.head.after_verify(accepted, state, rig.first.stream)
        text.confirm(drafts[:accepted])
        text.catch_up(state)
    check_chain(rig, text, state)


def test_the_seeds_chain_goes_through_hidden_states(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """Without a prompt: draft i is module i's alone, over the one row that the module has."""
    rig = make_multi(gpu, rng, levers={"chain_postnorm": True})
    text, hidden = Text(rig, rng, 9), None
    for k in (1, 2, 3):
        drafts = text.propose(rig.state(), k)
        token = text.tokens[-1] if k == 1 else drafts[k - 2]
        before = text.hidden[-1].astype(np.float64) if hidden is None else hidden
        oracle = Oracle.of(rig.first.config, rig.rigs[k - 1].arrays)
        logits, hidden = oracle.step(token, before, 9 + k - 1)
        assert relative_l2(rig.first.logits(), logits) < BOUND
        assert relative_l2(rig.first.hidden(), hidden) < BOUND


# ---------------------------------------------------------------- decoding


@contextmanager
def decoding(
    gpu: GpuBackend, folder: Path, rng: np.random.Generator, levers: ModelLevers, modules: int = 3
) -> Iterator[tuple[Any, MultiModule]]:
    """A target and modules that are copies of its checkpoint's own head, so that some drafts are right."""
    tiny = write_drafting_tiny(folder, rng)
    with open_checkpoint(tiny.folder, gpu, 128) as found:
        heads = [found.proposer(levers) for _ in range(modules)]
        for head in heads:
            assert isinstance(head, MtpHead)
            head.config = replace(head.config, num_mtp_modules=modules)
        yield found.target, mtp_multi.MultiModuleMtpHead(heads)


@pytest.mark.parametrize(("policy", "refeed"), thinned(rules.MODES, keep=[2], ids=rules.IDS))
def test_greedy_tokens_are_those_of_the_plain_run(
    gpu: GpuBackend, rng: np.random.Generator, tmp_path: Path, policy: RowPolicy, refeed: bool
) -> None:
    levers = ModelLevers(row_policy=policy, refeed=refeed, mtp_max_seqs=2)
    with decoding(gpu, tmp_path / "model", rng, levers) as (target, head):
        prompt = rng.integers(0, 300, 19).tolist()
        plain = SpeculativeDecoder(target, None, 0).generate(prompt, 40)
        accepted = 0
        for num_drafts in (1, 2, 3, 4):
            result = SpeculativeDecoder(target, head, num_drafts, levers=levers).generate(prompt, 40)
            assert result.tokens == plain.tokens
            assert len(result.stats.drafted_at) == min(num_drafts, 3)
            accepted += result.stats.accepted
        assert accepted > 0
        batched = BatchedSpeculativeDecoder(target, head, 3, levers=levers).generate_all([prompt, prompt[5:]], 30)
        assert batched[0].tokens == plain.tokens[:30]
        assert batched[1].tokens == SpeculativeDecoder(target, None, 0).generate(prompt[5:], 30).tokens
        for module in head.modules:
            assert module.kv_cache.num_free_blocks() == module.kv_cache.num_blocks()


# ---------------------------------------------------------------- wrong in one detail


@dataclass(frozen=True)
class Mutant:
    """`find` in the source of `module` becomes `put`; one of the tests named must fail."""

    module: str
    find: str
    put: str
    tests: tuple[str, ...]


STATE, ROWS, HEAD = "mtp_multi_state", "mtp_multi_rows", "mtp_multi"
MUTANTS = (
    Mutant(HEAD, "i == accepted and not self._verified", "i == accepted", ("rows[verified]",)),
    Mutant(HEAD, "i == accepted and not self._verified", "False", ("rows[seed]",)),
    Mutant(HEAD, "start + i, own, ctx, stream, embed_target", "start, own, ctx, stream, embed_target", ("rows[seed]",)),
    Mutant(HEAD, "            hidden = self.modules[i].output_row(ctx)\n", "", ("seed_chain",)),
    Mutant(HEAD, "hidden = self.modules[i].output_row(ctx)", "hidden = ctx.buffers.norm_output()", ("seed_chain",)),
    Mutant(HEAD, "self._deferred = i\n", "self._deferred = len(self.modules) - 1\n", ("deferred",)),
    Mutant(HEAD, "draft_embed_target if i == k - 1 else None", "draft_embed_target", ("deferred",)),
    Mutant(HEAD, "        own.last_num_drafted = 0\n        log", "        log", ("verdict",)),
    Mutant(HEAD, "check_verdict(num_accepted, k)", "num_accepted", ("verdict",)),
    Mutant(HEAD, "        del masks[len(self.modules) :]\n", "        masks = [masks[0]] * wanted\n", ("masks",)),
    Mutant(HEAD, "                per.last_pair_key = per.base_pair_key", "                pass", ("rows[seed]",)),
    Mutant(HEAD, "            module.free_state(gpu, per)", "            per.seq_len = 0", ("thousand",)),
    Mutant(HEAD, "own.outputs.keep(own.last_start, confirmed)", "own.outputs.keep(confirmed, confirmed)",
           ("verdicts",)),
    Mutant(HEAD, "drop = min(max(last_position(per) - confirmed, 0), written)", "drop = max(written - accepted, 0)",
           ("rows[refeed]",)),
    Mutant(ROWS, "if at - 1 not in known[i - 1]:", "if False:", ("prompts",)),
    Mutant(ROWS, "start = at = max(first, last_position(states[i]) + 1)", "start = at = first", ("rows[refeed]",)),
    Mutant(ROWS, "ends = [position + (i if i < k else 0) for i in range(n)]",
           "ends = [position + (i if i < k else -1) for i in range(n)]", ("rows[refeed]",)),
    Mutant(ROWS, "            for q in range(starts[i], ends[i]):\n                row(i, q)\n", "",
           ("rows[refeed]", "chain")),
    Mutant(ROWS, "tokens[q - position]", "tokens[0]", ("chain", "verdicts")),
    Mutant(ROWS, "outputs.row(i - 1, position + i - 1) if i else target_hidden",
           "ctx.buffers.hidden_states() if i else target_hidden", ("chain",)),
    Mutant(ROWS, "store.chunk_row(i - 1, at - begin) if i", "store.chunk_row(i - 1, at - begin + 1) if i",
           ("chain",)),
    Mutant(ROWS, "store.copy_row(store.chunk_row(i, FEED_CHUNK), store.chunk_row(i, 0), stream)", "pass", ("prompts",)),
    Mutant(STATE, "taken = {*kept.values(), *self.slots[module].values()}", "taken = {*self.slots[module].values()}",
           ("late",)),
    Mutant(STATE, "            self.outputs.slots = taken.slots\n", "            pass\n", ("propose_error",)),
)  # fmt: skip


def run_test(name: str, gpu: GpuBackend, rng: np.random.Generator, caplog: pytest.LogCaptureFixture) -> None:
    """One of the tests, on a smaller scale where it is a long one."""
    verified = RowPolicy.VERIFIED
    if name.startswith("rows["):
        policy, refeed = dict(zip(("seed]", "verified]", "refeed]"), rules.MODES, strict=True))[name[5:]]
        rules.test_rows_over_random_accept_patterns(gpu, rng, policy, refeed)
    elif name == "chain":
        test_drafts_are_those_of_the_definition(gpu, rng, 5)
    elif name == "seed_chain":
        test_the_seeds_chain_goes_through_hidden_states(gpu, rng)
    elif name == "deferred":
        rules.test_the_deferred_id_is_in_the_module_that_drafted_last(gpu, rng, RowPolicy.SEED, False, 2)
    elif name == "verdict":
        rules.test_a_verdict_counts_once(gpu, rng, RowPolicy.SEED, False)
    elif name == "masks":
        rules.test_one_mask_is_one_draft_and_a_mask_a_position_is_as_many(gpu, rng, caplog, False)
    elif name == "thousand":
        rules.test_a_thousand_requests_lose_nothing(gpu, rng, caplog, verified, True)
    elif name == "verdicts":
        for drafted, accepted in ((2, 1), (2, 2), (3, 3), (1, 1)):
            rules.test_each_verdict_leaves_the_confirmed_rows(gpu, rng, drafted, accepted)
    elif name == "prompts":
        for prompt in (3, 67):
            rules.test_prompts_around_the_first_rows_and_the_ends_of_chunks(gpu, rng, prompt)
    elif name == "late":
        rules.test_a_propose_that_failed_leaves_what_a_late_feed_needs(gpu, rng)
    else:
        assert name == "propose_error"
        rules.test_an_error_at_any_row_of_a_propose_is_undone(gpu, rng, verified, True)


def rebuilt(mutant: Mutant | None) -> type[MultiModule]:
    """MultiModuleMtpHead, made anew from its three files, one of them edited."""
    made: dict[str, ModuleType] = {}
    with pytest.MonkeyPatch.context() as patch:
        for original in (mtp_multi_state, mtp_multi_rows, mtp_multi):
            name = original.__name__.rpartition(".")[2]
            source = inspect.getsource(original)
            if mutant is not None and mutant.module == name:
                assert source.count(mutant.find) == 1, f"{source.count(mutant.find)} times: {mutant.find!r}"
                source = source.replace(mutant.find, mutant.put)
            module = ModuleType(original.__name__)
            module.__package__ = original.__package__
            patch.setitem(sys.modules, original.__name__, module)
            exec(compile(source, f"{name} (mutant)", "exec"), module.__dict__)
            made[name] = module
    return made["mtp_multi"].MultiModuleMtpHead  # type: ignore[no-any-return]


@pytest.mark.no_sanitizer("faults on purpose")
@pytest.mark.deep
@pytest.mark.parametrize(
    "mutant", [None, *MUTANTS], ids=lambda m: "unchanged" if m is None else f"{m.put.strip()[:50]}"
)
def test_mutants(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    mutant: Mutant | None,
) -> None:  # fmt: skip
    made = rebuilt(mutant)
    monkeypatch.setattr("tests.model.multi_support.MultiModuleMtpHead", made)
    monkeypatch.setattr(rules, "STEPS", 40)
    names = sorted({name for m in MUTANTS for name in m.tests}) if mutant is None else mutant.tests
    for name in names:
        caplog.clear()
        if mutant is None:
            run_test(name, gpu, rng, caplog)
            continue
        try:
            run_test(name, gpu, rng, caplog)
        except (ImportError, NameError, SyntaxError):
            raise
        except (Exception, pytest.fail.Exception):
            continue
        pytest.fail(f"{name} does not see {mutant}")
