# SPDX-License-Identifier: AGPL-3.0-only
"""Kernels of this package beside torch's, on the same data, in one process.

Each case is captured in a CUDA graph on both sides, and its replays are timed with events: the median of `--repeats`
batches. Inputs rotate through copies that together exceed the L2 cache. The largest difference between the two results
is printed with the times, so that a wrong kernel cannot look fast. One JSON object on stdout.

    python tools/bench_kernels.py [--repeats 15] [--seconds 50]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from spark_py.ops import gemm as gemm_ops
from spark_py.ops import gemv as gemv_ops
from spark_py.ops import paged_decode
from spark_py.ops.spark_gemv_rows import Projection, spark_gemv_rows
from spark_py.ops.spark_paged_decode_split import (
    partial_bytes,
    spark_paged_decode_merge,
    spark_paged_decode_split,
    sums_bytes,
)
from spark_py.ops.spark_w4a16_gemv_rows import Nvfp4Projection, spark_w4a16_gemv_rows
from spark_py.runtime import DevicePtr, GpuBackend, open_backend

ROTATE_BYTES = 192 << 20
"""More than three times the L2 cache of any GPU so far."""
Run = Callable[[int], None]


@dataclass(frozen=True)
class Nvfp4:
    """An NVFP4 weight on the device."""

    weight: DevicePtr
    weight_scale: DevicePtr
    weight_scale_2: float


class Bench:
    """One backend, one stream that both sides use, and the loop that times them."""

    def __init__(self, gpu: GpuBackend, repeats: int) -> None:
        import torch

        self.torch, self.gpu, self.repeats = torch, gpu, repeats
        self.stream = gpu.create_stream()
        self.torch_stream = torch.cuda.ExternalStream(self.stream)
        self.random = torch.Generator(device="cuda").manual_seed(0)
        self.kept: list[Any] = []

    def normal(self, *shape: int) -> Any:
        """A BF16 tensor of standard normal numbers."""
        values = self.torch.randn(shape, generator=self.random, device="cuda", dtype=self.torch.float32)
        return values.to(self.torch.bfloat16)

    def pointer(self, tensor: Any) -> DevicePtr:
        """The tensor's memory, known to the backend."""
        self.kept.append(tensor)
        return self.gpu.wrap(tensor)

    def microseconds(self, runs: Sequence[Run]) -> float:
        """Time of one call, the calls of one graph being `runs` with their indices."""
        gpu, stream = self.gpu, self.stream
        for index, run in enumerate(runs):
            run(index)
        gpu.synchronize(stream)
        gpu.begin_capture(stream)
        for index, run in enumerate(runs):
            run(index)
        graph = gpu.end_capture(stream)
        start, end = gpu.create_event(timing=True), gpu.create_event(timing=True)
        times = []
        for repeat in range(self.repeats + 3):
            gpu.record_event(start, stream)
            gpu.launch_graph(graph, stream)
            gpu.record_event(end, stream)
            gpu.synchronize(stream)
            if repeat >= 3:
                times.append(gpu.event_elapsed_ms(start, end) * 1e3 / len(runs))
        gpu.destroy_graph(graph)
        gpu.destroy_event(start)
        gpu.destroy_event(end)
        return statistics.median(times)

    def torch_microseconds(self, call: Callable[[int], Any], count: int) -> float:
        """The same for torch, in a graph of its own."""
        torch = self.torch
        with torch.cuda.stream(self.torch_stream):
            for index in range(count):
                call(index)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            for index in range(count):
                call(index)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        with torch.cuda.stream(self.torch_stream):
            for repeat in range(self.repeats + 3):
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                if repeat >= 3:
                    times.append(start.elapsed_time(end) * 1e3 / count)
        return statistics.median(times)

    def row(self, name: str, ours: float, theirs: float, nbytes: float, flops: float, worst: float) -> dict[str, Any]:
        """One line of the result."""
        self.release()
        return {
            "case": name,
            "us": round(ours, 2),
            "torch_us": round(theirs, 2),
            "torch_over_ours": round(theirs / ours, 3),
            "GB_per_s": round(nbytes / ours / 1e3, 1),
            "TFLOP_per_s": round(flops / ours / 1e6, 2),
            "largest_difference": worst,
        }

    def release(self) -> None:
        """Forget wrapped tensors."""
        self.gpu.synchronize(self.stream)
        for tensor in self.kept:
            self.gpu.unwrap(DevicePtr(tensor.data_ptr()))
        self.kept.clear()


def copies(nbytes: int) -> int:
    """How many sets of inputs to rotate."""
    return max(2, min(64, math.ceil(ROTATE_BYTES / nbytes)))


def gemv(bench: Bench, n: int, k: int) -> dict[str, Any]:
    """dense_gemv_bf16 beside torch.mv."""
    count = copies(2 * n * k)
    x, out = bench.normal(k), bench.normal(n)
    weights = [bench.normal(n, k) for _ in range(count)]
    kernel = bench.gpu.kernel("gemv", "dense_gemv_bf16")
    px, po, pw = bench.pointer(x), bench.pointer(out), [bench.pointer(w) for w in weights]

    def run(index: int) -> None:
        gemv_ops.dense_gemv(bench.gpu, kernel, px, pw[index], po, n, k, bench.stream)

    ours = bench.microseconds([run] * count)
    theirs = bench.torch_microseconds(lambda i: bench.torch.mv(weights[i], x), count)
    worst = float((out.float() - weights[-1].float() @ x.float()).abs().max())
    return bench.row(f"gemv n={n} k={k}", ours, theirs, 2.0 * n * k, 2.0 * n * k, worst)


