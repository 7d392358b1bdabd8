# SPDX-License-Identifier: AGPL-3.0-only
"""Grids: indices, atomics over OS threads, shared memory of blocks, cooperative launches, waits without end, graphs."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from spark_py.runtime.emulated import Schedule
from spark_py.runtime.errors import (
    ArgumentRangeError,
    ArityError,
    GeometryError,
    KernelFaultError,
    KernelTimeoutError,
)

from .support import ORDERS, emulate, get, launch, order_id, put


def test_indices(tmp_path: Path) -> None:
    text = """
    extern "C" __global__ void k(unsigned* out) {
        const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
        const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
        out[block * threads + thread] = blockIdx.x | blockIdx.y << 4 | blockIdx.z << 8 | threadIdx.x << 12 |
                                        threadIdx.y << 16 | threadIdx.z << 20;
    }
    """
    for schedule in (*ORDERS, Schedule(workers=2)):
        with emulate(tmp_path, text, schedule=schedule) as gpu:
            (out,) = launch(gpu, "k", (5, 3, 2), (7, 4, 3), [np.zeros(30 * 84, np.uint32)])
        bz, by, bx, tz, ty, tx = np.indices((2, 3, 5, 3, 4, 7))
        expected = bx | by << 4 | bz << 8 | tx << 12 | ty << 16 | tz << 20
        assert (out == expected.reshape(-1)).all(), order_id(schedule)


def test_atomics_over_two_os_threads(tmp_path: Path) -> None:
    text = """
    extern "C" __global__ void k(unsigned* sum, unsigned long long* wide, float* whole, unsigned* top, int* low,
                                 unsigned* swaps) {
        const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
        atomicAdd(sum, i);
        atomicAdd(wide, static_cast<unsigned long long>(i) << 20);
        atomicAdd(whole, 1.0f);
        atomicMax(top, i * 2654435761u);
        atomicMin(low, -static_cast<int>(i % 1000u));
        for (unsigned seen = *swaps;;) {
            const unsigned before = atomicCAS(swaps, seen, seen + 1u);
            if (before == seen) {
                break;
            }
            seen = before;
        }
    }
    """
    n = 1 << 20
    with emulate(tmp_path, text, schedule=Schedule(workers=2)) as gpu:
        args = [np.zeros(1, t) for t in (np.uint32, np.uint64, np.float32, np.uint32, np.int32, np.uint32)]
        total, wide, whole, top, low, swaps = launch(gpu, "k", n // 256, 256, args)
    assert total[0] == (n * (n - 1) // 2) % 2**32
    assert wide[0] == n * (n - 1) // 2 << 20
    assert whole[0] == n  # every partial sum is a whole number below 2**24
    assert top[0] == (np.arange(n, dtype=np.uint64) * 2654435761 % 2**32).max()
    assert low[0] == -999
    assert swaps[0] == n


def test_equal_names_in_two_files_stay_apart(tmp_path: Path) -> None:
    def text(size: int) -> str:
        return f"""
        template <class T> __device__ T* buffer() {{ __shared__ T held[{size}]; return held; }}
        extern "C" __global__ void k(unsigned* out) {{
            unsigned* held = buffer<unsigned>();
            for (unsigned i = threadIdx.x; i < {size}u; i += blockDim.x) {{ held[i] = i + {size}u; }}
            __syncthreads();
            for (unsigned i = threadIdx.x; i < {size}u; i += blockDim.x) {{ out[i] = held[i]; }}
        }}
        """

    with emulate(tmp_path / "a", text(64)) as small, emulate(tmp_path / "b", text(4096)) as large:
        for _ in range(3):
            for gpu, size in ((small, 64), (large, 4096)):
                (out,) = launch(gpu, "k", 1, 32, [np.zeros(size, np.uint32)])
                assert (out == np.arange(size) + size).all()


def test_shared_memory_is_poisoned_for_each_block(tmp_path: Path) -> None:
    text = """
    extern __shared__ __align__(16) unsigned char bytes[];
    extern "C" __global__ void k(unsigned* out) {
        __shared__ unsigned held;
        unsigned* word = reinterpret_cast<unsigned*>(bytes);
        if (threadIdx.x == 0u) { out[2 * blockIdx.x] = held; out[2 * blockIdx.x + 1] = word[3]; }
        held = word[3] = 5u;
    }
    """
    with emulate(tmp_path, text, schedule=Schedule(workers=1)) as gpu:
        (out,) = launch(gpu, "k", 4, 32, [np.zeros(8, np.uint32)], shared=16)
    assert (out == 0xFFFFFFFF).all()


BARRIER = """
extern "C" __global__ void k(volatile unsigned* arrived, unsigned* values, unsigned* sums) {
    if (threadIdx.x == 0u) {
        values[blockIdx.x] = blockIdx.x + 1u;
        __threadfence();
        atomicAdd(const_cast<unsigned*>(arrived), 1u);
        while (atomicAdd(const_cast<unsigned*>(arrived), 0u) < gridDim.x) {
        }
    }
    __syncthreads();
    unsigned sum = 0u;
    for (unsigned i = 0u; i < gridDim.x; ++i) {
        sum += values[i];
    }
    sums[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
"""


@pytest.mark.parametrize("checked", [False, True])
def test_a_cooperative_grid_meets_at_a_barrier(checked: bool, tmp_path: Path) -> None:
    with emulate(tmp_path, BARRIER, checked=checked) as gpu:
        args = [np.zeros(1, np.uint32), np.zeros(6, np.uint32), np.zeros(6 * 40, np.uint32)]
        *_, sums = launch(gpu, "k", 6, 40, args, cooperative=True)
        assert (sums == 21).all()
        with pytest.raises(GeometryError):
            launch(gpu, "k", 1000, 40, args, cooperative=True)


@pytest.mark.parametrize("checked", [False, True])
def test_a_wait_without_end_is_ended(checked: bool, tmp_path: Path) -> None:
    text = """
    extern "C" __global__ void k(volatile int* flag) { while (*flag == 0) { } }
    extern "C" __global__ void fine(int* out) { *out = 3; }
    """
    with emulate(tmp_path, text, checked=checked, schedule=Schedule(timeout=0.2, workers=2)) as gpu:
        for _ in range(2):
            with pytest.raises(KernelTimeoutError):
                launch(gpu, "k", 4, 32, [np.zeros(1, np.int32)])
            assert launch(gpu, "fine", 1, 1, [np.zeros(1, np.int32)])[0][0] == 3


def test_a_thread_that_waits_by_atomics_lets_others_run(tmp_path: Path) -> None:
    text = """
    extern "C" __global__ void k(unsigned* turn, unsigned* order) {
        while (atomicAdd(turn, 0u) != blockDim.x - 1u - threadIdx.x) { }
        order[threadIdx.x] = atomicAdd(turn, 1u);
    }
    """
    for schedule in ORDERS:
        with emulate(tmp_path, text, schedule=schedule) as gpu:
            _, order = launch(gpu, "k", 1, 96, [np.zeros(1, np.uint32), np.zeros(96, np.uint32)])
        assert (order == np.arange(95, -1, -1)).all(), order_id(schedule)


def test_wrong_launches_are_refused(tmp_path: Path) -> None:
    text = 'extern "C" __global__ void k(float* p, unsigned n) { p[0] = n; }'
    with emulate(tmp_path, text) as gpu:
        out = np.zeros(1, np.float32)
        for grid, block, shared in ((0, 1, 0), (1, 0, 0), (1, 1025, 0), (1, 1, 49153), ((1, 65536, 1), 1, 0)):
            with pytest.raises(GeometryError):
                launch(gpu, "k", grid, block, [out, 1], shared=shared)
        for args in ([out], [out, 1, 2]):
            with pytest.raises(ArityError):
                launch(gpu, "k", 1, 1, args)
        with pytest.raises(ArgumentRangeError):
            launch(gpu, "k", 1, 1, [out, 2**32])
        assert launch(gpu, "k", 1, 1, [out, 2**24])[0][0] == 2**24


def test_every_type_of_parameter_arrives(tmp_path: Path) -> None:
    text = """
    enum Colour { RED, BLUE };
    extern "C" __global__ void k(double* out, bool a, signed char b, unsigned short c, int d, unsigned e, long long f,
                                 unsigned long long g, float h, double i) {
        out[0] = a; out[1] = b; out[2] = c; out[3] = d; out[4] = e; out[5] = f; out[6] = g; out[7] = h; out[8] = i;
    }
    """
    values = [1, -7, 65535, -(2**31), 2**32 - 1, -(2**50), 2**52, 0.5, -1e300]
    for checked in (False, True):
        with emulate(tmp_path, text, checked=checked) as gpu:
            (out,) = launch(gpu, "k", 1, 1, [np.zeros(9), *values])
        assert out.tolist() == [float(value) for value in values]


def test_a_captured_launch_is_replayed(tmp_path: Path) -> None:
    text = 'extern "C" __global__ void k(unsigned* p) { atomicAdd(p, 1u); }'
    with emulate(tmp_path, text) as gpu:
        kernel, stream, ptr = gpu.kernel("kernels", "k"), gpu.create_stream(), put(gpu, np.zeros(1, np.uint32))
        gpu.begin_capture(stream)
        gpu.launch_typed(kernel, (2, 1, 1), (32, 1, 1), 0, stream, [ptr])
        graph = gpu.end_capture(stream)
        assert get(gpu, ptr, np.zeros(1, np.uint32))[0] == 0
        for _ in range(3):
            gpu.launch_graph(graph, stream)
        assert get(gpu, ptr, np.zeros(1, np.uint32))[0] == 192
        gpu.free(ptr)


def test_several_python_threads_launch_at_once(tmp_path: Path) -> None:
    text = """
    extern "C" __global__ void k(unsigned* out, unsigned first) {
        __shared__ unsigned held[64];
        held[threadIdx.x] = first + threadIdx.x;
        __syncthreads();
        out[threadIdx.x] = held[63u - threadIdx.x];
    }
    extern "C" __global__ void bad(float* p) { *(threadIdx.x == 9u ? (float*)64 : p) = 1.0f; }
    """
    wrong: list[object] = []
    with emulate(tmp_path, text) as gpu:

        def work(number: int) -> None:
            for turn in range(20):
                first = number * 1000 + turn
                (out,) = launch(gpu, "k", 1, 64, [np.zeros(64, np.uint32), first])
                if not (out == first + np.arange(63, -1, -1)).all():
                    wrong.append((number, turn))
                try:
                    launch(gpu, "bad", 2, 32, [np.zeros(1, np.float32)])
                    wrong.append((number, turn, "no fault"))
                except KernelFaultError:
                    pass

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_printf(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = 'extern "C" __global__ void k(int n) { printf("thread %u of %d\\n", threadIdx.x, n); }'
    with emulate(tmp_path, text) as gpu:
        launch(gpu, "k", 1, 3, [3])
    assert capfd.readouterr().out.splitlines() == [f"thread {i} of 3" for i in range(3)]
