# SPDX-License-Identifier: AGPL-3.0-only
"""States of a MultiModuleMtpHead, and the module outputs that later rows are made of; the rule is in mtp_multi_rows."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from ...runtime.errors import ProposerStateError
from ...runtime.gpu import DevicePtr, GpuBackend, StreamLike
from .mtp_head import MtpProposerState
from .mtp_head.life import alloc_for
from .mtp_head.types import MtpSnapshot

__all__ = ["BF16_BYTES", "FEED_CHUNK", "ModuleOutputs", "MultiModuleMtpState", "MultiSnapshot", "OutputStore"]

FEED_CHUNK = 64
"""Positions that are fed module by module before the next ones are."""
BF16_BYTES = 2


@dataclass(slots=True)
class ModuleOutputs:
    """Outputs g(i, q) of one sequence, of all modules but the last, in a slab [modules - 1, 2 * modules, h] in BF16.

    slots[i]: position -> place in the slab. A propose or a feed works on a copy of it and never writes to a place in
    use, so that putting the old mapping back undoes everything.
    """

    slab: DevicePtr
    modules: int
    h: int
    slots: list[dict[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = [{} for _ in range(self.modules - 1)]

    @property
    def places(self) -> int:
        """Outputs of one module that the slab holds: those that a failed propose must find again, and new ones."""
        return 2 * self.modules

    def row(self, module: int, position: int) -> DevicePtr:
        """Address of g(module, position)."""
        return self._address(module, self.slots[module][position])

    def copy_of_slots(self) -> list[dict[int, int]]:
        """The mappings, apart."""
        return [dict(slots) for slots in self.slots]

    def place(self, module: int, position: int, kept: Mapping[int, int]) -> DevicePtr:
        """Where to put g(module, position); neither the places of `kept` nor those in use now."""
        taken = {*kept.values(), *self.slots[module].values()}
        free = next((slot for slot in range(self.places) if slot not in taken), None)
        if free is None:
            raise ProposerStateError(f"module {module} has no place for its output at position {position}")
        self.slots[module][position] = free
        return self._address(module, free)

    def keep(self, first: int, last: int | None) -> None:
        """Forget the outputs at positions outside first .. last."""
        self.slots = [
            {q: slot for q, slot in slots.items() if q >= first and (last is None or q <= last)} for slots in self.slots
        ]

    def _address(self, module: int, slot: int) -> DevicePtr:
        return self.slab.offset((module * self.places + slot) * self.h * BF16_BYTES)


class OutputStore:
    """Device memory for the outputs of sequences and of a chunk that is fed; all of it goes with `stack`.

    A sequence's slab is taken at its first row and given back, for the next sequence, when the state is freed or
    dropped. chunk[i]: BF16 [FEED_CHUNK + 1, h], g(i, q) of a chunk, the first row that of the position before it.
    """

    def __init__(self, gpu: GpuBackend, modules: int, h: int, stack: ExitStack) -> None:
        self.gpu, self.modules, self.h, self._stack = gpu, modules, h, stack
        self._free_slabs: list[DevicePtr] = []
        row = h * BF16_BYTES
        self.chunk = [self._alloc(f"chunk[{i}]", (FEED_CHUNK + 1) * row) for i in range(modules - 1)]

    def chunk_row(self, module: int, index: int) -> DevicePtr:
        """Row `index` of chunk[module]."""
        return self.chunk[module].offset(index * self.h * BF16_BYTES)

    def copy_row(self, source: DevicePtr, target: DevicePtr, stream: StreamLike) -> None:
        """One hidden row."""
        self.gpu.copy_d2d_async(source, target, self.h * BF16_BYTES, stream)

    def watch(self, state: object, held: list[DevicePtr]) -> None:
        """Have the slab in `held` back when the state is dropped."""
        weakref.finalize(state, self._free_slabs.extend, held).atexit = False

    def take(self, held: list[DevicePtr]) -> ModuleOutputs:
        """A slab, which `held` has from now on."""
        if not self._free_slabs:
            nbytes = (self.modules - 1) * 2 * self.modules * self.h * BF16_BYTES
            self._free_slabs.append(self._alloc("outputs", nbytes))
        held.append(self._free_slabs.pop())
        return ModuleOutputs(held[0], self.modules, self.h)

    def give_back(self, held: list[DevicePtr]) -> None:
        """What `take` gave; nothing where it gave nothing."""
        self._free_slabs.extend(held)
        held.clear()

    def _alloc(self, name: str, nbytes: int) -> DevicePtr:
        if nbytes == 0:
            return DevicePtr.NULL
        return alloc_for(self._stack, self.gpu, nbytes, f"mtp_multi.{name}")


@dataclass(frozen=True, slots=True)
class MultiSnapshot:
    """What undoes a propose or a feed, blocks apart."""

    per_module: list[MtpSnapshot]
    last_num_drafted: int
    last_start: int
    slots: list[dict[int, int]]


@dataclass(slots=True, eq=False, weakref_slot=True)
class MultiModuleMtpState:
    """The rows of one sequence: `per_module[i]` belongs to module i, and the modules share no KV cache.

    last_num_drafted: drafts of the last propose while its verdict is outstanding, else 0; last_start: its position.
    `last_num_drafted` of each module counts the rows that it wrote then. outputs: where every module is kept complete,
    what later rows are made of; `slab` has its memory.
    """

    per_module: list[MtpProposerState]
    last_num_drafted: int = 0
    last_start: int = 0
    outputs: ModuleOutputs | None = None
    slab: list[DevicePtr] = field(default_factory=list)

    @property
    def block_table(self) -> list[int]:
        """Blocks of module 0; those of the others are in `per_module`."""
        return self.per_module[0].block_table

    def outputs_of(self, store: OutputStore) -> ModuleOutputs:
        """The outputs, with memory of `store` from the first use on."""
        if self.outputs is None:
            self.outputs = store.take(self.slab)
        return self.outputs

    def snapshot(self) -> MultiSnapshot:
        """What `restore` needs."""
        slots = [{} for _ in self.per_module[1:]] if self.outputs is None else self.outputs.copy_of_slots()
        return MultiSnapshot([s.snapshot() for s in self.per_module], self.last_num_drafted, self.last_start, slots)

    def restore(self, taken: MultiSnapshot) -> None:
        """Go back to a snapshot, but for `per_module`."""
        self.last_num_drafted, self.last_start = taken.last_num_drafted, taken.last_start
        if self.outputs is not None:
            self.outputs.slots = taken.slots
