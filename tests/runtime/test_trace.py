# SPDX-License-Identifier: AGPL-3.0-only
"""Launch traces: steps, their difference word by word, and replay."""

from __future__ import annotations

import numpy as np
import pytest

from spark_py.runtime import DevicePtr, GpuBackend
from spark_py.runtime.errors import ArityError, BackendClosedError, FreedPointerError, InvalidArgumentError

from .support import BF16, Concat, poisoned, read, refused, second_backend, upload


@pytest.fixture
def work(gpu: GpuBackend, rng: np.random.Generator) -> Concat:
    return Concat(gpu, rng)


def test_what_is_recorded(gpu: GpuBackend, work: Concat) -> None:
    ptr, stream = poisoned(gpu, 64), gpu.default_stream()
    work.launch()  # before the trace
    with gpu.trace() as trace:
        work.launch()
        gpu.copy_h2d_async(b"12345678", ptr, stream)
        gpu.memset_async(ptr, 7, 8, stream)
        with pytest.raises(ArityError):
            work.launch(args=[])  # refused, so not part of the step
        step = trace.step()
        gpu.copy_d2d(ptr, ptr.offset(32), 16)
        read(gpu, ptr, 4)
    work.launch()  # after it
    assert [entry.kind for entry in step] == ["launch", "copy_h2d_async", "memset_async"]
    launch = step[0]
    assert launch.name == "residual_add::bf16_concat"
    assert (launch.grid, launch.block, launch.shared_mem) == (work.grid, work.BLOCK, 0)
    assert launch.words == (
        ("a", work.a.address),
        ("b", work.b.address),
        ("out", work.out.address),
        ("N", work.n),
    )
    assert step[1].payload == b"12345678"
    assert dict(step[2].words) == {"ptr": ptr.address, "value": 7, "nbytes": 8}
    assert [entry.kind for entry in trace.steps[1]] == ["copy_d2d", "copy_d2h"]


def _norm(gpu: GpuBackend, eps: float, row: DevicePtr, out: DevicePtr) -> None:
    kernel = gpu.kernel("norm", "rms_norm")
    gpu.launch_typed(kernel, (1, 1, 1), (64, 1, 1), 0, gpu.default_stream(), [row, row, out, 64, eps])


def test_equal_steps(gpu: GpuBackend, work: Concat) -> None:
    with gpu.trace() as trace:
        for _ in range(2):
            work.launch()
            gpu.memset_async(work.out, 1, 4, gpu.default_stream())
            trace.step()
    assert trace.diff() == []


def test_diff_word_by_word(gpu: GpuBackend, rng: np.random.Generator) -> None:
    row, out, ptr = upload(gpu, rng.standard_normal(64).astype(BF16)), poisoned(gpu, 256), poisoned(gpu, 64)
    stream = gpu.default_stream()
    eps = 1e-6
    with gpu.trace() as trace:
        for step in range(2):
            _norm(gpu, eps if step == 0 else float(np.nextafter(np.float32(eps), np.float32(1))), row, out)
            _norm(gpu, eps, row, out.offset(128 * step))
            gpu.memset_async(ptr, 7 + step, 8, stream)
            gpu.copy_h2d_async(bytes([9, 9 + step]), ptr, stream)
            gpu.copy_d2d_2d_async(ptr, 8, out, 8 + step, 4, 4, stream)
            trace.step()
    found = trace.diff()
    bits = int(np.float32(eps).view(np.uint32))
    assert [(d.index, d.operation, d.word, d.first, d.second) for d in found] == [
        (0, "norm::rms_norm", "eps", bits, bits + 1),
        (1, "norm::rms_norm", "output", out.address, out.address + 128),
        (2, "memset_async", "value", 7, 8),
        (3, "copy_h2d_async", "bytes", b"\t\t", b"\t\n"),
        (4, "copy_d2d_2d_async", "dst_pitch", 8, 9),
    ]
    assert "eps" in str(found[0])
    assert hex(bits) in str(found[0])
    assert trace.diff(max_report=2) == found[:2]
    assert [(d.first, d.second) for d in trace.diff(1, 0)] == [(d.second, d.first) for d in found]


