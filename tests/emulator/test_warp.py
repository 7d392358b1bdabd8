# SPDX-License-Identifier: AGPL-3.0-only
"""Warp collectives against a table: shuffles of every kind, width and size, votes, matches, reductions, masks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spark_py.runtime.emulated import Schedule

from .support import ORDERS, Array, emulate, launch, order_id

WIDTHS = (1, 2, 4, 8, 16, 32)
ARGS = (0, 1, 3, 5, 16, 31, 33)

SHUFFLES = """
struct __align__(16) Wide { unsigned a, b, c, d; };
template <class T>
__device__ void all(const T* in, T* out, int width, int arg) {
    const T v = in[threadIdx.x];
    out[threadIdx.x] = __shfl_sync(0xffffffffu, v, arg, width);
    out[32 + threadIdx.x] = __shfl_up_sync(0xffffffffu, v, arg, width);
    out[64 + threadIdx.x] = __shfl_down_sync(0xffffffffu, v, arg, width);
    out[96 + threadIdx.x] = __shfl_xor_sync(0xffffffffu, v, arg, width);
}
extern "C" __global__ void four(const unsigned* in, unsigned* out, int width, int arg) { all(in, out, width, arg); }
extern "C" __global__ void eight(const double* in, double* out, int width, int arg) { all(in, out, width, arg); }
extern "C" __global__ void sixteen(const unsigned* in, unsigned* out, int width, int arg) {
    all(reinterpret_cast<const Wide*>(in), reinterpret_cast<Wide*>(out), width, arg);
}
"""


def shuffled(values: Array, width: int, arg: int) -> Array:
    """What __shfl, __shfl_up, __shfl_down and __shfl_xor give, as the CUDA C++ guide defines them."""
    lane = np.arange(32)
    base = lane - lane % width
    index = base + arg % width
    up = np.where(lane - arg < base, lane, lane - arg)
    down = np.where(lane + arg >= base + width, lane, lane + arg)
    xor = np.where((lane ^ arg) >= base + width, lane, lane ^ arg)
    return np.concatenate([values[source] for source in (index, up, down, xor)])


@pytest.mark.parametrize("checked", [False, True])
def test_shuffles(checked: bool, tmp_path: Path, rng: np.random.Generator) -> None:
    with emulate(tmp_path, SHUFFLES, checked=checked) as gpu:
        for width in WIDTHS:
            for arg in ARGS:
                for function, values in (
                    ("four", rng.integers(0, 2**32, 32, np.uint32)),
                    ("eight", rng.random(32)),
                    ("sixteen", rng.integers(0, 2**32, (32, 4), np.uint32)),
                ):
                    out = np.zeros((128, *values.shape[1:]), values.dtype)
                    _, got = launch(gpu, function, 1, 32, [values, out, width, arg])
                    assert (got == shuffled(values, width, arg)).all(), (function, width, arg)


MASKS = """
extern "C" __global__ void k(const unsigned* in, unsigned* out) {
    const unsigned lane = threadIdx.x % 32u;
    const unsigned mask = lane % 3u == 0u ? 0x49249249u : ~0x49249249u;
    unsigned v = in[threadIdx.x], sum = 0u;
    // Both halves of the warp are in a collective at once, the one as often again as the other.
    for (unsigned round = 0u; round < (lane % 3u == 0u ? 4u : 2u); ++round) {
        sum += __reduce_add_sync(mask, v + round);
    }
    unsigned* to = out + threadIdx.x * 8u;
    to[0] = sum;
    to[1] = __ballot_sync(mask, v & 1u);
    to[2] = __any_sync(mask, v == 7u) + 2u * __all_sync(mask, v < 100u);
    to[3] = __match_any_sync(mask, v % 4u);
    int same;
    to[4] = __match_all_sync(mask, mask, &same) + (same != 0 ? 0u : 1u);
    to[5] = __reduce_max_sync(mask, static_cast<int>(v) - 50);
    to[6] = __reduce_xor_sync(mask, v);
    to[7] = __activemask();
}
"""


@pytest.mark.parametrize("schedule", ORDERS, ids=order_id)
def test_two_masks_at_once(schedule: Schedule, tmp_path: Path, rng: np.random.Generator) -> None:
    values = rng.integers(0, 100, 64, np.uint32)
    with emulate(tmp_path, MASKS, schedule=schedule, checked=True) as gpu:
        _, got = launch(gpu, "k", 1, 64, [values, np.zeros((64, 8), np.uint32)])
    for thread in range(64):
        lane, warp = thread % 32, thread // 32
        group = [other for other in range(32) if (other % 3 == 0) == (lane % 3 == 0)]
        own = values[warp * 32 + np.array(group)].astype(np.int64)
        mask = sum(1 << other for other in group)
        rounds = 4 if lane % 3 == 0 else 2
        expected = [
            sum(int(own.sum()) + r * len(group) for r in range(rounds)),
            sum(1 << other for other, v in zip(group, own, strict=True) if v & 1),
            int((own == 7).any()) + 2 * int((own < 100).all()),
            sum(1 << other for other, v in zip(group, own, strict=True) if v % 4 == values[thread] % 4),
            mask,
            (int(own.max()) - 50) % 2**32,
            int(np.bitwise_xor.reduce(own)),
            1 << lane,
        ]
        assert got[thread].tolist() == expected, thread


def test_a_lane_that_left_is_not_waited_for(tmp_path: Path) -> None:
    text = """
    extern "C" __global__ void k(unsigned* out) {
        if (threadIdx.x >= 20u) { return; }
        out[threadIdx.x] = __ballot_sync(0xffffffffu, 1);
        __syncthreads();
        out[threadIdx.x] += __syncthreads_count(threadIdx.x % 2u) << 24;
    }
    """
    with emulate(tmp_path, text) as gpu:
        (got,) = launch(gpu, "k", 1, 64, [np.zeros(20, np.uint32)])
    assert (got == (1 << 20) - 1 + (10 << 24)).all()


def test_barriers_that_vote(tmp_path: Path) -> None:
    text = """
    extern "C" __global__ void k(int* out, int n) {
        const int t = threadIdx.x;
        out[3 * t] = __syncthreads_count(t < n);
        out[3 * t + 1] = __syncthreads_and(t < n);
        out[3 * t + 2] = __syncthreads_or(t < n);
    }
    """
    with emulate(tmp_path, text, checked=True) as gpu:
        for n in (0, 1, 50, 100):
            (got,) = launch(gpu, "k", 1, 100, [np.zeros((100, 3), np.int32), n])
            assert (got == [n, n == 100, n > 0]).all()
