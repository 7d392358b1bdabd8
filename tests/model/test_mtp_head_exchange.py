# SPDX-License-Identifier: AGPL-3.0-only
"""What a head and its graphs tell each other through page-locked memory: when the host may write it, and what it may
not say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_py.model.layers.mtp_head.propose_exchange import BlockTables
from spark_py.model.levers import ModelLevers
from spark_py.runtime import open_backend
from spark_py.runtime.errors import (
    BackendClosedError,
    FreedPointerError,
    InvalidArgumentError,
    OutOfBoundsError,
    ReleasedError,
    SparkError,
)
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from tests.model.mtp_forms import hide
from tests.model.support import a_hidden, download, make_rig, upload


def test_tables_are_packed_again_when_they_change() -> None:
    tables, table = BlockTables(), [3, 1, 2]
    for change in (lambda: None, lambda: None, lambda: table.append(9), table.pop, lambda: table.__setitem__(1, 7)):
        change()
        for blocks in range(len(table) + 1):
            assert np.frombuffer(tables.packed(table, blocks), "<i4").tolist() == table[:blocks]
    for _ in range(1000):  # of lists that are gone others have the place
        assert np.frombuffer(tables.packed([len(table), 5], 2), "<i4").tolist() == [3, 5]


@pytest.mark.parametrize("lacks", ["nothing", "spark_propose_inputs::spark_propose_inputs"])
def test_the_host_waits_for_the_graph_that_still_reads(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    """After a deferred draft, which nobody waits for, and after a launch that failed; not otherwise."""
    hide(monkeypatch, gpu, "nothing", function=lacks)
    rig, waits = make_rig(gpu, rng), list[str]()
    for name in ("event_synchronize", "synchronize", "launch_graph"):
        real = getattr(type(gpu), name)

        def told(self: Any, *args: Any, name: str = name, real: Any = real) -> Any:
            waits.append(name)
            return real(self, *args)

        monkeypatch.setattr(type(gpu), name, told)

    def propose(**more: Any) -> list[str]:
        state = rig.state()
        at = rig.put(a_hidden(rig, rng))
        waits.clear()
        rig.head.propose(3, at, 7, 1, state, rig.ctx, rig.stream, **more)
        return list(waits)

    target = gpu.alloc(2 * rig.config.hidden_size)
    propose(), propose()
    assert propose() == ["launch_graph", "synchronize"]
    assert propose(draft_embed_target=target) == ["launch_graph"]
    assert propose(draft_embed_target=target) == ["event_synchronize", "launch_graph"]
    assert propose() == ["event_synchronize", "launch_graph", "synchronize"]
    with monkeypatch.context() as patch:

        def fails(self: Any, *args: Any) -> None:
            raise SparkError("on purpose")

        patch.setattr(type(gpu), "launch_graph", fails)
        with pytest.raises(SparkError, match="on purpose"):
            propose()
    assert propose() == ["synchronize", "launch_graph", "synchronize"]
    assert propose() == ["launch_graph", "synchronize"]


@pytest.mark.parametrize("batched", [False, True])
def test_a_hidden_row_that_is_no_memory(gpu: GpuBackend, rng: np.random.Generator, batched: bool) -> None:
    """Its address reaches a kernel through memory, where no launch sees it: also the replay of a graph refuses it."""
    rig = make_rig(gpu, rng)
    row = 2 * rig.config.hidden_size

    def propose(*rows: DevicePtr) -> Any:
        states = [rig.state() for _ in rows]
        if batched:
            n = len(rows)
            return rig.head.propose_batch([3] * n, rows, [7] * n, 1, states, rig.ctx, rig.stream)
        return [
            rig.head.propose(3, at, 7, 1, state, rig.ctx, rig.stream) for at, state in zip(rows, states, strict=True)
        ]

    good = rig.put(rng.standard_normal(rig.config.hidden_size))
    first, freed = propose(good, good), gpu.alloc(row)
    for _ in range(2):
        assert propose(good, freed)[0] == first[0]
    gpu.free(freed)
    with pytest.raises(FreedPointerError, match="hidden row"):
        propose(good, freed)
    with pytest.raises(OutOfBoundsError, match="hidden row"):
        propose(good, good.offset(2))
    with pytest.raises(InvalidArgumentError, match="multiple of 2"):
        propose(good, gpu.alloc(row + 1).offset(1))
    assert propose(good, good) == first


def test_a_head_that_is_gone_writes_nowhere(rng: np.random.Generator) -> None:
    with open_backend("host") as gpu:
        rig = make_rig(gpu, rng)
        state, at = rig.state(), rig.put(a_hidden(rig, rng))
        rig.head.release()
        with pytest.raises((ReleasedError, FreedPointerError)):
            rig.head.propose_inputs.set(3, at, 7, 0, 1, [0], rig.stream)  # type: ignore[union-attr]
        other = make_rig(gpu, rng)
        state, at = other.state(), other.put(a_hidden(other, rng))
        other.head.reserve_rows(state, 8)
    with pytest.raises(BackendClosedError):
        other.head.propose(3, at, 7, 1, state, other.ctx, other.stream)
    other.head.release()


def test_a_set_without_the_kernel_copies(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hidden row before the graph, the slab within; ids and rows are those of single launches."""
    hide(monkeypatch, gpu, "nothing", function="spark_propose_inputs::spark_propose_inputs")
    rig = make_rig(gpu, rng)
    other = make_rig(gpu, rng, arrays=rig.arrays, levers=ModelLevers(propose_graph=False))
    for turn in range(4):
        hidden, found, target = a_hidden(rig, rng), [], upload(gpu, np.zeros(rig.config.hidden_size, np.uint16))
        for each in (rig, other):
            with gpu.trace() as trace:
                state = each.state()
                found.append(each.propose(state, turn, hidden, 9, 3))
                found.append([side.tobytes() for side in each.rows(state)])
                each.head.after_verify(3, state, each.stream)
                found.append(each.propose(state, turn, hidden, 13, 1, draft_embed_target=target))
                found.append(download(gpu, target, (rig.config.hidden_size,)).tobytes())
            kinds = [entry.kind for step in trace.steps for entry in step]
            if each is rig and turn > 1:
                assert kinds[-4:-2] == ["copy_d2d_async", "launch_graph"]
                assert not {"copy_h2d_async", "copy_d2h_on_stream"} & {*kinds}
        assert found[:4] == found[4:]
