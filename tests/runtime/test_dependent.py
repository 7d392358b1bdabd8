# SPDX-License-Identifier: AGPL-3.0-only
"""Kernels that start in a graph before the one before has ended: that they do, and that results do not tell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_py.ops.residual_add import bf16_concat
from spark_py.ops.spark_gemv_rows import Projection, spark_gemv_rows
from spark_py.runtime import GpuBackend
from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.gpu import StreamLike

from .dependent_support import dependent_backend
from .support import BF16, capture, read, upload

GRIDS = (1, 3, 40, 131, 1, 264, 8, 700)
"""Blocks of 256 threads of one kernel after the other: most leave multiprocessors without work."""
CLOCKS = 20_000_000


def _in_use(gpu: GpuBackend) -> bool:
    return bool(getattr(gpu._device, "dependent_launches", False))  # type: ignore[attr-defined]


def _seen(gpu: GpuBackend, between: Callable[[StreamLike], object] = lambda stream: None) -> bool:
    """Whether, in a graph, `tell` starts while `see` waits for it; `between` queues what stands between the two."""
    see, tell, stream = gpu.kernel("mix", "see"), gpu.kernel("tell", "tell"), gpu.create_stream()
    flag, seen = gpu.alloc(4), gpu.alloc(4)

    def work() -> None:
        gpu.memset_async(flag, 0, 4, stream)
        gpu.launch_typed(see, (1, 1, 1), (1, 1, 1), 0, stream, [flag, seen, CLOCKS])
        between(stream)
        gpu.launch_typed(tell, (1, 1, 1), (1, 1, 1), 0, stream, [flag])

    graph = capture(gpu, stream, work)
    found = []
    for _ in range(3):
        gpu.launch_graph(graph, stream)
        gpu.synchronize(stream)
        found.append(int.from_bytes(read(gpu, seen, 4), "little"))
    gpu.destroy_graph(graph)
    assert len(set(found)) == 1, found
    return found[0] == 1


@pytest.mark.gpu_only("a CPU runs one kernel after the other")
@pytest.mark.no_sanitizer("its kernels wait for one another against the rules")
def test_the_next_kernel_starts_early(gpu: GpuBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with dependent_backend(gpu, tmp_path) as with_it:
        if not _in_use(with_it):
            pytest.skip("needs compute capability 9.0, CUDA 12.3 of the driver, and SPARK_PY_DEPENDENT not 0")
        assert _seen(with_it)
        buffers = with_it.alloc(64), with_it.alloc(64)
        assert not _seen(with_it, lambda stream: with_it.copy_d2d_async(*buffers, 64, stream))
    monkeypatch.setenv("SPARK_PY_DEPENDENT", "0")
    with dependent_backend(gpu, tmp_path) as without:
        assert not _in_use(without)
        assert not _seen(without)


@pytest.mark.gpu_only("the switch is the CUDA backend's")
def test_the_switch_takes_no_other_word(gpu: GpuBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_PY_DEPENDENT", "no")
    with pytest.raises(InvalidArgumentError, match="SPARK_PY_DEPENDENT"), dependent_backend(gpu, tmp_path):
        pass


@pytest.mark.parametrize("n", [1000, 70_000])
def test_a_chain_has_the_bits_of_its_launches(
    gpu: GpuBackend, rng: np.random.Generator, tmp_path: Path, n: int
) -> None:
    """Each kernel reads, by loads for constant data too, what the last one wrote, and writes what that one read: a
    stale line of a cache, a start too early or a store too late gives other numbers."""
    on_gpu = gpu.name == "cuda"
    rounds, replays, n = (64, 300, n) if on_gpu else (6, 2, 100)
    with dependent_backend(gpu, tmp_path) as own:
        mix, stream = own.kernel("mix", "mix"), own.create_stream()
        source, a, b = (own.alloc(4 * n) for _ in range(3))

        def work(on: int) -> None:
            own.copy_d2d_async(source, a, 4 * n, on)
            for i in range(rounds):
                here, there = (a, b) if i % 2 == 0 else (b, a)
                grid = GRIDS[i % len(GRIDS)] if on_gpu else 2
                own.launch_typed(mix, (grid, 1, 1), (256 if on_gpu else 32, 1, 1), 0, on, [here, there, n, i])

        graph = capture(own, stream, lambda: work(stream))
        for replay in range(replays):
            own.copy_h2d(rng.integers(0, 2**32, n, np.uint32).view(np.uint8), source)
            own.launch_graph(graph, stream)
            own.synchronize(stream)
            found = read(own, a, 4 * n)
            if replay % 10 and on_gpu:
                continue
            work(own.default_stream())
            own.synchronize(own.default_stream())
            assert found == read(own, a, 4 * n), f"replay {replay}"
        own.destroy_graph(graph)


class Products:
    """Products of a row with small matrices, one after the other, each twice as wide as it is deep at most."""

    def __init__(self, gpu: GpuBackend, rng: np.random.Generator, k: int, count: int) -> None:
        self.gpu, self.k = gpu, k
        self.kernel, self.concat = (
            gpu.kernel("spark_gemv_rows", "spark_gemv_rows"),
            gpu.kernel("residual_add", "bf16_concat"),
        )
        self.weights = [upload(gpu, self._draw(rng, k // 2, k)) for _ in range(count)]
        self.row, self.halves, self.x = gpu.alloc(2 * k), gpu.alloc(2 * k), gpu.alloc(2 * k)

    @staticmethod
    def _draw(rng: np.random.Generator, *shape: int) -> np.ndarray[Any, Any]:
        return (rng.standard_normal(shape) * np.sqrt(2.0 / shape[-1])).astype(BF16)

    def new_row(self, rng: np.random.Generator) -> None:
        self.gpu.copy_h2d(self._draw(rng, self.k).view(np.uint8), self.row)

    def work(self, stream: StreamLike) -> None:
        half = self.k // 2
        self.gpu.copy_d2d_async(self.row, self.x, 2 * self.k, stream)
        for first, second in zip(self.weights[::2], self.weights[1::2], strict=True):
            spark_gemv_rows(
                self.gpu, self.kernel, self.x, [Projection(first, self.halves, half, half)], 1, self.k, stream
            )
            other = self.halves.offset(self.k)
            spark_gemv_rows(self.gpu, self.kernel, self.x, [Projection(second, other, half, half)], 1, self.k, stream)
            bf16_concat(self.gpu, self.concat, self.halves, other, self.x, half, stream)

    def result(self) -> bytes:
        return read(self.gpu, self.x, 2 * self.k)


def test_products_have_the_bits_of_their_launches(gpu: GpuBackend, rng: np.random.Generator, stream: int) -> None:
    on_gpu = gpu.name == "cuda"
    products = Products(gpu, rng, 1024 if on_gpu else 64, 24 if on_gpu else 2)
    graph = capture(gpu, stream, lambda: products.work(stream))
    results = set()
    for _ in range(200 if on_gpu else 2):
        products.new_row(rng)
        gpu.launch_graph(graph, stream)
        gpu.synchronize(stream)
        found = products.result()
        products.work(gpu.default_stream())
        gpu.synchronize(gpu.default_stream())
        assert found == products.result()
        results.add(found)
    assert len(results) > 1
    gpu.destroy_graph(graph)


def test_weights_that_the_graph_writes_are_waited_for(gpu: GpuBackend, rng: np.random.Generator, stream: int) -> None:
    products = Products(gpu, rng, 64, 2)
    products.new_row(rng)
    fresh = gpu.alloc(64 * 64)

    def work(on: int) -> None:
        gpu.copy_d2d_async(fresh, products.weights[0], 64 * 64, on)
        products.work(on)

    graph = capture(gpu, stream, lambda: work(stream))
    results = set()
    for _ in range(3):
        gpu.copy_h2d(Products._draw(rng, 32, 64).view(np.uint8), fresh)
        gpu.launch_graph(graph, stream)
        gpu.synchronize(stream)
        found = products.result()
        work(gpu.default_stream())
        gpu.synchronize(gpu.default_stream())
        assert found == products.result()
        results.add(found)
    assert len(results) == 3
    gpu.destroy_graph(graph)


class Recorder:
    """Stands for a device with dependent launches: which kernels were queued so."""

    def __init__(self, gpu: GpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        device: Any = gpu._device  # type: ignore[attr-defined]

        def plan_dependent(kernel: Any, grid: Any, block: Any, shared: int) -> Any:
            run = device.plan(kernel, grid, block, shared, False)

            def launch(stream: int, pointers: Any, scalars: Any) -> None:
                self.names.append(kernel.function)
                run(stream, pointers, scalars)

            return launch

        monkeypatch.setattr(device, "plan_dependent", plan_dependent)
        monkeypatch.setattr(gpu, "_plans", {})  # those made before know the device's own

    def take(self) -> list[str]:
        names, self.names = self.names, []
        return names


@pytest.fixture
def recorder(gpu: GpuBackend, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    if gpu.name == "host":
        pytest.skip("references are no kernels that could wait")
    return Recorder(gpu, monkeypatch)


PAIR = ["spark_gemv_rows", "spark_gemv_rows", "bf16_concat"]


def test_only_captures_launch_so(gpu: GpuBackend, rng: np.random.Generator, stream: int, recorder: Recorder) -> None:
    products = Products(gpu, rng, 64, 2)
    products.work(stream)
    gpu.synchronize(stream)
    assert recorder.take() == []
    graph = capture(gpu, stream, lambda: products.work(stream))
    assert recorder.take() == PAIR
    gpu.launch_graph(graph, stream)
    products.work(stream)
    gpu.synchronize(stream)
    assert recorder.take() == []
    gpu.destroy_graph(graph)


@pytest.mark.parametrize("how", ["copy", "fill", "kernel"])
def test_what_the_capture_wrote_is_no_early_read(
    gpu: GpuBackend, rng: np.random.Generator, stream: int, recorder: Recorder, how: str
) -> None:
    products = Products(gpu, rng, 64, 2)
    first, second = products.weights
    write: dict[str, Callable[[], object]] = {
        "copy": lambda: gpu.copy_d2d_async(second, first, 64, stream),
        "fill": lambda: gpu.memset_async(first, 0, 64, stream),
        "kernel": lambda: bf16_concat(gpu, products.concat, products.row, products.row, first, 64, stream),
    }
    written: list[str] = []

    def work() -> None:
        products.work(stream)
        recorder.take()
        write[how]()
        written.extend(recorder.take())
        products.work(stream)

    gpu.destroy_graph(capture(gpu, stream, work))
    assert written == (["bf16_concat"] if how == "kernel" else [])
    assert recorder.take() == PAIR[1:]  # not the product of `first`
    gpu.destroy_graph(capture(gpu, stream, lambda: products.work(stream)))
    assert recorder.take() == PAIR
