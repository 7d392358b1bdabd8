# SPDX-License-Identifier: AGPL-3.0-only
"""The staging pool against a device that finishes copies when it is told to."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from spark_py.runtime import staging
from spark_py.runtime.staging import StagingPool


class Device:
    """Queues copies and runs them on `finish` or when an event is waited for."""

    def __init__(self) -> None:
        self.memory: dict[int, np.ndarray] = {}
        self.queue: list[tuple[int, int, int] | int] = []  # copies (dst, src, nbytes) and recorded events, in order
        self.done: set[int] = set()
        self.events: set[int] = set()
        self.waits = 0
        self.fail = False

    def alloc_host(self, nbytes: int) -> int:
        block = np.full(nbytes, 0xEE, np.uint8)
        self.memory[block.ctypes.data] = block
        return block.ctypes.data

    def free_host(self, address: int) -> None:
        self.memory.pop(address)[:] = 0xDD

    def h2d(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        if self.fail:
            raise RuntimeError("the copy was refused")
        base = next(base for base, block in self.memory.items() if base <= src < base + block.size)
        assert src + nbytes <= base + self.memory[base].size
        self.queue.append((dst, src, nbytes))

    def create_event(self, timing: bool) -> int:
        event = len(self.events) + 1
        self.events.add(event)
        return event

    def destroy_event(self, event: int) -> None:
        self.events.remove(event)

    def record_event(self, event: int, stream: int) -> None:
        self.done.discard(event)
        self.queue.append(event)

    def query_event(self, event: int) -> bool:
        return event in self.done

    def sync_event(self, event: int) -> None:
        self.waits += 1
        self.finish(event)

    def finish(self, until: int | None = None) -> None:
        while self.queue:
            item = self.queue.pop(0)
            if isinstance(item, tuple):
                ctypes.memmove(*item)
            else:
                self.done.add(item)
                if item == until:
                    return

    @property
    def bytes_held(self) -> int:
        return sum(block.size for block in self.memory.values())


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "CHUNK", 8192)
    monkeypatch.setattr(staging, "MOST_IN_FLIGHT", 4 * 8192)


def test_bytes_are_taken_at_the_call(device: Device) -> None:
    pool, target, source = StagingPool(device), np.zeros(100, np.uint8), np.arange(100, dtype=np.uint8)
    pool.upload(target.ctypes.data, source.ctypes.data, 100, 1)
    source[:] = 0
    assert not target.any()
    device.finish()
    assert target.tolist() == list(range(100))
    pool.close()


def test_a_chunk_is_used_again_only_after_its_event(device: Device) -> None:
    pool = StagingPool(device)
    targets = np.zeros((3, 64), np.uint8)
    for value, target in enumerate(targets[:2], 1):
        pool.upload(target.ctypes.data, np.full(64, value, np.uint8).ctypes.data, 64, 1)
    assert len(device.memory) == 2  # the first copy is not done
    device.finish()
    pool.upload(targets[2].ctypes.data, np.full(64, 3, np.uint8).ctypes.data, 64, 1)
    assert len(device.memory) == 2
    device.finish()
    assert (targets == np.array([[1], [2], [3]])).all()
    assert device.waits == 0
    pool.close()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 8191, 8192, 8193, 50_000])
def test_sizes(device: Device, rng: np.random.Generator, size: int) -> None:
    pool, source = StagingPool(device), rng.integers(0, 256, size, np.uint8)
    target = np.full(size + 2, 0xA5, np.uint8)
    pool.upload(target.ctypes.data + 1, source.ctypes.data, size, 1)
    device.finish()
    assert (target[1:-1] == source).all()
    assert target[0] == target[-1] == 0xA5
    pool.close()


@pytest.mark.usefixtures("small_chunks")
def test_what_waits_is_bounded(device: Device, rng: np.random.Generator) -> None:
    pool, source = StagingPool(device), rng.integers(0, 256, 100 * 8192, np.uint8)
    target = np.zeros_like(source)
    pool.upload(target.ctypes.data, source.ctypes.data, source.size, 1)
    assert device.bytes_held <= 4 * 8192
    assert device.waits > 0
    device.finish()
    assert (target == source).all()
    pool.close()


@pytest.mark.usefixtures("small_chunks")
def test_a_refused_copy_loses_no_chunk(device: Device) -> None:
    pool, data = StagingPool(device), np.zeros(64, np.uint8)
    device.fail = True
    for _ in range(3):
        with pytest.raises(RuntimeError, match="refused"):
            pool.upload(data.ctypes.data, data.ctypes.data, 64, 1)
        device.finish()
    device.fail = False
    assert len(device.memory) == 1
    pool.close()
    assert not device.memory


def test_close_waits_and_returns_everything(device: Device) -> None:
    pool, target = StagingPool(device), np.zeros(64, np.uint8)
    pool.upload(target.ctypes.data, np.full(64, 9, np.uint8).ctypes.data, 64, 1)
    pool.close()
    assert (target == 9).all()
    assert not device.memory
    assert not device.events
    pool.close()
