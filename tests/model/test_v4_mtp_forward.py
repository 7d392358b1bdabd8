# SPDX-License-Identifier: AGPL-3.0-only
"""DeepseekV4MtpHead: what a draft is, in both hidden modes, against the module's formulas in FP64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spark_py.model.layers.hidden_mode import HiddenMode
from spark_py.model.levers import ModelLevers
from spark_py.runtime.gpu import GpuBackend
from spark_py.runtime.kv_cache import KvCacheDtype
from spark_py.testing import BF16, Array, f64
from tests.model.mtp_forms import hide
from tests.model.support import relative_l2
from tests.model.v4_mtp_support import MODES, Oracle, Rig, Text, equal_streams, make_rig

KEPT = ModelLevers(keep_logits=True)
NEAR = 2.0**-6
"""Two dozen roundings to BF16 between a token and its logits, 2^-9 of an element each at most, which add up as their
squares do."""
CLEAR = 0.05
"""Gap between the last expert chosen and the next: BF16 moves a score by about a hundredth."""


def one_row(rig: Rig, rng: np.random.Generator, rows: int) -> tuple[Text, Array, Oracle]:
    """A prompt of `rows` rows and one draft. (the text, the row's logits, an oracle that has the prompt's rows)"""
    oracle, text = Oracle.of(rig), Text(rig, rng, rows)
    for token, stack in zip(text.tokens[1:-1], text.stacks, strict=False):
        oracle.rows.append(oracle.row(token, seen(rig, stack)))
    state = rig.state()
    if rows > 1:
        assert text.prefill(state) == rows - 1
    text.propose(state, 1)
    return text, rig.logits(), oracle


def seen(rig: Rig, stack: Array) -> Array:
    """What the head reads of streams: themselves, or one row for all."""
    return stack if rig.stacked else equal_streams(stack[0].astype(BF16), rig.raw["hc_mult"])


def clear_row(rig: Rig, rng: np.random.Generator, rows: int) -> tuple[Text, Array, Oracle]:
    """As `one_row`, of a text at whose last row no rounding changes the choice of experts."""
    while True:
        text, logits, oracle = one_row(rig, rng, rows)
        copy = Oracle(oracle.raw, oracle.w, list(oracle.rows))
        copy.step(text.tokens[-1], seen(rig, text.stacks[-1]))
        if copy.gaps[-1][-1] > CLEAR:
            return text, logits, oracle


@pytest.mark.parametrize("kv_dtype", [KvCacheDtype.BF16, KvCacheDtype.FP8])
@pytest.mark.parametrize("mode", MODES)
def test_a_draft_is_the_modules(
    gpu: GpuBackend, rng: np.random.Generator, mode: HiddenMode, kv_dtype: KvCacheDtype
) -> None:
    """One row, as many as the window has, more, and the block's edges, over rows that were fed."""
    rig = make_rig(gpu, rng, mode, kv_dtype=kv_dtype, levers=KEPT)
    window = rig.raw["sliding_window"]
    # Latents in E4M3 are within 2^-4 of themselves.
    near = NEAR if kv_dtype is KvCacheDtype.BF16 else 2.0**-4
    for rows in (1, 16, 17, window, window + 1, 33):
        text, logits, oracle = clear_row(rig, rng, rows)
        wanted, streams, hidden = oracle.step(text.tokens[-1], seen(rig, text.stacks[-1]))
        assert relative_l2(logits, wanted) < near, f"{rows} rows"
        assert relative_l2(rig.streams(), streams) < near, f"{rows} rows"
        assert relative_l2(f64(rig.hidden()), hidden) < near, f"{rows} rows"


