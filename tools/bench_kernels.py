# SPDX-License-Identifier: AGPL-3.0-only
"""Attention of one row a sequence, and products of many rows, beside torch's.

How calls are timed: tools/beside_torch.py. A row says which share of the read bandwidth, measured first in the same
process, the time stands for. One JSON object on stdout.

    python tools/bench_kernels.py [--repeats 15] [--seconds 50]
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from spark_py.ops import gemm as gemm_ops
from spark_py.ops import paged_decode
from spark_py.ops.spark_paged_decode_split import (
    partial_bytes,
    spark_paged_decode_merge,
    spark_paged_decode_split,
    sums_bytes,
)
from spark_py.runtime import DevicePtr
from tools.beside_torch import Bench, Case, copies, run_cases

BLOCK_ROWS = 16
"""KV rows of a block."""


def gemm(bench: Bench, m: int, n: int, k: int) -> dict[str, Any]:
    """dense_gemm_bf16_pipelined beside torch.matmul."""
    count = copies(2 * (n * k + m * k))
    a, out = [bench.normal(m, k) for _ in range(count)], bench.poisoned(m, n)
    b = [bench.normal(n, k) for _ in range(count)]
    kernel = bench.gpu.kernel("gemm", "dense_gemm_bf16_pipelined")
    pa, pb, po = [bench.pointer(t) for t in a], [bench.pointer(t) for t in b], bench.pointer(out)

    def run(index: int) -> None:
        gemm_ops.dense_gemm_pipelined(bench.gpu, kernel, pa[index], pb[index], po, m, n, k, bench.stream)

    times = bench.times(run, {"matmul": lambda i: bench.torch.matmul(a[i], b[i].T)}, count)
    exact = a[-1].float() @ b[-1].float().T
    about = {"kernel": "dense_gemm_bf16_pipelined", "shape": f"{m} x {n} x {k}"}
    nbytes = 2.0 * (n * k + m * k + m * n)
    return bench.row(about, times, nbytes, 2.0 * m * n * k, out, exact)


def attention(
    bench: Bench, sequences: int, length: int, heads: int, kv_heads: int, head_dim: int, *, split: bool
) -> dict[str, Any]:
    """paged_decode_attn, or with `split` this project's two kernels, over a contiguous block table beside torch's
    scaled_dot_product_attention, which needs no table."""
    torch, block_size = bench.torch, BLOCK_ROWS
    blocks = length // block_size
    each = sequences * length * kv_heads * head_dim
    count = copies(4 * each)
    q, out = bench.normal(sequences, heads, head_dim), bench.poisoned(sequences, heads, head_dim)
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
        return attend(q, keys[index], values[index])

    def attend(queries: Any, k: Any, v: Any) -> Any:
        k, v = (side.transpose(1, 2) for side in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(
            queries[:, :, None], k, v, scale=scale, enable_gqa=True
        )[:, :, 0]

    times = bench.times(run, {"scaled_dot_product_attention": peer}, count)
    exact = attend(q.float(), keys[-1].float(), values[-1].float())
    kernels = "spark_paged_decode_split, _merge" if split else "paged_decode_attn"
    about = {"kernel": kernels, "shape": f"{sequences} x {length} tokens, {heads}/{kv_heads} heads of {head_dim}"}
    flops = 4.0 * sequences * length * heads * head_dim
    return bench.row(about, times, 4.0 * each, flops, out, exact)


def cases() -> list[Case]:
    """What to measure; the rows that the goals ask for come first, what takes long to compile last."""
    sequences = ((1, 32_768, 24, 4), (1, 4096, 24, 4), (8, 4096, 24, 4), (64, 1024, 16, 2))
    return [
        *(Case(attention, (*each, 256), {"split": True}) for each in sequences),
        *(Case(attention, (*each, 256), {"split": False}) for each in sequences),
        *(Case(gemm, each, {}) for each in ((128, 5120, 5120), (512, 17408, 5120), (4096, 4096, 4096))),
    ]


if __name__ == "__main__":
    raise SystemExit(run_cases(cases(), __doc__))
