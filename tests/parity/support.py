# SPDX-License-Identifier: AGPL-3.0-only
"""The target and the MTP head on the inputs of a fixture, and the comparison of what they give with what is stored.

Where the bounds come from. A fixture holds, for each row, the standard deviation ("spread") of its logits over runs of
Hugging Face's code in which every value that a BF16 engine stores had the random error of such a store; how many stores
there are comes from the formulas (tools/goldens/huggingface.py counts them), their size from the BF16 format alone, and
how errors grow through attention and norms from that code itself. The last store, of the logit, is known exactly: half
an ulp at most. So a logit may differ by

    half an ulp + SIGMAS * spread.

with the logit's own spread for the best ones and the row's largest for the others. SIGMAS is 6: some 200,000 logits are
compared, a normal error exceeds 6 deviations once in 500,000,000, and the spreads are known to a tenth only. Beside
this bound of single values the mean error is held to the expected one, which shows what single values cannot.

A router's choice is discrete: where the last expert that is taken and the first that is not are nearly equal, BF16 may
take the other one, and be as right. The tokens of fixtures with experts are such that no choice of the target is so; of
the head's rows those that are, and later drafts of their chains, are left out of every comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from spark_py.model.checkpoint import Checkpoint
from spark_py.model.layer import ForwardContext
from spark_py.model.layers.mtp_head import MtpHead
from spark_py.model.levers import ModelLevers
from spark_py.model.row_policy import RowPolicy
from spark_py.model.target import Target
from spark_py.runtime.gpu import DevicePtr
from tools.goldens import cases, checkpoint

BF16 = np.dtype(ml_dtypes.bfloat16)
Array = np.ndarray[Any, Any]

FIXTURES = Path(__file__).parent / "fixtures"
MAX_SEQ_LEN = 192
SIGMAS = 6.0
ROW = 2.5
"""RMS error of one row over the expected one. A row errs as a whole, since an error early in the model reaches all of
its logits, through few directions: 1.8 was the largest of 1,600 rows on the host."""
ALL_ROWS = 1.2
"""The same over all rows of a fixture, where it was 0.98 to 1.02 on the host."""


@dataclass(frozen=True)
class Part:
    """One prefix ("target", or one of drafts: "head", "reference", "collapsed") of a fixture; `drafts` a base
    position."""

    arrays: dict[str, Array]
    prefix: str
    drafts: int = cases.DRAFTS

    def __getattr__(self, name: str) -> Array:
        return self.arrays[f"{self.prefix}_{name}"]

    def bound(self) -> Array:
        """Bounds of the best logits, [rows, 4]."""
        bounds: Array = half_ulp(self.top_logits) + SIGMAS * self.top_spread
        return bounds

    def sure(self) -> Array:
        """Rows whose experts are known: every router's choice is clear, in the rows before them in their chain too."""
        if f"{self.prefix}_routing_gap" not in self.arrays:
            return np.ones(len(self.top_ids), bool)
        clear = np.all(self.routing_gap > SIGMAS * self.routing_spread, axis=1)
        if self.prefix != "target":
            clear = np.logical_and.accumulate(clear.reshape(-1, self.drafts), axis=1).reshape(-1)
        found: Array = clear
        return found

    def qualifies(self) -> Array:
        """Rows whose best logit is further from the next ones than twice the bound (the bounds of both, which differ
        a little): any other pick is a fault."""
        best, bound = self.top_logits.astype(np.float64), self.bound()
        clear: Array = best[:, :1] - best[:, 1:] > bound[:, :1] + bound[:, 1:]
        return np.all(clear, axis=1) & self.sure()  # type: ignore[no-any-return]


def load(name: str) -> dict[str, Array]:
    """A fixture's arrays, for the checkpoint that is here: another one must fail, not be compared."""
    meta, arrays = cases.load(FIXTURES / f"{name}.npz")
    folder = cases.DEMO if name == "demo" else None
    if folder is not None and checkpoint.digest(folder) != meta["checkpoint"]:
        pytest.fail(f"{name}.npz was made from another checkpoint: run tools/make_goldens.py")
    return arrays


