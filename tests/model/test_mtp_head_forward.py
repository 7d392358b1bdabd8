# SPDX-License-Identifier: AGPL-3.0-only
"""MtpHead's numbers: chained drafts against a head in FP64, and proof that the comparison would see a fault.

Bound: a row passes about 20 roundings to BF16 on its way to the logits, each 2^-9 of a value at most and independent,
which gives sqrt(20) * 2^-9 / sqrt(3) = 0.5 % in relative L2; the second and third draft start from the one before,
which at most doubles and triples it. Over 30 seeds the largest was 1.5 %; the faults below are at 5 % and more. 2.5 %
is between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from spark_py.model.layers.mtp_head import HeadBody, MtpHead, NormConvention, attention, ffn, norms, pick, rows
from spark_py.model.levers import ModelLevers
from spark_py.ops.residual_add import sigmoid_gate_mul
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from tests.model.mtp_forms import hide
from tests.model.support import BF16, Array, Oracle, Rig, download, make_rig, relative_l2

BOUND = 0.025
PLAIN = HeadBody(norm=NormConvention.PLAIN)


class Recording(MtpHead):
    """A head that keeps what each draft put out: (id, logits, hidden)."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.seen: list[tuple[int, Array, Array]] = []

    def forward_one(self, token: Any, target_hidden: Any, position: Any, state: Any, ctx: Any, *rest: Any) -> int:
        picked = super().forward_one(token, target_hidden, position, state, ctx, *rest)
        logits = download(self.gpu, ctx.buffers.logits(), (self.draft_vocab,)).astype(np.float64)
        hidden = download(self.gpu, ctx.buffers.hidden_states(), (self.h,)).astype(np.float64)
        self.seen.append((picked, logits, hidden))
        return picked


def check_drafts(rig: Rig, rng: np.random.Generator, prompt: int, drafts: int, one_plus_w: bool = True) -> None:
    """Feed a random prompt, propose, and hold every draft against the oracle, which is given the head's own ids."""
    assert isinstance(rig.head, Recording)
    tokens = [int(t) for t in rng.integers(0, rig.config.vocab_size, prompt + 1)]
    hidden = (rng.standard_normal((prompt, rig.config.hidden_size)) * 2).astype(BF16)
    oracle = Oracle.of(rig.config, rig.arrays, one_plus_w)
    state = rig.state()
    assert rig.feed(state, tokens[:-1], hidden) == prompt - 1
    oracle.feed(tokens[:-1], hidden.astype(np.float64))

    ids = rig.propose(state, tokens[-1], hidden[-1], prompt, drafts)
    assert len(ids) == drafts == len(rig.head.seen)
    token, own = tokens[-1], hidden[-1].astype(np.float64)
    for j, (picked, logits, after) in enumerate(rig.head.seen):
        wanted, own = oracle.step(token, own, prompt + j)
        assert relative_l2(logits, wanted) < BOUND, f"logits of draft {j}"
        assert relative_l2(after, own) < BOUND, f"hidden of draft {j}"
        assert picked == int(np.argmax(logits)) == ids[j]
        best, second = np.sort(wanted)[-1], np.sort(wanted)[-2]
        if best - second > 4 * BOUND * np.sqrt(np.mean(wanted**2)):
            assert picked == int(np.argmax(wanted)), f"id of draft {j}"
        token = picked
    keys, values = rig.rows(state)
    assert keys.shape[0] == prompt - 1 + drafts
    assert relative_l2(keys, np.stack(oracle.keys)) < BOUND
    assert relative_l2(values, np.stack(oracle.values)) < BOUND
    assert (state.last_pair_key, state.last_num_drafted) == (prompt + drafts - 2, drafts)


@pytest.mark.parametrize("prompt", [1, 2, 17, 40])
def test_three_chained_drafts(gpu: GpuBackend, rng: np.random.Generator, prompt: int) -> None:
    check_drafts(make_rig(gpu, rng, head_class=Recording), rng, prompt, 3)


@pytest.mark.parametrize("rows", [13, 14, 15, 16, 17, 126, 127, 128, 129])
def test_rows_around_the_end_of_a_block(gpu: GpuBackend, rng: np.random.Generator, rows: int) -> None:
    check_drafts(make_rig(gpu, rng, head_class=Recording), rng, rows + 1, 3)


