# SPDX-License-Identifier: AGPL-3.0-only
"""DeepSeek-V4 draft heads that are wrong in one rule, made from the package's own source: a test must catch each."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from spark_py.model.layers.deepseek_v4 import V4Attention
from spark_py.model.layers.deepseek_v4_mtp import DeepseekV4MtpHead
from spark_py.model.layers.deepseek_v4_mtp_forward import DeepseekV4MtpForward
from spark_py.model.layers.deepseek_v4_mtp_new import DeepseekV4MtpNew
from spark_py.model.layers.hidden_mode import HiddenMode
from spark_py.model.layers.mtp_head.pick import MtpHeadPick
from spark_py.model.layers.mtp_head.states import MtpStates, _Undo
from spark_py.model.row_policy import RowPolicy
from spark_py.runtime.errors import SparkError
from spark_py.runtime.gpu import GpuBackend
from spark_py.runtime.kv_cache import KvCacheDtype
from tests.model import test_v4_mtp as heads
from tests.model import test_v4_mtp_choice as choice
from tests.model import test_v4_mtp_forward as forward
from tests.model import test_v4_mtp_refusals as refusals

REFERENCE, COLLAPSED = HiddenMode.REFERENCE, HiddenMode.COLLAPSED
Check = Callable[[GpuBackend, np.random.Generator], Any]


def draft(mode: HiddenMode) -> Check:
    return partial(forward.test_a_draft_is_the_modules, mode=mode, kv_dtype=KvCacheDtype.BF16)


def chain(mode: HiddenMode, graph: bool = False) -> Check:
    return partial(forward.test_later_drafts_go_on_from_the_heads_own, mode=mode, graph=graph)


def fed(mode: HiddenMode, prompt: int) -> Check:
    return partial(heads.test_prompts_at_once_and_in_pieces, prompt=prompt, mode=mode)


def rows(policy: RowPolicy, refeed: bool) -> Check:
    return partial(
        heads.test_rows_over_random_accept_patterns, policy=policy, refeed=refeed, mode=REFERENCE,
        head_class=heads.RowsOnly, steps=12,
    )  # fmt: skip


def deferred(graph: bool) -> Check:
    return partial(choice.test_the_deferred_id_is_the_last_drafts, mode=REFERENCE, graph=graph)


WINDOW: Check = partial(forward.test_the_window_ends_where_it_should, window=16, graph=False)
REFUSALS: Check = partial(refusals.test_wrong_arguments_change_nothing, mode=REFERENCE)
FAILURE: Check = partial(refusals.test_a_propose_that_fails_gives_its_blocks_back, mode=REFERENCE)
GRAPH: Check = partial(choice.test_a_graph_drafts_as_single_launches_do, mode=REFERENCE)
POOL: Check = partial(heads.test_the_pool, kv_dtype=KvCacheDtype.BF16)


@dataclass(frozen=True)
class Mutant:
    """`old` in a method's source becomes `new`; `check` must fail then."""

    name: str
    owner: type[Any]
    method: str
    old: str
    new: str
    check: Check