def half_ulp(values: Array) -> Array:
    """Largest error of a BF16 store: half the distance of BF16 values there, 2**-8 of the power of two below."""
    exponent = np.floor(np.log2(np.maximum(np.abs(values.astype(np.float64)), 1e-30)))
    steps: Array = 2.0 ** (exponent - 8)
    return steps


@dataclass
class Rows:
    """What the package gave: logits [rows, V] and picked ids [rows]; `hidden` [rows, h] of the head."""

    logits: Array
    picks: Array
    hidden: Array | None = None


def run_target(target: Target, part: Part) -> Rows:
    """Every sequence of a fixture through the target, all logits and picks."""
    stream = target.gpu.default_stream()
    logits: list[Array] = []
    picks: list[int] = []
    for tokens in np.split(part.tokens, np.cumsum(part.lengths)[:-1]):
        state = target.alloc_state()
        rows = target.verify(tokens.tolist(), state, stream, keep_logits=True)
        target.free_state(state)
        assert rows.logits is not None
        logits.append(rows.logits.astype(np.float64))
        picks += rows.picks
    return Rows(np.concatenate(logits), np.array(picks))


def teach(head: Any, ctx: ForwardContext, part: Part, patch: pytest.MonkeyPatch) -> Callable[[], Rows]:
    """From now on `forward_one` gives the fixture's drafts, one after the other; the result gives what the head itself
    made of each."""
    logits: list[Array] = []
    picks: list[int] = []
    hiddens: list[Array] = []
    ids, forward_one, stream = iter(part.ids.tolist()), head.forward_one, ctx.gpu.default_stream()

    def taught(*args: Any, **kwargs: Any) -> int:
        picks.append(forward_one(*args, **kwargs))
        for into, source, count in (
            (logits, ctx.buffers.logits(), head.draft_vocab),
            (hiddens, ctx.buffers.hidden_states(), ctx.config.hidden_size),
        ):
            row = np.empty(count, BF16)
            ctx.gpu.copy_d2h_on_stream(source, row.view(np.uint8), stream)
            into.append(row.astype(np.float64))
        return int(next(ids))

    patch.setattr(head, "forward_one", taught)
    return lambda: Rows(np.array(logits), np.array(picks), np.array(hiddens))


def run_head(model: Checkpoint, target: Part, part: Part, patch: pytest.MonkeyPatch) -> Rows:
    """Chains of drafts by `propose` at every base position, each draft replaced by the fixture's before the next.

    The prompt up to the first base is fed by `prefill_drafter`; the rows of the drafter's own hidden are dropped after
    each chain, so that every base stands on rows made from the fixture's hidden.
    """
    gpu, config = model.target.gpu, model.config
    stream = gpu.default_stream()
    levers = ModelLevers(row_policy=RowPolicy.VERIFIED, mtp_max_seqs=1)
    head = model.proposer(levers)
    assert isinstance(head, MtpHead)
    ctx = ForwardContext(model.target.buffers, gpu, config, levers)
    rows_found = teach(head, ctx, part, patch)
    hidden_in = part.hidden_in
    for tokens, first in zip(np.split(target.tokens, np.cumsum(target.lengths)[:-1]), part.first, strict=False):
        rows, hidden_in = hidden_in[: len(tokens)], hidden_in[len(tokens) :]
        hidden = gpu.alloc(rows.nbytes, "parity.hidden")
        gpu.copy_h2d(rows.reshape(-1).view(np.uint8), hidden)
        state = head.alloc_state_for(gpu, MAX_SEQ_LEN)
        head.prefill_drafter(tokens[:first].tolist(), hidden, state, ctx, stream)
        for position in range(int(first), len(tokens)):
            row: DevicePtr = hidden.offset((position - 1) * rows.shape[1] * BF16.itemsize)
            head.propose(int(tokens[position]), row, position, cases.DRAFTS, state, ctx, stream)
            head.after_verify(0, state, stream)
        head.free_state(gpu, state)
        gpu.free(hidden)
    return rows_found()