@pytest.mark.parametrize("mode", MODES)
def test_misreadings_are_far_off(gpu: GpuBackend, rng: np.random.Generator, mode: HiddenMode) -> None:
    window = 5
    rig = make_rig(gpu, rng, mode, sliding_window=window, levers=KEPT)
    text, logits, oracle = clear_row(rig, rng, window + 3)
    token, stack = text.tokens[-1], seen(rig, text.stacks[-1])

    def logits_of(raw: dict[str, Any] | None = None, w: dict[str, Array] | None = None, **misread: bool) -> Array:
        other = Oracle(oracle.raw | (raw or {}), oracle.w | (w or {}), list(oracle.rows))
        return other.step(token, stack, **misread)[0]

    near, ones = relative_l2(logits, logits_of()), np.ones(rig.raw["hidden_size"])
    wrong = {
        "window one less": logits_of({"sliding_window": window - 1}),
        "window one more": logits_of({"sliding_window": window + 1}),
        "no window": logits_of({"sliding_window": 10**6}),
        "projections exchanged": logits_of(swapped=True),
        "no enorm": logits_of(w={"enorm.weight": ones}),
        "no hnorm": logits_of(w={"hnorm.weight": ones}),
        "no norm": logits_of(w={"norm.weight": ones}),
        "1 + norm": logits_of(w={"norm.weight": 1 + oracle.w["norm.weight"]}),
        "no sinks": logits_of(w={"attn.attn_sink": np.full(rig.raw["num_attention_heads"], -1e30)}),
        "the embedding of another token": logits_of(w={"embed.weight": np.roll(oracle.w["embed.weight"], 1, 0)}),
    }
    if rig.stacked:
        wrong["one mean square for all streams"] = logits_of(norm_over_all=True)
    for name, other in wrong.items():
        assert relative_l2(logits, other) > max(4 * near, 2.0**-6), name