def test_signs_and_nans_of_f32_are_words(gpu: GpuBackend, rng: np.random.Generator) -> None:
    row, out = upload(gpu, rng.standard_normal(64).astype(BF16)), poisoned(gpu, 128)
    with gpu.trace() as trace:
        for eps in (0.0, -0.0, float("nan"), float("nan")):
            _norm(gpu, eps, row, out)
            trace.step()
    assert [(d.word, d.first, d.second) for d in trace.diff(0, 1)] == [("eps", 0, 0x80000000)]
    assert trace.diff(2, 3) == []


def test_steps_of_another_shape(gpu: GpuBackend, work: Concat) -> None:
    with gpu.trace() as trace:
        work.launch()
        gpu.memset_async(work.out, 0, 4, gpu.default_stream())
        trace.step()
        gpu.memset_async(work.out, 0, 4, gpu.default_stream())
    found = [(d.index, d.word, d.first, d.second) for d in trace.diff()]
    assert (0, "operation", ("launch", "residual_add::bf16_concat"), ("memset_async", "")) in found
    assert (1, "operations", 2, 1) in found


def test_geometry_is_compared(gpu: GpuBackend, rng: np.random.Generator) -> None:
    small, large = Concat(gpu, rng, 100), Concat(gpu, rng, 600)
    with gpu.trace() as trace:
        small.launch()
        trace.step()
        small.launch(grid=(3, 1, 1), args=[large.a, large.b, large.out, 600])
    assert ("grid", (1, 1, 1), (3, 1, 1)) in [(d.word, d.first, d.second) for d in trace.diff()]


def test_replay(gpu: GpuBackend, work: Concat, rng: np.random.Generator) -> None:
    ptr, copy, stream = poisoned(gpu, 64), poisoned(gpu, 64), gpu.default_stream()
    with gpu.trace() as trace:
        gpu.copy_h2d(rng.bytes(64), ptr)
        gpu.memset(ptr.offset(60), 0, 4)
        gpu.copy_d2d_2d_async(ptr, 16, copy, 8, 8, 4, stream)
        gpu.copy_d2d(ptr, copy.offset(32), 32)
        work.launch()
        read(gpu, copy, 64)
    want = read(gpu, copy, 64)
    for memory in (ptr, copy):
        gpu.memset(memory, 0xEE, 64)
    work.reset()
    other = gpu.create_stream()
    assert trace.replay(stream=other) == 5  # the download is the recorder's
    gpu.synchronize(other)
    assert read(gpu, copy, 64) == want
    assert work.result == work.expected
    gpu.destroy_stream(other)
    gpu.free(ptr)
    with pytest.raises(FreedPointerError):
        trace.replay()


def test_replay_of_a_graph_launch(gpu: GpuBackend, work: Concat) -> None:
    stream = gpu.default_stream()
    gpu.begin_capture(stream)
    work.launch()
    graph = gpu.end_capture(stream)
    with gpu.trace() as trace:
        gpu.launch_graph(graph, stream)
    work.reset()
    assert trace.replay() == 1
    assert work.result == work.expected
    gpu.destroy_graph(graph)


def test_a_replay_is_not_recorded(gpu: GpuBackend, work: Concat) -> None:
    with gpu.trace() as trace:
        work.launch()
        trace.step()
        trace.replay()
        work.launch()
    assert [len(step) for step in trace.steps] == [1, 1]


def test_misuse(gpu: GpuBackend, work: Concat) -> None:
    with gpu.trace() as trace:
        with refused(InvalidArgumentError, "trace"), gpu.trace():
            pass
        work.launch()
    with refused(InvalidArgumentError, "first", "-2", "1 steps"):
        trace.diff()
    with refused(InvalidArgumentError, "step", "5"):
        trace.replay(5)
    other = second_backend(gpu)
    recorder = other.trace()
    other.close()
    with pytest.raises(BackendClosedError):
        other.trace()
    assert recorder.steps == []