def check(part: Part, rows: Rows, share: float, where: Array | None = None) -> str:
    """Compare; AssertionError for what differs. Gives the line that the test prints. `share` of the rows in the mask
    `where` (None: all) must qualify for the comparison of ids; ids are compared at every row that does."""
    assert len(rows.picks) == len(part.top_ids)
    assert np.isfinite(rows.logits).all()

    sure = part.sure()
    kept = sure[part.full_rows]
    at = part.full_rows[kept]
    wanted = part.logits[kept].astype(np.float64)
    error = rows.logits[at] - wanted
    limit = half_ulp(wanted) + SIGMAS * part.spread_max[at, None]
    worst = float((np.abs(error) / limit).max())
    assert worst <= 1, f"{part.prefix}: a logit is {worst:.2f} of its bound away"
    top = np.take_along_axis(rows.logits, part.top_ids.astype(np.int64), axis=1)
    top_worst = float((np.abs(top - part.top_logits) / part.bound())[sure].max())
    assert top_worst <= 1, f"{part.prefix}: one of the best logits is {top_worst:.2f} of its bound away"
    expected = np.sqrt(part.spread_rms[at] ** 2 + (half_ulp(wanted) ** 2 / 3).mean(axis=1))
    ratio = check_rms(f"{part.prefix} logits", error, expected)
    if rows.hidden is not None:
        hidden_error = rows.hidden[at] - part.hidden[kept]
        ratio = max(ratio, check_rms(f"{part.prefix} hidden", hidden_error, part.hidden_spread_rms[at]))

    clear = part.qualifies()
    wrong = np.flatnonzero(clear & (rows.picks != part.top_ids[:, 0]))
    assert not len(wrong), f"{part.prefix}: {len(wrong)} clear ids differ, first in row {wrong[0]}"
    counted = clear if where is None else clear[where]
    assert counted.mean() >= share, f"{part.prefix}: {counted.mean():.3f} of {len(counted)} rows qualify, not {share}"
    same = int((rows.picks == part.top_ids[:, 0]).sum())
    return (
        f"{part.prefix}: {int(counted.sum())} of {len(counted)} ids ({counted.mean():.1%}) have a gap above twice the"
        f" bound; of all rows {int(clear.sum())} of {len(clear)} ({clear.mean():.1%}), where every id is equal (in all,"
        f" {same});"
        f" largest error {max(worst, top_worst):.2f} of its bound, mean error {ratio:.2f} of the expected"
    )


def check_rms(what: str, error: Array, expected: Array) -> float:
    """Hold the RMS error of rows [rows, n], and of all of them, to the expected one; gives the latter ratio."""
    found = np.sqrt((error**2).mean(axis=1)) / expected
    assert found.max() <= ROW, f"{what}: the RMS error of a row is {found.max():.2f} times the expected one"
    mean = float(np.sqrt((found**2).mean()))
    assert mean <= ALL_ROWS, f"{what}: the RMS error of all rows is {mean:.2f} times the expected one"
    return mean


def first_sequence(arrays: dict[str, Array]) -> dict[str, Array]:
    """A fixture's arrays of its first sequence alone."""
    tokens = int(arrays["target_lengths"][0])
    rows = {"target": tokens, "head": cases.DRAFTS * (tokens - int(arrays["head_first"][0]))}
    found = {}
    for name, values in arrays.items():
        prefix, _, field = name.partition("_")
        if field in ("lengths", "decided", "first"):
            end = 1
        elif field == "hidden_in":
            end = tokens
        elif field in ("full_rows", "logits", "hidden"):
            end = int((arrays[f"{prefix}_full_rows"] < rows[prefix]).sum())
        else:
            end = rows[prefix]
        found[name] = values[:end]
    return found