def test_equal_streams_make_the_modes_agree_and_unequal_ones_differ(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """Bit for bit: the logits, the streams and the cache row. Only a first draft: later ones read other things."""
    rigs = {mode: make_rig(gpu, rng, mode, levers=KEPT) for mode in MODES[:1]}
    rigs |= {mode: make_rig(gpu, rng, mode, arrays=rigs[MODES[0]].arrays, levers=KEPT) for mode in MODES[1:]}
    row = rng.standard_normal(64).astype(BF16)
    equal, unequal = equal_streams(row, 4), rigs[MODES[0]].a_stack(rng)
    unequal[0] = equal[0]
    found: dict[str, list[Any]] = {}
    for name, stack in (("equal", equal), ("unequal", unequal)):
        for rig in rigs.values():
            state = rig.state()
            rig.feed(state, [3, 4, 5], np.stack([stack, stack]))
            rig.propose(state, 7, stack, 3, 1)
            found.setdefault(name, []).append((rig.logits().tobytes(), rig.streams().tobytes(), rig.rows(state)))
    assert found["equal"][0] == found["equal"][1]
    for one, other in zip(*found["unequal"], strict=True):
        assert one != other
    assert found["equal"][0] == found["unequal"][1], "the collapsed mode reads one row, and that is the same"


@pytest.mark.parametrize("mode", MODES)
def test_a_set_without_the_fused_kernels_gives_the_same_bits(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, mode: HiddenMode
) -> None:
    rig = make_rig(gpu, rng, mode)
    stack, found = rig.a_stack(rng), list[Any]()
    for fused in (True, False):
        if not fused:
            hide(monkeypatch, gpu, "spark_hc_norm", function="spark_rms_norm_f32::spark_rms_norm_both")
            rig = make_rig(gpu, rng, mode, arrays=rig.arrays)
        rig.propose(rig.state(), 7, stack, 1, 1)
        found.append((rig.logits().tobytes(), rig.streams().tobytes(), rig.hidden().tobytes()))
    assert found[0] == found[1]


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_later_drafts_go_on_from_the_heads_own(
    gpu: GpuBackend, rng: np.random.Generator, mode: HiddenMode, graph: bool
) -> None:
    """Draft by draft with what the mode chains on, given by hand: the same ids, rows and logits. Chaining on the other
    thing gives others."""
    rig = make_rig(gpu, rng, mode, levers=replace(KEPT, propose_graph=graph))
    text = Text(rig, rng, 20)

    def by_hand(collapsed: bool) -> tuple[list[int], list[bytes]]:
        state = rig.state()
        text.prefill(state)
        token, stack, ids = text.tokens[-1], text.stacks[-1], []
        for i in range(3):
            token = rig.propose(state, token, stack, 20 + i, 1)[0]
            ids.append(token)
            stack = equal_streams(rig.hidden(), 4) if collapsed else rig.streams()
            state.last_num_drafted = 0
        return ids, rig.rows(state)

    for turn in range(3 if graph else 1):  # launch by launch, captured, replayed
        chained = rig.state()
        text.prefill(chained)
        drafts = text.propose(chained, 3)
        got = rig.rows(chained), rig.logits().tobytes()
        ids, rows = by_hand(collapsed=not rig.stacked)
        assert (drafts, got) == (ids, (rows, rig.logits().tobytes())), f"turn {turn}"
        if rig.stacked:
            assert got[0] != by_hand(collapsed=True)[1]


def test_the_reference_mode_does_not_chain_on_the_target_again(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng, levers=KEPT)
    text, state = Text(rig, rng, 5), rig.state()
    drafts = text.propose(state, 2)
    other = rig.state()
    rig.propose(other, text.tokens[-1], text.stacks[-1], 5, 1)
    other.last_num_drafted = 0
    rig.propose(other, drafts[0], text.stacks[-1], 6, 1)
    assert rig.rows(state)[0] == rig.rows(other)[0]
    assert rig.rows(state)[1] != rig.rows(other)[1]


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("window", [15, 16, 17])
def test_the_window_ends_where_it_should(gpu: GpuBackend, rng: np.random.Generator, window: int, graph: bool) -> None:
    """Of rows that hold NaN, the first one outside is not read and the last one inside is. Windows begin before, at and
    behind the edge of a block."""
    rig = make_rig(gpu, rng, sliding_window=window, levers=replace(KEPT, propose_graph=graph))
    text, row_bytes = Text(rig, rng, 33), 2 * rig.raw["head_dim"]
    clean = rig.state()
    text.prefill(clean)
    text.propose(clean, 1)
    wanted = rig.logits().tobytes()
    for distance, same in ((window, True), (window - 1, False)):
        state = rig.state()
        text.prefill(state)
        row = 32 - distance  # the new one is number 32
        block = rig.head.kv_cache.k_cache_ptr(0, state.block_table[row // 16])
        gpu.memset(block.offset(row % 16 * row_bytes), 0xFF, row_bytes)
        text.propose(state, 1)
        assert (rig.logits().tobytes() == wanted) == same, f"distance {distance}"


@pytest.mark.parametrize("mode", MODES)
def test_a_shift_of_all_positions_is_harmless_and_one_of_some_is_not(
    gpu: GpuBackend, rng: np.random.Generator, mode: HiddenMode
) -> None:
    rig = make_rig(gpu, rng, mode, levers=KEPT)
    text = Text(rig, rng, 12)
    found = {}
    for name, (fed, drafted) in {"plain": (1, 12), "shifted": (31, 42), "apart": (1, 19)}.items():
        state = rig.state()
        rig.feed(state, text.tokens[:-1], np.stack(text.stacks), 0, fed)
        rig.propose(state, text.tokens[-1], text.stacks[-1], drafted, 1)
        found[name] = rig.logits()
    assert relative_l2(found["shifted"], found["plain"]) < NEAR
    assert relative_l2(found["apart"], found["plain"]) > 2.0**-4


def test_the_first_token_has_its_embedding(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """Nothing is masked at the first row: the token is one further than the hidden."""
    rig = make_rig(gpu, rng, levers=KEPT)
    stack = rig.a_stack(rng)
    states = [rig.state(), rig.state()]
    for state, token in zip(states, (3, 4), strict=True):
        rig.propose(state, token, stack, 1, 1)
    assert rig.rows(states[0]) != rig.rows(states[1])


@pytest.mark.parametrize("vocab", [0, 1, 33, 202, 203, 999])
def test_the_draft_vocabulary(gpu: GpuBackend, rng: np.random.Generator, vocab: int) -> None:
    """0 and too many are the whole one; the rows behind a smaller one never win."""
    rig = make_rig(gpu, rng, mtp_vocab_size=vocab, levers=KEPT)
    whole = 203
    assert rig.head.draft_vocab == (vocab if 0 < vocab < whole else whole)
    text, state = Text(rig, rng, 3), rig.state()
    draft = text.propose(state, 1)[0]
    assert draft == int(np.argmax(rig.logits()))
    assert 0 <= draft < rig.head.draft_vocab


@pytest.mark.parametrize("mode", MODES)
def test_chain_postnorm_is_the_collapsed_modes(gpu: GpuBackend, rng: np.random.Generator, mode: HiddenMode) -> None:
    rig = make_rig(gpu, rng, mode, levers=KEPT)
    other = make_rig(gpu, rng, mode, arrays=rig.arrays, levers=replace(KEPT, chain_postnorm=True))
    text = Text(rig, rng, 4)
    rows = []
    for each in (rig, other):
        state = each.state()
        each.propose(state, text.tokens[-1], text.stacks[-1], 4, 2)
        rows.append(each.rows(state))
    assert rows[0][0] == rows[1][0]
    assert (rows[0][1] == rows[1][1]) == rig.stacked
