# SPDX-License-Identifier: AGPL-3.0-only
"""Kernels of this package beside torch's, on the same data, in one process.

Each case is captured in a CUDA graph on both sides, and its replays are timed with events: the median of `--repeats`
batches. Inputs rotate through copies that together exceed the L2 cache. The largest difference between the two results
is printed with the times, so that a wrong kernel cannot look fast. One JSON object on stdout.

    python tools/bench_kernels.py [--repeats 15]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from spark_py.ops import gemm as gemm_ops
from spark_py.ops import gemv as gemv_ops
from spark_py.ops import paged_decode
from spark_py.runtime import DevicePtr, GpuBackend, open_backend

ROTATE_BYTES = 192 << 20
"""More than three times the L2 cache of any GPU so far."""
Run = Callable[[int], None]


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


def attention(bench: Bench, sequences: int, length: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    """paged_decode_attn over a contiguous block table beside torch's scaled_dot_product_attention."""
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

    def run(index: int) -> None:
        paged_decode.paged_decode_attn(
            bench.gpu,
            kernel,
            pointers[0],
            pk[index],
            pv[index],
            pointers[1],
            pointers[2],
            pointers[3],
            blocks,
            sequences,
            heads,
            kv_heads,
            head_dim,
            block_size,
            scale,
            heads * head_dim,
            0,
            bench.stream,
        )

    def peer(index: int) -> Any:
        k, v = (t[index].transpose(1, 2) for t in (keys, values))
        return torch.nn.functional.scaled_dot_product_attention(q[:, :, None], k, v, scale=scale, enable_gqa=True)

    ours = bench.microseconds([run] * count)
    theirs = bench.torch_microseconds(peer, count)
    worst = float((out.float() - peer(count - 1)[:, :, 0].float()).abs().max())
    name = f"attention seqs={sequences} length={length} heads={heads}/{kv_heads} head_dim={head_dim}"
    return bench.row(name, ours, theirs, 4.0 * each, 4.0 * sequences * length * heads * head_dim, worst)


def main() -> int:
    """Run every case and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="timed batches a case (default 15)")
    options = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        print(json.dumps({"not_run": "torch, the peer of these numbers, is not installed"}))
        return 0
    with open_backend("cuda") as gpu:
        bench = Bench(gpu, options.repeats)
        rows = [
            gemv(bench, 17408, 5120),
            gemv(bench, 5120, 17408),
            gemv(bench, 4096, 4096),
            gemv(bench, 1024, 5120),
            gemm(bench, 128, 5120, 5120),
            gemm(bench, 512, 17408, 5120),
            gemm(bench, 4096, 4096, 4096),
            attention(bench, 1, 4096, 24, 4, 256),
            attention(bench, 8, 4096, 24, 4, 256),
            attention(bench, 64, 1024, 16, 2, 256),
        ]
        result = {
            "device": gpu.device_name(),
            "torch": bench.torch.__version__,
            "repeats": options.repeats,
            "rows": rows,
        }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
