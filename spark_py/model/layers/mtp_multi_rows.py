# SPDX-License-Identifier: AGPL-3.0-only
"""Which rows the modules of a MultiModuleMtpHead write, and the module outputs that later rows are made of.

The chain. Let t(q) be the token at position q and g(-1, q) the target's hidden row after it. Module i, counted from 0,
makes of the row at q

    g(i, q) = module i of (embedding of t(q), g(i - 1, q - 1)), rotated at q, over its own rows up to q

and of g(i, q) the guess for token q + 1. The DeepSeek-V3 report (section 2.2) calls it h^(i+1) of index q - 1 - i: from
module to module the token moves on by one, and the index stays. The first hidden row is g(-1, 0), so module i has rows
from position i + 1 on: a prompt of P tokens gives it P - 1 - i of them.

A propose at p with k drafts d(0) .. d(k - 1), with t(p) = last_token and t(p + 1 + j) = d(j), needs g(i, p + i) for
each draft i. Row p + i of module i follows rows p .. p + i - 1 of the same module, whose tokens are t(p) and earlier
drafts. So module i writes i + 1 rows, k (k + 1) / 2 together, of which each module's last gives a draft. Modules from k
on write row p alone. After a propose with every module, all hold the same number of rows, p of a sequence that was fed
from its beginning.

Of a draft's row only the token is a guess: hidden rows come from the module before, as in training. So a row whose
tokens turn out right stays: after `accepted` drafts the rows up to p + accepted hold, and module i lacks those from
p + min(i, accepted) + 1 on. Feeding p + 1 .. p + accepted brings every module to the same position, and each row has
the bits that a fresh state fed with the same tokens would give it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ...runtime.gpu import DevicePtr, StreamLike
from ..layer import ForwardContext
from .mtp_head import MtpHead, MtpProposerState
from .mtp_multi_state import BF16_BYTES, FEED_CHUNK, MultiModuleMtpState, OutputStore

__all__ = ["CompleteRows", "last_position", "row_starts"]


def last_position(state: MtpProposerState) -> int:
    """Position of the state's last row; 0, where no row is, without rows."""
    return 0 if state.last_pair_key is None else state.last_pair_key + 1


def row_starts(
    states: Sequence[MtpProposerState], known: Sequence[Mapping[int, object]], first: int, ends: Sequence[int]
) -> list[int]:
    """The position from which on each module writes rows up to its `ends`; one past its end where it writes none.

    known[i]: positions q at which g(i, q) is at hand. Module 0 begins at `first`, a later one after its last row, but
    where g of the module before is missing, as at the beginning of a sequence, one after it.
    """
    starts = [first]
    for i in range(1, len(states)):
        start = at = max(first, last_position(states[i]) + 1)
        # What the module before writes, from starts[i - 1] on, is at hand when this one runs.
        while at <= min(starts[i - 1], ends[i]):
            if at - 1 not in known[i - 1]:
                start = at + 1
            at += 1
        starts.append(min(start, ends[i] + 1))
    return starts


