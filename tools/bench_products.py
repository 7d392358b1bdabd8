# SPDX-License-Identifier: AGPL-3.0-only
"""Products of one row and of eight with weights in BF16, NVFP4 and FP8, at the shapes of real heads, beside torch's.

Beside a BF16 product stands the quicker of torch's two ways to cuBLAS, `torch.mv` and `linear`; beside the others,
which torch has not for a row, the BF16 product of the same weights, dequantised. A row says how many bytes of weights
and scales must be read and which share of the read bandwidth, measured first in the same process, its time stands for.
How calls are timed: tools/beside_torch.py. One JSON object on stdout.

    python tools/bench_products.py [--repeats 15] [--seconds 50]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from spark_py.model.weight_map import Fp8DenseWeight
from spark_py.ops import gemv as gemv_ops
from spark_py.ops.gemv_fp8w import dense_gemv_fp8w
from spark_py.ops.spark_fp8_gemv_rows import Fp8Projection, spark_fp8_gemv_rows
from spark_py.ops.spark_gemv_rows import Projection, spark_gemv_rows
from spark_py.ops.spark_w4a16_gemv_rows import Nvfp4Projection, spark_w4a16_gemv_rows
from spark_py.ops.w4a16_gemv import w4a16_gemv_sw
from spark_py.runtime import DevicePtr
from tools.beside_torch import Bench, Case, Peers, copies, run_cases

SHAPES = (
    (17408, 5120),
    (12288, 5120),
    (5120, 17408),
    (5120, 6144),
    (5120, 10240),
    (4096, 4096),
    (1024, 5120),
    (100_000, 5120),
    (248_320, 5120),
)
"""[n, k] of Qwen3.6-27B's head: gate and up, queries with gates, down, attention's output, fc; 4096 x 4096 of others;
a key or value; the LM head of a draft vocabulary of 100,000 and of all words."""
PACKED_SHAPES = ((17408, 5120), (100_000, 5120), (248_320, 5120), (100_000, 2048))
_E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)


@dataclass(frozen=True)
class Nvfp4:
    """An NVFP4 weight on the device."""

    weight: DevicePtr
    weight_scale: DevicePtr
    weight_scale_2: float


def _peers(bench: Bench, weights: list[Any], x: Any) -> Peers:
    torch = bench.torch
    linear = {"linear": lambda i: torch.nn.functional.linear(x, weights[i % len(weights)])}
    if x.shape[0] > 1:
        return linear
    return linear | {"mv": lambda i: torch.mv(weights[i % len(weights)], x[0])}


def bf16(bench: Bench, m: int, n: int, k: int, engine: bool = False) -> dict[str, Any]:
    """spark_gemv_rows, or the engine's dense_gemv_bf16."""
    count = copies(2 * n * k)
    x, out = bench.normal(m, k), bench.poisoned(m, n)
    weights = [bench.normal(n, k) for _ in range(count)]
    module, function = ("gemv", "dense_gemv_bf16") if engine else ("spark_gemv_rows", "spark_gemv_rows")
    kernel = bench.gpu.kernel(module, function)
    px, po, pw = bench.pointer(x), bench.pointer(out), [bench.pointer(w) for w in weights]

    def run(index: int) -> None:
        if engine:
            gemv_ops.dense_gemv(bench.gpu, kernel, px, pw[index], po, n, k, bench.stream)
        else:
            spark_gemv_rows(bench.gpu, kernel, px, [Projection(pw[index], po, n, n)], m, k, bench.stream)

    times = bench.times(run, _peers(bench, weights, x), count)
    exact = x.float() @ weights[-1].float().T
    about = {"format": "bf16", "kernel": function, "m": m, "n": n, "k": k}
    return bench.row(about, times, 2.0 * n * k, 2.0 * m * n * k, out, exact)


