# SPDX-License-Identifier: AGPL-3.0-only
"""One backend, many threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from spark_py.runtime import DevicePtr, GpuBackend
from spark_py.runtime.errors import DoubleFreeError, ReleasedHandleError, SparkError

from .support import Concat, poisoned, read

THREADS = 8


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    """Threads take turns a thousand times as often as usual, so that races have their chance."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(usual)


def together(body: Callable[[int], object], count: int = THREADS) -> list[BaseException]:
    """`body(index)` on `count` threads that start at once; what they raised."""
    errors: list[BaseException] = []
    start = threading.Barrier(count, timeout=60)

    def run(index: int) -> None:
        try:
            start.wait()
            body(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_everything_at_once(gpu: GpuBackend) -> None:
    before = gpu.live_bytes()

    def life(index: int) -> None:
        rng = np.random.default_rng(index)
        stream = gpu.create_stream()
        for round_ in range(15):
            work = Concat(gpu, rng, 50 + 37 * index + round_)
            work.launch(stream)
            token = rng.bytes(16)
            ptr = gpu.alloc(16)
            gpu.copy_h2d_async(token, ptr, stream)
            out = bytearray(16)
            gpu.copy_d2h_on_stream(ptr, out, stream)
            assert bytes(out) == token
            assert work.result == work.expected
            for each in (work.a, work.b, work.out, ptr):
                gpu.free(each)
        gpu.destroy_stream(stream)

    assert together(life) == []
    assert gpu.live_bytes() == before


def test_a_block_is_freed_once(gpu: GpuBackend) -> None:
    for _ in range(30):
        ptr = gpu.alloc(64)
        errors = together(lambda index, ptr=ptr: gpu.free(ptr))
        assert len(errors) == THREADS - 1
        assert all(isinstance(error, DoubleFreeError) for error in errors)


def test_handles_are_destroyed_once(gpu: GpuBackend) -> None:
    for make, destroy in (
        (gpu.create_stream, gpu.destroy_stream),
        (gpu.create_event, gpu.destroy_event),
        (lambda: _graph(gpu), gpu.destroy_graph),
    ):
        handle = make()
        errors = together(lambda index, destroy=destroy, handle=handle: destroy(handle))
        assert len(errors) == THREADS - 1
        assert all(isinstance(error, ReleasedHandleError) for error in errors)


def _graph(gpu: GpuBackend) -> object:
    stream = gpu.create_stream()
    gpu.begin_capture(stream)
    graph = gpu.end_capture(stream)
    gpu.destroy_stream(stream)
    return graph


def test_lookups_give_one_handle(gpu: GpuBackend) -> None:
    found: list[object] = []
    assert together(lambda index: found.append(gpu.kernel("norm", "rms_norm_residual"))) == []
    assert len(set(found)) == 1


def test_captures_beside_copies_and_frees(gpu: GpuBackend) -> None:
    """Half of the threads capture, half copy, wait and free; no capture is disturbed and no wait meets a capture."""

    def capture(index: int) -> None:
        rng = np.random.default_rng(index)
        work, stream = Concat(gpu, rng), gpu.create_stream()
        for _ in range(15):
            gpu.begin_capture(stream)
            for _ in range(10):
                work.launch(stream)
            graph = gpu.end_capture(stream)
            gpu.launch_graph(graph, stream)
            gpu.destroy_graph(graph)
        assert work.result == work.expected
        gpu.destroy_stream(stream)

    def copy(index: int) -> None:
        for round_ in range(60):
            ptr = poisoned(gpu, 64)
            gpu.copy_h2d(bytes([index]) * 64, ptr)
            assert read(gpu, ptr, 64) == bytes([index]) * 64
            gpu.free(ptr)
            if round_ % 10 == 0:
                gpu.destroy_stream(gpu.create_stream())

    assert together(lambda index: (capture if index % 2 else copy)(index)) == []


def test_a_launch_and_a_free_of_its_memory(gpu: GpuBackend) -> None:
    """The launch is either refused or done before the memory goes; never anything else."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        work = Concat(gpu, rng)
        done: list[str] = []

        def act(index: int, work: Concat = work, done: list[str] = done) -> None:
            if index == 0:
                gpu.free(work.a)
                return
            try:
                work.launch()
                done.append("ran")
            except SparkError as error:
                done.append("refused" if "'a'" in str(error) else str(error))

        if gpu.name == "cuda":
            gpu.free(work.a)  # a GPU cannot be asked to lose this race: only the refusal is tested
            with pytest.raises(SparkError):
                work.launch()
            continue
        assert together(act, 2) == []
        assert done[0] in ("ran", "refused")
        assert work.result == work.expected if done == ["ran"] else work.untouched


def test_retained_memory_outlives_a_wait_of_another_thread(gpu: GpuBackend) -> None:
    """A wait lets go of what was queued before it, and of nothing that another thread queues meanwhile."""
    stream = gpu.create_stream()
    targets: list[DevicePtr] = [poisoned(gpu, 4096) for _ in range(4)]
    stop = threading.Event()

    def act(index: int) -> None:
        if index == 0:
            while not stop.is_set():
                gpu.synchronize(gpu.default_stream())
                gpu.memset(targets[0], 0, 1)
            return
        try:
            for round_ in range(40):
                for value, ptr in enumerate(targets[1:]):
                    gpu.copy_h2d_async_retained(bytes([value + round_]) * 4096, ptr, stream)
                gpu.synchronize(stream)
                for value, ptr in enumerate(targets[1:]):
                    assert read(gpu, ptr, 4096) == bytes([value + round_]) * 4096
        finally:
            stop.set()

    assert together(act, 2) == []
    gpu.destroy_stream(stream)