HEAD, FORWARD, NEW, UNDO = DeepseekV4MtpHead, DeepseekV4MtpForward, DeepseekV4MtpNew, _Undo
SUM = "self.connections.expand_sum(b.h_branch, "
KEYS = "own.last_pair_key = own.base_pair_key"
MUTANTS = [
    Mutant("position one more", MtpHeadPick, "_upload_meta", "position, self", "position + 1, self",
           heads.test_metadata_of_a_row),
    Mutant("length without the row itself", MtpHeadPick, "_upload_meta", "state.seq_len + 1,", "state.seq_len,",
           heads.test_metadata_of_a_row),
    Mutant("slot by position", MtpHeadPick, "_upload_meta", "self._slot(state, state.seq_len)", "position",
           heads.test_metadata_of_a_row),
    Mutant("later drafts at the first one's position", HEAD, "_propose_by_steps", "stacked, position + i, own",
           "stacked, position, own", chain(REFERENCE)),
    Mutant("fed rows one position further", FORWARD, "_write_chunk", "np.arange(position, position + rows",
           "np.arange(position + 1, position + 1 + rows", fed(REFERENCE, 17)),
    Mutant("every chunk from the first one's source", FORWARD, "_write_fed_rows", "source.offset(done * source_bytes)",
           "source", fed(COLLAPSED, 130)),
    Mutant("streams taken for BF16", FORWARD, "_write_fed_rows", "self.h * 4 if", "self.h * 2 if", fed(REFERENCE, 130)),
    Mutant("window one less", V4Attention, "_attend", "shape.window,", "shape.window - 1,", WINDOW),
    Mutant("window one more", V4Attention, "_attend", "shape.window,", "shape.window + 1,", WINDOW),
    Mutant("reference mode chains on the collapsed row", FORWARD, "_forward_row", "self._lm_head(",
           "self.connections.expand(h_out, combiner.streams, 1, stream); self._lm_head(", chain(REFERENCE)),
    Mutant("the same in a graph", FORWARD, "_forward_row", "self._lm_head(",
           "self.connections.expand(h_out, combiner.streams, 1, stream); self._lm_head(", chain(REFERENCE, graph=True)),
    Mutant("collapsed mode chains behind the final norm", FORWARD, "chain_source", "if self.levers.chain_postnorm",
           "if True", chain(COLLAPSED)),
    Mutant("later drafts go on from the target's", HEAD, "_propose_by_steps", "draft, self.chain_source(ctx, stacked)",
           "draft, source", chain(REFERENCE)),
    Mutant("later drafts embed the first token", HEAD, "_propose_by_steps", "current_token, current_source = draft,",
           "current_token, current_source = token,", chain(COLLAPSED)),
    Mutant("no embedding", FORWARD, "_combine", f"{SUM}b.h_in", f"{SUM}b.h_branch", draft(REFERENCE)),
    Mutant("the first stream for all", FORWARD, "_combine", "b.streams, rows, True", "b.streams, rows, False",
           draft(REFERENCE)),
    Mutant("norms exchanged", FORWARD, "_combine", "embed, self.module.enorm", "embed, self.module.hnorm",
           draft(COLLAPSED)),
    Mutant("no final norm", FORWARD, "_forward_row", "(normed, buf.logits()", "(h_out, buf.logits()",
           draft(COLLAPSED)),
    Mutant("no row stays", MtpStates, "after_verify", "keep = rows_to_keep(", "keep = 0 * rows_to_keep(",
           rows(RowPolicy.SEED, False)),
    Mutant("refeed forgotten", MtpStates, "after_verify", "self.levers.refeed)", "False)",
           rows(RowPolicy.VERIFIED, True)),
    Mutant("keys by subtraction across gaps", MtpStates, "after_verify", KEYS, "own.last_pair_key -= drafted",
           heads.test_the_engines_rule_in_numbers),
    Mutant("a verdict that stays", MtpStates, "after_verify", "own.last_num_drafted, own.base_pair_key = 0, None",
           "pass", REFUSALS),
    Mutant("a verdict that was not asked for", HEAD, "propose", 'self._require_verdict(own, "propose")', "pass",
           REFUSALS),
    Mutant("the first draft's id deferred", HEAD, "_propose_by_steps", "if i == len(masks) - 1", "if i == 0",
           deferred(False)),
    Mutant("the same in a graph's", HEAD, "_propose_on_device", "inputs.told(drafts - 1)", "inputs.told(0)",
           deferred(True)),
    Mutant("an old deferred id", HEAD, "propose", "self.last_conf, self._deferred = 1.0, False", "self.last_conf = 1.0",
           deferred(True)),
    Mutant("blocks lost in an error", UNDO, "__exit__", "head.restore_state(own, taken)",
           "own.restore(taken)", FAILURE),
    Mutant("rows kept in an error", UNDO, "__exit__", "head.restore_state(own, taken)", "pass", FAILURE),
    Mutant("blocks for one sequence", NEW, "_build", "* self.levers.mtp_max_seqs", "", POOL),
    Mutant("a graph of another arena", HEAD, "_propose_on_device", "weakref.ref(ctx.buffers))",
           "weakref.ref(self.kv_cache))", GRAPH),
    Mutant("a graph of the other number of drafts", HEAD, "_propose_on_device", "GraphKey(drafts,", "GraphKey(1,",
           GRAPH),
    Mutant("blocks of a freed state", MtpStates, "free_state", "self._free_table(self._own(state).block_table)",
           "self._own(state)", rows(RowPolicy.SEED, False)),
]  # fmt: skip


def patched(mutant: Mutant) -> Any:
    """The method with its source changed."""
    method = inspect.unwrap(vars(mutant.owner)[mutant.method])
    source = textwrap.dedent(inspect.getsource(method))
    assert source.count(mutant.old) == 1, f"{mutant.old!r} is there {source.count(mutant.old)} times"
    names: dict[str, Any] = dict(vars(sys.modules[method.__module__]))
    exec(source.replace(mutant.old, mutant.new), names)
    return names[mutant.method]


@pytest.mark.host_only("rules do not depend on where kernels run")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_rule_is_caught(
    gpu: GpuBackend,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    mutant: Mutant,
) -> None:
    monkeypatch.setattr(mutant.owner, mutant.method, patched(mutant))
    with pytest.raises((AssertionError, SparkError, pytest.fail.Exception)):
        mutant.check(gpu, rng)