@pytest.mark.parametrize("fused", [True, False])
def test_plain_norm_weights(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    """Also on a set that has no fused addition and norm for them."""
    if not fused:
        hide(monkeypatch, gpu, "spark_residual_add_rms_norm_vanilla")
    rig = make_rig(gpu, rng, head_class=Recording, body=PLAIN)
    assert bool(rig.head.residual_add_rms_norm_k) is fused
    with gpu.trace() as trace:
        check_drafts(rig, rng, 17, 3, one_plus_w=False)
    assert ("residual_add_rms_norm" in str(trace.steps)) is fused


def test_rows_by_the_gemm(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng, head_class=Recording, levers=ModelLevers(exact_drafter_rows=False))
    check_drafts(rig, rng, 40, 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"partial_rotary_factor": 1.0},
        {"partial_rotary_factor": 0.25, "rope_theta": 1e7},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"head_dim": 64, "num_attention_heads": 2},
        {"hidden_size": 136, "intermediate_size": 40},
        {"rms_norm_eps": 0.5},
    ],
    ids=str,
)
def test_other_shapes(gpu: GpuBackend, rng: np.random.Generator, changes: dict[str, Any]) -> None:
    check_drafts(make_rig(gpu, rng, head_class=Recording, **changes), rng, 20, 3)


