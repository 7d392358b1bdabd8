# SPDX-License-Identifier: AGPL-3.0-only
"""What the head writes to the log, and the chain of drafts behind the final norm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spark_py.model.layers.mtp_head import MtpHead
from spark_py.model.layers.mtp_head.diagnostics import stage_norms, top_probabilities
from spark_py.model.levers import ModelLevers
from spark_py.runtime.gpu import GpuBackend
from tests.model.support import BF16, Oracle, a_hidden, download, make_rig


@pytest.mark.parametrize(
    ("logits", "k", "ids"),
    [
        ([0.0, 2.0, 1.0], 2, [1, 2]),
        ([1.0, 3.0, 3.0, 3.0], 3, [1, 2, 3]),
        ([1.0, 0.0], 8, [0, 1]),
        ([float("nan"), 1.0, 2.0], 3, [2, 1, 0]),
        ([5.0], 1, [0]),
    ],
)
def test_the_most_probable(logits: list[float], k: int, ids: list[int]) -> None:
    found = top_probabilities(np.array(logits, np.float32), k)
    assert [token for token, _ in found] == ids
    if not np.isnan(logits).any():
        shares = np.exp(logits) / np.exp(logits).sum()
        assert [share for _, share in found] == pytest.approx([shares[i] for i in ids])


@pytest.mark.parametrize("k", [0, 1, 8])
def test_the_most_probable_ids_of_each_draft(
    gpu: GpuBackend, rng: np.random.Generator, caplog: pytest.LogCaptureFixture, k: int
) -> None:
    plain = make_rig(gpu, rng)
    rig = make_rig(gpu, rng, levers=ModelLevers(shadow_topk=k), arrays=plain.arrays)
    hidden = a_hidden(rig, rng)
    with caplog.at_level("INFO", "spark_py.model.mtp_head"):
        drafts = rig.propose(rig.state(), 7, hidden, 4, 3)
    assert drafts == plain.propose(plain.state(), 7, hidden, 4, 3), "the log changes no draft"
    lines = [record.message for record in caplog.records if record.message.startswith("draft after")]
    assert len(lines) == (3 if k else 0)
    for i, line in enumerate(lines):
        head, _, rest = line.partition(": ")
        assert head == f"draft after position {4 + i}"
        shown = [part.split(": ") for part in rest.split(", ")]
        assert len(shown) == k
        assert int(shown[0][0]) == drafts[i]
    if lines:
        logits = rig.logits()
        shares = np.sort(np.exp(logits - logits.max()))[::-1] / np.exp(logits - logits.max()).sum()
        assert [float(share) for _, share in shown] == pytest.approx(shares[:k].tolist(), abs=6e-5)


def test_norms_of_the_stages(gpu: GpuBackend, rng: np.random.Generator, caplog: pytest.LogCaptureFixture) -> None:
    """Against the formulas in FP64. Bound: a norm of BF16 values that differ by roundings, of which at most eight lie
    between the inputs and a stage, 8 * 2^-9."""
    rig = make_rig(gpu, rng, levers=ModelLevers(debug_norms=True))
    hidden, oracle = a_hidden(rig, rng), Oracle.of(rig.config, rig.arrays)
    with caplog.at_level("INFO", "spark_py.model.mtp_head"):
        rig.propose(rig.state(), 7, hidden, 4, 1)
    (line,) = [record.message for record in caplog.records if record.message.startswith("norms at")]
    assert line.startswith("norms at position 4: embedding ")
    norms = stage_norms(rig.head, rig.ctx, rig.stream)
    assert line.endswith(f"logits {norms['logits']:.4g}")

    logits, stream = oracle.step(7, hidden.astype(np.float64), 4)
    wanted = {
        "embedding": oracle.w["embed_tokens"][7],
        "normed embedding": oracle.rms(oracle.w["embed_tokens"][7], "pre_fc_norm_embedding"),
        "normed hidden": oracle.rms(hidden.astype(np.float64), "pre_fc_norm_hidden"),
        "key": oracle.keys[0],
        "value": oracle.values[0],
        "stream": stream,
        "normed stream": oracle.rms(stream, "norm"),
        "logits": logits,
    }
    for name, value in wanted.items():
        assert norms[name] == pytest.approx(np.linalg.norm(value), rel=8 * 2**-9), name
    _, normed = oracle.body_input(7, hidden.astype(np.float64))
    joint = (oracle.w["q_proj"] @ normed).reshape(4, 2, 32)
    assert norms["gate"] == pytest.approx(np.linalg.norm(joint[:, 1]), rel=8 * 2**-9)
    assert norms["query"] == pytest.approx(np.linalg.norm(oracle.rms(joint[:, 0], "q_norm")), rel=8 * 2**-9)
    gated = np.repeat(oracle.values[0], 2, 0) / (1 + np.exp(-joint[:, 1]))
    assert norms["attention"] == pytest.approx(np.linalg.norm(gated), rel=8 * 2**-9)
    assert len(norms) == 13


class Watched(MtpHead):
    """Remembers the hidden row that each draft was given."""

    given: list[bytes]
    left: list[tuple[bytes, bytes]]

    def forward_one(self, token: Any, target_hidden: Any, position: Any, state: Any, ctx: Any, *rest: Any) -> int:
        def read(ptr: Any) -> bytes:
            return download(self.gpu, ptr, (self.h,), BF16).tobytes()

        self.given.append(read(target_hidden))
        draft = super().forward_one(token, target_hidden, position, state, ctx, *rest)
        self.left.append((read(ctx.buffers.hidden_states()), read(ctx.buffers.norm_output())))
        return draft


@pytest.mark.parametrize("postnorm", [False, True])
def test_what_the_next_draft_goes_on_from(gpu: GpuBackend, rng: np.random.Generator, postnorm: bool) -> None:
    rig = make_rig(gpu, rng, head_class=Watched, levers=ModelLevers(chain_postnorm=postnorm))
    assert isinstance(rig.head, Watched)
    rig.head.given, rig.head.left = [], []
    hidden = a_hidden(rig, rng)
    rig.propose(rig.state(), 7, hidden, 4, 3)
    assert rig.head.given == [hidden.tobytes(), *(both[postnorm] for both in rig.head.left[:2])]
    assert all(stream != normed for stream, normed in rig.head.left)


@pytest.mark.parametrize("on", [False, True])
def test_seconds_of_what_is_fed(
    gpu: GpuBackend, rng: np.random.Generator, caplog: pytest.LogCaptureFixture, on: bool
) -> None:
    rig = make_rig(gpu, rng, levers=replace(ModelLevers(), prefill_profile=on))
    with caplog.at_level("INFO", "spark_py.model.mtp_head"):
        rig.feed(rig.state(), [1, 2, 3], rng.standard_normal((3, 64)))
    lines = [record.message for record in caplog.records if record.message.startswith("fed ")]
    assert [line.split()[:4] for line in lines] == ([["fed", "2", "drafter", "rows"]] if on else [])
