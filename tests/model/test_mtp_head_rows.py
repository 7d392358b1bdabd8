# SPDX-License-Identifier: AGPL-3.0-only
"""Which rows the drafter holds: each policy's rule over random accept patterns, bytes included, and fresh states."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from spark_py.model.layers.mtp_head import MtpProposerState
from spark_py.model.levers import ModelLevers
from spark_py.model.row_policy import RowPolicy, catchup_range
from spark_py.runtime.errors import CapacityError, InvalidArgumentError, ProposerStateError
from spark_py.runtime.gpu import GpuBackend, KernelHandle
from tests.model.support import BF16, Array, Rig, make_rig, relative_l2
from tests.thin import thinned

STEPS = 200


@dataclass
class Row:
    """What the written rule says of a row: its pair key, and whether the target's hidden made it."""

    key: int
    from_target: bool
    k: bytes = b""
    v: bytes = b""


class Sequence:
    """Tokens that the target confirmed, each with a hidden row of its own; the last token is not processed yet."""

    def __init__(self, rig: Rig, rng: np.random.Generator, prompt: int) -> None:
        self.rig, self.rng = rig, rng
        self.tokens = [int(t) for t in rng.integers(0, rig.config.vocab_size, prompt + 1)]
        self.hidden = [self._hidden() for _ in range(prompt)]

    def _hidden(self) -> Array:
        return self.rng.standard_normal(self.rig.config.hidden_size).astype(BF16)

    @property
    def position(self) -> int:
        return len(self.hidden)

    def confirm(self, drafts: list[int]) -> None:
        """The pending token and `drafts` are processed now; a random token is next."""
        self.hidden += [self._hidden() for _ in range(1 + len(drafts))]
        self.tokens += [*drafts, int(self.rng.integers(0, self.rig.config.vocab_size))]

    def rows(self, first: int, last: int) -> Array:
        return np.stack(self.hidden[first:last])


def kept_by_the_rule(policy: RowPolicy, refeed: bool, drafted: int, accepted: int) -> int:
    """The rule in words: SEED keeps as many rows as were accepted, VERIFIED one more where there is one; with refeed
    what stays must come from the target's hidden, and that is the first row alone."""
    kept = min(drafted, accepted) if policy is RowPolicy.SEED else min(drafted, accepted + 1)
    return min(kept, 1) if refeed else kept


def check_rows(rig: Rig, state: MtpProposerState, rows: list[Row]) -> None:
    keys, values = rig.rows(state)
    assert rig.head.drafter_rows(state) == len(rows) == keys.shape[0]
    assert rig.head.last_pair_key(state) == (rows[-1].key if rows else None)
    for slot, row in enumerate(rows):
        assert keys[slot].tobytes() == row.k, f"K of slot {slot}, key {row.key}"
        assert values[slot].tobytes() == row.v, f"V of slot {slot}, key {row.key}"


def note_bytes(rig: Rig, state: MtpProposerState, rows: list[Row], count: int) -> None:
    keys, values = rig.rows(state)
    for slot in range(len(rows) - count, len(rows)):
        rows[slot].k, rows[slot].v = keys[slot].tobytes(), values[slot].tobytes()


def fresh_rows(rig: Rig, seq: Sequence, first_key: int, last_key: int) -> tuple[Array, Array]:
    """K and V of pair keys first .. last as a fresh state holds them."""
    state = rig.state()
    rig.feed(state, seq.tokens[first_key : last_key + 2], seq.rows(first_key, last_key + 1), 0, first_key + 1)
    found = rig.rows(state)
    rig.head.free_state(rig.gpu, state)
    return found