def gemv_rows(bench: Bench, m: int, n: int, k: int) -> dict[str, Any]:
    """spark_gemv_rows beside torch's product with m rows."""
    count = copies(2 * n * k)
    x, out = bench.normal(m, k), bench.normal(m, n)
    weights = [bench.normal(n, k) for _ in range(count)]
    kernel = bench.gpu.kernel("spark_gemv_rows", "spark_gemv_rows")
    px, po, pw = bench.pointer(x), bench.pointer(out), [bench.pointer(w) for w in weights]

    def run(index: int) -> None:
        projections = [Projection(pw[index], po, n, n)]
        spark_gemv_rows(bench.gpu, kernel, px, projections, m, k, bench.stream)

    ours = bench.microseconds([run] * count)
    peer = (lambda i: bench.torch.mv(weights[i], x[0])) if m == 1 else (lambda i: x @ weights[i].T)
    theirs = bench.torch_microseconds(peer, count)
    worst = float((out.float() - x.float() @ weights[-1].float().T).abs().max())
    return bench.row(f"gemv rows m={m} n={n} k={k}", ours, theirs, 2.0 * n * k, 2.0 * m * n * k, worst)


def gemv_nvfp4(bench: Bench, m: int, n: int, k: int) -> dict[str, Any]:
    """spark_w4a16_gemv_rows on random codes and scales; torch's product is of the same weights in BF16."""
    torch, nbytes = bench.torch, n * k * 9 / 16
    count = copies(int(nbytes))
    x, out = bench.normal(m, k), bench.normal(m, n)
    shapes = ((n, k // 2, 0, 256), (n, k // 16, 0x28, 0x58))
    sets = [
        [torch.randint(low, high, (rows, width), dtype=torch.uint8, device="cuda") for rows, width, low, high in shapes]
        for _ in range(count)
    ]
    kernel = bench.gpu.kernel("spark_w4a16_gemv_rows", "spark_w4a16_gemv_rows")
    px, po = bench.pointer(x), bench.pointer(out)
    weights = [Nvfp4(bench.pointer(codes), bench.pointer(scales), 0.0123) for codes, scales in sets]

    def run(index: int) -> None:
        projections = [Nvfp4Projection(weights[index], po, n, n)]
        spark_w4a16_gemv_rows(bench.gpu, kernel, px, projections, m, k, bench.stream)

    ours = bench.microseconds([run] * count)
    codes, scales = sets[-1]
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], device="cuda")
    nibbles = torch.stack([codes & 15, codes >> 4], -1).reshape(n, k).int()
    factors = scales.view(torch.float8_e4m3fn).to(torch.bfloat16).repeat_interleave(16, 1) * 0.0123
    wide = values.to(torch.bfloat16)[nibbles] * factors
    theirs = bench.torch_microseconds(lambda i: x @ wide.T, 2)
    exact = x.float() @ wide.float().T
    worst = float((out.float() - exact).abs().max() / exact.abs().max())
    return bench.row(f"gemv nvfp4 m={m} n={n} k={k}", ours, theirs, nbytes, 2.0 * m * n * k, worst)


def gemm(bench: Bench, m: int, n: int, k: int) -> dict[str, Any]:
    """dense_gemm_bf16_pipelined beside torch.matmul."""
    count = copies(2 * (n * k + m * k))
    a, out = [bench.normal(m, k) for _ in range(count)], bench.normal(m, n)
    b = [bench.normal(n, k) for _ in range(count)]
    kernel = bench.gpu.kernel("gemm", "dense_gemm_bf16_pipelined")
    pa, pb, po = [bench.pointer(t) for t in a], [bench.pointer(t) for t in b], bench.pointer(out)

    def run(index: int) -> None:
        gemm_ops.dense_gemm_pipelined(bench.gpu, kernel, pa[index], pb[index], po, m, n, k, bench.stream)

    ours = bench.microseconds([run] * count)
    theirs = bench.torch_microseconds(lambda i: bench.torch.matmul(a[i], b[i].T), count)
    worst = float((out.float() - a[-1].float() @ b[-1].float().T).abs().max())
    return bench.row(f"gemm m={m} n={n} k={k}", ours, theirs, 2.0 * (n * k + m * k + m * n), 2.0 * m * n * k, worst)