def nvfp4(bench: Bench, m: int, n: int, k: int, engine: bool = False) -> dict[str, Any]:
    """spark_w4a16_gemv_rows, or the engine's w4a16_gemv_sw, on random codes and scales."""
    torch, nbytes = bench.torch, n * k * 9 / 16
    count = copies(int(nbytes))
    x, out = bench.normal(m, k), bench.poisoned(m, n)
    shapes = ((n, k // 2, 0, 256), (n, k // 16, 0x28, 0x58))
    sets = [
        [torch.randint(low, high, (rows, width), dtype=torch.uint8, device="cuda") for rows, width, low, high in shapes]
        for _ in range(count)
    ]
    names = ("w4a16_gemv", "w4a16_gemv_sw") if engine else ("spark_w4a16_gemv_rows", "spark_w4a16_gemv_rows")
    kernel = bench.gpu.kernel(*names)
    px, po = bench.pointer(x), bench.pointer(out)
    weights = [Nvfp4(bench.pointer(codes), bench.pointer(scales), 0.0123) for codes, scales in sets]

    def run(index: int) -> None:
        if engine:
            w4a16_gemv_sw(bench.gpu, kernel, px, weights[index], po, n, k, bench.stream)
        else:
            projections = [Nvfp4Projection(weights[index], po, n, n)]
            spark_w4a16_gemv_rows(bench.gpu, kernel, px, projections, m, k, bench.stream)

    codes, scales = sets[-1]
    values = torch.tensor(_E2M1, device="cuda", dtype=torch.bfloat16)
    wide = torch.empty(n, k, device="cuda", dtype=torch.bfloat16)
    for half, nibbles in ((0, codes & 15), (1, codes >> 4)):
        wide[:, half::2] = values[nibbles.int()]
    wide *= scales.view(torch.float8_e4m3fn).to(torch.bfloat16).repeat_interleave(16, 1)
    times = bench.times(run, _peers(bench, [wide], x), count)
    exact = x.float() @ wide.float().T * 0.0123
    about = {"format": "nvfp4", "kernel": names[1], "m": m, "n": n, "k": k}
    return bench.row(about, times, nbytes, 2.0 * m * n * k, out, exact)


def fp8(bench: Bench, m: int, n: int, k: int, engine: bool = False) -> dict[str, Any]:
    """spark_fp8_gemv_rows, or the engine's dense_gemv_fp8w: E4M3 codes of normal numbers, a scale a row."""
    torch, nbytes = bench.torch, n * k + 4.0 * n
    count = copies(int(nbytes))
    x, out = bench.normal(m, k), bench.poisoned(m, n)
    sets = [
        (bench.normal(n, k).to(torch.float8_e4m3fn), torch.rand(n, device="cuda", generator=bench.random) + 0.5)
        for _ in range(count)
    ]
    names = ("gemv_fp8w", "dense_gemv_fp8w") if engine else ("spark_fp8_gemv_rows", "spark_fp8_gemv_rows")
    kernel = bench.gpu.kernel(*names)
    px, po = bench.pointer(x), bench.pointer(out)
    weights = [
        Fp8DenseWeight(bench.pointer(codes.view(torch.uint8)), bench.pointer(scales), n, k) for codes, scales in sets
    ]

    def run(index: int) -> None:
        if engine:
            dense_gemv_fp8w(bench.gpu, kernel, px, weights[index], po, n, k, bench.stream)
        else:
            projections = [Fp8Projection(weights[index], po, n, n)]
            spark_fp8_gemv_rows(bench.gpu, kernel, px, projections, m, k, bench.stream)

    codes, scales = sets[-1]
    wide = codes.to(torch.bfloat16)
    times = bench.times(run, _peers(bench, [wide], x), count)
    exact = x.float() @ wide.float().T * scales
    about = {"format": "fp8", "kernel": names[1], "m": m, "n": n, "k": k}
    return bench.row(about, times, nbytes, 2.0 * m * n * k, out, exact)


def cases() -> list[Case]:
    """What to measure; the rows that the goals ask for come first."""
    packed = [(call, shape) for call in (nvfp4, fp8) for shape in PACKED_SHAPES]
    return [
        *(Case(bf16, (1, *shape), {}) for shape in SHAPES),
        *(Case(call, (1, *shape), {}) for call, shape in packed),
        *(Case(bf16, (8, *shape), {}) for shape in SHAPES),
        *(Case(call, (8, *shape), {}) for call, shape in packed),
        *(Case(call, (1, 17408, 5120), {"engine": True}) for call in (bf16, nvfp4, fp8)),
        *(Case(bf16, (1, *shape), {"engine": True}) for shape in ((5120, 17408), (4096, 4096), (1024, 5120))),
    ]


if __name__ == "__main__":
    raise SystemExit(run_cases(cases(), __doc__))