@pytest.mark.no_sanitizer("200 steps launch too often for it; the tests of single steps run the same kernels")
@pytest.mark.parametrize("refeed", thinned([False, True], keep=[1], ids=["as_kept", "refeed"]))
@pytest.mark.parametrize("policy", RowPolicy)
def test_rows_keys_and_bytes_over_random_accept_patterns(
    gpu: GpuBackend, rng: np.random.Generator, policy: RowPolicy, refeed: bool
) -> None:
    rig = make_rig(gpu, rng, levers=ModelLevers(row_policy=policy, refeed=refeed), max_seq_len=1024)
    free = rig.head.kv_cache.num_free_blocks()
    seq, state = Sequence(rig, rng, 5), rig.state()
    assert rig.feed(state, seq.tokens[:5], seq.rows(0, 5)) == 4
    rows = [Row(key, True) for key in range(4)]
    note_bytes(rig, state, rows, 4)

    for _ in range(STEPS):
        drafted, p = int(rng.integers(1, 4)), seq.position
        accepted = int(rng.integers(0, drafted + 1))
        drafts = rig.propose(state, seq.tokens[-1], seq.hidden[-1], p, drafted)
        rows += [Row(p - 1 + j, j == 0) for j in range(drafted)]
        note_bytes(rig, state, rows, drafted)
        check_rows(rig, state, rows)

        rig.head.after_verify(accepted, state, rig.stream)
        kept = kept_by_the_rule(policy, refeed, drafted, accepted)
        del rows[len(rows) - drafted + kept :]
        check_rows(rig, state, rows)
        seq.confirm(drafts[:accepted])

        missing = catchup_range(rig.head.last_pair_key(state), seq.position, 0, len(seq.hidden)) if refeed else None
        if missing:
            first, count = missing
            tokens, hidden = seq.tokens[first : first + count + 1], seq.rows(first, first + count)
            assert rig.feed(state, tokens, hidden, len(rows), first + 1) == count
            rows += [Row(first + j, True) for j in range(count)]
            note_bytes(rig, state, rows, count)

    # A row's K and V are those of its key, wherever it came from the target's hidden.
    keys, values = fresh_rows(rig, seq, 0, seq.position - 2)
    for row in rows:
        if row.from_target and row.key <= seq.position - 2:
            assert (row.k, row.v) == (keys[row.key].tobytes(), values[row.key].tobytes()), f"key {row.key}"
    if refeed:
        assert [row.key for row in rows] == list(range(seq.position - 1)), "with refeed no key is missing"
    if policy is RowPolicy.VERIFIED and refeed:
        found = rig.rows(state)
        assert (found[0].tobytes(), found[1].tobytes()) == (keys.tobytes(), values.tobytes())
    rig.head.free_state(gpu, state)
    assert rig.head.kv_cache.num_free_blocks() == free


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_verified_rows_are_the_confirmed_prefix(gpu: GpuBackend, rng: np.random.Generator, accepted: int) -> None:
    """Three drafts, also as the first thing after a prompt: afterwards the rows are exactly those of the pairs whose
    token is confirmed, and after a refeed those of a fresh state, byte for byte."""
    rig = make_rig(gpu, rng, levers=ModelLevers(row_policy=RowPolicy.VERIFIED, refeed=True))
    seq, state = Sequence(rig, rng, 6), rig.state()
    rig.feed(state, seq.tokens[:6], seq.rows(0, 6))
    drafts = rig.propose(state, seq.tokens[-1], seq.hidden[-1], 6, 3)
    rig.head.after_verify(accepted, state, rig.stream)
    seq.confirm(drafts[:accepted])
    missing = catchup_range(rig.head.last_pair_key(state), seq.position, 6, 1 + accepted)
    assert missing == ((6, accepted) if accepted else None)
    if missing:
        first, count = missing
        rig.feed(state, seq.tokens[first : first + count + 1], seq.rows(first, first + count), 6, first + 1)
    keys, values = fresh_rows(rig, seq, 0, seq.position - 2)
    found = rig.rows(state)
    assert rig.head.drafter_rows(state) == seq.position - 1
    assert (found[0].tobytes(), found[1].tobytes()) == (keys.tobytes(), values.tobytes())


def test_a_refed_state_drafts_as_a_fresh_one(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng, levers=ModelLevers(row_policy=RowPolicy.VERIFIED, refeed=True))
    seq, state, fresh = Sequence(rig, rng, 3), rig.state(), rig.state()
    rig.feed(state, seq.tokens[:3], seq.rows(0, 3))
    drafts = rig.propose(state, seq.tokens[-1], seq.hidden[-1], 3, 3)
    rig.head.after_verify(2, state, rig.stream)
    seq.confirm(drafts[:2])
    first, count = catchup_range(rig.head.last_pair_key(state), 6, 0, 6) or (0, 0)
    rig.feed(state, seq.tokens[first : first + count + 1], seq.rows(first, first + count), 3, first + 1)
    rig.feed(fresh, seq.tokens[:6], seq.rows(0, 6))
    assert rig.propose(state, seq.tokens[-1], seq.hidden[-1], 6, 3) == rig.propose(
        fresh, seq.tokens[-1], seq.hidden[-1], 6, 3
    )
    for a, b in zip(rig.rows(state), rig.rows(fresh), strict=True):
        assert a.tobytes() == b.tobytes()


