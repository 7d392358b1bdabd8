# SPDX-License-Identifier: AGPL-3.0-only
"""What a kernel launch costs the host: this package, CuPy's RawKernel and plain ctypes, in one process.

A kernel of ten parameters (five pointers, three u32, one f32, one u64) is launched with values that change at every
call. Each loop queues `--launches` launches, then waits outside the timed part; the loops take turns, so that a machine
that is slower for a moment is slower for all. Prints one JSON object: the median and the spread over `--repeats` loops,
in microseconds a launch.

Of ctypes there are three, each packing the ten values at each call and checking nothing: new ctypes objects and a
table of casts to them, as one writes it first; new objects and a table of their addresses; and objects and a table
that stay, into which the values are set, which is the least that ctypes can do. `over_ctypes` is launch_typed over the
quickest of the three.

    python tools/bench_launch.py [--launches 500] [--repeats 31]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from spark_py.runtime import KernelLaunch, open_backend

SOURCE = """// SPDX-License-Identifier: AGPL-3.0-only
extern "C" __global__ void ten(const float* a, const float* b, const float* c, const float* d, float* out,
                               unsigned int n, unsigned int m, unsigned int k, float scale, unsigned long long stride) {
    if (n == 0xffffffffu) {
        out[stride] = (a[m] + b[k] + c[m] + d[k]) * scale;
    }
}
"""


Loop = Callable[[int], None]
"""Queues so many launches."""


def microseconds(
    loops: dict[str, Loop], launches: int, repeats: int, wait: Callable[[], None]
) -> dict[str, dict[str, float]]:
    """Of each loop the median, lowest and highest time of one launch over the repeats."""
    times: dict[str, list[float]] = {name: [] for name in loops}
    for repeat in range(repeats + 2):
        for name, loop in loops.items():
            wait()
            start = time.perf_counter()
            loop(launches)
            taken = time.perf_counter() - start
            wait()
            if repeat >= 2:
                times[name].append(taken / launches * 1e6)
    return {
        name: {"median_us": statistics.median(us), "min_us": min(us), "max_us": max(us)} for name, us in times.items()
    }


def ctypes_loops(launch: Any, function: int, stream: int, places: list[list[int]]) -> dict[str, Loop]:
    """Ways to launch with ctypes alone: `launch` is cuLaunchKernel, or what takes and gives the same."""
    u64, u32, f32, void = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_float, ctypes.c_void_p
    handle, queue = void(function), void(stream)

    def casts(count: int) -> None:
        a, b, c, d, out = places
        byref, cast = ctypes.byref, ctypes.cast
        table = (void * 10)()
        for i in range(count):
            j = i & 63
            pointers = (u64(a[j]), u64(b[j]), u64(c[j]), u64(d[j]), u64(out[j]))
            values = (*pointers, u32(i), u32(i + 1), u32(i + 2), f32(i * 0.5), u64(i))
            for n, value in enumerate(values):
                table[n] = cast(byref(value), void)
            if launch(handle, 1, 1, 1, 32, 1, 1, 0, queue, table, None):
                raise RuntimeError("cuLaunchKernel failed")

    def addresses(count: int) -> None:
        a, b, c, d, out = places
        table, of = void * 10, ctypes.addressof
        for i in range(count):
            j = i & 63
            pointers = (u64(a[j]), u64(b[j]), u64(c[j]), u64(d[j]), u64(out[j]))
            values = (*pointers, u32(i), u32(i + 1), u32(i + 2), f32(i * 0.5), u64(i))
            if launch(handle, 1, 1, 1, 32, 1, 1, 0, queue, table(*map(of, values)), None):
                raise RuntimeError("cuLaunchKernel failed")

    def kept(count: int) -> None:
        a, b, c, d, out = places
        cells = (u64(), u64(), u64(), u64(), u64(), u32(), u32(), u32(), f32(), u64())
        table = (void * 10)(*map(ctypes.addressof, cells))
        pa, pb, pc, pd, po, n, m, k, scale, stride = cells
        for i in range(count):
            j = i & 63
            pa.value, pb.value, pc.value, pd.value, po.value = a[j], b[j], c[j], d[j], out[j]
            n.value, m.value, k.value, scale.value, stride.value = i, i + 1, i + 2, i * 0.5, i
            if launch(handle, 1, 1, 1, 32, 1, 1, 0, queue, table, None):
                raise RuntimeError("cuLaunchKernel failed")

    return {
        "ctypes_new_objects_cast": casts,
        "ctypes_new_objects_addresses": addresses,
        "ctypes_kept_objects": kept,
    }


def main() -> int:
    """Run the three loops and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=500, help="launches a loop (default 500)")
    parser.add_argument("--repeats", type=int, default=31, help="loops that count (default 31)")
    options = parser.parse_args()

    import cupy

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "ten.cu").write_text(SOURCE)
        gpu = open_backend("cuda", kernels=folder)
        kernel = gpu.kernel("ten", "ten")
    stream = gpu.default_stream()
    base = [gpu.alloc(1 << 20) for _ in range(5)]
    # Pointers change at every call too: 64 places a buffer.
    places = [[ptr.offset(256 * i) for i in range(64)] for ptr in base]

    def ours(count: int) -> None:
        a, b, c, d, out = places
        for i in range(count):
            j = i & 63
            gpu.launch_typed(
                kernel, (1, 1, 1), (32, 1, 1), 0, stream, (a[j], b[j], c[j], d[j], out[j], i, i + 1, i + 2, i * 0.5, i)
            )

    def builder(count: int) -> None:
        a, b, c, d, out = places
        for i in range(count):
            j = i & 63
            (
                KernelLaunch(gpu, kernel)
                .grid([1, 1, 1])
                .block([32, 1, 1])
                .arg_ptr(a[j])
                .arg_ptr(b[j])
                .arg_ptr(c[j])
                .arg_ptr(d[j])
                .arg_ptr(out[j])
                .arg_u32(i)
                .arg_u32(i + 1)
                .arg_u32(i + 2)
                .arg_f32(i * 0.5)
                .arg_u64(i)
                .launch(stream)
            )

    raw = cupy.RawKernel(SOURCE, "ten")
    arrays = [[gpu.view(ptr, (64,), "float32") for ptr in row] for row in places]
    external = cupy.cuda.ExternalStream(stream)

    def with_cupy(count: int) -> None:
        a, b, c, d, out = arrays
        uint32, float32, uint64 = cupy.uint32, cupy.float32, cupy.uint64
        with external:
            for i in range(count):
                j = i & 63
                raw(
                    (1,),
                    (32,),
                    (
                        a[j],
                        b[j],
                        c[j],
                        d[j],
                        out[j],
                        uint32(i),
                        uint32(i + 1),
                        uint32(i + 2),
                        float32(i * 0.5),
                        uint64(i),
                    ),
                )

    launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    function = int(gpu._kernels[kernel.value].raw.ptr)  # type: ignore[attr-defined]

    def wait() -> None:
        gpu.synchronize(stream)

    with_ctypes = ctypes_loops(launch, function, stream, [[int(ptr) for ptr in row] for row in places])
    loops = {"launch_typed": ours, "kernel_launch_builder": builder, "cupy_raw_kernel": with_cupy, **with_ctypes}
    times = microseconds(loops, options.launches, options.repeats, wait)
    least = min(times[name]["median_us"] for name in with_ctypes)
    result: dict[str, object] = {**times, "over_ctypes": round(times["launch_typed"]["median_us"] / least, 3)}
    result["device"] = gpu.device_name()
    result["launches"], result["repeats"] = options.launches, options.repeats
    result["what"] = "microseconds of host time a launch of 10 changing arguments"
    print(json.dumps(result))
    for ptr in base:
        gpu.free(ptr)
    gpu.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