def test_moe_width_of_the_target_is_not_the_heads(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """Rust sizes a dense FFN with moe_intermediate_size where the config has one, and runs it with the other."""
    sparse = {"mlp_only_layers": [], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    check_drafts(make_rig(gpu, rng, head_class=Recording, **sparse), rng, 5, 3)


def test_a_hidden_row_that_lies_in_hidden_states(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """The target's last row may still be where the head writes its own."""
    rig = make_rig(gpu, rng, head_class=Recording)
    hidden = (rng.standard_normal(rig.config.hidden_size)).astype(BF16)
    wanted, _ = Oracle.of(rig.config, rig.arrays).step(7, hidden.astype(np.float64), 3)
    place = rig.ctx.buffers.hidden_states()
    gpu.copy_h2d(hidden.view(np.uint8), place)
    rig.head.propose(7, place, 3, 1, rig.state(), rig.ctx, rig.stream)
    assert relative_l2(rig.logits(), wanted) < BOUND


def test_prefill_in_several_chunks(gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    from spark_py.model.layers.mtp_head import prefill

    rig = make_rig(gpu, rng)
    tokens = [int(t) for t in rng.integers(0, rig.config.vocab_size, 101)]
    hidden = rng.standard_normal((100, rig.config.hidden_size))
    whole, parts = rig.state(), rig.state()
    rig.feed(whole, tokens, hidden)
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 7)
    rig.feed(parts, tokens, hidden)
    for a, b in zip(rig.rows(whole), rig.rows(parts), strict=True):
        assert a.tobytes() == b.tobytes()


def test_one_row_at_a_time_without_the_batched_gemv(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """The fallback for kernel sets that lack it, bit for bit."""
    rig = make_rig(gpu, rng)
    tokens = [int(t) for t in rng.integers(0, rig.config.vocab_size, 20)]
    hidden = rng.standard_normal((19, rig.config.hidden_size))
    batched, single = rig.state(), rig.state()
    rig.feed(batched, tokens, hidden)
    rig.head.dense_gemv_batchm_k = type(rig.head.dense_gemv_batchm_k)(0)
    rig.feed(single, tokens, hidden)
    for a, b in zip(rig.rows(batched), rig.rows(single), strict=True):
        assert a.tobytes() == b.tobytes()


# ---------------------------------------------------------------- faults that the check must see

Patch = Callable[[pytest.MonkeyPatch], None]


def _patched(name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]], module: Any) -> Patch:
    def apply(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, name, change(getattr(module, name)))

    return apply


def _nothing(*args: Any, **more: Any) -> None:
    pass


def _replaced(index: int, value: Callable[[Any], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Change one positional argument."""

    def change(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *a, **more: real(*a[:index], value(a[index]), *a[index + 1 :], **more)

    return change


def _swapped(i: int, j: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def change(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            changed = list(args)
            changed[i], changed[j] = changed[j], changed[i]
            return real(*changed)

        return call

    return change


PATCHES: dict[str, Patch] = {
    "concat order swapped": _patched("spark_norm_concat", _swapped(2, 3), norms),
    "position one too large": _patched("pack_mtp_attn_meta", _replaced(0, lambda p: p + 1), pick),
    "own row not seen": _patched("pack_mtp_attn_meta", _replaced(2, lambda n: n - 1), pick),
    "queries and gates not taken apart": _patched("spark_gemv_rows", lambda real: lambda *a, head_dim: real(*a), rows),
    "no gate": _patched("sigmoid_gate_mul", lambda real: _nothing, attention),
    "no softmax scale": _patched("paged_decode_attn", _replaced(14, lambda s: 1.0), attention),
    "a window of one row": _patched("paged_decode_attn", _replaced(16, lambda w: 1), attention),
    "keys not normed": _patched("spark_qk_norm_rope_cache", _replaced(6, lambda w: None), attention),
    "rotary half": _patched("spark_qk_norm_rope_cache", _replaced(17, lambda r: r // 2), attention),
    "queries not normed": _patched("spark_qk_norm_rope_cache", _replaced(5, lambda w: None), attention),
    "FFN neither added nor normed": _patched("spark_add_then_norm", lambda real: _nothing, norms),
    "gate and up swapped": _patched("silu_mul", _swapped(2, 3), ffn),
}


@pytest.mark.parametrize("fault", PATCHES)
def test_a_patched_step_is_seen(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    rig = make_rig(gpu, rng, head_class=Recording)
    PATCHES[fault](monkeypatch)
    with pytest.raises(AssertionError):
        check_drafts(rig, rng, 17, 3)


class GateAfterOutputProjection(Recording):
    def gemv(self, input: DevicePtr, proj: Any, output: DevicePtr, n: int, k: int, stream: Any) -> None:  # noqa: A002
        super().gemv(input, proj, output, n, k, stream)
        if proj is self.o_proj:
            gate = self.last_ctx.buffers.qkv_output().offset(2 * self.nq * self.hd)
            sigmoid_gate_mul(self.gpu, self.sigmoid_gate_mul_k, output, gate, output, n, stream)

    def forward_one(self, token: Any, target_hidden: Any, position: Any, state: Any, ctx: Any, *rest: Any) -> int:
        self.last_ctx = ctx
        return super().forward_one(token, target_hidden, position, state, ctx, *rest)


class ChainAfterFinalNorm(Recording):
    def forward_one(self, token: Any, target_hidden: Any, position: Any, state: Any, ctx: Any, *rest: Any) -> int:
        picked = super().forward_one(token, target_hidden, position, state, ctx, *rest)
        self.gpu.copy_d2d(ctx.buffers.norm_output(), ctx.buffers.hidden_states(), 2 * self.h)
        return picked


class ChainFromTheTarget(Recording):
    """Every draft starts from the target's hidden."""

    first: DevicePtr | None = None

    def forward_one(self, token: Any, target_hidden: Any, *rest: Any) -> int:
        self.first = self.first or target_hidden
        return super().forward_one(token, self.first, *rest)


class NormOverGates(Recording):
    """The norm of the queries runs over the gates too."""

    def _rms_norm(self, source: Any, weight: Any, output: Any, rows: int, width: int, stream: Any) -> None:
        super()._rms_norm(source, weight, output, 2 * rows if weight is self.q_norm else rows, width, stream)


class PositionsStandStill(Recording):
    def forward_one(self, token: Any, target_hidden: Any, position: int, *rest: Any) -> int:
        self.start = getattr(self, "start", position)
        return super().forward_one(token, target_hidden, self.start, *rest)


class NoKeyNorm(Recording):
    def _rms_norm(self, source: Any, weight: Any, output: Any, rows: int, width: int, stream: Any) -> None:
        if weight is not self.k_norm:
            super()._rms_norm(source, weight, output, rows, width, stream)


BROKEN: Sequence[type[Recording]] = (
    ChainAfterFinalNorm,
    ChainFromTheTarget,
    NormOverGates,
    PositionsStandStill,
    NoKeyNorm,
)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda c: c.__name__)
def test_a_broken_head_is_seen(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, broken: type[Recording]
) -> None:
    hide(monkeypatch, gpu, "spark_qk_norm_rope_cache")
    with pytest.raises(AssertionError):
        check_drafts(make_rig(gpu, rng, head_class=broken), rng, 17, 3)


def test_a_gate_after_the_output_projection_is_seen(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(gpu, rng, head_class=GateAfterOutputProjection)
    monkeypatch.setattr(attention, "sigmoid_gate_mul", _nothing)
    with pytest.raises(AssertionError):
        check_drafts(rig, rng, 17, 3)


def test_norm_weights_without_the_one_are_seen(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng, head_class=Recording, body=PLAIN)
    with pytest.raises(AssertionError):
        check_drafts(rig, rng, 17, 3, one_plus_w=True)


@pytest.mark.parametrize(
    "name",
    [
        "pre_fc_norm_embedding",
        "pre_fc_norm_hidden",
        "input_layernorm",
        "q_norm",
        "k_norm",
        "post_attn_layernorm",
        "norm",
    ],
)
def test_every_norm_weight_counts(gpu: GpuBackend, rng: np.random.Generator, name: str) -> None:
    """Zeros in place of one norm's weight, which is what a forgotten one amounts to."""
    rig = make_rig(gpu, rng, head_class=Recording)
    weight = getattr(rig.head, name)
    gpu.memset(weight.weight, 0, 2 * math.prod(weight.shape))
    with pytest.raises(AssertionError):
        check_drafts(rig, rng, 17, 3)
