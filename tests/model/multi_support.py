# SPDX-License-Identifier: AGPL-3.0-only
"""Several MTP modules on a backend, and a slow model of the rows that they hold, which keeps whole lists of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spark_py.model.layers.mtp_head import MtpHead, MtpQuantization
from spark_py.model.layers.mtp_multi import MultiModuleMtpHead, MultiModuleMtpState
from spark_py.model.levers import ModelLevers
from spark_py.model.row_policy import RowPolicy, catchup_range
from spark_py.runtime.gpu import GpuBackend
from tests.model.support import BF16, Array, Rig, make_rig, mtp_weights, random_weights

BLOCK = 16


@dataclass
class MultiRig:
    """A proposer of several modules; `rigs[i]` is module i with its own weights, the tables and the arena shared."""

    head: MultiModuleMtpHead
    rigs: list[Rig]

    @property
    def first(self) -> Rig:
        return self.rigs[0]

    def state(self) -> MultiModuleMtpState:
        return self.head.alloc_state(self.first.gpu)

    def propose(
        self, state: MultiModuleMtpState, token: int, hidden: Array, position: int, n: int, **more: Any
    ) -> list[int]:
        ptr, rig = self.first.put(hidden), self.first
        try:
            return self.head.propose(token, ptr, position, n, state, rig.ctx, rig.stream, **more)
        finally:
            rig.gpu.free(ptr)

    def feed(
        self, state: MultiModuleMtpState, tokens: Sequence[int], hidden: Array, row_base: int = 0, pos_base: int = 1
    ) -> int:
        ptr, rig = self.first.put(hidden), self.first
        try:
            return self.head.catchup_drafter(tokens, ptr, row_base, pos_base, state, rig.ctx, rig.stream)
        finally:
            rig.gpu.free(ptr)

    def rows(self, state: MultiModuleMtpState) -> list[list[bytes]]:
        """The bytes of every module's rows, K and V together."""
        found = []
        for rig, per in zip(self.rigs, state.per_module, strict=True):
            keys, values = rig.rows(per)
            found.append([k.tobytes() + v.tobytes() for k, v in zip(keys, values, strict=True)])
        return found

    def free_blocks(self) -> list[int]:
        return [rig.head.kv_cache.num_free_blocks() for rig in self.rigs]

    def snapshots(self, state: MultiModuleMtpState) -> Any:
        """All that a state is, tables included."""
        tables = [list(per.block_table) for per in state.per_module]
        return state.snapshot(), tables