def attention(
    bench: Bench, sequences: int, length: int, heads: int, kv_heads: int, head_dim: int, *, split: bool
) -> dict[str, Any]:
    """paged_decode_attn, or with `split` this project's two kernels, over a contiguous block table beside torch's
    scaled_dot_product_attention."""
    torch, block_size = bench.torch, 16
    blocks = length // block_size
    each = sequences * length * kv_heads * head_dim
    count = copies(4 * each)
    q, out = bench.normal(sequences, heads, head_dim), bench.normal(sequences, heads, head_dim)
    keys = [bench.normal(sequences, length, kv_heads, head_dim) for _ in range(count)]
    values = [bench.normal(sequences, length, kv_heads, head_dim) for _ in range(count)]
    table = torch.arange(sequences * blocks, dtype=torch.int32, device="cuda")
    lengths = torch.full((sequences,), length, dtype=torch.int32, device="cuda")
    kernel = bench.gpu.kernel("paged_decode", "paged_decode_attn")
    pointers = [bench.pointer(t) for t in (q, out, table, lengths)]
    pk, pv = [bench.pointer(t) for t in keys], [bench.pointer(t) for t in values]
    scale = 1.0 / math.sqrt(head_dim)

    partial = torch.empty(partial_bytes(sequences, heads, head_dim) // 4, device="cuda")
    sums = torch.empty(sums_bytes(sequences, heads) // 4, device="cuda")
    pp, ps = bench.pointer(partial), bench.pointer(sums)
    own = [
        bench.gpu.kernel("spark_paged_decode_split", f"spark_paged_decode_{part}") if split else kernel
        for part in ("split", "merge")
    ]
    row = heads * head_dim

    def run(index: int) -> None:
        gpu, stream, (pq, po, pt, pl) = bench.gpu, bench.stream, pointers
        if not split:
            paged_decode.paged_decode_attn(
                gpu, kernel, pq, pk[index], pv[index], po, pt, pl, blocks, sequences, heads, kv_heads, head_dim,
                block_size, scale, row, 0, stream,
            )  # fmt: skip
            return
        spark_paged_decode_split(
            gpu, own[0], pq, pk[index], pv[index], pp, ps, pt, pl, blocks, 1, sequences, heads, kv_heads, head_dim,
            block_size, scale, row, block_size * kv_heads * head_dim, 0, stream,
        )  # fmt: skip
        spark_paged_decode_merge(
            gpu, own[1], pp, ps, po, DevicePtr.NULL, pl, 1, sequences, heads, head_dim, 1.0, row, 0, stream
        )

    def peer(index: int) -> Any:
        k, v = (t[index].transpose(1, 2) for t in (keys, values))
        return torch.nn.functional.scaled_dot_product_attention(q[:, :, None], k, v, scale=scale, enable_gqa=True)

    ours = bench.microseconds([run] * count)
    theirs = bench.torch_microseconds(peer, count)
    worst = float((out.float() - peer(count - 1)[:, :, 0].float()).abs().max())
    shape = f"seqs={sequences} length={length} heads={heads}/{kv_heads} head_dim={head_dim}"
    name = f"attention split {shape}" if split else f"attention {shape}"
    return bench.row(name, ours, theirs, 4.0 * each, 4.0 * sequences * length * heads * head_dim, worst)


def cases() -> list[tuple[Callable[..., dict[str, Any]], tuple[int, ...], dict[str, bool]]]:
    """What to measure: a function above, its numbers and switches. What takes long to compile comes last."""
    tall, wide = ((17408, 5120), (5120, 17408)), ((5120, 10240), (5120, 6144), (4096, 4096), (100_000, 5120))
    sequences = ((1, 4096, 24, 4), (1, 32_768, 24, 4), (8, 4096, 24, 4), (64, 1024, 16, 2))
    return [
        *((gemv_rows, (m, n, k), {}) for n, k in tall + wide for m in (1, 8)),
        *((gemv_nvfp4, (m, n, k), {}) for n, k in ((17408, 5120), (100_000, 2048)) for m in (1, 8)),
        *((attention, (*each, 256), {"split": True}) for each in sequences),
        *((gemv, (n, k), {}) for n, k in (*tall, (4096, 4096), (1024, 5120))),
        *((attention, (*each, 256), {"split": False}) for each in sequences),
        *((gemm, each, {}) for each in ((128, 5120, 5120), (512, 17408, 5120), (4096, 4096, 4096))),
    ]


def main() -> int:
    """Run every case that there is time for and print the result; 1 where one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="timed batches a case (default 15)")
    parser.add_argument("--seconds", type=float, default=50.0, help="after which no case is begun (default 50)")
    options = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        print(json.dumps({"not_run": "torch, the peer of these numbers, is not installed"}))
        return 0
    until = time.monotonic() + options.seconds
    rows, errors, late = list[dict[str, Any]](), list[str](), list[str]()
    with open_backend("cuda") as gpu:
        bench = Bench(gpu, options.repeats)
        for case, numbers, switches in cases():
            name = f"{case.__name__}{numbers}"
            if time.monotonic() > until:
                late.append(name)
                continue
            try:
                rows.append(case(bench, *numbers, **switches))
            except Exception as error:
                errors.append(f"{name}: {error}")
                bench.release()
        result = {
            "device": gpu.device_name(),
            "torch": bench.torch.__version__,
            "repeats": options.repeats,
            "rows": rows,
        }
    if late:
        result["no_time_for"] = late
    if errors:
        result["errors"] = errors
    print(json.dumps(result))
    return 1 if errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