class CompleteRows:
    """Modules whose caches are kept without holes. Device memory for it goes with `store`."""

    def __init__(self, modules: Sequence[MtpHead], store: OutputStore) -> None:
        self.modules, self.store = modules, store
        self._row_bytes = store.h * BF16_BYTES

    def draft(
        self,
        draft: Callable[[int, int, DevicePtr], int],
        token: int,
        target_hidden: DevicePtr,
        position: int,
        k: int,
        own: MultiModuleMtpState,
        ctx: ForwardContext,
        stream: StreamLike,
    ) -> list[int]:
        """Write the rows of a propose at `position` and give its k drafts. `draft(i, token, hidden)` has module i write
        row position + i and gives its guess."""
        n, outputs = len(self.modules), own.outputs_of(self.store)
        kept = outputs.copy_of_slots()
        outputs.keep(position - 1, position - 1)
        ends = [position + (i if i < k else 0) for i in range(n)]
        starts = row_starts(own.per_module, outputs.slots, position, ends)
        self._reserve(own, starts, ends)
        tokens = [token]

        def keep_output(i: int, q: int) -> None:
            if i < n - 1:
                self.store.copy_row(self.modules[i].output_row(ctx), outputs.place(i, q, kept[i]), stream)

        def row(i: int, q: int) -> None:
            self._write(i, [tokens[q - position]], outputs.row(i - 1, q - 1), q, own, ctx, stream)
            own.per_module[i].last_num_drafted += 1
            keep_output(i, q)

        # Modules that do not draft come first, so that what the last draft leaves in the arena stays.
        for i in range(k, n):
            for q in range(starts[i], ends[i] + 1):
                row(i, q)
        for i in range(k):
            for q in range(starts[i], ends[i]):
                row(i, q)
            hidden = outputs.row(i - 1, position + i - 1) if i else target_hidden
            tokens.append(draft(i, tokens[-1], hidden))
            keep_output(i, position + i)
        return tokens[1:]

    def feed(
        self,
        tokens: Sequence[int],
        hiddens: DevicePtr,
        first: int,
        own: MultiModuleMtpState,
        ctx: ForwardContext,
        stream: StreamLike,
    ) -> None:
        """Rows at first, first + 1, ... for `tokens` and the target's hidden rows before them: chunk by chunk, and in a
        chunk module by module, so that the weights of one are read again while they are near."""
        store, outputs, n, last = self.store, own.outputs_of(self.store), len(self.modules), first + len(tokens) - 1
        kept = outputs.copy_of_slots()
        ends = [last] * n
        starts = row_starts(own.per_module, outputs.slots, first, ends)
        self._reserve(own, starts, ends)
        end = first - 1
        while end < last:
            begin, end = end + 1, min(end + FEED_CHUNK, last)
            for i in range(n - 1):
                if starts[i] < begin:
                    store.copy_row(store.chunk_row(i, FEED_CHUNK), store.chunk_row(i, 0), stream)
                for q in outputs.slots[i]:
                    if begin - 1 <= q < min(starts[i], end + 1):
                        store.copy_row(outputs.row(i, q), store.chunk_row(i, q - begin + 1), stream)
            for i in range(n):
                at = max(starts[i], begin)
                if at <= end:
                    source = store.chunk_row(i - 1, at - begin) if i else hiddens.offset((at - first) * self._row_bytes)
                    into = store.chunk_row(i, at - begin + 1) if i < n - 1 else None
                    self._write(i, tokens[at - first : end + 1 - first], source, at, own, ctx, stream, into)
        outputs.keep(last, None)
        for i in range(n - 1):
            if starts[i] <= last:
                store.copy_row(store.chunk_row(i, end - begin + 1), outputs.place(i, last, kept[i]), stream)

    def _write(
        self,
        i: int,
        tokens: Sequence[int],
        hiddens: DevicePtr,
        position: int,
        own: MultiModuleMtpState,
        ctx: ForwardContext,
        stream: StreamLike,
        into: DevicePtr | None = None,
    ) -> None:
        """Rows of module i at position, position + 1, ...; `into` receives its outputs. Nobody reads those of the last
        module, so it writes K and V alone where it can."""
        module, per = self.modules[i], own.per_module[i]
        if i == len(self.modules) - 1 and module.supports_drafter_prefill:
            module.drafter_rows_impl([0, *tokens], hiddens, per.seq_len, position, per, ctx, stream)
            return
        for r, token in enumerate(tokens):
            offset = r * self._row_bytes
            module.write_row(token, hiddens.offset(offset), position + r, per, ctx, stream)
            if into is not None:
                self.store.copy_row(module.output_row(ctx), into.offset(offset), stream)

    def _reserve(self, own: MultiModuleMtpState, starts: Sequence[int], ends: Sequence[int]) -> None:
        for module, per, start, end in zip(self.modules, own.per_module, starts, ends, strict=True):
            module.reserve_rows(per, per.seq_len + max(end - start + 1, 0))