def make_multi(
    gpu: GpuBackend,
    rng: np.random.Generator,
    modules: int = 3,
    *,
    policy: RowPolicy = RowPolicy.SEED,
    refeed: bool = False,
    max_seq_len: int = 256,
    main_kv_blocks: int = 1 << 20,
    mtp_vocab_size: int = 0,
    head_class: type[MtpHead] = MtpHead,
    quant: MtpQuantization = MtpQuantization.BF16,
    levers: dict[str, Any] | None = None,
    **changes: Any,
) -> MultiRig:
    """Modules with random weights of their own."""
    switches = ModelLevers(row_policy=policy, refeed=refeed, **(levers or {}))
    rigs = [
        make_rig(
            gpu, rng, head_class=head_class, levers=switches, max_seq_len=max_seq_len, main_kv_blocks=main_kv_blocks,
            mtp_vocab_size=mtp_vocab_size, quant=quant, **changes,
        )
    ]  # fmt: skip
    first = rigs[0]
    for _ in range(modules - 1):
        arrays = random_weights(rng, first.config) | {n: first.arrays[n] for n in ("embed_tokens", "lm_head")}
        head = head_class(
            mtp_weights(gpu, arrays), first.head.embed_tokens, first.head.lm_head, None, first.config, gpu, quant,
            mtp_vocab_size, max_seq_len, main_kv_blocks, switches,
        )  # fmt: skip
        for pool in (head.kv_cache.k_pool_ptr(0), head.kv_cache.v_pool_ptr(0)):
            gpu.memset(pool, 0xFF, head.kv_cache.total_bytes() // 2)
        rigs.append(Rig(gpu, first.config, arrays, head, first.ctx, first.stream))
    return MultiRig(MultiModuleMtpHead([rig.head for rig in rigs]), rigs)


@dataclass
class SlowModule:
    """One module's rows as (position, token), oldest first, and the blocks that they needed at most."""

    rows: list[tuple[int, int]] = field(default_factory=list)
    blocks: int = 0

    def put(self, rows: list[tuple[int, int]]) -> None:
        self.rows = rows
        self.blocks = max(self.blocks, -(-len(rows) // BLOCK))


class SlowModel:
    """The written rule on whole token lists; `complete`: VERIFIED with refeed.

    Where complete, a module's rows are said anew each time from the sequence alone: module i holds every position from
    i + 1 on whose token it has seen. Otherwise a module gains one row a draft, and loses it again.
    """

    def __init__(self, modules: int, policy: RowPolicy, complete: bool) -> None:
        self.modules = [SlowModule() for _ in range(modules)]
        self.policy, self.complete = policy, complete

    def _all(self, i: int, tokens: list[int], last: int) -> list[tuple[int, int]]:
        return [(q, tokens[q]) for q in range(i + 1, last + 1)]

    def fed(self, tokens: list[int], last: int) -> None:
        """The rows of all positions up to `last` were fed."""
        for i, module in enumerate(self.modules):
            module.put(self._all(i, tokens, last))

    def proposed(self, tokens: list[int], drafts: list[int]) -> None:
        """`tokens` ends with the one that is not processed yet."""
        p, whole = len(tokens) - 1, [*tokens, *drafts]
        for i, module in enumerate(self.modules):
            if self.complete:
                module.put(self._all(i, whole, p + (i if i < len(drafts) else 0)))
            elif i < len(drafts):
                module.put([*module.rows, (p + i, whole[p + i])])

    def verified(self, drafted: int, accepted: int, position: int) -> None:
        for i, module in enumerate(self.modules):
            if self.complete:
                module.put([row for row in module.rows if row[0] <= position + accepted])
            elif i < drafted:
                stays = i < accepted if self.policy is RowPolicy.SEED else i <= accepted
                module.put(module.rows if stays else module.rows[:-1])


class Text:
    """Tokens that the target confirmed, each with a hidden row of its own; the last token is not processed yet."""

    def __init__(self, rig: MultiRig, rng: np.random.Generator, prompt: int) -> None:
        self.rig, self.rng, self.c = rig, rng, rig.first.config
        self.tokens = [int(t) for t in rng.integers(0, self.c.vocab_size, prompt + 1)]
        self.hidden = [self._hidden() for _ in range(prompt)]

    def _hidden(self) -> Array:
        return self.rng.standard_normal(self.c.hidden_size).astype(BF16)

    @property
    def position(self) -> int:
        return len(self.hidden)

    def propose(self, state: MultiModuleMtpState, n: int, **more: Any) -> list[int]:
        return self.rig.propose(state, self.tokens[-1], self.hidden[-1], self.position, n, **more)

    def confirm(self, drafts: list[int]) -> None:
        """The pending token and `drafts` are processed now; a random token is next."""
        self.hidden += [self._hidden() for _ in range(1 + len(drafts))]
        self.tokens += [*drafts, int(self.rng.integers(0, self.c.vocab_size))]

    def prefill(self, state: MultiModuleMtpState) -> int:
        """Feed a fresh state everything that is processed."""
        return self.rig.feed(state, self.tokens[:-1], np.stack(self.hidden))

    def catch_up(self, state: MultiModuleMtpState) -> int:
        """Feed what a propose must find."""
        head = self.rig.head
        missing = catchup_range(head.last_pair_key(state), self.position, 0, len(self.hidden))
        if missing is None:
            return 0
        first, n = missing
        tokens, hidden = self.tokens[first : first + n + 1], np.stack(self.hidden[first : first + n])
        assert self.rig.feed(state, tokens, hidden, head.drafter_rows(state), first + 1) == n
        return n


def check_rows(rig: MultiRig, state: MultiModuleMtpState, model: SlowModel) -> None:
    """Rows, last positions and blocks of every module."""
    for i, (per, module) in enumerate(zip(state.per_module, model.modules, strict=True)):
        assert per.seq_len == len(module.rows), f"rows of module {i}"
        assert per.last_pair_key == (module.rows[-1][0] - 1 if module.rows else None), f"last key of module {i}"
        assert len(per.block_table) == module.blocks, f"blocks of module {i}"