def test_rows_of_the_gemm_are_near_those_of_a_propose(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """The engine's own prefill sums in another order. Bound: a last bit of the sums before three roundings (fc, K or V,
    and the K norm) and RoPE's, 4 * 2^-9 in relative L2; the pair keys are the same."""
    rig = make_rig(gpu, rng)
    gemm = make_rig(gpu, rng, levers=ModelLevers(exact_drafter_rows=False), arrays=rig.arrays)
    seq = Sequence(rig, rng, 40)
    a, b = rig.state(), gemm.state()
    rig.feed(a, seq.tokens[:40], seq.rows(0, 40))
    gemm.feed(b, seq.tokens[:40], seq.rows(0, 40))
    assert a.last_pair_key == b.last_pair_key == 38
    for x, y in zip(rig.rows(a), gemm.rows(b), strict=True):
        assert relative_l2(x, y.astype(np.float64)) < 4 * 2**-9


def test_a_propose_writes_its_own_slots_and_nothing_else(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """Two sequences with interleaved blocks, and the whole pool compared."""
    rig = make_rig(gpu, rng)
    kv, hidden = rig.head.kv_cache, rng.standard_normal((40, rig.config.hidden_size))
    first, second = rig.state(), rig.state()
    rig.feed(first, [1] * 16, hidden)
    rig.feed(second, [2] * 17, hidden)
    rig.feed(first, [3] * 17, hidden, 15, 16)
    assert (first.block_table, second.block_table) == ([0, 2], [1])

    def pool() -> Array:
        sides = [np.stack([kv.read_block(0, block)[side] for block in range(4)]) for side in (0, 1)]
        return np.stack(sides).reshape(2, 4 * kv.block_size(), -1)

    before = pool()
    rig.propose(second, 9, hidden[0], 60, 3)  # rows 16, 17, 18: a new block
    changed = np.flatnonzero((pool() != before).any(axis=(0, 2)))
    assert second.block_table == [1, 3]
    assert changed.tolist() == [48, 49, 50]


def test_positions_are_absolute_after_a_pause(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """The target went on for 700 tokens without drafts: the row is rotated at the caller's position, not at the row
    count."""
    rig = make_rig(gpu, rng, max_seq_len=1024)
    seq = Sequence(rig, rng, 4)
    state, alone = rig.state(), rig.state()
    rig.feed(state, seq.tokens[:4], seq.rows(0, 4))
    rig.propose(state, seq.tokens[-1], seq.hidden[-1], 704, 1)
    rig.feed(alone, [0, seq.tokens[-1]], seq.hidden[-1][None], 0, 704)
    assert (rig.head.drafter_rows(state), rig.head.last_pair_key(state)) == (4, 703)
    assert rig.rows(state)[0][3].tobytes() == rig.rows(alone)[0][0].tobytes()


def test_a_key_after_a_gap_is_that_of_the_last_row(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """Nothing accepted: the rows before the propose are the last again, gap or no gap. Rust's subtraction gives 10."""
    rig = make_rig(gpu, rng)
    seq, state = Sequence(rig, rng, 4), rig.state()
    rig.feed(state, seq.tokens[:4], seq.rows(0, 4))
    rig.propose(state, 1, seq.hidden[-1], 12, 2)
    rig.head.after_verify(0, state, rig.stream)
    assert rig.head.last_pair_key(state) == 2


def test_a_first_row_that_is_dropped_leaves_no_key(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """A prompt of one token. Rust's saturating subtraction leaves key 0, which no row has."""
    rig = make_rig(gpu, rng)
    seq, state = Sequence(rig, rng, 1), rig.state()
    assert rig.feed(state, seq.tokens[:1], seq.rows(0, 1)) == 0
    rig.propose(state, seq.tokens[-1], seq.hidden[0], 1, 1)
    assert rig.head.last_pair_key(state) == 0
    rig.head.after_verify(0, state, rig.stream)
    assert (rig.head.drafter_rows(state), rig.head.last_pair_key(state)) == (0, None)


# ---------------------------------------------------------------- order of calls


def test_a_verdict_counts_once(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng)
    state, hidden = rig.state(), rng.standard_normal(rig.config.hidden_size)
    with pytest.raises(ProposerStateError, match="propose comes first"):
        rig.head.after_verify(0, state, rig.stream)
    rig.propose(state, 3, hidden, 4, 2)
    with pytest.raises(InvalidArgumentError, match="num_accepted is 3"):
        rig.head.after_verify(3, state, rig.stream)
    with pytest.raises(InvalidArgumentError, match="num_accepted is -1"):
        rig.head.after_verify(-1, state, rig.stream)
    rig.head.after_verify(1, state, rig.stream)
    with pytest.raises(ProposerStateError):
        rig.head.after_verify(1, state, rig.stream)
    assert rig.head.drafter_rows(state) == 1


def test_nothing_comes_between_a_propose_and_its_verdict(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng)
    state, hidden = rig.state(), rng.standard_normal((3, rig.config.hidden_size))
    rig.propose(state, 3, hidden[0], 4, 2)
    before = state.snapshot()
    with pytest.raises(ProposerStateError, match="2 drafts"):
        rig.propose(state, 3, hidden[0], 6, 2)
    with pytest.raises(ProposerStateError, match="2 drafts"):
        rig.feed(state, [1, 2, 3], hidden, 2, 6)
    with pytest.raises(ProposerStateError, match="2 drafts"):
        rig.head.take_drafter_kv(state)
    assert state.snapshot() == before


def test_rows_are_fed_where_they_belong_or_not_at_all(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng, max_seq_len=20)
    state, hidden = rig.state(), rng.standard_normal((30, rig.config.hidden_size))
    assert rig.feed(state, [], hidden) == 0
    assert rig.feed(state, [4], hidden) == 0
    assert rig.feed(state, [4, 5, 6], hidden) == 2
    before = state.snapshot()
    with pytest.raises(InvalidArgumentError, match="row_base is 0"):
        rig.feed(state, [4, 5, 6], hidden)
    with pytest.raises(InvalidArgumentError, match="last pair key is 1"):
        rig.feed(state, [4, 5, 6], hidden, 2, 2)
    with pytest.raises(CapacityError, match=r"is 20: the limit is 19"):
        rig.feed(state, list(range(19)), hidden, 2, 3)
    assert state.snapshot() == before
    assert rig.feed(state, list(range(18)), hidden, 2, 3) == 17


def test_a_head_without_prefill_says_so(
    gpu: GpuBackend, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(gpu, rng, levers=ModelLevers(drafter_prefill=False))
    hidden = rng.standard_normal((3, rig.config.hidden_size))
    assert rig.head.supports_drafter_prefill is False
    assert [rig.feed(rig.state(), [1, 2, 3], hidden) for _ in range(3)] == [0, 0, 0]
    assert len([r for r in caplog.records if "not fed" in r.message]) == 1
    assert make_rig(gpu, rng).head.supports_drafter_prefill is True

    caplog.clear()
    gemm = make_rig(gpu, rng, levers=ModelLevers(exact_drafter_rows=False))
    assert gemm.head.supports_drafter_prefill is True
    gemm.head.dense_gemm_k = KernelHandle(0)  # as on a kernel set that lacks it
    assert gemm.head.supports_drafter_prefill is False
    assert gemm.feed(gemm.state(), [1, 2, 3], hidden) == 0
    assert "no dense_gemm_bf16" in caplog.text


def test_rows_move_from_one_state_to_another(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng)
    seq, state, heir = Sequence(rig, rng, 20), rig.state(), rig.state()
    assert rig.head.take_drafter_kv(state) is None
    rig.feed(state, seq.tokens[:20], seq.rows(0, 20))
    rows = rig.rows(state)
    free = rig.head.kv_cache.num_free_blocks()
    taken = rig.head.take_drafter_kv(state)
    assert taken is not None
    blocks, count, key = taken
    assert (len(blocks), count, key) == (2, 19, 18)
    assert (rig.head.drafter_rows(state), rig.head.last_pair_key(state)) == (0, None)
    with pytest.raises(InvalidArgumentError, match="rows is 33"):
        rig.head.install_drafter_kv(heir, blocks, 33, 40)
    with pytest.raises(InvalidArgumentError, match="last_pair_key is 17"):
        rig.head.install_drafter_kv(heir, blocks, 19, 17)
    with pytest.raises(InvalidArgumentError, match="not given back"):
        rig.head.install_drafter_kv(heir, [*blocks, blocks[1] + 1], count, key)
    assert rig.head.install_drafter_kv(heir, blocks, count, key)
    assert not rig.head.install_drafter_kv(heir, blocks, count, key), "the state has rows already"
    for a, b in zip(rig.rows(heir), rows, strict=True):
        assert a.tobytes() == b.tobytes()
    rig.propose(heir, seq.tokens[-1], seq.hidden[-1], 20, 1)
    assert rig.head.kv_cache.num_free_blocks() == free
    rig.head.free_state(gpu, heir)
    assert rig.head.kv_cache.num_free_blocks() == free + 2
